// Products of GGUF's types with tokens that are quantized by "q8_1", as linear_records has them (gguf_stream.cu): each
// thread block quantizes its tokens itself, while its first weights are on their way, and int8 tensor cores multiply
// the bytes that decoders give (gguf_records.cuh). What 16 or 32 elements of a row and 32 of a token share multiplies
// exact sums, so
//
//     y = sum over blocks of e * sum over sub-blocks of (A * dot(c, q) + B * sum(q))
//
// A byte has a bias, or is a signed number. The bias is taken off where sums begin. They begin at the bits of a float
// whose last bit counts 1, so that they are read as a float less that number.
#pragma once
#include "linear/block_activations.cuh"
#include "linear/gguf_records.cuh"
#include "linear/integers.cuh"

constexpr int SUM_BITS = 0x4b400000;      // of this:
constexpr float SUM_FIRST = 12582912.0f;  // 1.5 * 2^23
constexpr int Q8 = 32, CODES_GAP = 16;    // elements that share a scale; bytes behind 64 codes of all tokens

// How a decoder's bytes are multiplied, and what tokens have beside their codes.
//
//     HALVES   lanes t = 0, 1 have 16 elements and t = 2, 3 others, with another factor: a token has two columns, in
//              which the codes of one half are, and zeros, so that their sums stay apart
//     WHOLE    factors of sub-blocks are integers, and so are sums of 32
//     FOLDED   factors are in the bytes
//     APART    minima are integers, too: a token has the sums of its sub-blocks times their scale, as three bfloat16,
//              which have all of a float
//     OFFSETS  else, where minima are floats: sums of SUB codes, as floats
//     BIASED   what sums of products begin with, or where they are no integers what is taken off them
template <typename R>
struct Quantized {
    static constexpr int SUB = R::SUB > Q8 ? Q8 : R::SUB, SUBS = RECORD / SUB;
    static constexpr bool BIASED = R::BIAS != 0 && !R::SIGNED, HALVES = SUB == 16 && R::ORDER == BY_EIGHT,
                          SUMMED = BIASED || R::OFFSETS;
    static_assert(!(BIASED && R::OFFSETS) && !(HALVES && (BIASED || !R::WHOLE)), "decoders that there are");
    // Whether 127 times 32 elements are below 2^22.
    static constexpr bool SHORT = R::MOST <= 1024;
    static constexpr int FIRST = R::WHOLE ? 0 : SUM_BITS;
    // Bytes of a token where minima stand apart, of which each lane has SUB / 2; and of a record of so many TOKENS.
    static constexpr int PARTS = SUB == 16 ? 96 : 64;
    template <int MANY>
    static constexpr int BYTES = MANY * (R::APART ? PARTS : SUBS * 4);

    // Keep what there is to be kept of the sub-block that begins at element k.
    template <int MANY>
    __device__ __forceinline__ static void store(unsigned to, int k, int token, int sum, float scale) {
        if constexpr (R::APART) {
            // Lane t has those of sub-blocks 2 t and 2 t + 1; of sixteen of them two more, 8 further on.
            const int sub = k % RECORD / SUB;
            to += k / RECORD * BYTES<MANY> + token * PARTS + sub % 2 * 2;
            to += SUB == 16 ? sub % 8 / 2 * 8 + sub / 8 * 4 : sub / 2 * 16;
            float left = static_cast<float>(sum) * scale;
#pragma unroll
            for (int part = 0; part < 3; ++part) {
                const __nv_bfloat16 rounded = __float2bfloat16_rn(left);
                left -= __bfloat162float(rounded);
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + part * (SUB == 16 ? 32 : 4)),
                             "h"(__bfloat16_as_ushort(rounded))
                             : "memory");
            }
        } else if constexpr (BIASED || R::OFFSETS) {
            float word = static_cast<float>(sum);
            if (BIASED)
                word = R::WHOLE ? __int_as_float(-R::BIAS * sum) : SUM_FIRST + static_cast<float>(R::BIAS * sum);
            store_shared(to + (k / SUB * MANY + token) * 4, word);
        }
    }
};

