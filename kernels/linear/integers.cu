// Products of int8 tokens with integer codes of any format that has some, as they are stored: the plain way, on any
// GPU. The contract stands in kbitcupy/products/integers.py, how codes lie in kbitcupy/formats/integer_codes.py.
#include "common/ieee.cuh"
#include "common/types.cuh"
#include "linear/ids.cuh"

// Of the host, ahead of this source: struct IntegerWeight; numbers of `added`, of dtypes and of a bias; Q8_BLOCK, codes
// of a token that share a scale where all of them do not; PRODUCT_THREADS of a block; TOGETHER, tokens that share the
// decoding of a row.
constexpr int WARPS = PRODUCT_THREADS / WARP;

__device__ __forceinline__ const unsigned char* plane_at(unsigned long long address) {
    return reinterpret_cast<const unsigned char*>(address);
}

__device__ __forceinline__ float float_at(const void* plane, int dtype, long long i) {
    switch (dtype) {
        case FLOAT32_BIAS:
            return static_cast<const float*>(plane)[i];
        case FLOAT16_BIAS:
            return to_float(static_cast<const __half*>(plane)[i]);
        default:
            return to_float(static_cast<const __nv_bfloat16*>(plane)[i]);
    }
}

__device__ __forceinline__ int integer_at(const void* plane, int dtype, long long i) {
    switch (dtype) {
        case INT32_ENTRIES:
            return static_cast<const int*>(plane)[i];
        case INT8_ENTRIES:
            return static_cast<const signed char*>(plane)[i];
        default:
            return static_cast<const unsigned char*>(plane)[i];
    }
}

// The code of an element in the order of memory.
__device__ __forceinline__ int code_at(const IntegerWeight& w, long long e) {
    const int fields = 8 / w.bits, run = w.width * fields;
    const long long in_run = e % run;
    const int byte = plane_at(w.codes)[e / run * w.width + in_run % w.width];
    const int code = byte >> w.bits * static_cast<int>(in_run / w.width) & ((1 << w.bits) - 1);
    const int flip = w.is_signed << (w.bits - 1);
    return (code ^ flip) - flip;
}

// What the elements of a group have in common.
struct OfGroup {
    float scale, offset;
    int zero;
};

__device__ __forceinline__ OfGroup group_at(const IntegerWeight& w, long long number) {
    OfGroup of{0.0f, 0.0f, w.zero};
    if (w.added == INNER) {
        // kbitcupy/formats/gguf/kquants.py has the order of the bits.
        const long long block = number / 8;
        const int j = number % 8, i = j % 4;
        const unsigned char* bytes = plane_at(w.beside) + block * 12;
        const int low = bytes[i], high = bytes[i + 4], rest = bytes[i + 8];
        const int scale = j < 4 ? low & 63 : (rest & 15) | low >> 6 << 4;
        const int least = j < 4 ? high & 63 : rest >> 4 | high >> 6 << 4;
        of.scale = ieee::multiply(float_at(plane_at(w.scales), w.scale_dtype, block * 2), static_cast<float>(scale));
        of.offset =
            -ieee::multiply(float_at(plane_at(w.scales), w.scale_dtype, block * 2 + 1), static_cast<float>(least));
        return of;
    }
    of.scale = float_at(plane_at(w.scales), w.scale_dtype, number);
    if (w.added == OFFSETS) {
        of.scale = ieee::finite(of.scale);
        of.offset = float_at(plane_at(w.beside), w.scale_dtype, number);
        return of;
    }
    if (w.positive) of.scale = usable(of.scale);
    if (w.added == ZERO_POINTS) {
        const int lowest = -(w.is_signed << (w.bits - 1));
        of.zero = min(max(integer_at(plane_at(w.beside), w.beside_dtype, number), lowest), lowest + (1 << w.bits) - 1);
    }
    return of;
}

__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL_WARP, x);
#else
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
#endif
}

