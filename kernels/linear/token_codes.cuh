// BitNet's tokens, quantized by a product itself, by all threads of a block, while its weights are on their way: the
// codes stay in shared memory, in the order in which mma takes them. The bits are those of quantize_activations
// (linear/activations.cu), RMSNorm included.
//
// A thread has OCTETS times eight neighbours of BATCH tokens at a time, in registers from the first to the last.
#pragma once
#include "common/copy.cuh"
#include "common/ieee.cuh"
#include "common/sync.cuh"
#include "linear/quantize.cuh"
#include "linear/rms_norm.cuh"
#include "linear/ternary_operands.cuh"

// Of the host, ahead of this source: ROW_THREADS of a block; LANES, see linear/rms_norm.cuh.
constexpr int TOKENS = 8, ROW_WARPS = ROW_THREADS / WARP, MEMBER_BYTES = 4 * CHUNK;

// How tokens are quantized.
struct Quantizer {
    float eps;
    int lowest, highest, away;
};

// Of a token's codes: what they add up to, and their scale.
struct Quantized {
    int sum;
    float scale;
};

// ---- sums and maxima ---------------------------------------------------------------------------------------------

__device__ __forceinline__ double joined(double a, double b) { return a + b; }
__device__ __forceinline__ unsigned joined(unsigned a, unsigned b) { return max(a, b); }
__device__ __forceinline__ int joined(int a, int b) { return a + b; }

// COUNT numbers of each lane, joined over the lanes: lane l gets number l % COUNT. Lanes exchange half of what they
// have as long as that is more than one.
template <int COUNT, typename A>
__device__ __forceinline__ A of_warp(const A (&v)[COUNT]) {
    const int lane = threadIdx.x % WARP;
    A kept[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) kept[i] = v[i];
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        if (step >= COUNT) {
            kept[0] = joined(kept[0], __shfl_xor_sync(FULL_WARP, kept[0], step));
            continue;
        }
        const bool odd = lane & step;
#pragma unroll
        for (int i = 0; i < COUNT / (2 * step); ++i) {
            const A own = odd ? kept[2 * i + 1] : kept[2 * i], others = odd ? kept[2 * i] : kept[2 * i + 1];
            kept[i] = joined(own, __shfl_xor_sync(FULL_WARP, others, step));
        }
    }
    return kept[0];
}

// The same over what the warps of a block have left at `part`, in every warp.
template <int COUNT, typename A>
__device__ __forceinline__ A of_block(const A (&part)[ROW_WARPS * COUNT]) {
    const int lane = threadIdx.x % WARP;
    A own = part[lane % (ROW_WARPS * COUNT)];
#pragma unroll
    for (int i = WARP; i < ROW_WARPS * COUNT; i += WARP) own = joined(own, part[i + lane]);
#pragma unroll
    for (int step = COUNT; step < min(WARP, ROW_WARPS * COUNT); step *= 2)
        own = joined(own, __shfl_xor_sync(FULL_WARP, own, step));
    return own;
}

// ---- RMSNorm -----------------------------------------------------------------------------------------------------

// Its factor in the order of the contract, by all threads.
template <typename T>
__device__ __forceinline__ float ordered_factor(const T* row, int depth, double eps) {
    __shared__ double lane[LANES];
    const int thread = threadIdx.x;
    double sum = 0;
    __syncthreads();  // an earlier sum has been read
    if (thread < LANES) {
        for (int k = thread; k < depth; k += LANES) {
            const double x = ieee::widen(number(to_float(row[k])));
            sum += x * x;
        }
        lane[thread] = sum;
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) lane[thread] += lane[thread + half];
    }
    __syncthreads();
    return ieee::narrow(1.0 / sqrt(lane[0] / static_cast<double>(depth) + eps));
}

// ---- tokens ------------------------------------------------------------------------------------------------------

