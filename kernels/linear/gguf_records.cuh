// Decoders of GGUF's types for the streaming products (linear/gguf_stream.cu). In every type an element is an integer
// times a factor that some neighbours share, and some types add a number to it that they share, too:
//
//     w = A * c + B        c of at most 8 bits, A and B float32, of each SUB elements
//
// A record is what 256 elements of a row take, one block or eight or four: of each field (of kbitcupy/formats/gguf) its
// bytes, side by side in shared memory, fields of 16 bytes or more first. Fields of 2 bytes come in a register.
//
// Lane (g, t) of a warp decodes rows g and g + 8, half a record at a time: in each of the 8 steps of a half four
// neighbouring elements of each row, so that the lanes t = 0 .. 3 have 16 elements of a row with one factor. As
// integers of T these are the fragments of one mma, whose sums are scaled in fp32: no weight is rounded.
//
// A decoder R has
//
//     FIELDS, bytes(i)           of a record, in the order of the format's planes; of 2 bytes up to two
//     SUB                        elements that share A and B: 16, 32 or 128
//     ORDER                      which elements lane t has in step s of a record, see first_of
//     BIAS                       a byte less BIAS is c
//     OFFSETS                    whether there is a B
//     TABLE, table_word(i)       words of a table in shared memory; 0: none
//     COPIES                     with a table: of its words as many are equal, or four of them at least
//     kept(i)                    KEPT: numbers that it needs in a register, as `table.kept[i]`, i below 3: an
//     instruction
//                                has room for one constant
//     load(record, table, t, half)
//                                read what the lane needs of half a record, or look it up
//     codes(s)                   the four bytes of step s, 0 to 7, in the order of elements
//     factor(j), offset(j)       A and B of sub-block j of the half
//     outer()                    of the record: what A is beside factor(j); 1 without
//     BYTES                      whether factor(j) are bytes with signs, of 16 sub-blocks. Then two_bytes(selector) has
//                                those of two sub-blocks of the half in bytes 0 and 2, as the selector's names them
//     INNER                      whether A and B are integers times what all of the record shares, A's integer times c
//                                is below 2048, and c has no bias. Then load is load_codes and what these need,
//                                scale(j) is A's integer, and `Inner`, which is loaded once a record, has what it is
//                                multiplied with, d, and -B as integers, minima, times dmin
//     WHOLE_LINES                whether copies of its fields of less than 128 bytes bring whole lines to the L2 cache:
//                                Q6_K gains 5 % by it, Q5_K and Q5_0 nothing
//
// and for tokens that are quantized (linear/gguf_integers.cuh), which decoders of types with lanes of their own
// (linear/gguf_lanes.cuh) are for alone,
//
//     SIGNED                     whether there is signed_codes(s), c as bytes with signs, in place of codes(s) there
//     WHOLE                      whether A is an integer, whole(j), times outer(); of which c times A is up to MOST
//     FOLDED                     whether codes(s) are multiplied with A already
//     APART                      whether -B is an integer: `Minima`, loaded once a record, has as bytes those of
//                                sub-blocks 2 t and 2 t + 1, of sixteen of them two more, 8 further on, and what they
//                                are multiplied with, d
//
// In half precision codes need no conversion: the bits of a half below 2048 are that many times 2^-24, and tensor cores
// multiply subnormal numbers, too. The bias is then taken off by sums of x, with which the sums of products begin, or
// by one more mma with factors that are bytes; and an inner scale is a multiplication of two codes at once, as
// integers.
//
// Where s and j are known, what they choose costs nothing. Everything but reading is plain C++, so that a test compiles
// it with the host's compiler (tests/products/test_records.py).
#pragma once
#include "formats/gguf_fields.cuh"

constexpr int RECORD = 256;  // elements