// A warp has a channel and up to TOKENS tokens: its lanes add up a unit, elements that share all scales, and lane i
// keeps the sum of the terms of token i. With `ids` each product has an expert, and TOKENS is 1.
template <typename T, int TOKENS>
__global__ void __launch_bounds__(PRODUCT_THREADS) multiply_integers(
    const signed char* __restrict__ a,        // [tokens, pitch]
    const float* __restrict__ token_scale,    // [tokens]; or [1]; or of units of Q8_BLOCK, [units, padded]
    const __grid_constant__ IntegerWeight w,  // of [channels, depth], or of experts of them
    const void* __restrict__ ids,             // [products] of experts, or null: products are tokens
    const void* __restrict__ bias,            // [channels] of the type that bias_kind names; 0 for none
    T* __restrict__ y,                        // [products, channels]
    long long products, long long channels, long long depth, long long pitch, long long padded, long long experts,
    int slots,    // products of a token
    int blocked,  // whether there are scales of units
    int shared,   // whether all tokens have one scale
    int bias_kind,
    int id_bytes) {  // of each of the ids, which are int32 or int64
    const int lane = threadIdx.x % WARP;
    const long long together = (products + TOKENS - 1) / TOKENS;
    const long long step = static_cast<long long>(gridDim.x) * WARPS;
    for (long long at = blockIdx.x * static_cast<long long>(WARPS) + threadIdx.x / WARP; at < together * channels;
         at += step) {
        const long long first = at / channels * TOKENS, n = at % channels;
        const int count = static_cast<int>(min(products - first, static_cast<long long>(TOKENS)));
        const long long expert = ids == nullptr ? 0 : id_at(ids, id_bytes, first);
        float total = -0.0f;  // added to a number it changes nothing
        const bool there = expert >= 0 && expert < experts;
        const long long row = expert * channels + n, begin = row / w.outer * w.per + row % w.outer / w.run;
        const long long token = ids == nullptr ? first : first / slots;
        const float of_token = blocked ? 0.0f : usable(token_scale[shared ? 0 : min(token + lane, token + count - 1)]);
        const long long group = w.group == 0 ? max(depth, 1ll) : w.group;
        for (long long k0 = 0; there && k0 < depth;) {
            long long end = min(depth, (k0 / group + 1) * group);
            if (blocked) end = min(end, (k0 / Q8_BLOCK + 1) * Q8_BLOCK);
            const OfGroup of = group_at(w, begin + k0 / group);
            int sum[TOKENS] = {}, of_codes[TOKENS] = {};
            for (long long k = k0 + lane; k < end; k += WARP) {
                const int code = code_at(w, row * depth + k) - of.zero;
#pragma unroll
                for (int i = 0; i < TOKENS; ++i) {
                    const int x = i < count ? a[(token + i) * pitch + k] : 0;
                    sum[i] += code * x, of_codes[i] += x;
                }
            }
            int own = 0, own_codes = 0;
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                const int all = warp_sum(sum[i]);
                if (lane == i) own = all;
                if (w.added == OFFSETS || w.added == INNER) {
                    const int all_codes = warp_sum(of_codes[i]);
                    if (lane == i) own_codes = all_codes;
                }
            }
            if (lane < count) {
                const float e = blocked ? usable(token_scale[k0 / Q8_BLOCK * padded + token + lane]) : of_token;
                float term = ieee::multiply(ieee::multiply(__int2float_rn(own), e), of.scale);
                if (w.added == OFFSETS || w.added == INNER)
                    term = ieee::add(term, ieee::multiply(ieee::multiply(__int2float_rn(own_codes), e), of.offset));
                total = k0 == 0 ? term : ieee::add(total, term);
            }
            k0 = end;
        }
        if (lane >= count) continue;
        if (!there || depth == 0) total = 0.0f;
        if (bias_kind != 0) total = ieee::add(total, float_at(bias, bias_kind, n));
        T& target = y[(first + lane) * channels + n];
        if constexpr (sizeof(T) == 4) target = total;
        else target = Word<T>::element(Word<T>::pack(total, total), 0);
    }
}
