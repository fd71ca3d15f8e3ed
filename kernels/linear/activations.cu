// BitNet's activations: the largest magnitude of tokens, their codes, and RMSNorm ahead of both. The contract stands in
// kbitcupy/products/activations.py, whose NumPy side gives the same bits.
//
// A thread block has one token at a time. What only normalizes, or finds the largest magnitude, reads it once for each
// pass, a thread every LANES-th element. What quantizes has eight neighbours a thread, once: short code, which comes
// from memory as well, and few steps, as the product waits for it.
//
// Arguments that the kernels share:
//     x                T[tokens, depth]
//     weight           float32[depth] of RMSNorm, or null
//     tokens, depth    M and K
//     normalizes       whether there is an RMSNorm
//     norm_share       1 / K, by which it multiplies the sum of squares first of all
//     norm_eps         what it adds to the mean of squares
#include "common/copy.cuh"
#include "common/ieee.cuh"
#include "common/sync.cuh"
#include "common/types.cuh"
#include "linear/fragments.cuh"
#include "linear/quantize.cuh"
#include "linear/rms_norm.cuh"

// Of the host, ahead of this source: LANES of the sum of squares, a power of two; MOST_THREADS of a block that
// quantizes; STEP of linear/fragments.cuh; ROOM, elements of a token in shared memory, a multiple of 8.
static_assert((LANES & (LANES - 1)) == 0, "sums are halved");

// What RMSNorm makes of the elements of a token, or the elements.
struct Normalizer {
    const float* weight;
    float factor;
    bool normalizes;

    __device__ __forceinline__ float operator()(float x, long long k) const {
        if (!normalizes) return x;
        const float z = ieee::multiply(x, factor);
        return weight == nullptr ? z : ieee::multiply(z, weight[k]);
    }
};

// All threads of a block take part; each returns the Normalizer of the token.
template <typename T>
__device__ __forceinline__ Normalizer
normalizer_of(const T* row, const float* weight, long long depth, bool normalizes, double norm_eps) {
    if (!normalizes) return {nullptr, 1.0f, false};
    __shared__ double lane[LANES];
    const int thread = threadIdx.x;
    double sum = 0;
    for (long long k = thread; k < depth; k += LANES) {
        const double x = ieee::widen(number(to_float(row[k])));
        sum += x * x;
    }
    __syncthreads();  // an earlier sum has been read
    lane[thread] = sum;
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) lane[thread] += lane[thread + half];
    }
    __syncthreads();
    const double mean = lane[0] / static_cast<double>(depth > 0 ? depth : 1);
    return {weight, ieee::narrow(1.0 / sqrt(mean + norm_eps)), true};
}

// The bits of the largest magnitude of a token, in every thread.
template <typename T>
__device__ __forceinline__ unsigned largest_of(const T* row, long long depth, const Normalizer& normalized) {
    __shared__ unsigned lane[LANES];
    const int thread = threadIdx.x;
    unsigned most = 0;
    for (long long k = thread; k < depth; k += LANES)
        most = max(most, ieee::magnitude_bits(number(normalized(to_float(row[k]), k))));
    __syncthreads();  // an earlier maximum has been read
    lane[thread] = most;
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) lane[thread] = max(lane[thread], lane[thread + half]);
    }
    __syncthreads();
    return lane[0];
}

template <typename T>
__global__ void __launch_bounds__(LANES) normalize_tokens(
    const T* __restrict__ x, const float* __restrict__ weight,
    float* __restrict__ y,  // [tokens, depth]
    long long tokens, long long depth, double norm_eps) {
    for (long long m = blockIdx.x; m < tokens; m += gridDim.x) {
        const T* row = x + m * depth;
        const Normalizer normalized = normalizer_of(row, weight, depth, true, norm_eps);
        for (long long k = threadIdx.x; k < depth; k += LANES) y[m * depth + k] = normalized(to_float(row[k]), k);
    }
}

template <typename T>
__global__ void __launch_bounds__(LANES) largest_of_tokens(
    const T* __restrict__ x, const float* __restrict__ weight,
    float* __restrict__ largest,  // [tokens]
    long long tokens, long long depth, int normalizes, double norm_eps) {
    for (long long m = blockIdx.x; m < tokens; m += gridDim.x) {
        const T* row = x + m * depth;
        const unsigned most = largest_of(row, depth, normalizer_of(row, weight, depth, normalizes != 0, norm_eps));
        if (threadIdx.x == 0) largest[m] = __uint_as_float(most);
    }
}

