// k-bit codebooks: kbit1 to kbit8. The contract is that of kbitcupy/formats/codebook/kbit.py.
#pragma once
#include "formats/planes.cuh"
#include "formats/scales.cuh"

// plane   packed, absmax, scale (null: 1)
// number  K
// table   2^K values of the codebook
template <int FORMAT>
struct Kbit {
    static constexpr int TABLE = 256, TOGETHER = 4, APART = 1;  // a block of 32

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

    __device__ __forceinline__ static void decode_together(const Planes& planes, long long octet, float (&v)[4][8]) {
        const int k = static_cast<int>(planes.number[0]);
        const long long block = octet / 4;
        const unsigned* plane = planes.at<unsigned>(0) + block * k;
        unsigned word[8], low[4], high[4];
#pragma unroll
        for (int p = 0; p < 8; ++p) word[p] = p < k ? __ldg(plane + p) : 0u;
        const float a = Absmax<FORMAT>::decode(planes.at<typename Absmax<FORMAT>::Code>(1)[block]);
        const float scale = __fmul_rn(a, planes.plane[2] ? *planes.at<float>(2) : 1.0f);
        nibbles(word[0], word[1], word[2], word[3], low);
        auto look_up = [&](bool more) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const int j = i / 8, from = i % 4 * 8 + (i & 4);
                const unsigned index = low[j] >> from & 15, above = more ? (high[j] >> from & 15) << 4 : 0u;
                v[j][i % 8] = __fmul_rn(planes.table[index | above], scale);
            }
        };
        if (k <= 4) {
            look_up(false);
        } else {
            nibbles(word[4], word[5], word[6], word[7], high);
            look_up(true);
        }
    }

    // Of four bit planes of a block a word for each octet, with the bits of element e in a field of four, from bit
    // e % 4 * 8 + (e & 4) on.
    __device__ __forceinline__ static void nibbles(
        unsigned a, unsigned b, unsigned c, unsigned d, unsigned (&word)[4]) {
        const unsigned ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
        const unsigned behind_ab = __byte_perm(a, b, 0x7362), behind_cd = __byte_perm(c, d, 0x7362);
        word[0] = __byte_perm(ab, cd, 0x5410), word[1] = __byte_perm(ab, cd, 0x7632);
        word[2] = __byte_perm(behind_ab, behind_cd, 0x5410), word[3] = __byte_perm(behind_ab, behind_cd, 0x7632);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            unsigned swap = (word[j] ^ word[j] >> 7) & 0x00aa00aau;
            word[j] ^= swap ^ swap << 7;
            swap = (word[j] ^ word[j] >> 14) & 0x0000ccccu;
            word[j] ^= swap ^ swap << 14;
        }
    }
};