// Which four neighbours lane t has in step s of a record: by 16 elements four of each lane, or by 32 eight of each lane
// in two steps. Or lanes have 64 elements each: neighbours, or half of the bytes 0 to 31 of either half, where a byte
// has four elements that are 32 apart, one field after the other.
enum RecordOrder { BY_SIXTEEN, BY_EIGHT, BY_QUARTERS, BY_FIELDS };
template <int ORDER>
__host__ __device__ constexpr int first_of(int t, int s) {
    return ORDER == BY_SIXTEEN    ? s * 16 + t * 4
           : ORDER == BY_EIGHT    ? s / 2 * 32 + t * 8 + s % 2 * 4
           : ORDER == BY_QUARTERS ? t * 64 + s * 4
                                  : t / 2 * 128 + s / 4 * 32 + t % 2 * 16 + s % 4 * 4;
}
// The other way round: the step and the lane that have element k.
template <int ORDER>
__host__ __device__ constexpr int step_of(int k) {
    return ORDER == BY_SIXTEEN    ? k / 16
           : ORDER == BY_EIGHT    ? k / 32 * 2 + k / 4 % 2
           : ORDER == BY_QUARTERS ? k % 64 / 4
                                  : k % 128 / 32 * 4 + k % 16 / 4;
}
template <int ORDER>
__host__ __device__ constexpr int lane_of(int k) {
    return ORDER == BY_SIXTEEN    ? k / 4 % 4
           : ORDER == BY_EIGHT    ? k / 8 % 4
           : ORDER == BY_QUARTERS ? k / 64
                                  : k / 128 * 2 + k % 32 / 16;
}

// Where fields lie in a record.
template <typename R>
struct RecordLayout {
    // The bytes by which a field is copied at once; 0: it comes in a register.
    __host__ __device__ static constexpr int piece(int i) {
        const int bytes = R::bytes(i);
        return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 0;
    }
    __host__ __device__ static constexpr int end() {
        int all = 0;
        for (int i = 0; i < R::FIELDS; ++i) all += piece(i) ? R::bytes(i) : 0;
        return all;
    }
    // Behind all fields that are copied by larger pieces, and those before it that are copied by the same.
    __host__ __device__ static constexpr int at(int field) {
        int before = 0;
        for (int i = 0; i < R::FIELDS; ++i)
            if (piece(i) > piece(field) || (piece(i) == piece(field) && i < field)) before += R::bytes(i);
        return before;
    }
    // Bytes from a record to the next: an odd multiple of 16, so that eight rows lie in other banks.
    __host__ __device__ static constexpr int stride() {
        const int pieces = (end() + 15) / 16;
        return (pieces % 2 ? pieces : pieces + 1) * 16;
    }
};

// What decoders have that lack something.
struct RecordBase {
    static constexpr int TABLE = 0, ORDER = BY_SIXTEEN, BIAS = 0, MOST = 1 << 20;
    static constexpr bool LANES = false, KEPT = false, SIGNED = false, OFFSETS = false, INNER = false, WHOLE = false,
                          FOLDED = false, APART = false, BYTES = false, WHOLE_LINES = false;
    __device__ __forceinline__ static unsigned table_word(int) { return 0; }
    __device__ __forceinline__ float offset(int) const { return 0.0f; }
    __device__ __forceinline__ float outer() const { return 1.0f; }
};

// Bytes of two words by the four lowest nibbles of a selector, each 0 to 7: __byte_perm masks what is not known to be
// so.
__device__ __forceinline__ unsigned permuted(unsigned a, unsigned b, unsigned selector) {
#ifdef __CUDA_ARCH__
    unsigned r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
#else
    return __byte_perm(a, b, selector & 0x7777u);
#endif
}

// The same where a fourth bit of a selector counts, too: then all bits are the highest one of the byte.
__device__ __forceinline__ unsigned selected(unsigned a, unsigned b, unsigned selector) {
#ifdef __CUDA_ARCH__
    return permuted(a, b, selector);
#else
    unsigned bytes = __byte_perm(a, b, selector & 0x7777u);
    for (int i = 0; i < 4; ++i)
        if (selector >> (4 * i + 3) & 1)
            bytes = (bytes & ~(255u << 8 * i)) | ((bytes >> (8 * i + 7) & 1) * 255u) << 8 * i;
    return bytes;
#endif
}

