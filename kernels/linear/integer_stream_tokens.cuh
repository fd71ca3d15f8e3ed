// Tokens of integer_stream.cu: their codes as operand b of mma, and what stands beside codes.
#pragma once
#include "linear/integer_stream_scales.cuh"

// The tokens of a product.
struct Tokens {
    const unsigned char* a;    // fragments of all
    const float* token_scale;  // [tokens]; or [1]; or of units of Q8_BLOCK, [units, padded]
    const int* sums;           // of codes: [units, padded], or of tokens
    int padded, first, count;  // of all; those of this product
};

// A word, or four, of them: in shared memory, where the block has quantized them itself, or in global memory.
__device__ __forceinline__ unsigned load_anywhere(const void* p) {
    unsigned v;
    asm volatile("ld.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ unsigned load_anywhere_if(const void* p, bool wanted) {
    unsigned v = 0;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.u32 %0, [%1]; }"
                 : "+r"(v)
                 : "l"(p), "r"(unsigned(wanted))
                 : "memory");
    return v;
}
__device__ __forceinline__ void load_four_anywhere(unsigned (&v)[4], const void* p) {
    asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(p)
                 : "memory");
}

// What is known of a unit of a token: with Q8 its scale; and what the zero point or offset of a row is multiplied by.
template <int ADDED_, bool Q8>
struct Record {
    static constexpr int WORDS = Q8 + (ADDED_ != NOTHING);

    __device__ __forceinline__ static void store(unsigned* to, float scale, int sum) {
        if constexpr (Q8) to[0] = __float_as_uint(scale);
        if constexpr (ADDED_ == ZERO_POINTS) to[WORDS - 1] = sum;
        if constexpr (ADDED_ == OFFSETS)
            to[WORDS - 1] = __float_as_uint(Q8 ? ieee::multiply(__int2float_rn(sum), scale) : __int2float_rn(sum));
    }

    float scale[2];
    unsigned other[2];  // of two neighbouring tokens

    __device__ __forceinline__ explicit Record(const unsigned* from) {
        if constexpr (WORDS == 2) {
            const uint4 four = *reinterpret_cast<const uint4*>(from);
            scale[0] = __uint_as_float(four.x), other[0] = four.y;
            scale[1] = __uint_as_float(four.z), other[1] = four.w;
        } else if constexpr (WORDS == 1) {
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            scale[0] = __uint_as_float(other[0] = two.x), scale[1] = __uint_as_float(other[1] = two.y);
        }
    }
};

__device__ __forceinline__ float fma_ieee(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// Of a share that begins at `k`: the b of its mma. Where there is no token, that of another stands: its sums are of no
// one. No register is cleared that could still be the address of a load: that would wait for it. `wait` is called as
// soon as it is known where they lie.
template <typename Of, int EIGHTS, typename W>
__device__ __forceinline__ void load_tokens(
    unsigned (&x)[EIGHTS][Of::SHARE / FRAGMENT_K][4], const Tokens& tokens, int k, int depth, int lane, const W& wait) {
    constexpr int ALL = Of::SHARE / FRAGMENT_K;
    const int first = k / FRAGMENT_K, there = (depth + 127) / 128 * (128 / FRAGMENT_K) - first;  // of whole 128 k
    const long long step = static_cast<long long>(tokens.padded) * MEMBER_BYTES;
    const unsigned char* from[EIGHTS];
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
        from[e] = tokens.a + first * step + lane % 4 * 16 +
                  (tokens.first + min(8 * e + lane / 4, tokens.count - 1)) * MEMBER_BYTES;
    if constexpr (W::WAITS) from[0] = opaque(from[0]);
    wait();
    if (there >= ALL) {
#pragma unroll
        for (int i = 0; i < ALL; ++i)
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) load_four_anywhere(x[e][i], from[e] + i * step);
    } else {
#pragma unroll
        for (int i = 0; i < ALL; ++i)
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
                if (i < there) load_four_anywhere(x[e][i], from[e] + i * step);
                else x[e][i][0] = x[e][i][1] = x[e][i][2] = x[e][i][3] = 0;
    }
}

// The b of one token, which all lanes have, spread: eight mma after each other have one unit each, of the column with
// that number; others are 0 there. So the eight units come in one sum.
template <int N>
__device__ __forceinline__ void spread_units(unsigned (&x)[N][4], int g) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int w = 0; w < 4; ++w) x[i][w] = g == (2 * i + w / 2) % 8 ? x[i][w] : 0;
}

// What the block scales of q4_k have beside: minima are multiplied by sums of tokens on tensor cores, each sum in two
// parts of 11 bits, the upper one first. Those of 256 k and eight tokens are a piece of 16 bytes for each lane, of two
// units, its b of two mma.
__device__ __forceinline__ int place_of_sum(int unit, int token, int eights) {
    return ((unit / 8 * eights + token / 8) * WARP + token % 8 * 4 + unit % 4) * 4 + unit % 8 / 4 * 2;
}

