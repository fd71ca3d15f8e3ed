// Decoders of GGUF's types of 2 and 3 bits for the streaming products with tokens of floats (linear/gguf_stream.cu):
// instructions limit these, so each lane has elements of its own, 64 neighbours or four groups of 16, and scales of a
// few groups. What records are stands in linear/gguf_records.cuh.
//
// Scales are multiplied with codes, as halves: the bits of a half below 2048 are that many times 2^-24, tensor cores
// and multiplications take subnormal numbers, too, and scale times code is below 2048. So a code needs no conversion
// but to be masked out, wherever it is in its half: what a shift would have taken off comes off the scale, or at the
// end.
//
// Such a decoder has, beside FIELDS, bytes(i), SUB, OFFSETS, TABLE and table_word(i) of all,
//
//     ORDER                 which elements lane t has in step s of a record, see first_of
//     fetch(record, t)      read what the lane needs
//     look_up(table, half)  look up what it needs for steps 8 half to 8 half + 7
//     scaled(s, a)          elements 0 and 2, and 1 and 3 of step s, as numbers times 2^-24, 1 / d and UNIT^-part(s)
//     PARTS, part(s), UNIT  parts of a record that have sums of their own, until powers of UNIT join them
//     d                     of a record, when it has been read
//     minima(table, i), dmin
//                           OFFSETS: -B of the lane's sub-blocks 2 i and 2 i + 1, as bfloat16 from 128 on
#pragma once
#include "linear/gguf_records.cuh"

// 1024 as a half, 128 as a bfloat16, twice: whole numbers become its lowest bits.
constexpr unsigned HALF_MAGIC = 0x64006400u, BFLOAT_MAGIC = 0x43004300u;

struct LanesBase : RecordBase {
    static constexpr int ORDER = BY_QUARTERS, PARTS = 1;
    static constexpr bool LANES = true, KEPT = true;
    static constexpr float UNIT = 1.0f, dmin = 0.0f;
    __host__ __device__ static constexpr unsigned kept(int i) { return i ? 0 : HALF_MAGIC; }
    __host__ __device__ static constexpr int part(int) { return 0; }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table&, int) {}
};

// Of two halves one twice, which costs no instruction where it is a factor.
__device__ __forceinline__ unsigned twice(unsigned pair, int i) {
#ifdef __CUDA_ARCH__
    unsigned r;
    if (i) asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};}" : "=r"(r) : "r"(pair));
    else asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};}" : "=r"(r) : "r"(pair));
    return r;
#else
    return __byte_perm(pair, 0, i ? 0x3232 : 0x1010);
#endif
}

// a * b + c of two halves each, rounded once; subnormal ones are kept.
__device__ __forceinline__ unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
#ifdef __CUDA_ARCH__
    unsigned r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
#else
    unsigned r = 0;
    for (int i = 0; i < 2; ++i) {  // a product of halves is exact in float32, and so are the sums that decoders need
        const float sum = __fadd_rn(__fmul_rn(half_of(a, i), half_of(b, i)), half_of(c, i));
        r |= static_cast<unsigned>(__half_as_ushort(__float2half_rn(sum))) << 16 * i;
    }
    return r;
#endif
}
__device__ __forceinline__ unsigned multiply_halves(unsigned a, unsigned b) {
#ifdef __CUDA_ARCH__
    unsigned r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    return fma_halves(a, b, 0x80008000u);
#endif
}
__host__ __device__ constexpr unsigned halves(unsigned bits) { return bits * 0x00010001u; }
__host__ __device__ constexpr unsigned power_of_two(int exponent) { return halves((15u + exponent) << 10); }

// ---- blocks of 256 ---------------------------------------------------------------------------------------------

// Lane t has 16 bytes of codes of 2 bits, those of a row's bytes 16 t and on: four groups of 16, one in each field.
struct FourFields : LanesBase {
    static constexpr int SUB = 16, ORDER = BY_FIELDS, PARTS = 4;
    static constexpr float UNIT = 0.25f;
    __host__ __device__ static constexpr int part(int s) { return s / 4; }
    unsigned word[4];
    unsigned pair[2];  // scales of groups 2 i and 2 i + 1