// Byte i of a word, which is signed.
__device__ __forceinline__ int signed_byte(unsigned word, int i) {
    return static_cast<int>(word << (24 - 8 * i)) >> 24;
}

// Of each byte its highest bit, eight times.
__device__ __forceinline__ unsigned sign_bytes(unsigned word) {
#ifdef __CUDA_ARCH__
    unsigned r;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(r) : "r"(word));
    return r;
#else
    return (word >> 7 & 0x01010101u) * 255u;
#endif
}

// All bits of the halves that differ.
__device__ __forceinline__ unsigned unequal_halves(unsigned a, unsigned b) {
#ifdef __CUDA_ARCH__
    unsigned r;
    asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    return ((a ^ b) & 0xffffu ? 0xffffu : 0u) | ((a ^ b) >> 16 ? 0xffff0000u : 0u);
#endif
}

// ---- blocks of 32 ----------------------------------------------------------------------------------------------

// Four words of codes of 4 bits, element i of 32 in the low nibble of byte i or the high one of byte i - 16.
struct SplitCodes {
    unsigned word[4];

    template <typename Record>
    __device__ __forceinline__ void load(const Record& record, int at, int t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = record.word(at + 16 * j + 4 * t);
    }
    __device__ __forceinline__ unsigned nibbles(int s) const { return word[s / 2] >> s % 2 * 4 & 0x0f0f0f0fu; }
};

// Bits 0 to 3 of `four` as bit 4 of four bytes: bit i goes to 8 i + 4, by 7 i + 4 places.
__device__ __forceinline__ unsigned fifth_bits(unsigned four) { return (four & 15u) * 0x02040810u & 0x10101010u; }

// fields: d and m, qs
struct Q4_1_Record : RecordBase {
    using Layout = RecordLayout<Q4_1_Record>;
    static constexpr int FIELDS = 2, SUB = 32;
    static constexpr bool OFFSETS = true;
    __host__ __device__ static constexpr int bytes(int i) { return i ? 128 : 32; }
    SplitCodes split;
    unsigned d[4];

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table&, int t, int half) {
        split.load(record, Layout::at(1) + 64 * half, t);
#pragma unroll
        for (int j = 0; j < 4; ++j) d[j] = record.word(Layout::at(0) + 16 * half + 4 * j);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return split.nibbles(s); }
    __device__ __forceinline__ float factor(int j) const { return half_of(d[j], 0); }
    __device__ __forceinline__ float offset(int j) const { return half_of(d[j], 1); }
};

// Four words of fifth bits, bit i that of element i of 32.
struct FifthBits {
    unsigned word[4];

    template <typename Record>
    __device__ __forceinline__ void load(const Record& record, int at, int t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = record.word(at + 4 * j) >> 4 * t;
    }
    __device__ __forceinline__ unsigned bits(int s) const { return fifth_bits(word[s / 2] >> s % 2 * 16); }
};

// fields: d, qh, qs
struct Q5_0_Record : RecordBase {
    using Layout = RecordLayout<Q5_0_Record>;
    static constexpr int FIELDS = 3, SUB = 32, BIAS = 16;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 16 : i == 1 ? 32 : 128; }
    SplitCodes split;
    FifthBits fifth;
    unsigned d[2];

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table&, int t, int half) {
        split.load(record, Layout::at(2) + 64 * half, t);
        fifth.load(record, Layout::at(1) + 16 * half, t);
        d[0] = record.word(Layout::at(0) + 8 * half), d[1] = record.word(Layout::at(0) + 8 * half + 4);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return split.nibbles(s) | fifth.bits(s); }
    __device__ __forceinline__ float factor(int j) const { return half_of(d[j / 2], j % 2); }
};

