// What the quantizers of GGUF's types share: the numbers they take, their roundings, and the planes they write. Nothing
// here talks to another lane, so the host's compiler takes it, too.
#pragma once
#include <cuda_fp16.h>

#include "common/ieee.cuh"
#include "common/types.cuh"

// The planes that an encoder writes, in the order of the fields.
constexpr int MAX_FIELDS = 5;
struct Fields {
    unsigned char* field[MAX_FIELDS];

    __device__ __forceinline__ void put_half(int i, long long at, float x) const {
        reinterpret_cast<__half*>(field[i])[at] = __float2half_rn(x);
    }
    // `words` words of the block, at byte `first`, which is a multiple of 4 from the plane on; planes begin anywhere.
    template <int WORDS>
    __device__ __forceinline__ void put_words(int i, long long first, const unsigned (&word)[WORDS]) const {
        unsigned char* to = field[i] + first;
        const bool aligned = (reinterpret_cast<unsigned long long>(to) & 3) == 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            if (aligned) {
                reinterpret_cast<unsigned*>(to)[w] = word[w];
                continue;
            }
#pragma unroll
            for (int b = 0; b < 4; ++b) to[4 * w + b] = static_cast<unsigned char>(word[w] >> 8 * b);
        }
    }
};

constexpr unsigned LARGEST_HALF = 0x477fe000u;  // 65504 as a float

// A block's elements of a dtype.
template <typename T>
struct Source {
    const T* x;

    // COUNT of them, a multiple of 8, from `first` on.
    template <int COUNT>
    __device__ __forceinline__ void load(int first, float (&v)[COUNT]) const {
        constexpr int PER_WORD = Word<T>::COUNT, EACH = 4 * PER_WORD;  // elements of a word, of 16 bytes
        const T* from = x + first;
        const bool aligned = (reinterpret_cast<unsigned long long>(from) & 15) == 0;
#pragma unroll
        for (int i = 0; i < COUNT / EACH; ++i) {
            if (aligned) {
                const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i);
                const unsigned word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int e = 0; e < EACH; ++e) v[i * EACH + e] = Word<T>::get(word[e / PER_WORD], e % PER_WORD);
            } else {
#pragma unroll
                for (int e = 0; e < EACH; ++e) v[i * EACH + e] = to_float(from[i * EACH + e]);
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) v[i] = within_half(v[i]);
    }

    // NaN is 0, and what is beyond the largest half is that.
    __device__ __forceinline__ static float within_half(float a) {
        const unsigned bits = ieee::magnitude_bits(a);
        if (bits <= LARGEST_HALF) return a;
        return bits > 0x7f800000u ? 0.0f : __uint_as_float((__float_as_uint(a) & 0x80000000u) | LARGEST_HALF);
    }
};

// The nearest of 0 to LARGEST, halves to even; 0 where it is not finite.
template <int LARGEST>
__device__ __forceinline__ int to_code(float x) {
    const float whole = rintf(ieee::finite(x));
    return static_cast<int>(fminf(fmaxf(whole, 0.0f), static_cast<float>(LARGEST)));
}
