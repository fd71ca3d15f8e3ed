// Tokens that are quantized by "q8_1" as sums of two halves, for products that take tokens as floats: a column of an
// mma for each half, so up to four tokens are at once what else eight are. Numbers of tokens are within 2^-24 of what
// they stand for where these are above 2^-28 of the largest one of their part, and further below within 2^-51 of that
// one.
#pragma once
#include "linear/block_activations.cuh"

constexpr int PAIRED_TOKENS = 4;   // the most
constexpr int HALF_EXPONENT = 14;  // of the largest number of a part, as a half
constexpr float SECOND = 4096.0f;  // by which second halves are larger

// Sixteen neighbours of a token, of which each lane of a warp has some and the next one those behind them.
struct SixteenHalves {
    float scale;
    unsigned codes[4];

    // Quantize them. Returns the bits of the largest magnitude of their block.
    template <typename X>
    __device__ __forceinline__ unsigned quantize(Numbers<X>& numbers) {
        unsigned most = numbers.largest();
        most = max(most, __shfl_xor_sync(FULL_WARP, most, 1));
        const BlockRule rule(most);
        float v[SIXTEEN];
        numbers.get(v);
        rule.codes(v, codes);
        scale = rule.scale;
        return most;
    }
    // The exponent of a part with this largest magnitude, as a float has it: so that either power of two is one.
    __device__ __forceinline__ static unsigned exponent_of(unsigned most) {
        return max(most >> 23, unsigned(HALF_EXPONENT + 1));
    }
    // From here on the numbers are less than 2^(HALF_EXPONENT + 1).
    __device__ __forceinline__ void bring_down(unsigned exponent) {
        scale = ieee::multiply(scale, __uint_as_float(254u + HALF_EXPONENT - exponent << 23));
    }
    // The first half of number e, or the second one, to be rounded.
    __device__ __forceinline__ float get(int e, bool second) const {
        const float number = static_cast<float>(static_cast<signed char>(codes[e / 4] >> e % 4 * 8)) * scale;
        return second ? (number - __half2float(__float2half_rn(number))) * SECOND : number;
    }
};
