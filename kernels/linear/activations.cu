// BitNet's activations: the largest magnitude of tokens, their codes, and RMSNorm ahead of both. The contract stands in
// kbitcupy/products/activations.py, whose NumPy side gives the same bits.
//
// A thread block has one token at a time, a thread every LANES-th element of it; a token is read once for each of up to
// three passes (squares, magnitudes, codes), the later ones from the cache.
//
// Arguments that the kernels share:
//     x                T[tokens, depth]
//     weight           float32[depth] of RMSNorm, or null
//     tokens, depth    M and K
//     normalizes       whether there is an RMSNorm
//     norm_eps         what it adds to the mean of squares
#include "common/ieee.cuh"
#include "common/types.cuh"

// Of the host, ahead of this source: LANES, the threads of a block, a power of two.
static_assert((LANES & (LANES - 1)) == 0, "sums are halved");

constexpr unsigned LARGEST_FINITE = 0x7f7fffffu, INFINITE = 0x7f800000u;

// x with 0 for NaN, and the largest finite number of its sign for an infinity.
__device__ __forceinline__ float number(float x) {
    const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > INFINITE) return 0.0f;
    return magnitude == INFINITE ? __uint_as_float((bits & 0x80000000u) | LARGEST_FINITE) : x;
}

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

template <typename T>
__global__ void __launch_bounds__(LANES) quantize_activations(
    const T* __restrict__ x, const float* __restrict__ weight,
    const unsigned* __restrict__ given,  // [1] bits of the largest magnitude of all tokens, or null: of each its own
    signed char* __restrict__ codes,     // [tokens, pitch], zeros from depth on
    float* __restrict__ scales,          // [tokens], or [1] with `given`
    long long tokens, long long depth, long long pitch, int normalizes, double norm_eps, float eps, int lowest,
    int highest, int away) {
    const float top = static_cast<float>(highest), bottom = static_cast<float>(lowest);
    for (long long m = blockIdx.x; m < tokens; m += gridDim.x) {
        const T* row = x + m * depth;
        signed char* target = codes + m * pitch;
        const Normalizer normalized = normalizer_of(row, weight, depth, normalizes != 0, norm_eps);
        const unsigned most = given == nullptr ? largest_of(row, depth, normalized) : *given;
        const float a = __uint_as_float(max(most, __float_as_uint(eps))), factor = ieee::divide(top, a);
        for (long long k = threadIdx.x; k < pitch; k += LANES) {
            if (k >= depth) {
                target[k] = 0;
                continue;
            }
            const float x = ieee::multiply(number(normalized(to_float(row[k]), k)), factor);
            float clamped = fminf(fmaxf(x, bottom), top);
            if (away) {
                const float whole = truncf(clamped);
                if (fabsf(clamped - whole) >= 0.5f) clamped = whole + (clamped < 0 ? -1.0f : 1.0f);
                else clamped = whole;
            }
            // In the low bits of this sum is the nearest integer, half to even.
            const unsigned bits = __float_as_uint(__fadd_rn(clamped, ROUNDER));
            target[k] = ieee::magnitude_bits(x) > INFINITE ? 0 : static_cast<signed char>(bits);
        }
        if (threadIdx.x == 0 && (given == nullptr || m == 0)) scales[given == nullptr ? m : 0] = ieee::divide(a, top);
    }
}
