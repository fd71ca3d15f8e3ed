// How GGUF's simple types are quantized: the twins of kbitcupy/formats/gguf, bit for bit.
//
// Numbers come from a source: source.load(i, v) gives elements i to i + 31 of a block, NaN as 0 and none beyond the
// range of a half. An encoder is a struct with BLOCK, its elements, and encode(source, fields, block).
#pragma once
#include "formats/gguf_numbers.cuh"

struct Q8_0Encoder {
    static constexpr int BLOCK = 32;

    template <typename S>
    __device__ __forceinline__ static void encode(const S& source, const Fields& fields, long long block) {
        float v[32];
        source.load(0, v);
        const float d = ieee::divide(__uint_as_float(largest_magnitude(v, 0)), 127.0f);
        const float factor = ieee::reciprocal(d);
        unsigned word[8] = {};
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int q = round_away(ieee::finite(ieee::multiply(v[i], factor)));
            word[i / 4] |= static_cast<unsigned>(q & 0xff) << i % 4 * 8;
        }
        fields.put_half(0, block, d);
        fields.put_words(1, block * 32, word);
    }
};

struct Q4_0Encoder {
    static constexpr int BLOCK = 32;

    template <typename S>
    __device__ __forceinline__ static void encode(const S& source, const Fields& fields, long long block) {
        float v[32], signed_max = 0.0f;
        source.load(0, v);
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const unsigned bits = ieee::magnitude_bits(v[i]);
            if (bits > largest) largest = bits, signed_max = v[i];
        }
        const float d = ieee::divide(signed_max, -8.0f);
        const float factor = ieee::reciprocal(d);
        unsigned word[4] = {};
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            // Never negative: -8 + 8.5 is the least. A cast rounds toward zero.
            const int q = static_cast<int>(ieee::finite(ieee::add(ieee::multiply(v[i], factor), 8.5f)));
            word[i % 16 / 4] |= static_cast<unsigned>(min(q, 15)) << (i % 4 * 8 + i / 16 * 4);
        }
        fields.put_half(0, block, d);
        fields.put_words(1, block * 16, word);
    }
};

struct TQ2_0Encoder {
    static constexpr int BLOCK = 256;

    template <typename S>
    __device__ __forceinline__ static void encode(const S& source, const Fields& fields, long long block) {
        float v[32];
        unsigned largest = 0;
        for (int i = 0; i < BLOCK; i += 32) {
            source.load(i, v);
            largest = largest_magnitude(v, largest);
        }
        const float d = __uint_as_float(largest), factor = ieee::reciprocal(d);
        for (int part = 0; part < 2; ++part) {
            unsigned word[8] = {};
            for (int s = 0; s < 4; ++s) {
                source.load(part * 128 + s * 32, v);
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    const int t = round_away(ieee::finite(ieee::multiply(v[i], factor))) + 1;
                    word[i / 4] |= static_cast<unsigned>(t) << (i % 4 * 8 + s * 2);
                }
            }
            fields.put_words(0, block * 64 + part * 32, word);
        }
        fields.put_half(1, block, d);
    }
};