// fields: d and m, qh, qs
struct Q5_1_Record : RecordBase {
    using Layout = RecordLayout<Q5_1_Record>;
    static constexpr int FIELDS = 3, SUB = 32;
    static constexpr bool OFFSETS = true;
    __host__ __device__ static constexpr int bytes(int i) { return i == 2 ? 128 : 32; }
    SplitCodes split;
    FifthBits fifth;
    unsigned d[4];

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table&, int t, int half) {
        split.load(record, Layout::at(2) + 64 * half, t);
        fifth.load(record, Layout::at(1) + 16 * half, t);
#pragma unroll
        for (int j = 0; j < 4; ++j) d[j] = record.word(Layout::at(0) + 16 * half + 4 * j);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return split.nibbles(s) | fifth.bits(s); }
    __device__ __forceinline__ float factor(int j) const { return half_of(d[j], 0); }
    __device__ __forceinline__ float offset(int j) const { return half_of(d[j], 1); }
};

// The numbers of iq4's table, as bytes with 128 in the middle, or signed: those of the low nibbles of four bytes, or of
// the `high` ones.
struct IQ4Values {
    static constexpr unsigned LOW = 0x3f2d1801u, HIGH = 0xa6998d81u;  // the lower four of either half
    static constexpr unsigned SELECTORS = 0x32103210u;
    unsigned low, high, selectors;
    template <typename Table>
    __device__ __forceinline__ void keep(const Table& table) {
        low = table.kept[0], high = table.kept[1], selectors = table.kept[2];
    }
    template <bool SIGNED>
    __device__ __forceinline__ unsigned of(unsigned word, int upper) const {
        constexpr unsigned TURNED = SIGNED ? 0x80808080u : 0;
        // Three bits choose of either half of the table, the fourth of the two.
        const unsigned index = word & 0x77777777u, which = (word >> 1 & 0x44444444u) | selectors;
        unsigned found[2];  // of two bytes each, the low nibble of a byte first
#pragma unroll
        for (int i = 0; i < 2; ++i)
            found[i] = selected(
                selected(low ^ TURNED, 0x766a5d4fu ^ TURNED, index >> 16 * i),
                selected(high ^ TURNED, 0xf1d9c5b5u ^ TURNED, index >> 16 * i), which >> 16 * i);
        return __byte_perm(found[0], found[1], upper ? 0x7531 : 0x6420);
    }
};

// fields: d, qs
struct IQ4_NL_Record : RecordBase {
    using Layout = RecordLayout<IQ4_NL_Record>;
    static constexpr int FIELDS = 2, SUB = 32, BIAS = 128;
    static constexpr bool SIGNED = true, KEPT = true;
    __host__ __device__ static constexpr unsigned kept(int i) {
        return i == 0 ? IQ4Values::LOW : i == 1 ? IQ4Values::HIGH : IQ4Values::SELECTORS;
    }
    __host__ __device__ static constexpr int bytes(int i) { return i ? 128 : 16; }
    IQ4Values values;
    SplitCodes split;
    unsigned d[2];

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        values.keep(table);
        split.load(record, Layout::at(1) + 64 * half, t);
        d[0] = record.word(Layout::at(0) + 8 * half), d[1] = record.word(Layout::at(0) + 8 * half + 4);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return values.of<false>(split.word[s / 2], s % 2); }
    __device__ __forceinline__ unsigned signed_codes(int s) const { return values.of<true>(split.word[s / 2], s % 2); }
    __device__ __forceinline__ float factor(int j) const { return half_of(d[j / 2], j % 2); }
};

