// The 8-bit dynamic map: dynamic8. The contract is that of kbitcupy/formats/codebook/table4.py.
#pragma once
#include "formats/planes.cuh"

// plane   codes, absmax
// number  log2 of the elements of a block, 4 to 12
// table   the map
struct Dynamic8 {
    static constexpr int TABLE = 256;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        unsigned word[2];
        load_words(planes, 0, octet * 8, planes.size, word);
        const float scale = planes.at<float>(1)[octet >> (planes.number[0] - 3)];
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(planes.table[word[e / 4] >> e % 4 * 8 & 0xff], scale);
    }
};
