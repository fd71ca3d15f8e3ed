// How GGUF's types are quantized: the twins of kbitcupy/formats/gguf, bit for bit. Nothing here talks to another lane,
// so the host's compiler takes it, too.
//
// Numbers come from a source: source.load(i, v) gives elements i to i + 31 of a block, NaN as 0 and none beyond the
// range of a half. An encoder of whole blocks is a struct with BLOCK, its elements, and encode(source, fields, block);
// one that needs eight lanes for the sub-blocks of a block is drawn at Q4_KEncoder.
#pragma once
#include <cuda_fp16.h>

#include "common/ieee.cuh"

// The planes that an encoder writes, in the order of the fields.
constexpr int MAX_FIELDS = 4;
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

// The nearest integer of |x| up to 127 and a little, halves away from zero. The difference is exact.
__device__ __forceinline__ int round_away(float x) {
    const int whole = static_cast<int>(x);
    const float rest = __fsub_rn(x, static_cast<float>(whole));
    return whole + (rest >= 0.5f) - (rest <= -0.5f);
}

__device__ __forceinline__ unsigned largest_magnitude(const float (&v)[32], unsigned largest) {
#pragma unroll
    for (int i = 0; i < 32; ++i) largest = max(largest, ieee::magnitude_bits(v[i]));
    return largest;
}

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

// The nearest of 0 to LARGEST, halves to even; 0 where it is not finite.
template <int LARGEST>
__device__ __forceinline__ int to_code(float x) {
    const float whole = rintf(ieee::finite(x));
    return static_cast<int>(fminf(fmaxf(whole, 0.0f), static_cast<float>(LARGEST)));
}

// Eight lanes make a block of Q4_K, each with a sub-block of 32:
//
//     lane.search(x)                        scale, minimum and codes of its own
//     lane.finish(S, M)                     what is stored of these, where S and M are the largest of the eight lanes
//     lane.store(number, of lane number ^ 1: its codes, of lane number ^ 4: its sc and mn, fields, block)
struct Q4_KEncoder {
    static constexpr int BLOCK = 256, LARGEST = 15, STEPS = 20, LARGEST_SCALE = 63;

    float x[32], scale, minimum;
    unsigned codes[4];  // 8 of 4 bits a word
    int sc, mn;

    // The sum of w * (scale * code - low - x)^2, w = rms + |x|.
    __device__ __forceinline__ float error_of(const unsigned (&code)[4], float scale, float low, float rms) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float level = static_cast<float>(code[i / 8] >> i % 8 * 4 & 15);
            const float e = ieee::subtract(ieee::add(ieee::multiply(scale, level), low), x[i]);
            sum = ieee::add(sum, ieee::multiply(weight(i, rms), ieee::multiply(e, e)));
        }
        return sum;
    }

    __device__ __forceinline__ float weight(int i, float rms) const { return ieee::add(rms, ieee::magnitude(x[i])); }

    // The codes for a scale of 1 / step.
    __device__ __forceinline__ void codes_of(float step, float low, unsigned (&code)[4]) const {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int c = to_code<LARGEST>(ieee::multiply(step, ieee::subtract(x[i], low)));
            code[i / 8] = static_cast<unsigned>(c) << i % 8 * 4 | (i % 8 ? code[i / 8] : 0);
        }
    }

    __device__ __forceinline__ void search() {
        float low = 0.0f, high = x[0], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            if (ieee::less(x[i], low)) low = x[i];
            if (ieee::less(high, x[i])) high = x[i];
            squares = ieee::add(squares, ieee::multiply(x[i], x[i]));
        }
        const float rms = ieee::square_root(ieee::divide(squares, 32.0f));
        float sum_w = 0.0f, sum_x = 0.0f;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float w = weight(i, rms);
            sum_w = ieee::add(sum_w, w), sum_x = ieee::add(sum_x, ieee::multiply(w, x[i]));
        }
        const bool constant = !ieee::less(low, high);
        const float first = ieee::divide(static_cast<float>(LARGEST), ieee::subtract(high, low));
        codes_of(first, low, codes);
        scale = ieee::divide(1.0f, first);
        float error = error_of(codes, scale, low, rms);