// d = a * b + c for a of 16 rows and 16 or 32 columns, bytes that may be SIGNED, and b of 8 columns of signed ones.
template <bool SIGNED>
__device__ __forceinline__ void mma_bytes(
    int (&d)[4], const unsigned (&a)[2][2], unsigned b0, unsigned b1, const int (&c)[4]) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0][0]), "r"(a[1][0]), "r"(a[0][1]), "r"(a[1][1]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]),
              "r"(c[3]));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0][0]), "r"(a[1][0]), "r"(a[0][1]), "r"(a[1][1]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]),
              "r"(c[3]));
#endif
}
template <bool SIGNED>
__device__ __forceinline__ void mma_bytes(int (&d)[4], unsigned a0, unsigned a1, unsigned b, const int (&c)[4]) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#endif
}

// The bytes of a step.
template <typename R>
__device__ __forceinline__ unsigned bytes_of(const R& r, int s) {
    if constexpr (R::SIGNED) return r.signed_codes(s);
    else return r.codes(s);
}

// A sum of 32 products, of integers or begun at SUM_FIRST, as a number.
template <typename R>
__device__ __forceinline__ float sum_of(int bits) {
    return R::WHOLE && !Quantized<R>::SHORT ? static_cast<float>(bits) : __int_as_float(bits) - SUM_FIRST;
}

// What multiply_integers does with block j of half a record: its bytes times `b`, of which lane t has tokens 2 t and
// 2 t + 1, times what sub-blocks have beside the scale of a token. `sums` are those of sub-blocks from `pitch` to
// `pitch`.
template <typename R>
__device__ __forceinline__ void multiply_block(
    const R (&r)[2], int j, const unsigned (&a)[2][2], const unsigned (&b)[2], unsigned sums, int pitch,
    float (&of_block)[4]) {
    using Quantized = ::Quantized<R>;
    constexpr int STEPS = Quantized::SUB / 16, BEGIN = Quantized::SHORT ? SUM_BITS : 0;
    int whole[4] = {BEGIN, BEGIN, BEGIN, BEGIN};
#pragma unroll
    for (int part = 0; part < 2; part += R::FOLDED ? 2 : STEPS) {
        const int sub = (2 * j + part) * 16 / R::SUB;
        uint2 of_x = {};
        if constexpr (!R::APART && (Quantized::BIASED || R::OFFSETS))
            of_x = shared_at<uint2>(sums + (2 * j + part) / STEPS * pitch);
        int first[2] = {Quantized::FIRST, Quantized::FIRST}, d[4];
        if constexpr (Quantized::BIASED && R::WHOLE) first[0] = of_x.x, first[1] = of_x.y;
        float less[2] = {SUM_FIRST, SUM_FIRST};
        if constexpr (Quantized::BIASED) less[0] = __uint_as_float(of_x.x), less[1] = __uint_as_float(of_x.y);
        const int c[4] = {first[0], first[1], first[0], first[1]};
        if constexpr (STEPS == 2 || R::FOLDED) mma_bytes<R::SIGNED>(d, a, b[0], b[1], c);
        else mma_bytes<R::SIGNED>(d, a[0][part], a[1][part], b[part], c);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (R::FOLDED) {
                of_block[i] = sum_of<R>(d[i]);
            } else if constexpr (R::WHOLE) {
                whole[i] += d[i] * r[i / 2].whole(sub);
            } else {
                of_block[i] = fmaf(__int_as_float(d[i]) - less[i % 2], r[i / 2].factor(sub), of_block[i]);
                if constexpr (R::OFFSETS)
                    of_block[i] = fmaf(__uint_as_float(i % 2 ? of_x.y : of_x.x), r[i / 2].offset(sub), of_block[i]);
            }
        }
    }
    if constexpr (R::WHOLE)
#pragma unroll
        for (int i = 0; i < 4; ++i) of_block[i] = sum_of<R>(whole[i]);
}

