// Tokens that a thread block quantizes itself, for products that save a launch by it: while they do, the weights that
// they have asked for are on their way. The codes are those of linear/integer_activations.cu, bit for bit: what is
// rare, numbers that are not finite and scales near the ends of float32, goes through the same functions, and what is
// common through fewer instructions.
//
// A thread has sixteen neighbours at a time, half of a block of "q8_1"; a token has a number of warps, of one thread
// block. Rows of x start at multiples of 16 bytes, and K is a multiple of 16 ("q8_1": of 32).
#pragma once
#include "common/copy.cuh"
#include "common/ieee.cuh"
#include "linear/quantize.cuh"

constexpr int SIXTEEN = 16, HALVES_OF_BLOCK = 2;
constexpr unsigned LARGEST_SCALE = 0x7c010203u;  // of which 127 are finite

// ---- codes of numbers ---------------------------------------------------------------------------------------------

// Byte BYTE of four words; with SIGNS eight times the highest bit of each of these.
template <int BYTE, bool SIGNS = false>
__device__ __forceinline__ unsigned bytes_of(float a, float b, float c, float d) {
    constexpr unsigned SELECTOR = BYTE | (4 + BYTE) << 4 | (SIGNS ? 0x88 : 0);
    unsigned low, high;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(low) : "f"(a), "f"(b), "n"(SELECTOR));
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(high) : "f"(c), "f"(d), "n"(SELECTOR));
    return __byte_perm(low, high, 0x5410);
}

// Codes of numbers of at most 127 in magnitude, give or take a rounding, in order: half to even,
template <int N>
__device__ __forceinline__ void round_even(const float (&v)[N], unsigned (&word)[N / 4]) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        float sum[4];  // with the nearest integer in the low bits
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = __fadd_rn(v[4 * i + e], ROUNDER);
        word[i] = bytes_of<0>(sum[0], sum[1], sum[2], sum[3]);
    }
}
// ... or away from zero: a half is added to the magnitude, and what is behind the point is cut off. Of numbers from
// 2^15 on the integer is in the second byte.
template <int N>
__device__ __forceinline__ void round_away(const float (&v)[N], unsigned (&word)[N / 4]) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        float sum[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = __fadd_rz(ieee::magnitude(v[4 * i + e]), 32768.5f);
        const unsigned magnitude = bytes_of<1>(sum[0], sum[1], sum[2], sum[3]);
        const unsigned below = bytes_of<3, true>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        // Negative ones are 1 + ~magnitude, byte by byte: seven bits, so that no carry leaves a byte, then the eighth.
        const unsigned seven = ((magnitude ^ below) & 0x7f7f7f7fu) + (below & 0x01010101u);
        word[i] = seven ^ (below & 0x80808080u);
    }
}

// What the bytes of words add up to.
template <int WORDS>
__device__ __forceinline__ int sum_of_codes(const unsigned (&word)[WORDS]) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) sum = __dp4a(static_cast<int>(word[i]), 0x01010101, sum);
    return sum;
}

// ---- numbers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint2 load_written(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}

// N neighbouring numbers of a token, as they came; N times their size is a multiple of 16, or 8.
template <typename T, int N = SIXTEEN>
struct Numbers {
    static constexpr int COUNT = Word<T>::COUNT, WORDS = N / COUNT;
    static constexpr unsigned MAGNITUDES = COUNT == 2 ? 0x7fff7fffu : 0x7fffffffu;
    unsigned word[WORDS];

    __device__ __forceinline__ void load(const T* at) {
        if constexpr (WORDS == 2) to_words(word, load_written(reinterpret_cast<const uint2*>(at)));
        else
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                to_words(word + i, load_written(reinterpret_cast<const uint4*>(at) + i / 4));
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word[i] = 0;
    }

    // The bits of the largest magnitude, as which an infinity counts as the largest finite number. NaN becomes 0.
    __device__ __forceinline__ unsigned largest() {
        unsigned most = magnitude();
        if (most > INFINITE) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = without_nan(word[i]);
            most = magnitude();
        }
        return min(most, LARGEST_FINITE);
    }

    __device__ __forceinline__ void get(float (&v)[N]) const {
#pragma unroll
        for (int e = 0; e < N; ++e) v[e] = Word<T>::get(word[e / COUNT], e % COUNT);
    }

  private:
    // Of magnitudes the larger one has the larger bits, and NaN the largest.
    __device__ __forceinline__ unsigned magnitude() const {
        unsigned most = word[0] & MAGNITUDES;
#pragma unroll
        for (int i = 1; i < WORDS; ++i) most = Word<T>::largest_or_nan(most, word[i]);
        if (COUNT == 2) most = max(most & 0xffffu, most >> 16);
        return __float_as_uint(Word<T>::get(most, 0));
    }
    __device__ __forceinline__ static unsigned without_nan(unsigned both) {
        if constexpr (COUNT == 1) return (both & MAGNITUDES) > INFINITE ? 0 : both;
        else return both & __heq2_mask(Word<T>::as(both), Word<T>::as(both));
    }
};