// The codes of eight numbers, and what they add up to besides.
__device__ __forceinline__ int codes_of(
    unsigned (&word)[2], const float (&v)[OCTET], float scale, const Quantizer& by, int sum) {
    if (by.away == 0 && ieee::magnitude_bits(scale) < INFINITE) {
        // No number is beyond the one that the scale is made from, so that no code has to be clamped.
        unsigned bits[OCTET];
#pragma unroll
        for (int e = 0; e < OCTET; ++e) bits[e] = __float_as_uint(__fadd_rn(ieee::multiply(v[e], scale), ROUNDER));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned* four = bits + 4 * i;
            word[i] = __byte_perm(__byte_perm(four[0], four[1], 0x0040), __byte_perm(four[2], four[3], 0x0040), 0x5410);
        }
    } else {
        const float top = static_cast<float>(by.highest), bottom = static_cast<float>(by.lowest);
        word[0] = word[1] = 0;
#pragma unroll
        for (int e = 0; e < OCTET; ++e)
            word[e / 4] |= static_cast<unsigned>(code_of(ieee::multiply(v[e], scale), bottom, top, by.away != 0) & 0xff)
                           << e % 4 * 8;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum = __dp4a(static_cast<int>(word[i]), 0x01010101, sum);
    return sum;
}

// Where codes of several tokens go: pieces [load, token, t] at `staged`; and `quantized`.
struct FewTokens {
    unsigned staged;
    int tokens;
    Quantized* quantized;

    // Ahead of the first barrier.
    __device__ __forceinline__ void clear() const {
        if (threadIdx.x < tokens) quantized[threadIdx.x].sum = 0;
    }
    __device__ __forceinline__ void store(int m, int load, int byte, const unsigned (&word)[2]) const {
        store_shared(staged + (load * tokens + m) * MEMBER_BYTES + byte, word[0], word[1]);
    }
    // What the codes of a warp add up to, and the scale of the token, by one lane.
    __device__ __forceinline__ void finish(int m, int sum, float scale) const {
        atomicAdd(&quantized[m].sum, sum);
        if (threadIdx.x < WARP) quantized[m].scale = scale;
    }
};

// ... and those of one token, with the sums of each warp.
struct OneToken {
    unsigned staged;
    int (&sums)[ROW_WARPS];
    float& scale;

    __device__ __forceinline__ void clear() const {}
    __device__ __forceinline__ void store(int, int load, int byte, const unsigned (&word)[2]) const {
        store_shared(staged + load * MEMBER_BYTES + byte, word[0], word[1]);
    }
    __device__ __forceinline__ void finish(int, int sum, float of_codes) const {
        sums[threadIdx.x / WARP] = sum;
        if (threadIdx.x < WARP) scale = of_codes;
    }
};

// Which eight neighbours are a thread's i-th ones, and how far it is to the next of them.
constexpr int RUN = ROW_THREADS * OCTET;
__device__ __forceinline__ int place_of(int i) { return i * RUN + static_cast<int>(threadIdx.x) * OCTET; }

// The weights of an RMSNorm; 1 where there are none.
template <int OCTETS>
__device__ __forceinline__ void load_weight(float (&g)[OCTETS][OCTET], const float* weight, int depth) {
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        const bool there = weight != nullptr && place_of(i) < depth;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            constexpr unsigned ONE = 0x3f800000u;
            uint4 four{ONE, ONE, ONE, ONE};
            if (there) four = load_written(reinterpret_cast<const uint4*>(weight + place_of(i)) + j);
            g[i][4 * j] = __uint_as_float(four.x), g[i][4 * j + 1] = __uint_as_float(four.y);
            g[i][4 * j + 2] = __uint_as_float(four.z), g[i][4 * j + 3] = __uint_as_float(four.w);
        }
    }
}

// The sum of a thread's squares.
template <typename T, int OCTETS>
__device__ __forceinline__ double squares_of(const float (&v)[OCTETS][OCTET], int depth) {
    double part[4] = {};
#pragma unroll
    for (int i = 0; i < OCTETS && i * RUN < depth; ++i)
#pragma unroll
        for (int e = 0; e < OCTET; ++e) {
            const double wide = widened<T>(v[i][e]);
            part[e % 4] = fma(wide, wide, part[e % 4]);
        }
    return (part[0] + part[1]) + (part[2] + part[3]);
}

// Make numbers what is quantized. Returns the bits of the largest magnitude.
template <int OCTETS>
__device__ __forceinline__ unsigned prepare(
    float (&v)[OCTETS][OCTET], const float (&g)[OCTETS][OCTET], float factor, bool normalizes, int depth) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < OCTETS && i * RUN < depth; ++i)
#pragma unroll
        for (int e = 0; e < OCTET; ++e) {
            if (normalizes) v[i][e] = ieee::multiply(ieee::multiply(v[i][e], factor), g[i][e]);
            most = ieee::larger_or_nan(most, ieee::magnitude(v[i][e]));
        }
    unsigned largest = __float_as_uint(most);
    if (largest < INFINITE) return largest;
    largest = 0;