// What four nibbles of 4-bit floats stand for, twice that and 64, as bytes; the first in the lowest bits. A permutation
// gives the highest bit of a byte, which is 0 in all of these, eight times where a selector has its fourth bit.
struct Fp4Values {
    static constexpr unsigned POSITIVE = 0x43424140u, NEGATIVE = 0x3d3e3f40u;  // the lower four of either
    unsigned positive, negative;
    template <typename Table>
    __device__ __forceinline__ void keep(const Table& table) {
        positive = table.kept[0], negative = table.kept[1];
    }
    __device__ __forceinline__ unsigned of(unsigned nibbles) const {
        return selected(positive, 0x4c484644u, nibbles) | selected(negative, 0x34383a3cu, nibbles ^ 0x8888u);
    }
};

// fields: scales, qs
struct MXFP4_Record : RecordBase {
    using Layout = RecordLayout<MXFP4_Record>;
    static constexpr int FIELDS = 2, SUB = 32, BIAS = 64, ORDER = BY_EIGHT;
    static constexpr bool KEPT = true;
    __host__ __device__ static constexpr unsigned kept(int i) {
        return i == 0 ? Fp4Values::POSITIVE : i == 1 ? Fp4Values::NEGATIVE : 0;
    }
    __host__ __device__ static constexpr int bytes(int i) { return i ? 128 : 8; }
    Fp4Values values;
    unsigned word[4], scales;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        values.keep(table);
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = record.word(Layout::at(1) + 64 * half + 16 * j + 4 * t);
        scales = record.word(Layout::at(0) + 4 * half);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return values.of(word[s / 2] >> s % 2 * 16); }
    __device__ __forceinline__ float factor(int j) const {  // 2^(exponent - 128), which may be subnormal
        const unsigned exponent = scales >> 8 * j & 255u;
        return __uint_as_float(exponent < 2 ? 0x00200000u << exponent : exponent - 1 << 23);
    }
};

// fields: scales, qs, and a scale of all that is the epilogue's
struct NVFP4_Record : RecordBase {
    using Layout = RecordLayout<NVFP4_Record>;
    static constexpr int FIELDS = 2, SUB = 16, BIAS = 64;
    static constexpr bool KEPT = true;
    __host__ __device__ static constexpr unsigned kept(int i) {
        return i == 0 ? Fp4Values::POSITIVE : i == 1 ? Fp4Values::NEGATIVE : 0;
    }
    __host__ __device__ static constexpr int bytes(int i) { return i ? 128 : 16; }
    Fp4Values values;
    unsigned word[8], scales[4];  // halves

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        values.keep(table);
#pragma unroll
        for (int s = 0; s < 8; ++s) word[s] = record.pair(Layout::at(1) + 64 * half + 8 * s + 2 * t);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned four = record.word(Layout::at(0) + 8 * half + i / 2 * 4);
            const unsigned two = __byte_perm(four, 0, i % 2 ? 0x4342 : 0x4140) << 7;
            scales[i] = two & unequal_halves(two, 0x3f803f80u) & 0x3f803f80u;  // 0x7f is no number
        }
    }
    __device__ __forceinline__ unsigned codes(int s) const { return values.of(word[s]); }
    __device__ __forceinline__ float factor(int j) const { return half_of(scales[j / 2], j % 2); }
    __device__ __forceinline__ float outer() const { return 128.0f; }  // half of what a byte stands for, see NVFP4
};

// ---- blocks of 256 ---------------------------------------------------------------------------------------------

// Codes of 2 bits of a half: bits 2 i of byte 32 p + m are those of element 128 p + 32 i + m.
struct TwoBits {
    unsigned word[2];

    template <typename Record>
    __device__ __forceinline__ void load(const Record& record, int at, int t) {
        word[0] = record.word(at + 4 * t), word[1] = record.word(at + 16 + 4 * t);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return word[s % 2] >> s / 2 * 2 & 0x03030303u; }
};

// One bit of each element: bit i of byte m is that of element 32 i + m.
struct OneBit {
    unsigned word[2];