// ... and the records of its units, and behind them those pieces: asked for all at once, since each answer takes as
// long as all of them. A lane has a token and a unit of eight at a time, so that pieces meet in no bank; of fewer units
// it has one at a time.
template <typename Of, int UNIT, int ADDED_, bool Q8, int EIGHTS>
struct Records {
    using Entry = Record<ADDED_, Q8>;
    static constexpr bool ANY = UNIT != 0 && (Entry::WORDS != 0 || Of::MINIMA),
                          SUMMED = ADDED_ != NOTHING || Of::MINIMA;
    static constexpr int TOKENS = 8 * EIGHTS, UNITS = UNIT ? Of::SHARE / (UNIT ? UNIT : 1) : 1, ALL = UNITS * TOKENS;
    static constexpr int ABREAST = UNITS % 8 == 0 ? 8 : UNITS, EACH = WARP / ABREAST;  // units; tokens of a turn
    static constexpr int COUNT = ANY ? (ALL + WARP - 1) / WARP : 1;
    int sum[SUMMED ? COUNT : 1];
    unsigned scale[Q8 ? COUNT : 1];

    // Which unit and token turn j of a lane is for.
    __device__ __forceinline__ static int unit_of(int j, int lane) {
        return j * EACH / TOKENS * ABREAST + lane % ABREAST;
    }
    __device__ __forceinline__ static int token_of(int j, int lane) { return j * EACH % TOKENS + lane / ABREAST; }

    // Of a share that begins at `k`; `wait` as that of load_tokens.
    template <typename W>
    __device__ __forceinline__ void load(const Tokens& tokens, int k, int depth, int lane, const W& wait) {
        if constexpr (ANY) {
            const int first = k / UNIT, units = (depth + UNIT - 1) / UNIT - first;
            long long begin =
                static_cast<long long>(first + lane % ABREAST) * tokens.padded + tokens.first + lane / ABREAST;
            const long long step = static_cast<long long>(ABREAST) * tokens.padded;
            const int* of_sums = tokens.sums;
            if constexpr (W::WAITS) {
                static_assert(!Q8, "where scales lie is not found out ahead");
                if constexpr (SUMMED) of_sums = opaque(of_sums + begin);
                begin = 0;
            }
            wait();
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                const bool there = unit_of(j, lane) < units && token_of(j, lane) < min(tokens.count, TOKENS);
                const long long at = begin + j * EACH / TOKENS * step + j * EACH % TOKENS;
                if constexpr (SUMMED) sum[j] = static_cast<int>(load_anywhere_if(of_sums + at, there));
                if constexpr (Q8) scale[j] = load_anywhere_if(tokens.token_scale + at, there);
            }
        } else {
            wait();
        }
    }

    // A turn all of whose tokens are not there is left out: what stands in their place is multiplied for no one.
    __device__ __forceinline__ void store(unsigned* records, int count, int lane) const {
        if constexpr (ANY) {
            __syncwarp();  // all lanes have read those of the phase before
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                const int unit = unit_of(j, lane), token = token_of(j, lane);
                if (j * EACH % TOKENS >= count || (ALL < WARP && token >= TOKENS)) continue;
                const float of_unit = Q8 ? usable(__uint_as_float(scale[Q8 ? j : 0])) : 0.0f;
                const int of_codes = SUMMED ? sum[SUMMED ? j : 0] : 0;
                Entry::store(records + (unit * TOKENS + token) * Entry::WORDS, of_unit, of_codes);
                if constexpr (Of::MINIMA) {
                    const float codes = __int2float_rn(of_codes), whole = Q8 ? ieee::multiply(codes, of_unit) : codes;
                    const unsigned high = __float_as_uint(whole) & 0xffffe000u;
                    const float low = ieee::finite(ieee::subtract(whole, __uint_as_float(high)));
                    *reinterpret_cast<uint2*>(records + ALL * Entry::WORDS + place_of_sum(unit, token, EIGHTS)) =
                        make_uint2(high, __float_as_uint(low));
                }
            }
            __syncwarp();
        }
    }
};

// What is known of tokens 2t and 2t + 1 of each eight as a whole: their scales, and the sums of their codes. RAW scales
// are as they come, since what makes them usable waits for them.
template <int UNIT, bool Q8, bool RAW, int EIGHTS>
__device__ __forceinline__ void load_whole(
    float2 (&scale)[EIGHTS], int2 (&sum)[EIGHTS], const Tokens& tokens, int scale_step, int t) {
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; ++i) {
        const int of = i / 2 * 8 + 2 * t + i % 2, m = tokens.first + of;
        float& s = i % 2 ? scale[i / 2].y : scale[i / 2].x;
        int& c = i % 2 ? sum[i / 2].y : sum[i / 2].x;
        s = 0.0f, c = 0;
        if constexpr (RAW) {
            const bool there = of < tokens.count;
            if (!Q8) s = __uint_as_float(load_anywhere_if(tokens.token_scale + m * scale_step, there));
            if (UNIT == 0) c = load_anywhere_if(tokens.sums + m, there);
            continue;
        }
        if (of >= tokens.count) continue;
        if (!Q8) s = usable(__uint_as_float(load_anywhere(tokens.token_scale + m * scale_step)));
        if (UNIT == 0) c = load_anywhere(tokens.sums + m);
    }
}
