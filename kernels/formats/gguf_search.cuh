// How GGUF's types with searched scales are quantized: the twins of kbitcupy/formats/gguf, bit for bit.
#pragma once
#include "formats/gguf_numbers.cuh"

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