    template <typename Record>
    __device__ __forceinline__ void load(const Record& record, int at, int t, int half) {
        word[0] = record.word(at + 4 * t) >> 4 * half, word[1] = record.word(at + 16 + 4 * t) >> 4 * half;
    }
    // As bit `to` of bytes.
    __device__ __forceinline__ unsigned bits(int s, int to) const {
        const unsigned bits = to >= s / 2 ? word[s % 2] << (to - s / 2) : word[s % 2] >> (s / 2 - to);
        return bits & 0x01010101u << to;
    }
};

// fields: scales, qs, d and dmin. Bytes are codes times scales.
struct Q2_K_Record : RecordBase {
    using Layout = RecordLayout<Q2_K_Record>;
    static constexpr int FIELDS = 3, SUB = 16;
    static constexpr bool OFFSETS = true, FOLDED = true, APART = true;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 16 : i == 1 ? 64 : 4; }
    TwoBits two;
    unsigned scales[2];
    float d;

    struct Minima {
        unsigned two[2];
        float d;
        template <typename Record>
        __device__ __forceinline__ void load(const Record& record, int t) {
#pragma unroll
            for (int i = 0; i < 2; ++i) two[i] = record.pair(Layout::at(0) + 8 * i + 2 * t) >> 4 & 0x0f0fu;
            d = -half_of(record.word(Layout::at(2)), 1);
        }
    };

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table&, int t, int half) {
        two.load(record, Layout::at(1) + 32 * half, t);
        scales[0] = record.word(Layout::at(0) + 8 * half), scales[1] = record.word(Layout::at(0) + 8 * half + 4);
        d = half_of(record.word(Layout::at(2)), 0);
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        return two.codes(s) * __byte_perm(scales[s / 4] & 0x0f0f0f0fu, 0, 0x4440 + s % 4);
    }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: hmask, qs, scales, d
struct Q3_K_Record : RecordBase {
    using Layout = RecordLayout<Q3_K_Record>;
    static constexpr int FIELDS = 4, SUB = 16, MOST = 128;
    static constexpr bool SIGNED = true, WHOLE = true;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 32 : i == 1 ? 64 : i == 2 ? 12 : 2; }
    TwoBits two;
    OneBit below;  // whether 4 are taken off
    unsigned scales[2];
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table&, int t, int half) {
        two.load(record, Layout::at(1) + 32 * half, t);
        below.load(record, Layout::at(0), t, half);
#pragma unroll
        for (int i = 0; i < 2; ++i) below.word[i] = ~below.word[i];
        // Sub-block j of all 16: four bits of byte j % 8, and two of byte 8 + j % 4, at 2 (j / 4); less 32.
        const unsigned more = record.word(Layout::at(2) + 8) >> 4 * half;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned low = record.word(Layout::at(2) + 4 * i) >> 4 * half & 0x0f0f0f0fu;
            scales[i] = ((low | (more >> 2 * i << 4 & 0x30303030u)) + 0x60606060u) ^ 0x80808080u;
        }
        d = half_of(record.narrow, 0);
    }
    __device__ __forceinline__ unsigned signed_codes(int s) const { return below.bits(s, 2) * 63u + two.codes(s); }
    __device__ __forceinline__ int whole(int j) const { return signed_byte(scales[j / 4], j % 4); }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: d and dmin, scales, qh, qs
