// Products of int8 activations and int8 weights: quantization of tokens, integer mma, rescaling.
//
// y[m, n] = sum_k a[m, k] * w[n, k] * token_scale[m] * channel_scale[n] + bias[n]
//
// a is what quantize_tokens wrote, or laid out as that: int8 [M, pitch], zeros from K to pitch, pitch a multiple of 128
// and the array aligned to 16 bytes. So only w, which is the caller's, has edges in K. Sums are exact in int32 up to K
// = 131071. The float32 operations keep subnormal numbers, as NumPy does, although -ftz=true is on.
//
// Arguments that the kernels which multiply share:
//     a               int8 [tokens, pitch] tokens
//     w               int8 [channels, depth] weights
//     y               T[tokens, channels]
//     token_scale     float32[tokens]
//     channel_scale   float32[channels]
//     bias            [channels] of the type that bias_kind names, or null
//     tokens, channels, depth, pitch    M, N, K and bytes from token to token
#pragma once
#include "common/mma.cuh"

// ---- float32 without flushing ----------------------------------------------------------------------------------

__device__ __forceinline__ float add_ieee(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// Comparisons flush subnormal numbers, too.
__device__ __forceinline__ bool is_zero(float x) { return (__float_as_uint(x) & 0x7fffffffu) == 0; }

// ---- rescaling -------------------------------------------------------------------------------------------------

struct Rescaling {
    const float* token_scale;    // [M]
    const float* channel_scale;  // [N]
    const void* bias;            // [N]
    long long bias_kind;         // its dtype: FLOAT32_BIAS, FLOAT16_BIAS, BFLOAT16_BIAS; else there is none

    __device__ __forceinline__ float of_token(long long m) const { return load_written_factor(token_scale + m); }
    __device__ __forceinline__ float of_channel(long long n) const { return usable(__ldg(channel_scale + n)); }
    // Without a bias -0, which changes no number.
    __device__ __forceinline__ float bias_of(long long n) const {
        switch (bias_kind) {
            case FLOAT32_BIAS:
                return static_cast<const float*>(bias)[n];
            case FLOAT16_BIAS:
                return to_float(static_cast<const __half*>(bias)[n]);
            case BFLOAT16_BIAS:
                return to_float(static_cast<const __nv_bfloat16*>(bias)[n]);
            default:
                return -0.0f;
        }
    }
    __device__ __forceinline__ static float apply(int sum, float token, float channel, float bias) {
        return add_ieee(multiply_ieee(multiply_ieee(__int2float_rn(sum), token), channel), bias);
    }
};

__device__ __forceinline__ void from_float(float& y, float x) { y = x; }
__device__ __forceinline__ void from_float(__half& y, float x) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(__nv_bfloat16& y, float x) { y = __float2bfloat16_rn(x); }

// Four words of each of four neighbouring lanes, rows and columns exchanged.
__device__ __forceinline__ void transpose_quad(unsigned (&w)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const unsigned got = __shfl_xor_sync(FULL_WARP, upper ? w[i] : w[i + step], step);
            if (upper) w[i] = got;
            else w[i + step] = got;
        }
    }
}

// Where a warp writes sums. Those of 16 tokens x 8 channels are laid out by mma as: lane (g, t), g = lane / 4 and t =
// lane % 4, holds channels 2t and 2t + 1 of token g, then those of token g + 8.
template <typename T>
struct Output {
    T* y;            // [M, N]
    long long m, n;  // M and N
    bool aligned;    // whether rows start at multiples of 16 bytes

    // Sums of 16 tokens from `token` on and of 32 channels from `channel` on; scale and bias of those channels.
    __device__ __forceinline__ void store(
        const int* sums, long long token, long long channel, const Rescaling& rescaling, const float* scale,
        const float* bias, int lane) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long row = token + g + 8 * half;
            const float of_token = row < m ? rescaling.of_token(row) : 0.0f;
            unsigned words[sizeof(T) == 2 ? 4 : 1];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 s = *reinterpret_cast<const float2*>(scale + 8 * i + 2 * t);
                const float2 b = *reinterpret_cast<const float2*>(bias + 8 * i + 2 * t);
                const float v[2] = {
                    Rescaling::apply(sums[4 * i + 2 * half], of_token, s.x, b.x),
                    Rescaling::apply(sums[4 * i + 2 * half + 1], of_token, s.y, b.y)};
                if constexpr (sizeof(T) == 2) {
                    words[i] = Word<T>::pack(v);
                } else {
                    const long long column = channel + 8 * i + 2 * t;
                    T* target = y + row * n + column;
                    if (row < m && aligned && column < n)
                        __stcs(reinterpret_cast<float2*>(target), make_float2(v[0], v[1]));
                    else if (row < m)
                        for (int e = 0; e < 2; ++e)
                            if (column + e < n) target[e] = v[e];
                }
            }
            if constexpr (sizeof(T) == 2) {
                transpose_quad(words, lane);  // eight neighbouring channels a lane
                const long long column = channel + 8 * t;
                T* target = y + row * n + column;
                if (row < m && aligned && column < n) {
                    __stcs(reinterpret_cast<uint4*>(target), make_uint4(words[0], words[1], words[2], words[3]));
                } else if (row < m) {
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        if (column + e < n) target[e] = Word<T>::element(words[e / 2], e % 2);
                }
            }
        }
    }
};

// ---- tiles ------------------------------------------------------------------------------------------------------

// Tiles in an order that keeps those under way at a time together: runs of up to 16 tiles of tokens for each tile of
// channels.
struct TileOrder {
    long long along_m, along_n;
    static constexpr int RUN = 16;

    __device__ __forceinline__ void at(long long number, long long& m, long long& n) const {
        const long long group = number / (RUN * along_n), rest = number % (RUN * along_n);
        const long long run = min(static_cast<long long>(RUN), along_m - group * RUN);
        m = group * RUN + rest % run;
        n = rest / run;
    }
};

// 16 bytes of row w from k on, zeros from K on. ALIGNED: rows start at multiples of 16 bytes and so does k.
template <bool ALIGNED>
__device__ __forceinline__ uint4 load_weights(const signed char* row, long long k, long long depth) {
    if constexpr (ALIGNED) {
        return k < depth ? load_once(row + k) : make_uint4(0, 0, 0, 0);
    } else {
        unsigned word[4] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (k + i < depth)
                word[i / 4] |= static_cast<unsigned>(static_cast<unsigned char>(row[k + i])) << i % 4 * 8;
        return make_uint4(word[0], word[1], word[2], word[3]);
    }
}
