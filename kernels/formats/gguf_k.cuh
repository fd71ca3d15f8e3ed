// GGUF's K types. The contracts are those of kbitcupy/formats/gguf/kquants.py. A decoder's planes are the fields of its
// class, in their order.
#pragma once
#include <cuda_fp16.h>

#include "formats/planes.cuh"

// 4-bit integers, 256 a block, with a 6-bit scale and minimum for each 32 of them. plane: d and dmin, scales, qs
struct Q4_K {
    static constexpr int TABLE = 0;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        const long long block = octet / 32;
        const int part = static_cast<int>(octet % 32), sub = part / 4;
        unsigned word[2];
        load_words(planes, 2, block * 128 + sub / 2 * 32 + part % 4 * 8, planes.size / 2, word);
        const unsigned char* s = planes.at<unsigned char>(1) + block * 12;
        int sc = s[sub] & 63, mn = s[sub + 4] & 63;
        if (sub >= 4) sc = (s[sub + 4] & 15) | s[sub - 4] >> 6 << 4, mn = s[sub + 4] >> 4 | s[sub] >> 6 << 4;
        const __half* d = planes.at<__half>(0) + block * 2;
        const float scale = __fmul_rn(__half2float(d[0]), static_cast<float>(sc));
        const float minimum = __fmul_rn(__half2float(d[1]), static_cast<float>(mn));
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int q = static_cast<int>(word[e / 4] >> (e % 4 * 8 + sub % 2 * 4) & 15);
            v[e] = __fsub_rn(__fmul_rn(scale, static_cast<float>(q)), minimum);
        }
    }
};
