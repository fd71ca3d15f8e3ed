// BitNet's activations: the largest magnitude of tokens, their codes, and RMSNorm ahead of both. The contract stands in
// kbitcupy/products/activations.py, whose NumPy side gives the same bits.
//
// A thread block has one token at a time, fetched at once to shared memory, as far as there is room: only what is
// beyond is read again for each of up to three passes (squares, magnitudes, codes). In them a thread has every LANES-th
// element.
//
// Arguments that the kernels share:
//     x                T[tokens, depth]
//     weight           float32[depth] of RMSNorm, or null
//     tokens, depth    M and K
//     normalizes       whether there is an RMSNorm
//     norm_eps         what it adds to the mean of squares
#include "common/copy.cuh"
#include "common/ieee.cuh"
#include "common/sync.cuh"
#include "common/types.cuh"
#include "linear/fragments.cuh"

// Of the host, ahead of this source: LANES, the threads of a block, a power of two; ROOM, elements of a token in shared
// memory, a multiple of it; STEP of linear/fragments.cuh.
constexpr int WARPS = LANES / WARP;
static_assert((LANES & (LANES - 1)) == 0, "sums are halved");
static_assert(STEP == LANES, "elements of a thread have the same place in all fragments");

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

// A token as the threads of a block have it. Only its own elements does a thread change.
template <typename T>
struct Token {
    const T* row;
    long long depth;
    float* kept;  // the first of them

    __device__ __forceinline__ long long room() const { return min(depth, static_cast<long long>(ROOM)); }
    // All threads of a block take part.
    __device__ __forceinline__ void load() {
        constexpr int EACH = 16 / sizeof(T);
        __syncthreads();  // an earlier token has been read
        if (is_aligned(row) && depth % EACH == 0) {
#pragma unroll 4
            for (int i = threadIdx.x; i < room() / EACH; i += LANES) {
                unsigned word[4];
                to_words(word, reinterpret_cast<const uint4*>(row)[i]);
#pragma unroll
                for (int e = 0; e < EACH; ++e)
                    kept[i * EACH + e] = Word<T>::get(word[e / Word<T>::COUNT], e % Word<T>::COUNT);
            }
        } else {
            for (int k = threadIdx.x; k < room(); k += LANES) kept[k] = to_float(row[k]);
        }
        __syncthreads();
    }
    // Calls f with every element of this thread, in their order, and its number: with those that are kept, which it may
    // change, and with the others behind `before`.
    template <typename G, typename F>
    __device__ __forceinline__ void each(const G& before, const F& f) const {
        const int there = static_cast<int>(room());
#pragma unroll 8
        for (int k = threadIdx.x; k < there; k += LANES) f(kept[k], k);
        for (long long k = threadIdx.x + ROOM; k < depth; k += LANES) {
            float v = before(to_float(row[k]), k);
            f(v, k);
        }
    }
};

// The sums and maxima of a block; all threads take part, and all have the result.
template <typename A, typename F>
__device__ __forceinline__ A joined(A own, const F& join) {
    __shared__ A lane[LANES];
    __syncthreads();  // an earlier one has been read
    lane[threadIdx.x] = own;
    __syncthreads();
    // (i) + (i + half), until one is left: from thread to thread of other warps, which all warps do alike, then within
    // one, where either of two lanes may come first.
    A part[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) part[w] = lane[w * WARP + threadIdx.x % WARP];
#pragma unroll
    for (int half = WARPS / 2; half > 0; half /= 2)
#pragma unroll
        for (int w = 0; w < half; ++w) part[w] = join(part[w], part[w + half]);
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) part[0] = join(part[0], __shfl_xor_sync(FULL_WARP, part[0], step));
    return part[0];
}

// All threads of a block take part; each returns the Normalizer of the token.
template <typename T>
__device__ __forceinline__ Normalizer
normalizer_of(const Token<T>& token, const float* weight, bool normalizes, double norm_eps) {
    if (!normalizes) return {nullptr, 1.0f, false};
    double sum = 0;
    token.each(
        [](float x, long long) { return x; },
        [&](float x, long long) {
            const double finite = ieee::widen(number(x));
            sum += finite * finite;
        });
    sum = joined(sum, [](double a, double b) { return a + b; });
    const double mean = sum / static_cast<double>(token.depth > 0 ? token.depth : 1);
    return {weight, ieee::narrow(1.0 / sqrt(mean + norm_eps)), true};
}

// The bits of the largest magnitude of a token, in every thread. What is kept becomes what is quantized.
template <typename T>
__device__ __forceinline__ unsigned largest_of(const Token<T>& token, const Normalizer& normalized) {
    unsigned most = 0;
    token.each(
        [](float x, long long) { return x; },
        [&](float& x, long long k) {
            x = number(normalized(x, k));
            most = max(most, ieee::magnitude_bits(x));
        });
    return joined(most, [](unsigned a, unsigned b) { return max(a, b); });
}