// ---- codes -------------------------------------------------------------------------------------------------------

// The largest of a block, or the sum; all threads take part, and all have it.
template <typename F>
__device__ __forceinline__ int joined(int own, const F& join) {
    __shared__ int of_warp[MOST_THREADS / WARP];
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) own = join(own, __shfl_xor_sync(FULL_WARP, own, step));
    __syncthreads();  // earlier ones have been read
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = own;
    __syncthreads();
    const int warps = blockDim.x / WARP;  // a power of two
    own = of_warp[threadIdx.x % warps];
#pragma unroll 1
    for (int step = warps / 2; step > 0; step /= 2) own = join(own, __shfl_xor_sync(FULL_WARP, own, step));
    return own;
}

// The sum over a block, likewise.
__device__ __forceinline__ double total_of(double own) {
    __shared__ double of_warp[MOST_THREADS / WARP];
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) own += __shfl_xor_sync(FULL_WARP, own, step);
    __syncthreads();  // earlier ones have been read
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = own;
    __syncthreads();
    const int warps = blockDim.x / WARP;  // a power of two
    own = of_warp[threadIdx.x % warps];
#pragma unroll 1
    for (int step = warps / 2; step > 0; step /= 2) own += __shfl_xor_sync(FULL_WARP, own, step);
    return own;
}

// 1 / root of the mean of squares in the order of the contract, from `kept`, where the first `room` elements are, and
// the row.
template <typename T>
__device__ __forceinline__ float root_factor(
    const T* row, const float* kept, int room, long long depth, double norm_eps) {
    __shared__ double lane[LANES];
    __shared__ float factor;
    const int thread = threadIdx.x;
    double sum = 0;
    if (thread < LANES) {
        const int there = static_cast<int>(min(depth, static_cast<long long>(room)));
#pragma unroll 1
        for (int k = thread; k < there; k += LANES) {
            const double x = ieee::widen(number(kept[k]));
            sum += x * x;
        }
#pragma unroll 1
        for (long long k = room + thread; k < depth; k += LANES) {
            const double x = ieee::widen(number(to_float(row[k])));
            sum += x * x;
        }
        lane[thread] = sum;
    }
    __syncthreads();
    if (thread < WARP) {
        // (i) + (i + half), until one is left; within a warp either of two may come first.
        double part[LANES / WARP];
#pragma unroll
        for (int w = 0; w < LANES / WARP; ++w) part[w] = lane[w * WARP + thread];
#pragma unroll
        for (int half = LANES / WARP / 2; half > 0; half /= 2)
#pragma unroll
            for (int w = 0; w < half; ++w) part[w] += part[w + half];
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) part[0] += __shfl_xor_sync(FULL_WARP, part[0], step);
        const double mean = part[0] / static_cast<double>(depth > 0 ? depth : 1);
        if (thread == 0) factor = ieee::narrow(1.0 / sqrt(mean + norm_eps));
    }
    __syncthreads();
    return factor;
}

