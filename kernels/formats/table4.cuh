// Blockwise tables of 16 values: nf4, fp4, table4. The contract is that of kbitcupy/formats/codebook/table4.py.
#pragma once
#include "formats/planes.cuh"

constexpr int NESTED_BLOCK_LOG2 = 8;  // blocks whose absmax are quantized together

// plane   packed, absmax; NESTED: nested_absmax, nested_offset
// number  log2 of the elements of a block, 4 to 12
// table   16 values; NESTED: and the 256 of the dynamic map, by which absmax is coded
template <bool NESTED>
struct Table4 {
    static constexpr int TABLE = NESTED ? 16 + 256 : 16;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        unsigned word[1];
        load_words(planes, 0, octet * 4, (planes.size + 1) / 2, word);
        const long long block = octet >> (planes.number[0] - 3);
        float scale;
        if constexpr (NESTED) {
            const float code = planes.table[16 + planes.at<unsigned char>(1)[block]];
            scale = __fmul_rn(code, planes.at<float>(2)[block >> NESTED_BLOCK_LOG2]);
            scale = __fadd_rn(scale, *planes.at<float>(3));
        } else {
            scale = planes.at<float>(1)[block];
        }
#pragma unroll
        for (int e = 0; e < 8; ++e)  // the first of two in the high nibble
            v[e] = __fmul_rn(planes.table[word[0] >> 4 * (e ^ 1) & 15], scale);
    }
};