template <typename T>
__global__ void __launch_bounds__(LANES) normalize_tokens(
    const T* __restrict__ x, const float* __restrict__ weight,
    float* __restrict__ y,  // [tokens, depth]
    long long tokens, long long depth, double norm_eps) {
    __shared__ __align__(16) float kept[ROOM];
    for (long long m = blockIdx.x; m < tokens; m += gridDim.x) {
        Token<T> token{x + m * depth, depth, kept};
        token.load();
        const Normalizer normalized = normalizer_of(token, weight, true, norm_eps);
        token.each(
            [](float v, long long) { return v; }, [&](float v, long long k) { y[m * depth + k] = normalized(v, k); });
    }
}

template <typename T>
__global__ void __launch_bounds__(LANES) largest_of_tokens(
    const T* __restrict__ x, const float* __restrict__ weight,
    float* __restrict__ largest,  // [tokens]
    long long tokens, long long depth, int normalizes, double norm_eps) {
    __shared__ __align__(16) float kept[ROOM];
    for (long long m = blockIdx.x; m < tokens; m += gridDim.x) {
        Token<T> token{x + m * depth, depth, kept};
        token.load();
        const unsigned most = largest_of(token, normalizer_of(token, weight, normalizes != 0, norm_eps));
        if (threadIdx.x == 0) largest[m] = __uint_as_float(most);
    }
}

// Where a thread writes its codes: one place for every LANES elements.
struct Places {
    signed char* first;
    long long step;

    // groups  0 for rows of `pitch` bytes, else fragments (linear/fragments.cuh) of so many times 8 tokens
    __device__ __forceinline__ Places(signed char* codes, long long m, long long pitch, int groups, bool octets) {
        const int k = threadIdx.x;
        step = groups == 0 ? LANES : groups * (4ll * FRAGMENT_BYTES);
        first = codes + (groups == 0 ? m * pitch + k : place_in_fragments(k, m, groups, octets));
    }
};

template <typename T>
__global__ void __launch_bounds__(LANES) quantize_activations(
    const T* __restrict__ x, const float* __restrict__ weight,
    const unsigned* __restrict__ given,  // [1] bits of the largest magnitude of all tokens, or null: of each its own
    signed char* __restrict__ codes,     // rows [tokens, pitch], zeros from depth on, or fragments: see Places
    float* __restrict__ scales,          // [tokens], or [1] with `given`
    int* __restrict__ sums,              // [tokens] of the codes, or null
    long long tokens, long long depth, long long pitch, int groups, int octets, int normalizes, double norm_eps,
    float eps, int lowest, int highest, int away) {
    __shared__ __align__(16) float kept[ROOM];
    if (weight != nullptr)
        for (long long k = threadIdx.x * 32; k < depth; k += LANES * 32) prefetch_l2(weight + k);
    wait_for_previous();
    launch_dependents();  // not earlier: the next kernel reads weights at once
    const float top = static_cast<float>(highest), bottom = static_cast<float>(lowest);
    for (long long m = blockIdx.x; m < tokens; m += gridDim.x) {
        Token<T> token{x + m * depth, depth, kept};
        token.load();
        const Normalizer normalized = normalizer_of(token, weight, normalizes != 0, norm_eps);
        const unsigned largest = largest_of(token, normalized), most = given == nullptr ? largest : *given;
        const float a = __uint_as_float(max(most, __float_as_uint(eps))), factor = ieee::divide(top, a);
        const Places places(codes, m, pitch, groups, octets != 0);
        int sum = 0;
        const auto write = [&](float v, long long k) {
            const float x = ieee::multiply(v, factor);
            float clamped = fminf(fmaxf(x, bottom), top);
            if (away) {
                const float whole = truncf(clamped);
                if (fabsf(clamped - whole) >= 0.5f) clamped = whole + (clamped < 0 ? -1.0f : 1.0f);
                else clamped = whole;
            }
            // In the low bits of this sum is the nearest integer, half to even.
            const unsigned bits = __float_as_uint(__fadd_rn(clamped, ROUNDER));
            const signed char code = ieee::magnitude_bits(x) > INFINITE ? 0 : static_cast<signed char>(bits);
            places.first[k / LANES * places.step] = code;
            sum += code;
        };
        token.each([&](float v, long long k) { return number(normalized(v, k)); }, write);
        if (groups == 0)
            for (long long k = depth + threadIdx.x; k < pitch; k += LANES) codes[m * pitch + k] = 0;
        if (sums != nullptr) {
            sum = joined(sum, [](int a, int b) { return a + b; });
            if (threadIdx.x == 0) sums[m] = sum;
        }
        if (threadIdx.x == 0 && (given == nullptr || m == 0)) scales[given == nullptr ? m : 0] = ieee::divide(a, top);
    }
}