    // Those of step s where they are in their halves.
    __device__ __forceinline__ unsigned field(int s, int h) const {
        return word[s % 4] >> 8 * h & halves(3u << s / 4 * 2);
    }
};

// fields: scales, qs, d and dmin
struct Q2_K_Lanes : FourFields {
    using Layout = RecordLayout<Q2_K_Lanes>;
    static constexpr int FIELDS = 3;
    static constexpr bool OFFSETS = true;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 16 : i == 1 ? 64 : 4; }
    __host__ __device__ static constexpr unsigned kept(int i) { return i ? BFLOAT_MAGIC : HALF_MAGIC; }
    unsigned scales[2];  // a byte of either half: scale and minimum
    float d, dmin;

    template <typename Record>
    __device__ __forceinline__ void fetch(const Record& record, int t) {
        record.words(word, Layout::at(1) + 16 * t), record.words(scales, Layout::at(0) + t / 2 * 8);
        const unsigned both = record.word(Layout::at(2));
        d = half_of(both, 0), dmin = half_of(both, 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] >>= t % 2 * 8;
    }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table& table, int half) {
        if (half) return;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            pair[i] = fma_halves((scales[i] & 0x000f000fu) | table.kept[0], power_of_two(0), HALF_MAGIC | 0x80008000u);
    }
    template <typename Table>
    __device__ __forceinline__ unsigned minima(const Table& table, int i) const {
        return (scales[i] >> 4 & 0x000f000fu) | table.kept[1];
    }
    __device__ __forceinline__ void scaled(int s, unsigned (&a)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) a[h] = multiply_halves(field(s, h), twice(pair[s / 8], s / 4 % 2));
    }
};

// fields: hmask, qs, scales, d
struct Q3_K_Lanes : FourFields {
    using Layout = RecordLayout<Q3_K_Lanes>;
    static constexpr int FIELDS = 4;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 32 : i == 1 ? 64 : i == 2 ? 12 : 2; }
    unsigned high[4];  // bit i of a byte belongs to field i
    unsigned low[2], more;
    float d;

    template <typename Record>
    __device__ __forceinline__ void fetch(const Record& record, int t) {
        record.words(word, Layout::at(1) + 16 * t), record.words(high, Layout::at(0) + t % 2 * 16);
        // Of sub-block j of all 16 there are four bits of byte j % 8, and two of byte 8 + j % 4, at 2 (j / 4).
        const int shift = t / 2 * 4 + t % 2 * 8;
        record.words(low, Layout::at(2));
        more = record.word(Layout::at(2) + 8) >> shift, d = half_of(record.narrow, 0);
#pragma unroll
        for (int i = 0; i < 2; ++i) low[i] >>= shift;
#pragma unroll
        for (int i = 0; i < 4; ++i) high[i] >>= t / 2 * 4;
    }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table& table, int half) {
        if (half) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // 32 more than scales, and 1024, less that
            const unsigned raised = (low[i] & 0x000f000fu) | table.kept[0];
            pair[i] = fma_halves((more << (4 - 2 * i) & 0x00300030u) | raised, power_of_two(0), 0xe420e420u);
        }
    }
    __device__ __forceinline__ void scaled(int s, unsigned (&a)[2]) const {
        // What is added for all, -4, and for a high bit, 4; that is bit i of a half, codes begin at bit 2 i.
        const int i = s / 4;
        const unsigned least = multiply_halves(pair[i / 2], halves(0x8000u | 4u << 2 * i));
        const unsigned above = multiply_halves(pair[i / 2], power_of_two(2 + i));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = fma_halves(field(s, h), twice(pair[i / 2], i % 2), twice(least, i % 2));
            a[h] = fma_halves(high[s % 4] >> 8 * h & halves(1u << i), twice(above, i % 2), a[h]);
        }
    }
};
