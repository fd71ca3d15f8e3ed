// Tokens that are quantized for products of integers, or int8 already and brought into the order of one. The contract
// stands in kbitcupy/products/integer_activations.py, whose NumPy side gives the same bits.
#include "common/copy.cuh"
#include "common/ieee.cuh"
#include "common/sync.cuh"
#include "linear/block_activations.cuh"
#include "linear/integer_activations.cuh"

// Of the host, ahead of this source: TOKEN_THREADS, the most of a block; Q8_BLOCK, elements of a token that share a
// scale where all of them do not.
__device__ __forceinline__ float to_float(signed char x) { return static_cast<float>(x); }

// Eight neighbours from k on, zeros beyond the end and for NaN. VECTOR: all are there or none, at a multiple of 16
// bytes.
template <bool VECTOR, typename T>
__device__ __forceinline__ void load_numbers(float (&v)[OCTET], const T* row, int k, int depth) {
#pragma unroll
    for (int e = 0; e < OCTET; ++e) v[e] = 0.0f;
    if constexpr (VECTOR && sizeof(T) > 1) {
        if (k >= depth) return;
        constexpr int WORDS = OCTET / Word<T>::COUNT;
        unsigned word[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 four = reinterpret_cast<const uint4*>(row + k)[i / 4];
            word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
        }
#pragma unroll
        for (int e = 0; e < OCTET; ++e) v[e] = Word<T>::get(word[e / Word<T>::COUNT], e % Word<T>::COUNT);
    } else {
#pragma unroll
        for (int e = 0; e < OCTET; ++e)
            if (k + e < depth) v[e] = to_float(row[k + e]);
    }
#pragma unroll
    for (int e = 0; e < OCTET; ++e)
        if (ieee::magnitude_bits(v[e]) > INFINITE) v[e] = 0.0f;
}

// The largest finite number of its sign for an infinity.
__device__ __forceinline__ float finite_of(float x) {
    const unsigned bits = __float_as_uint(x);
    return __uint_as_float((bits & 0x80000000u) | min(bits & 0x7fffffffu, LARGEST_FINITE));
}

__device__ __forceinline__ unsigned largest_of(const float (&v)[OCTET]) {
    unsigned most = 0;
#pragma unroll
    for (int e = 0; e < OCTET; ++e) most = max(most, ieee::magnitude_bits(v[e]));
    return min(most, LARGEST_FINITE);  // as which an infinity counts
}

// The largest of a block, in every thread.
__device__ __forceinline__ unsigned block_max(unsigned most) {
    __shared__ unsigned of_warp[TOKEN_THREADS / WARP];
    most = warp_max(most);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = most;
    __syncthreads();
    const int warps = blockDim.x / WARP;
    return warp_max(threadIdx.x % WARP < warps ? of_warp[threadIdx.x % WARP] : 0);
}

// x / scale, rounded to the nearest; 0 where the scale of subnormal numbers is 0.
struct Divider {
    float scale, reciprocal;
    bool plain;  // whether the short division is exact

    __device__ __forceinline__ explicit Divider(float by) : scale(by) {
        plain = by > 0x1p-60f && by < 0x1p60f;
        reciprocal = plain ? __frcp_rn(by) : 0.0f;
    }
    // Of eight numbers of no more than 127 scales, give or take a rounding.
    __device__ __forceinline__ void operator()(float (&v)[OCTET]) const {
        if (plain) {
#pragma unroll
            for (int e = 0; e < OCTET; ++e) v[e] = divide_by_reciprocal(v[e], scale, reciprocal);
        } else {
#pragma unroll
            for (int e = 0; e < OCTET; ++e) v[e] = ieee::is_zero(scale) ? 0.0f : ieee::divide(v[e], scale);
        }
    }
};

// The nearest integer within the range, of a tie the even one.
__device__ __forceinline__ int nearest_even(float x) {
    const float clamped = fminf(fmaxf(x, -128.0f), 127.0f);
    return static_cast<int>(__float_as_uint(__fadd_rn(clamped, ROUNDER)) - __float_as_uint(ROUNDER));
}
// ... the one away from 0; of NaN, which 0 times infinity is, 0.
__device__ __forceinline__ int nearest_away(float x) {
    if (ieee::magnitude_bits(x) > INFINITE) return 0;
    const float clamped = fminf(fmaxf(x, -127.0f), 127.0f), whole = truncf(clamped);
    const int code = static_cast<int>(whole);
    return fabsf(clamped - whole) >= 0.5f ? code + (clamped < 0 ? -1 : 1) : code;
}

