// k-bit codebooks: kbit1 to kbit8. The contract is that of kbitcupy/formats/codebook/kbit.py.
#pragma once
#include "formats/planes.cuh"
#include "formats/scales.cuh"

// plane   packed, absmax, scale (null: 1)
// number  K
// table   2^K values of the codebook
template <int FORMAT>
struct Kbit {
    static constexpr int TABLE = 256;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        const int k = static_cast<int>(planes.number[0]);
        const long long block = octet / 4;  // of 32 elements, whose K words hold a bit plane each
        const unsigned char* plane = planes.at<unsigned char>(0) + block * k * 4 + octet % 4;
        unsigned long long bits = 0;
#pragma unroll
        for (int p = 0; p < 8; ++p) bits |= static_cast<unsigned long long>(p < k ? plane[4 * p] : 0) << 8 * p;
        const unsigned long long index = transpose8(bits);  // a byte for each element
        const float a = Absmax<FORMAT>::decode(planes.at<typename Absmax<FORMAT>::Code>(1)[block]);
        const float scale = __fmul_rn(a, planes.plane[2] ? *planes.at<float>(2) : 1.0f);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(planes.table[index >> 8 * e & 0xff], scale);
    }
};