#pragma unroll
    for (int i = 0; i < OCTETS && i * RUN < depth; ++i)
#pragma unroll
        for (int e = 0; e < OCTET; ++e) {
            v[i][e] = number(v[i][e]);
            largest = max(largest, ieee::magnitude_bits(v[i][e]));
        }
    return largest;
}

// Quantize tokens, by all threads. What has been stored is there behind the next barrier.
//
// to     where codes go
// at     gives where token m begins
// asked  called when the first numbers have been asked for, with 0, and when they have come, with 1
template <typename T, int OCTETS, int BATCH, typename C, typename R, typename F>
__device__ __forceinline__ void quantize_tokens(
    const C& to, const R& at, int tokens, int depth, const Quantizer& by, const RootMeanSquare& norm, const F& asked) {
    constexpr int PIECES = sizeof(T) / 2;  // of 16 bytes of an octet
    __shared__ double sum_part[ROW_WARPS * BATCH];
    __shared__ unsigned most_part[2][ROW_WARPS * BATCH];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    to.clear();
    float g[OCTETS][OCTET];
#pragma unroll 1
    for (int first = 0, turn = 0; first < tokens; first += BATCH, turn ^= 1) {
        const int count = min(BATCH, tokens - first);
        const auto row_of = [&](int b) -> const T* { return at(first + b); };
        uint4 raw[BATCH][OCTETS][PIECES] = {};
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
#pragma unroll
            for (int i = 0; i < OCTETS; ++i)
#pragma unroll
                for (int j = 0; j < PIECES; ++j)
                    if (b < count && place_of(i) < depth)
                        raw[b][i][j] = load_written(reinterpret_cast<const uint4*>(row_of(b) + place_of(i)) + j);
        if (first == 0) {
            load_weight(g, norm.weight, depth);
            asked(0);
        }
        float v[BATCH][OCTETS][OCTET];
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) {
                unsigned word[4 * PIECES];
#pragma unroll
                for (int j = 0; j < PIECES; ++j) to_words(word + 4 * j, raw[b][i][j]);
#pragma unroll
                for (int e = 0; e < OCTET; ++e) v[b][i][e] = Word<T>::get(word[e / Word<T>::COUNT], e % Word<T>::COUNT);
            }
        float factor = 1.0f;  // of token lane % BATCH
        if (norm.used) {
            double sums[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) sums[b] = squares_of<T>(v[b], depth);
            const double of_own = of_warp<BATCH>(sums);
            if (lane < BATCH) sum_part[warp * BATCH + lane] = of_own;
            __syncthreads();
            if (first == 0) asked(1);
            const bool certain = factor_from(of_block<BATCH>(sum_part), norm, factor);
            unsigned others = __ballot_sync(FULL_WARP, !certain) & ((1u << count) - 1);
#pragma unroll 1
            for (; others != 0; others &= others - 1) {
                const int b = __ffs(static_cast<int>(others)) - 1;
                const float of_token = ordered_factor(row_of(b), depth, norm.eps);
                if (lane % BATCH == b) factor = of_token;
            }
        }
        unsigned largest[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            largest[b] = prepare(v[b], g, __shfl_sync(FULL_WARP, factor, b), norm.used, depth);
        const unsigned of_own = of_warp<BATCH>(largest);
        if (lane < BATCH) most_part[turn][warp * BATCH + lane] = of_own;
        __syncthreads();
        if (first == 0 && !norm.used) asked(1);
        // Of token lane % BATCH.
        const float a = __uint_as_float(max(of_block<BATCH>(most_part[turn]), __float_as_uint(by.eps)));
        const float top = static_cast<float>(by.highest), scale = ieee::divide(top, a);
        int sums[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const float of_token = __shfl_sync(FULL_WARP, scale, b);
            sums[b] = 0;
            if (b >= count) continue;
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) {
                const int k = place_of(i), in_step = k % STEP;
                if (k >= depth) break;
                unsigned word[2];
                sums[b] = codes_of(word, v[b][i], of_token, by, sums[b]);
                const int load = k / STEP * FIELDS + in_step % BLOCK / 32;
                to.store(first + b, load, (in_step / BLOCK * 2 + in_step % 32 / 16) * CHUNK + in_step % 16, word);
            }
        }
        const int sum = of_warp<BATCH>(sums);
        if (lane < count) to.finish(first + lane, sum, ieee::divide(a, top));
    }
}