// A block has one token, or with Q8_1 a part of it; a thread has eight neighbours at a time. VECTOR: rows of x start at
// multiples of 16 bytes, and K is a multiple of 8.
template <typename T, bool VECTOR>
__global__ void __launch_bounds__(TOKEN_THREADS) quantize_integers(
    const T* __restrict__ x,            // [tokens, depth]; signed char is taken as it is
    unsigned char* __restrict__ codes,  // in `layout`, zeros from depth to pitch
    float* __restrict__ scales,         // [tokens], or for Q8_1 [ceil(depth / Q8_BLOCK), padded]; null: none
    int* __restrict__ sums,             // [ceil(depth / group), padded] of codes, or [tokens] for group 0; null: none
    int depth, int pitch, int padded, int preset, int layout, int group) {
    wait_for_previous();
    launch_dependents();
    const int m = blockIdx.x, lane = threadIdx.x % WARP;
    const T* row = x + static_cast<long long>(m) * depth;
    const int first = (blockIdx.y * blockDim.x + threadIdx.x) * OCTET, run = gridDim.y * blockDim.x * OCTET;
    float v[OCTET];
    float scale = 1.0f;
    if (preset == INT8_TOKENS) {
        unsigned most = 0;
        // The first octet stays; what is behind it is read again.
        for (int k = first + run; k < depth; k += run) {
            load_numbers<VECTOR>(v, row, k, depth);
            most = max(most, largest_of(v));
        }
        load_numbers<VECTOR>(v, row, first, depth);
        most = block_max(max(most, largest_of(v)));
        scale = most == 0 ? 1.0f : ieee::divide(__uint_as_float(most), 127.0f);
        scale = __uint_as_float(min(__float_as_uint(scale), LARGEST_SCALE));
        if (threadIdx.x == 0) scales[m] = scale;
    } else {
        load_numbers<VECTOR>(v, row, first, depth);
    }
    const Divider divide_by_scale(scale);
    int sum_of_token = 0;
    for (int k = first; k - lane * OCTET < pitch; k += run) {
        if (k != first) load_numbers<VECTOR>(v, row, k, depth);
        int code[OCTET], sum = 0;
        if (preset == Q8_1_TOKENS) {
            unsigned most = largest_of(v);
#pragma unroll
            for (int step = 1; step < Q8_BLOCK / OCTET; step *= 2)
                most = max(most, __shfl_xor_sync(FULL_WARP, most, step));
            scale = ieee::divide(__uint_as_float(most), 127.0f);
            const float factor = ieee::reciprocal(scale);
#pragma unroll
            for (int e = 0; e < OCTET; ++e) code[e] = nearest_away(ieee::multiply(finite_of(v[e]), factor));
            if (k % Q8_BLOCK == 0 && k < depth) scales[static_cast<long long>(k / Q8_BLOCK) * padded + m] = scale;
        } else {
            if (preset == INT8_TOKENS) divide_by_scale(v);
#pragma unroll
            for (int e = 0; e < OCTET; ++e) code[e] = nearest_even(v[e]);  // int8 as it came is its own
        }
        unsigned word[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < OCTET; ++e) {
            const int at = evens_first(layout) ? e % 2 * 4 + e / 2 : e;
            word[at / 4] |= static_cast<unsigned>(code[e] & 0xff) << at % 4 * 8;
            sum += code[e];
        }
        if (k < pitch && layout == HALF_ROWS) {
            unsigned pair[OCTET / 2];
#pragma unroll
            for (int e = 0; e < OCTET; e += 2)
                pair[e / 2] = Word<__half>::pack(static_cast<float>(code[e]), static_cast<float>(code[e + 1]));
            reinterpret_cast<uint4*>(codes)[(static_cast<long long>(m) * pitch + k) / OCTET] =
                make_uint4(pair[0], pair[1], pair[2], pair[3]);
        } else if (k < pitch) {
            int behind;
            unsigned char* target = codes + place_of_octet(layout, k, m, padded, pitch, behind);
            *reinterpret_cast<unsigned*>(target) = word[0];
            *reinterpret_cast<unsigned*>(target + behind) = word[1];
        }
        sum_of_token += sum;
        if (group != 0 && sums != nullptr) {
#pragma unroll 1
            for (int step = 1; step < group / OCTET; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
            if (k < depth && k % group == 0) sums[static_cast<long long>(k / group) * padded + m] = sum;
        }
    }
    if (group != 0 || sums == nullptr) return;
    // Sums of all of a token need one thread block for it.
    __shared__ int of_warp[TOKEN_THREADS / WARP];
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) sum_of_token += __shfl_xor_sync(FULL_WARP, sum_of_token, step);
    if (lane == 0) of_warp[threadIdx.x / WARP] = sum_of_token;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < blockDim.x / WARP; ++i) sum_of_token += of_warp[i];
        sums[m] = sum_of_token;
    }
}