#pragma unroll 1
        for (int number = 0; number <= STEPS; ++number) {
            const float range = __fadd_rn(__fadd_rn(-1.0f, __fmul_rn(0.1f, static_cast<float>(number))), LARGEST);
            unsigned tried[4];
            codes_of(ieee::divide(range, ieee::subtract(high, low)), low, tried);
            float sum_l = 0.0f, sum_ll = 0.0f, sum_xl = 0.0f;
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const float level = static_cast<float>(tried[i / 8] >> i % 8 * 4 & 15);
                const float weighted = ieee::multiply(weight(i, rms), level);
                sum_l = ieee::add(sum_l, weighted);
                sum_ll = ieee::add(sum_ll, ieee::multiply(weighted, level));
                sum_xl = ieee::add(sum_xl, ieee::multiply(weighted, x[i]));
            }
            const float determinant = ieee::subtract(ieee::multiply(sum_w, sum_ll), ieee::multiply(sum_l, sum_l));
            if (!ieee::less(0.0f, determinant)) continue;
            float new_scale =
                ieee::divide(ieee::subtract(ieee::multiply(sum_w, sum_xl), ieee::multiply(sum_x, sum_l)), determinant);
            float new_low =
                ieee::divide(ieee::subtract(ieee::multiply(sum_ll, sum_x), ieee::multiply(sum_l, sum_xl)), determinant);
            if (ieee::less(0.0f, new_low)) new_low = 0.0f, new_scale = ieee::divide(sum_xl, sum_ll);
            const float new_error = error_of(tried, new_scale, new_low, rms);
            if (!ieee::less(new_error, error)) continue;
            error = new_error, scale = new_scale, low = new_low;
#pragma unroll
            for (int w = 0; w < 4; ++w) codes[w] = tried[w];
        }
        if (constant) {
            scale = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; ++w) codes[w] = 0;
        }
        minimum = ieee::negative(low);
    }

    // A scale as it is stored: its largest in the block over 63.
    __device__ __forceinline__ static float stored(float largest) {
        return __half2float(__float2half_rn(ieee::divide(largest, static_cast<float>(LARGEST_SCALE))));
    }

    __device__ __forceinline__ static int scale_code(float number, float largest) {
        const float top = static_cast<float>(LARGEST_SCALE);
        const float step = ieee::less(0.0f, largest) ? ieee::divide(top, largest) : 0.0f;
        return to_code<LARGEST_SCALE>(ieee::multiply(step, number));
    }

    __device__ __forceinline__ void finish(float largest_scale, float largest_minimum) {
        sc = scale_code(scale, largest_scale), mn = scale_code(minimum, largest_minimum);
        const float factor = __fmul_rn(stored(largest_scale), static_cast<float>(sc));
        const float offset = __fmul_rn(stored(largest_minimum), static_cast<float>(mn));
        if (factor == 0.0f) return;  // the codes of the search stay
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int c = to_code<LARGEST>(ieee::divide(ieee::add(x[i], offset), factor));
            codes[i / 8] = static_cast<unsigned>(c) << i % 8 * 4 | (i % 8 ? codes[i / 8] : 0);
        }
    }

    // Lanes 2p and 2p + 1 write half of the 32 bytes of their 64 elements each.
    __device__ __forceinline__ void store(
        int lane, const unsigned (&beside)[4], int sc_beside, int mn_beside, const Fields& fields,
        long long block) const {
        unsigned word[4];
        const int half = lane % 2;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const unsigned mine = codes[half * 2 + i / 8] >> i % 8 * 4 & 15;
            const unsigned other = beside[half * 2 + i / 8] >> i % 8 * 4 & 15;
            const unsigned byte = half ? other | mine << 4 : mine | other << 4;
            word[i / 4] = byte << i % 4 * 8 | (i % 4 ? word[i / 4] : 0);
        }
        fields.put_words(2, block * 128 + lane * 16, word);
        unsigned char* scales = fields.field[1] + block * 12;
        if (lane < 4) {
            scales[lane] = static_cast<unsigned char>(sc | sc_beside >> 4 << 6);
            scales[lane + 4] = static_cast<unsigned char>(mn | mn_beside >> 4 << 6);
        } else {
            scales[lane + 4] = static_cast<unsigned char>((sc & 15) | mn << 4);
        }
    }
};