// ---- rules --------------------------------------------------------------------------------------------------------

// "q8_1", of 32 neighbours: see kbitcupy/products/integer_activations.py.
struct BlockRule {
    float scale, factor;
    bool plain;

    // `most`: the bits of the largest magnitude.
    __device__ __forceinline__ explicit BlockRule(unsigned most) {
        const float a = __uint_as_float(most);
        plain = a > 0x1p-50f && a < 0x1p50f;
        if (plain) {
            scale = divide_by_reciprocal(a, 127.0f, 1.0f / 127.0f);
            factor = __frcp_rn(scale);
        } else {
            scale = ieee::divide(a, 127.0f);
            factor = ieee::reciprocal(scale);
        }
    }
    template <int N>
    __device__ __forceinline__ void codes(float (&v)[N], unsigned (&word)[N / 4]) const {
#pragma unroll
        for (int e = 0; e < N; ++e) v[e] = ieee::multiply(v[e], factor);
        if (!plain) {
            // 0 times infinity is 0.
#pragma unroll
            for (int e = 0; e < N; ++e)
                v[e] = ieee::magnitude_bits(v[e]) > INFINITE ? 0.0f : fminf(fmaxf(v[e], -127.0f), 127.0f);
        }
        round_away(v, word);
    }
};

// A rule of whole tokens has: begin, which gets the bits of the largest magnitude; codes; scale.

// "int8".
struct Int8Rule {
    float divisor = 1.0f, scaled = 1.0f, power = 1.0f, reciprocal = 1.0f;

    __device__ __forceinline__ void begin(unsigned most) {
        divisor = most == 0 ? 1.0f : ieee::divide(__uint_as_float(most), 127.0f);
        divisor = __uint_as_float(min(__float_as_uint(divisor), LARGEST_SCALE));
        // Far from 1 numbers and divisor are multiplied by the same power of two, which changes no quotient that
        // counts.
        power = 1.0f;
        if (__float_as_uint(divisor) < __float_as_uint(0x1p-60f)) power = 0x1p96f;
        if (divisor > 0x1p60f) power = 0x1p-96f;
        scaled = ieee::multiply(divisor, power);
        reciprocal = __frcp_rn(scaled);
    }
    template <int N>
    __device__ __forceinline__ void codes(float (&v)[N], unsigned (&word)[N / 4]) const {
        if (power != 1.0f) {
#pragma unroll
            for (int e = 0; e < N; ++e)
                v[e] = fminf(fmaxf(ieee::multiply(v[e], power), -0x1p100f), 0x1p100f);  // no infinity
        }
#pragma unroll
        for (int e = 0; e < N; ++e) v[e] = divide_by_reciprocal(v[e], scaled, reciprocal);
        if (power != 1.0f) {
#pragma unroll
            for (int e = 0; e < N; ++e) v[e] = ieee::is_zero(divisor) ? 0.0f : fminf(fmaxf(v[e], -128.0f), 127.0f);
        }
        round_even(v, word);
    }
    __device__ __forceinline__ float scale() const { return divisor; }
};

// ---- tokens of a thread block -------------------------------------------------------------------------------------

// Which warps of a block have which token: `each` of them one, for `together` tokens at a time; this one is number
// `mate` of those that have token `own`.
struct Shares {
    int each, together, warps, warp, own, mate;

    __device__ __forceinline__ explicit Shares(int tokens) : warps(blockDim.x / WARP), warp(warp_number()) {
        together = min(tokens, warps), each = warps / together;
        own = int(opaque(unsigned(warp / each))), mate = warp - own * each;  // where it is constructed
    }
    __device__ __forceinline__ int token() const { return own; }
    // The first sixteen of this thread, and how far it is to the next ones.
    __device__ __forceinline__ int first() const { return (mate * WARP + threadIdx.x % WARP) * SIXTEEN; }
    __device__ __forceinline__ int step() const { return each * WARP * SIXTEEN; }
};

// The same of one token, which all warps have: no division tells which, and the turns of a warp begin at
// WARP * SIXTEEN times its number.
struct OwnShares {
    static constexpr int together = 1;
    int warp;

    __device__ __forceinline__ int token() const { return 0; }
    __device__ __forceinline__ int first() const { return (warp * WARP + threadIdx.x % WARP) * SIXTEEN; }
    __device__ __forceinline__ int step() const { return blockDim.x * SIXTEEN; }
};

// How many times sixteen numbers a thread asks for at once.
template <typename T>
constexpr int HELD_NUMBERS = 8 / int(sizeof(T));

__device__ __forceinline__ unsigned largest_of_warp(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, x);
#else
    return warp_max(x);
#endif
}