// acc += what minima add, given as bytes: those of sub-blocks 2 t and 2 t + 1 of two rows, of sixteen of them two more,
// 8 further on.
template <typename R, int EIGHTS>
__device__ __forceinline__ void add_minima(const typename R::Minima (&own)[2], unsigned sums, float (&acc)[EIGHTS][4]) {
    constexpr bool SIXTEENS = Quantized<R>::SUB == 16;
    unsigned a[2][2];
#pragma unroll
    for (int j = 0; j < 1 + SIXTEENS; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)  // as bfloat16 from 128 on, less 128
            a[j][i] = add_pairs<__nv_bfloat16>(__byte_perm(own[i].two[j], 0x43434343u, 0x4140), 0xc300c300u);
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
        const unsigned from = sums + e * (TOKENS * Quantized<R>::PARTS);
        float d[4] = {};
        if constexpr (SIXTEENS) {
#pragma unroll
            for (int part = 0; part < 3; ++part) {
                const uint2 two = shared_at<uint2>(from + part * 32);
                mma<__nv_bfloat16>(d, a[0][0], a[0][1], a[1][0], a[1][1], two.x, two.y);
            }
        } else {
            const uint4 parts = shared_at<uint4>(from);
            mma<__nv_bfloat16>(d, a[0][0], a[0][1], a[0][0], a[0][1], parts.x, parts.y);
            mma<__nv_bfloat16>(d, a[0][0], a[0][1], 0u, 0u, parts.z, 0u);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[e][i] = fmaf(d[i], own[i / 2].d, acc[e][i]);
    }
}