// The first elements of a token are kept in shared memory, each thread its own but for the squares; the others are read
// again. VECTOR: rows, and the weight, start at multiples of 16 bytes, codes at 8, and depth is a multiple of 8.
template <typename T, bool VECTOR>
__global__ void __launch_bounds__(MOST_THREADS) quantize_activations(
    const T* __restrict__ x, const float* __restrict__ weight,
    const unsigned* __restrict__ given,  // [1] bits of the largest magnitude of all tokens, or null: of each its own
    signed char* __restrict__ codes,     // rows [tokens, pitch], zeros from depth on, or fragments
    float* __restrict__ scales,          // [tokens], or [1] with `given`
    int* __restrict__ sums,              // of the codes: [tokens], or as store_group_sums has them; or null
    long long tokens, long long depth, long long pitch,
    int groups,  // 0 for rows, else times 8 tokens of fragments
    int group,   // of whose codes there are sums, and fragments in octets; 0 for all of a token
    int normalizes, double norm_share, double norm_eps, float eps, int lowest, int highest, int away) {
    __shared__ __align__(16) float kept[ROOM];
    if (weight != nullptr)
        for (long long k = threadIdx.x * 32; k < depth; k += blockDim.x * 32) prefetch_l2(weight + k);
    wait_for_previous();
    launch_dependents();  // not earlier: the next kernel reads weights at once
    const float top = static_cast<float>(highest), bottom = static_cast<float>(lowest);
    const int size = static_cast<int>(depth), there = min(size, ROOM), run = OCTET * blockDim.x;
    const int first = threadIdx.x * OCTET;
    for (long long m = blockIdx.x; m < tokens; m += gridDim.x) {
        const T* row = x + m * depth;
        float v[OCTET];
        const auto keep = [&](int k) {
            if (k >= ROOM) return;
#pragma unroll
            for (int e = 0; e < OCTET; ++e) kept[k + e] = v[e];
        };
        float factor = 1.0f, g[OCTET];
        if (normalizes) {
            // Ahead of what takes time.
            if (weight != nullptr && first < size) load_octet<VECTOR>(g, weight, first, size);
            double squares[2] = {0, 0};
#pragma unroll 2
            for (int k = first; k < size; k += run) {
                load_octet<VECTOR>(v, row, k, size);
                keep(k);
#pragma unroll
                for (int e = 0; e < OCTET; ++e) {
                    const double wide = widened<T>(v[e]);
                    squares[e % 2] = fma(wide, wide, squares[e % 2]);
                }
            }
            const RootMeanSquare root{true, weight, norm_share, norm_eps};
            if (!factor_from(total_of(squares[0] + squares[1]), root, factor))
                factor = root_factor(row, kept, ROOM, depth, norm_eps);
        }
        // What is quantized.
        const auto prepare = [&](int k) {
            if (normalizes && k < ROOM) load_octet<true>(v, kept, k, size);
            else load_octet<VECTOR>(v, row, k, size);
            if (normalizes) {
                if (weight != nullptr && k != first) load_octet<VECTOR>(g, weight, k, size);
#pragma unroll
                for (int e = 0; e < OCTET; ++e) {
                    v[e] = ieee::multiply(v[e], factor);
                    if (weight != nullptr) v[e] = ieee::multiply(v[e], g[e]);
                }
            }
#pragma unroll
            for (int e = 0; e < OCTET; ++e) v[e] = VECTOR || k + e < size ? number(v[e]) : 0.0f;
        };
        unsigned most = 0;
#pragma unroll 1
        for (int k = first; k < size; k += run) {
            prepare(k);
            keep(k);
#pragma unroll
            for (int e = 0; e < OCTET; ++e) most = max(most, ieee::magnitude_bits(v[e]));
        }
        most = joined(static_cast<int>(most), [](int a, int b) { return max(a, b); });
        if (given != nullptr) most = *given;
        const float a = __uint_as_float(max(most, __float_as_uint(eps))), scale = ieee::divide(top, a);
        int sum = 0;
        const int lane = threadIdx.x % WARP;
#pragma unroll 1
        for (int k = first; k - lane * OCTET < size; k += run) {
            int of_octet = 0;
            if (k < size) {
                if (k < ROOM) load_octet<true>(v, kept, k, size);
                else prepare(k);
                unsigned word[2] = {0, 0};
#pragma unroll
                for (int e = 0; e < OCTET; ++e) {
                    const int code = code_of(ieee::multiply(v[e], scale), bottom, top, away != 0);
                    word[e / 4] |= static_cast<unsigned>(code & 0xff) << e % 4 * 8;
                    of_octet += code;
                }
                signed char* target =
                    codes + (groups == 0 ? m * pitch + k : place_in_fragments(k, m, groups, group != 0));
                if (VECTOR) {
                    *reinterpret_cast<uint2*>(target) = make_uint2(word[0], word[1]);
                } else {
#pragma unroll
                    for (int e = 0; e < OCTET; ++e)
                        if (k + e < size) target[e] = static_cast<signed char>(word[e / 4] >> e % 4 * 8);
                }
            }
            if (group != 0) store_group_sums(sums, of_octet, k, size, m, groups, group);
            sum += of_octet;
        }
        if (groups == 0)
            for (long long k = depth + threadIdx.x; k < pitch; k += blockDim.x) codes[m * pitch + k] = 0;
        if (sums != nullptr && group == 0) {
            sum = joined(sum, [](int a, int b) { return a + b; });
            if (threadIdx.x == 0) sums[m] = sum;
        }
        if (threadIdx.x == 0 && (given == nullptr || m == 0)) scales[given == nullptr ? m : 0] = ieee::divide(a, top);
        __syncthreads();  // what is kept has been read
    }
}