// Quantize tokens by blocks of 32. All of a warp call it.
//
//     HELD    how many times sixteen numbers a thread asks for at once
//     x       [tokens, depth]
//     share   which of them this warp has: Shares or OwnShares
//     reach   K, rounded up: to there codes are put, behind K zeros
//     put     called by all of a warp: with a token, the first k of sixteen, which may be behind `reach`, and four
//             words of codes in order
//     finish  called once for each block: with a token, the block, its scale, and what its codes add up to
//     arrived called by all of a warp when its first numbers are there, with a word of them; not by warps without any
template <int HELD, typename T, typename S, typename P, typename F, typename A>
__device__ __forceinline__ void quantize_by_blocks(
    const T* x, const S& share, int tokens, int depth, int reach, const P& put, const F& finish, const A& arrived) {
    const int own = share.first(), first = own - threadIdx.x % WARP * SIXTEEN, step = share.step();
    if (share.token() >= share.together) return;
    int m = share.token(), at = 0;
    Numbers<T> held[HELD];
    const auto load = [&] {
        const T* row = x + static_cast<long long>(m) * depth;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (const int k = own + at + i * step; k < depth) held[i].load(row + k);
            else held[i].clear();
    };
    load();  // ahead of the loop: there it would wait for all that has been loaded before, scales of weights as well
#pragma unroll 1
    while (m < tokens) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (first + at + i * step >= reach) break;
            const int k = own + at + i * step;
            unsigned most = held[i].largest();
            most = max(most, __shfl_xor_sync(FULL_WARP, most, 1));
            if (i == 0 && at == 0 && m < share.together) arrived(most);
            const BlockRule rule(most);
            float v[SIXTEEN];
            held[i].get(v);
            unsigned word[4];
            rule.codes(v, word);
            int sum = sum_of_codes(word);
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            put(m, k, word);
            if (k < depth && k / SIXTEEN % HALVES_OF_BLOCK == 0)
                finish(m, k / (SIXTEEN * HALVES_OF_BLOCK), rule.scale, sum);
        }
        at += HELD * step;
        if (first + at >= reach) at = 0, m += share.together;
        if (m < tokens) load();
    }
}

// Quantize tokens, each by one scale. All threads of the block call it.
//
//     SUMMED    whether `finish` gets what all codes add up to; else 0
//     HELD      how many times sixteen numbers a thread keeps; what is behind them is read again
//     reach     as above
//     exchange  two words for each warp, in shared memory
//     rule      of which each thread has its own
//     put       as above, and whether the sixteen are there; returns what their codes add up to, or 0 if not SUMMED
//     finish    called once for each token: with it, its scale, and what its codes add up to
//     arrived   called by all threads when the numbers of the first tokens are there, with a word of them
template <bool SUMMED, int HELD, typename T, typename R, typename P, typename F, typename A>
__device__ __forceinline__ void quantize_by_tokens(
    const T* x, int tokens, int depth, int reach, unsigned* exchange, R rule, const P& put, const F& finish,
    const A& arrived) {
    const Shares share(tokens);
    const int lane = threadIdx.x % WARP, mate = share.mate, step = share.step();
    const int own = share.first(), first = own - lane * SIXTEEN;
    for (int begin = 0; begin < tokens; begin += share.together) {
        const int m = begin + share.token();
        const bool mine = m < tokens && share.token() < share.together;
        const T* row = x + static_cast<long long>(mine ? m : 0) * depth;
        const int end = mine ? depth : 0, last = mine ? reach : 0;
        Numbers<T> held[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (own + i * step < end) held[i].load(row + own + i * step);
            else held[i].clear();
        unsigned most = 0;
#pragma unroll 2
        for (int k = own + HELD * step; k < end; k += step) {
            Numbers<T> numbers;
            numbers.load(row + k);
            most = max(most, numbers.largest());
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) most = max(most, held[i].largest());
        most = largest_of_warp(most);
        if (begin > 0) __syncthreads();  // what was exchanged has been read
        if (lane == 0) exchange[share.warp] = most;
        __syncthreads();
        if (begin == 0) arrived(most);
        rule.begin(largest_of_warp(lane < share.each ? exchange[min(share.warp - mate + lane, share.warps - 1)] : 0));
        int sum = 0;
        const auto quantize = [&](const Numbers<T>& numbers, int k) {
            float v[SIXTEEN];
            unsigned word[4];
            numbers.get(v);
            rule.codes(v, word);
            if (k >= end) word[0] = word[1] = word[2] = word[3] = 0;
            sum += put(m, k, word, k < end);
        };
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (first + i * step < last) quantize(held[i], own + i * step);
#pragma unroll 1
        for (int at = HELD * step; first + at < last; at += step) {
            Numbers<T> numbers;
            numbers.clear();
            if (own + at < end) {
                numbers.load(row + own + at);
                numbers.largest();  // NaN becomes 0 again
            }
            quantize(numbers, own + at);
        }
        if constexpr (SUMMED) {
#pragma unroll
            for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
            if (lane == 0) exchange[share.warps + share.warp] = static_cast<unsigned>(sum);
            __syncthreads();
        }
        if (mine && mate == 0 && lane == 0) {
            if constexpr (SUMMED)
                for (int i = 1; i < share.each; ++i) sum += static_cast<int>(exchange[share.warps + share.warp + i]);
            finish(m, rule.scale(), sum);
        }
    }
}