struct Q5_K_Record : RecordBase {
    using Layout = RecordLayout<Q5_K_Record>;
    static constexpr int FIELDS = 4, SUB = 32;
    static constexpr bool OFFSETS = true, INNER = true, WHOLE = true, APART = true;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 4 : i == 1 ? 12 : i == 2 ? 32 : 128; }
    unsigned word[2][2];
    OneBit fifth;

    // Of each half a word of scales and one of minima, a byte each.
    struct Inner {
        unsigned sc[2], mn[2];
        float d, dmin;

        template <typename Record>
        __device__ __forceinline__ void load(const Record& record) {
            const unsigned a = record.word(Layout::at(1)), b = record.word(Layout::at(1) + 4);
            const unsigned c = record.word(Layout::at(1) + 8), both = record.word(Layout::at(0));
            sc[0] = a & 0x3f3f3f3fu, sc[1] = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
            mn[0] = b & 0x3f3f3f3fu, mn[1] = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
            d = half_of(both, 0), dmin = half_of(both, 1);
        }
        __device__ __forceinline__ unsigned minima(int, bool others) const { return others ? mn[1] : mn[0]; }
    };
    struct Minima {
        unsigned two[1];
        float d;
        template <typename Record>
        __device__ __forceinline__ void load(const Record& record, int t) {
            Inner inner;
            inner.load(record);
            two[0] = (t >= 2 ? inner.mn[1] : inner.mn[0]) >> t % 2 * 16, d = -inner.dmin;
        }
    };
    unsigned sc;
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load_codes(
        const Record& record, const Table&, const Inner& inner, int t, int half) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            word[i / 2][i % 2] = record.word(Layout::at(3) + 64 * half + i / 2 * 32 + i % 2 * 16 + 4 * t);
        fifth.load(record, Layout::at(2), t, half);
        sc = inner.sc[half], d = inner.d;
    }
    __device__ __forceinline__ unsigned scale(int j) const { return sc >> 8 * j & 255u; }
    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        Inner inner;
        inner.load(record);
        load_codes(record, table, inner, t, half);
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        return (word[s / 4][s % 2] >> s / 2 % 2 * 4 & 0x0f0f0f0fu) | fifth.bits(s, 4);
    }
    __device__ __forceinline__ int whole(int j) const { return scale(j); }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: ql, qh, scales, d
struct Q6_K_Record : RecordBase {
    using Layout = RecordLayout<Q6_K_Record>;
    static constexpr int FIELDS = 4, SUB = 16, BIAS = 32, MOST = 4096;
    static constexpr bool WHOLE = true, BYTES = true, WHOLE_LINES = true;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 128 : i == 1 ? 64 : i == 2 ? 16 : 2; }
    unsigned word[4], top[2], scales[2];
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table&, int t, int half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = record.word(Layout::at(0) + 64 * half + 16 * i + 4 * t);
#pragma unroll
        for (int i = 0; i < 2; ++i) top[i] = record.word(Layout::at(1) + 32 * half + 16 * i + 4 * t);
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] = record.word(Layout::at(2) + 8 * half + 4 * i);
        d = half_of(record.narrow, 0);
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        const int at = s / 2 * 2;
        const unsigned high = at < 4 ? top[s % 2] << (4 - at) : top[s % 2] >> (at - 4);
        return (word[s % 4] >> s / 4 * 4 & 0x0f0f0f0fu) | (high & 0x30303030u);
    }
    __device__ __forceinline__ float factor(int j) const {
        return static_cast<float>(static_cast<signed char>(scales[j / 4] >> j % 4 * 8));
    }
    __device__ __forceinline__ unsigned two_bytes(unsigned selector) const {
        return permuted(scales[0], scales[1], selector);
    }
    // Those of sub-blocks 2 t and 2 t + 1.
    __device__ __forceinline__ void factors(int t, float (&factor)[2]) const {
        const unsigned two = (t < 2 ? scales[0] : scales[1]) >> t % 2 * 16;
        factor[0] = static_cast<float>(static_cast<signed char>(two));
        factor[1] = static_cast<float>(static_cast<signed char>(two >> 8));
    }
    __device__ __forceinline__ int whole(int j) const { return signed_byte(scales[j / 4], j % 4); }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: d, scales_h, scales_l, qs