// acc += W x of one record of 16 rows and 8 EIGHTS tokens; `stage` is the address of row g's. Of `beside` x are the
// codes of the lane's column, sums and scales those of tokens 2 t and 2 t + 1, or with HALVES of t and t + 4, as which
// acc is then, too. `next` starts to copy the next record to the same place, when all has been read from there.
template <typename R, typename Record, int EIGHTS, typename Table, typename Beside, typename Next>
__device__ __forceinline__ void multiply_integers(
    unsigned stage, const unsigned (&narrow)[2], const Table& table, const Beside& beside, int m, int t, bool mine,
    const Next& next, float (&acc)[EIGHTS][4]) {
    using Quantized = ::Quantized<R>;
    constexpr int STRIDE = RecordLayout<R>::stride(), PITCH = EIGHTS * TOKENS * 4;
    R both[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) both[half][i].load(Record{stage + i * 8 * STRIDE, narrow[i]}, table, t, half);
    if constexpr (R::APART) {
        typename R::Minima own[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) own[i].load(Record{stage + i * 8 * STRIDE, narrow[i]}, t);
        add_minima<R, EIGHTS>(own, beside.sums, acc);
    }
    __syncwarp();
    next();
    if constexpr (Quantized::HALVES) {
        // Four tokens, then the others.
#pragma unroll
        for (int tile = 0; tile < 2 * EIGHTS; ++tile) {
            if (tile * 4 >= m) break;
            float sum[2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 x;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (j % 2 == 0) {
                        x = uint4{};
                        if (mine) x = shared_at<uint4>(beside.x + (half * 2 + j / 2) * beside.pitch + tile * 256);
                    }
                    unsigned a[2][2];
#pragma unroll
                    for (int i = 0; i < 2; ++i)
#pragma unroll
                        for (int s = 0; s < 2; ++s) a[i][s] = bytes_of(both[half][i], 2 * j + s);
                    int d[4];
                    const int c[4] = {};
                    mma_bytes<R::SIGNED>(d, a, j % 2 ? x.z : x.x, j % 2 ? x.w : x.y, c);
                    const float scale = shared_at<float>(beside.scales + (half * 4 + j) * PITCH + tile * 16);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const R& r = both[half][i];
                        const int whole = (Quantized::SHORT ? SUM_BITS : 0) + d[2 * i] * r.whole(2 * j) +
                                          d[2 * i + 1] * r.whole(2 * j + 1);
                        sum[i] = fmaf(sum_of<R>(whole), scale, sum[i]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& to = acc[tile / 2][2 * i + tile % 2];
                to = fmaf(sum[i], both[0][i].outer(), to);
            }
        }
    } else {
        float sum[EIGHTS][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 x[EIGHTS];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (j % 2 == 0)
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e)
                        x[e] = shared_at<uint4>(beside.x + (half * 2 + j / 2) * beside.pitch + e * (TOKENS * 64));
                unsigned a[2][2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int s = 0; s < 2; ++s) a[i][s] = bytes_of(both[half][i], 2 * j + s);
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) {
                    const unsigned b[2] = {j % 2 ? x[e].z : x[e].x, j % 2 ? x[e].w : x[e].y};
                    float of_block[4] = {};
                    multiply_block<R>(
                        both[half], j, a, b, beside.sums + half * (Quantized::SUBS / 2) * PITCH + e * (TOKENS * 4),
                        PITCH, of_block);
                    const uint2 scales = shared_at<uint2>(beside.scales + (half * 4 + j) * PITCH + e * (TOKENS * 4));
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sum[e][i] = fmaf(of_block[i], __uint_as_float(i % 2 ? scales.y : scales.x), sum[e][i]);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[e][i] = fmaf(sum[e][i], both[0][i / 2].outer(), acc[e][i]);
    }
}

// Quantize the tokens of a block, which has room for MANY, `records` of each from x on, `depth` elements from one to
// the next: their codes to shared memory, in the order of fragments, 16 bytes of each lane for 64 elements; their
// scales and what Quantized has.
template <typename R, int MANY, typename X>
__device__ __forceinline__ void stage_quantized(
    const X* x, long long depth, int m, int records, unsigned codes, unsigned pitch, unsigned sums, unsigned scales) {
    using Quantized = ::Quantized<R>;
    static_assert(R::ORDER == BY_SIXTEEN || R::ORDER == BY_EIGHT, "four lanes share what has one scale");
    const int all = records * (RECORD / SIXTEEN);
#pragma unroll 1
    for (int begin = 0; begin < all; begin += blockDim.x) {
        const int at = begin + threadIdx.x;
        const bool there = at < all;
        const X* from = x + min(at, all - 1) * SIXTEEN;
        Numbers<X> next;
        next.load(from);
#pragma unroll 1
        for (int token = 0; token < m; ++token) {
            Numbers<X> now = next;
            if (token + 1 < m) next.load(from + (token + 1) * depth);
            unsigned most = now.largest();
            most = max(most, __shfl_xor_sync(FULL_WARP, most, 1));
            const BlockRule rule(most);
            float v[SIXTEEN];
            now.get(v);
            unsigned word[4];
            rule.codes(v, word);
            int sum = 0;
            if constexpr (Quantized::SUMMED) {
                sum = sum_of_codes(word);
                if (Quantized::SUB == Q8) sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            }
            if (!there) continue;
            // Lane t has four neighbours of each sixteen, or eight of the whole block.
            const unsigned to = codes + at / 4 * pitch + token * 64;
            if constexpr (R::ORDER == BY_SIXTEEN) {
#pragma unroll
                for (int t = 0; t < 4; ++t) store_shared(to + t * 16 + at % 4 * 4, __uint_as_float(word[t]));
            } else {
#pragma unroll
                for (int t = 0; t < 2; ++t)
                    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + (at % 2 * 2 + t) * 16 + at / 2 % 2 * 8),
                                 "r"(word[2 * t]), "r"(word[2 * t + 1])
                                 : "memory");
            }
            if (at % 2 == 0) store_shared(scales + (at / 2 * MANY + token) * 4, rule.scale);
            if (at % 2 == 0 || Quantized::SUB == SIXTEEN)
                Quantized::template store<MANY>(sums, at * SIXTEEN, token, sum, rule.scale);
        }
    }
}

// The same from x[from] on, of the type that `kind` names.
template <typename R, int MANY>
__device__ __forceinline__ void stage_quantized(
    const void* x, int kind, long long from, long long depth, int m, int records, unsigned codes, unsigned pitch,
    unsigned sums, unsigned scales) {
    if (kind == FLOAT_NUMBERS)
        stage_quantized<R, MANY>(static_cast<const float*>(x) + from, depth, m, records, codes, pitch, sums, scales);
    else if (kind == HALF_NUMBERS)
        stage_quantized<R, MANY>(static_cast<const __half*>(x) + from, depth, m, records, codes, pitch, sums, scales);
    else
        stage_quantized<R, MANY>(
            static_cast<const __nv_bfloat16*>(x) + from, depth, m, records, codes, pitch, sums, scales);
}