struct IQ4_XS_Record : RecordBase {
    using Layout = RecordLayout<IQ4_XS_Record>;
    static constexpr int FIELDS = 4, SUB = 32, BIAS = 128, MOST = 4096;
    static constexpr bool SIGNED = true, KEPT = true, WHOLE = true;
    __host__ __device__ static constexpr unsigned kept(int i) {
        return i == 0 ? IQ4Values::LOW : i == 1 ? IQ4Values::HIGH : IQ4Values::SELECTORS;
    }
    __host__ __device__ static constexpr int bytes(int i) { return i < 2 ? 2 : i == 2 ? 4 : 128; }
    IQ4Values values;
    SplitCodes split;
    unsigned scales;
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        values.keep(table);
        split.load(record, Layout::at(3) + 64 * half, t);
        // Four nibbles and four pairs of bits as bytes.
        unsigned low = record.word(Layout::at(2)) >> 16 * half & 0xffffu;
        unsigned high = record.narrow >> (16 + 8 * half) & 0xffu;
        low = (low | low << 8) & 0x00ff00ffu, low = (low | low << 4) & 0x0f0f0f0fu;
        high = (high | high << 12) & 0x000f000fu, high = (high | high << 6) & 0x03030303u;
        scales = low | high << 4, d = half_of(record.narrow, 0);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return values.of<false>(split.word[s / 2], s % 2); }
    __device__ __forceinline__ unsigned signed_codes(int s) const { return values.of<true>(split.word[s / 2], s % 2); }
    __device__ __forceinline__ float factor(int j) const { return from_byte(scales, j, 32); }
    __device__ __forceinline__ int whole(int j) const { return int(scales >> 8 * j & 255u) - 32; }
    __device__ __forceinline__ float outer() const { return d; }
};

// ---- -1, 0 and 1 -----------------------------------------------------------------------------------------------

// fields: qs, d
struct TQ2_0_Record : RecordBase {
    using Layout = RecordLayout<TQ2_0_Record>;
    static constexpr int FIELDS = 2, SUB = 128, BIAS = 1;
    __host__ __device__ static constexpr int bytes(int i) { return i ? 2 : 64; }
    TwoBits two;
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table&, int t, int half) {
        two.load(record, Layout::at(0) + 32 * half, t);
        d = half_of(record.narrow, 0);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return two.codes(s); }
    __device__ __forceinline__ float factor(int) const { return d; }
};

// fields: qs, qh, d. Steps 0 to 9 of a record are digits 0 to 4 of bytes 0 to 31, 10 to 14 those of bytes 32 to 47; of
// step 15 lane t has digit t of the four bytes of qh.
struct TQ1_0_Record : RecordBase {
    using Layout = RecordLayout<TQ1_0_Record>;
    static constexpr int FIELDS = 3, SUB = 128, BIAS = 1;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 48 : i == 1 ? 4 : 2; }
    unsigned word[4];  // three of qs, and qh with the lane's digit first
    int half;
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table&, int t, int half) {
        this->half = half;
#pragma unroll
        for (int i = 0; i < 3; ++i) word[i] = record.word(Layout::at(0) + 16 * i + 4 * t);
        const unsigned power = 0x1b090301u >> 8 * t & 255u;  // 3^t
        word[3] = times(record.word(Layout::at(1)), power);
        d = half_of(record.narrow, 0);
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        constexpr unsigned POWERS[5] = {1, 3, 9, 27, 81};
        const int step = 8 * half + s;
        if (step == 15) return digits(word[3]);
        return digits(times(step < 10 ? word[step % 2] : word[2], POWERS[step < 10 ? step / 2 : step - 10]));
    }
    __device__ __forceinline__ float factor(int) const { return d; }

  private:
    // Bytes times `power`, less what goes beyond 8 bits.
    __device__ __forceinline__ static unsigned times(unsigned bytes, unsigned power) {
        return ((bytes & 0x00ff00ffu) * power & 0x00ff00ffu) | ((bytes >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu) << 8;
    }
    // The highest digits in base 3: 3 / 256 of the bytes.
    __device__ __forceinline__ static unsigned digits(unsigned bytes) {
        return ((bytes & 0x00ff00ffu) * 3 >> 8 & 0x00ff00ffu) | ((bytes >> 8 & 0x00ff00ffu) * 3 & 0xff00ff00u);
    }
};
