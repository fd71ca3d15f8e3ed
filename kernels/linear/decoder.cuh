// What a decoder of the product kernels is: the contract between a format and linear_few, linear_one and linear_tile.
//
// y = x W^T runs on tensor cores as D[rows, tokens] = A[rows, k] B[k, tokens], and the weight W is A. A decoder makes
// fragments of it, the registers that an mma takes, out of codes in shared memory. Lane (g, t), g = lane / 4 and t =
// lane % 4, holds in mma m16n8k16:
//
//     A   a0 = row g, k lo    a1 = row g + 8, k lo    a2 = row g, k hi    a3 = row g + 8, k hi      two numbers each
//     B   b0 = k lo, token g  b1 = k hi, token g
//     D   rows g and g + 8 of tokens 2t and 2t + 1
//
// Which k are lo and hi is free as long as A and B agree. So a lane owns 32 k of each of its two rows in a k-tile of 16
// rows x 128 k (ITEM_ROWS x ITEM_K): it decodes them where they are, and takes x in the order in which they come out.
// No weight crosses lanes, and no scale either where blocks are 32 elements.
//
// Values come out of a table in shared memory of pairs of values (see table_entry), so that one byte of codes and one
// load make two weights.
//
// Members of a decoder of linear_few (Kbit and Table4 of codebook.cuh):
//     Type                      of x and y: __half or __nv_bfloat16
//     VALUES, ENTRIES           of the codebook, and of the table that fill_table makes of it
//     GAPS                      whether 128 bytes behind each entry of the table are free: other data goes there
//     WORDS, FIELDS             32-bit words of codes that a lane owns in a row of a k-tile; the same after unpack
//     ITEM_BYTES, LANE_BYTES    of codes in a row of a k-tile; of what a lane reads of it at a time
//     SCALE_BYTES               of scales for a row of a k-tile, in shared memory
//     SCALE_STEP                bytes from the scale of a lane to that of the next lane; 0: a row's lanes share theirs
//     SPREAD_SCALES             whether scales may have to be expanded on their way: one float32 for each SUB elements
//     EPILOGUE_SCALE            what the epilogue must multiply sums by, beside 1 / power of the table
//     SWIZZLE_PERIOD            how many pairs of rows are swizzled differently in shared memory; 1: rows are in order
//     ONE_READ                  whether what a lane reads of a row of a k-tile is one piece of 16 bytes
//     MIXED                     whether each word of unpack has bits of all words that read brings
//     row(g)                    the row of a tile that the lanes g have, with the one 8 below it
//     token(g)                  the token of eight that the lanes g have; those that read x together have banks apart
//     fill<ONE>(...)            fill the table from a value a lane; ONE: for linear_one
//     read, read_swizzled       the codes that a lane owns in a row of a k-tile, from shared memory
//     load_x_global, load_x_shared    the x for them, 16 words of two numbers; arrange_x brings these to the order of k
//     unpack(words, fields)     what all steps of multiply share
//     multiply<EIGHTS>(...)     acc += decoded rows * x, scales included, for 8 EIGHTS tokens
//                               or with `tokens`, TokenScales, integers of tokens that have scales of 32 (Blocked)
//     lane_offset(lane)         where the lane's copy stands in an entry of the table
// linear_one has one token and so scales sums instead of weights (SingleToken of single_token.cuh adds to these);
// linear_tile decodes for wgmma, 64 rows at a time (decoders of hopper_sm90a.cu).
#pragma once
#include "common/mma.cuh"
#include "common/tiles.cuh"
#include "formats/scales.cuh"

// Of the host (kbitcupy/products/fused.py), ahead of this source: ITEM_K and ITEM_ROWS, k and rows of an k-tile; TOKENS
// of an mma; TABLE_START and ENTRY_STRIDE, HEAD and FEW_HEAD, see below; NO_BIAS, OWN_BIAS and FLOAT_BIAS; struct
// Group; and
//     struct Values   the values of a codebook times `power`, and `map`, those of 8-bit scales: passed by value, so
//                     that nothing is uploaded and nothing has to be kept

// ---- tokens with scales of 32 --------------------------------------------------------------------------------------

// A decoder whose lanes share each 32 elements, for tokens that are integers with scales of 32: a sum over 32 is exact,
// and is multiplied by its token's scale before it is added to others.
template <typename Base>
struct Blocked : Base {};
template <typename Decoder>
struct IsBlocked {
    static constexpr bool VALUE = false;
};
template <typename Base>
struct IsBlocked<Blocked<Base>> {
    static constexpr bool VALUE = true;
};

// A decoder for up to four tokens that the kernel quantizes by "q8_1": what a token stands for is the sum of two
// halves, which have a column each (gguf_tables.cuh, few_tokens.cuh).
template <typename Base>
struct InHalves;
template <typename Decoder>
struct IsInHalves {
    static constexpr bool VALUE = false;
};
template <typename Base>
struct IsInHalves<InHalves<Base>> {
    static constexpr bool VALUE = true;
};

// Whether a lane's four words of a row of a k-tile, whatever row that is, are one of the four matrices of a load.
template <typename Decoder>
struct ByMatrices {
    static constexpr bool VALUE = false;
};

// Multiplies sums over 32, of a k-tile its group `j`, by the scales of their tokens.
struct NoTokenScales {
    template <int EIGHTS>
    __device__ __forceinline__ void scale(float (&)[EIGHTS][4], int) const {}
};
struct TokenScales {
    unsigned at;  // in the shared window, of this lane's tokens: for each group 8 EIGHTS floats

    template <int EIGHTS>
    __device__ __forceinline__ void scale(float (&part)[EIGHTS][4], int j) const {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const uint2 two = shared_at<uint2>(at + (j * EIGHTS + e) * (TOKENS * 4));
#pragma unroll
            for (int i = 0; i < 4; ++i) part[e][i] *= __uint_as_float(i % 2 ? two.y : two.x);
        }
    }
    // acc += scaled sums.
    template <int EIGHTS>
    __device__ __forceinline__ void add(const float (&part)[EIGHTS][4], int j, float (&acc)[EIGHTS][4]) const {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const uint2 two = shared_at<uint2>(at + (j * EIGHTS + e) * (TOKENS * 4));
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[e][i] = fmaf(part[e][i], __uint_as_float(i % 2 ? two.y : two.x), acc[e][i]);
        }
    }
};

// The same of two groups at a time, number `jj` of a k-tile, whose scales lie beside each other.
struct PairedTokenScales {
    unsigned at;  // in the shared window, of this lane's two tokens: for each two groups 8 EIGHTS times two floats

    template <int EIGHTS>
    __device__ __forceinline__ uint4 load(int jj) const {
        return shared_at<uint4>(at + jj * EIGHTS * (TOKENS * 8));
    }
    // acc += scaled sums, of the first or the second of the two groups. Tokens are columns of sums, 16 of them rows.
    template <int EIGHTS>
    __device__ __forceinline__ static void add(
        const float (&part)[EIGHTS][4], const uint4& four, bool second, float (&acc)[EIGHTS][4]) {
        const unsigned scale[2] = {second ? four.y : four.x, second ? four.w : four.z};
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                acc[e][i] = fmaf(part[e][i], __uint_as_float(scale[EIGHTS == 1 ? i % 2 : i / 2]), acc[e][i]);
    }
};

// The sizes that the host reckons with when it finds out how much shared memory a kernel needs.
template <int ENTRIES, bool GAPS, int ITEM_BYTES, int SCALE_BYTES, bool SWIZZLED>
struct Layout {
    template <typename Decoder>
    static constexpr bool IS_OF =
        Decoder::ENTRIES == ENTRIES && Decoder::GAPS == GAPS && Decoder::ITEM_BYTES == ITEM_BYTES &&
        Decoder::SCALE_BYTES == SCALE_BYTES && (Decoder::SWIZZLE_PERIOD > 1) == SWIZZLED;
};

// What moves so many bytes at once.
template <int BYTES>
struct PieceOf {
    using Type = uint4;
};
template <>
struct PieceOf<8> {
    using Type = uint2;
};

// Whether the host always knows the values of a decoder's table.
template <typename Decoder>
struct KnownValues {
    static constexpr bool VALUE = false;
};

// ---- scales in half precision --------------------------------------------------------------------------------------

// An E4M4 code as a number of T, twice in a register, without a conversion: its bits where T has exponent and mantissa,
// which makes 1 / FACTOR of its value, subnormals included.
template <typename T>
struct E4m4Pair;

template <>
struct E4m4Pair<__half> {
    static constexpr float FACTOR = 16.0f;  // the upper byte of a half, less its sign
    __device__ __forceinline__ static unsigned of(unsigned code) { return code * 0x00400040u; }
};

template <>
struct E4m4Pair<__nv_bfloat16> {
    static constexpr float FACTOR = 8.307674973655724e34f;  // 2^116: bits 3 to 10
    __device__ __forceinline__ static unsigned of(unsigned code) { return code * 0x00080008u; }
};

// ---- what all decoders share ---------------------------------------------------------------------------------------

// a * b + c of two pairs of T, each rounded once.
template <typename T>
__device__ __forceinline__ unsigned fma_pairs(unsigned a, unsigned b, unsigned c) {
    return Word<T>::bits(__hfma2(Word<T>::as(a), Word<T>::as(b), Word<T>::as(c)));
}

// 2^-e with e the exponent of `largest`, the largest magnitude of a table: the table then fits the range of half
// precision whatever the codebook.
__device__ __forceinline__ float power_below(float largest) {
    const int exponent = int(__float_as_uint(largest) >> 23);
    return exponent == 0 || exponent > 252 ? 1.0f : __int_as_float((254 - exponent) << 23);
}

// value[lane % (2 HALF)] of a kernel parameter, by selection: where lanes read parameters at different addresses, they
// are served one after the other.
template <int HALF>
__device__ __forceinline__ float select_parameter(const float* value, int lane) {
    if constexpr (HALF == 0) {
        return value[0];
    } else {
        const float low = select_parameter<HALF / 2>(value, lane),
                    high = select_parameter<HALF / 2>(value + HALF, lane);
        return lane & HALF ? high : low;
    }
}

// Value number lane % VALUES of a codebook, which is in a plane (`values`) or came as a parameter, times the prescale
// `power`, a factor for all of them that brings the largest to 1 .. 2. All lanes of a warp are here.
template <int VALUES>
__device__ __forceinline__ float codebook_value(const float* values, const Values& codebook, float& power) {
    const int lane = threadIdx.x % WARP;
    if (values) {
        wait_for_previous();
        const float value = values[lane % VALUES];
        power = power_below(__uint_as_float(warp_max(__float_as_uint(fabsf(value)))));
        return value * power;
    }
    power = codebook.power;
    return select_parameter<VALUES / 2>(codebook.value, lane);
}

// ---- shared memory -------------------------------------------------------------------------------------------------

// The table of values stands at a fixed address of the shared window, so that a byte permutation forms the address of
// an entry and no addition is left: entries are 256 bytes apart, byte 1 of the offset is the index, byte 0 the lane,
// which has a copy of its own (no bank conflicts), byte 3 the block's number in its cluster. Entries of 4 bytes leave a
// gap of 128 bytes behind each.
constexpr unsigned TABLE_AT = TABLE_START;
static_assert(ENTRY_STRIDE == 256, "byte 1 of an offset is the index");

// The offset of the entry whose index is byte `byte` of `indices`: one byte permutation.
__device__ __forceinline__ unsigned entry_offset(unsigned indices, int byte, unsigned lane_offset) {
    return __byte_perm(indices, lane_offset, 0x7504 | byte << 4);
}

// A word, or two, of an entry of the table, BEHIND bytes on.
template <int BEHIND = 0>
__device__ __forceinline__ unsigned table_entry(unsigned offset) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(v) : "r"(offset), "n"(TABLE_AT + BEHIND));
    return v;
}
__device__ __forceinline__ uint2 table_entry_pair(unsigned offset) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2+%3];" : "=r"(v.x), "=r"(v.y) : "r"(offset), "n"(TABLE_AT));
    return v;
}

// Write one half, `part`, of entry `index` of a table of WORDS words a lane: the same `four` again and again.
template <int WORDS>
__device__ __forceinline__ void fill_entry(unsigned table, int index, int part, uint4 four) {
    // The chunks of neighbouring entries are written in different order: no bank conflicts.
    constexpr unsigned CHUNKS = WORDS * WARP / 4 / 2;
    const unsigned at = table + index * ENTRY_STRIDE + (part * CHUNKS + index % CHUNKS) * 16;
#pragma unroll
    for (unsigned i = 0; i < CHUNKS; ++i)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at ^ i * 16), "r"(four.x), "r"(four.y),
                     "r"(four.z), "r"(four.w)
                     : "memory");
}

// ... where all lanes have the same words.
template <int WORDS>
__device__ __forceinline__ void fill_entry(unsigned table, int index, int part, const unsigned (&word)[WORDS]) {
    fill_entry<WORDS>(table, index, part, make_uint4(word[0], word[WORDS - 1], word[0], word[WORDS - 1]));
}

// Entry `index` for one value: in the low half of a word, `part` 0, and 128 bytes on in the high half, `part` 1.
template <typename T>
__device__ __forceinline__ void fill_halves(unsigned table, int index, int part, float v) {
    const unsigned word[1] = {part ? Word<T>::pack(0.0f, v) : Word<T>::pack(v, 0.0f)};
    fill_entry<1>(table + part * 128, index, 0, word);
    fill_entry<1>(table + part * 128, index, 1, word);
}

// ---- values that are rounded both ways -----------------------------------------------------------------------------

// A table holds values rounded to T. Were each always rounded to the nearest, all weights of a code would be off by the
// same, and unless that is undone by the code of the negative value it does not average out: nf4, rows of 4096 and x of
// mean 1 made errors 2.7 to 3.7 times those of weights that are decoded one by one. So a value is rounded up in some
// places of the table and down in others, as often as it takes for the mean to be right. Places differ by the lane's
// part of k and by which of the elements of an entry it is, which codes have nothing to do with, and then by the other
// code of the entry. Values that T holds are the same everywhere.

// Whether a decoder's table is one of these.
template <typename Decoder>
struct RoundsBothWays {
    static constexpr bool VALUE = false;
};

// Whether it keeps each value as two numbers of T.
template <typename Decoder>
struct InTwoParts {
    static constexpr bool VALUE = false;
};

// The number of T at v or next to it towards zero, in the upper half, and how far v is from there to the next one.
template <typename T>
__device__ __forceinline__ unsigned between(float v) {
    if constexpr (SameType<T, __half>::VALUE) {
        const unsigned low = __half_as_ushort(__float2half_rz(v));
        const float from = __half2float(__ushort_as_half(low)), to = __half2float(__ushort_as_half(low + 1));
        // A step is a power of two, and so is its reciprocal.
        const float steps = __uint_as_float((254u << 23) - (__float_as_uint(to - from) & 0x7f800000u));
        return low << 16 | __float2uint_rz(fabsf(v - from) * steps * 65536.0f);
    } else {
        return __float_as_uint(v);
    }
}

// Two values, which are `between`, rounded after something was added to each.
__device__ __forceinline__ unsigned rounded_pair(unsigned low, unsigned to_low, unsigned high, unsigned to_high) {
    return __byte_perm(low + to_low, high + to_high, 0x7632);
}

// What one code adds to the value of the other of its entry: its four bits in reverse order, so that codes that are
// alike differ most.
__device__ __forceinline__ unsigned bits_of_code(unsigned code) { return (__brev(code) >> 19 & 0x1e00u) | 128u; }

// The words of four lanes for two values, which are `between`, of codes that make `bits`. What is added to a value
// before its upper half is taken is evenly spread over 2^16: by eight places, and by the other code of the entry.
__device__ __forceinline__ uint4 rounded_pairs(unsigned low, unsigned high, unsigned low_bits, unsigned high_bits) {
    auto word = [&](unsigned t) {
        return rounded_pair(low, high_bits + t * 0x4000u, high, low_bits + t * 0x4000u + 0x2000u);
    };
    return make_uint4(word(0), word(1), word(2), word(3));
}

// The words of two lanes, two each, for four values: by eight places alone.
__device__ __forceinline__ uint4 rounded_fours(const unsigned (&v)[4]) {
    auto word = [&](int i, unsigned t) {
        const unsigned place = (t * 4 + i) * 0x2000u + 0x1000u;
        return rounded_pair(v[i], place, v[i + 1], place + 0x2000u);
    };
    return make_uint4(word(0, 0), word(2, 0), word(0, 1), word(2, 1));
}

// Entry `index` for one value, as `fill_halves`: by eight places alone.
__device__ __forceinline__ void fill_rounded_halves(unsigned table, int index, int part, unsigned value) {
    auto word = [&](unsigned t) {
        const unsigned place = t * 0x4000u + part * 0x2000u + 0x1000u;
        return part ? rounded_pair(0u, 0u, value, place) : rounded_pair(value, place, 0u, 0u);
    };
    const uint4 four = make_uint4(word(0), word(1), word(2), word(3));
    fill_entry<1>(table + part * 128, index, 0, four);
    fill_entry<1>(table + part * 128, index, 1, four);
}

// A whole table of pairs of 16 values, the first of a pair in the upper four bits of the index. Each lane brings a
// value: lane i that of index i % 16.
template <typename T>
__device__ __forceinline__ void fill_pairs(unsigned table, float mine, unsigned thread, unsigned threads) {
    const unsigned value = between<T>(mine);
    for (unsigned i = thread; i < 2 * 256; i += threads) {
        const unsigned index = i / 2;
        const unsigned first = __shfl_sync(FULL_WARP, value, index >> 4);
        const unsigned second = __shfl_sync(FULL_WARP, value, index & 15);
        const uint4 four = rounded_pairs(first, second, bits_of_code(index >> 4), bits_of_code(index));
        fill_entry<1>(table, index, i % 2, four);
    }
}

// A factor from 1 to 2 with which values lose little when they are rounded to T both ways, as the host chooses one for
// those that it knows (gentle_factor of kbitcupy/products/fused.py). Each thread tries one; lane i brings the value of
// index i % VALUES. `scratch` is shared memory, a word for each warp, and `sync` a barrier of these `threads`.
template <typename T, int VALUES, typename Sync>
__device__ __forceinline__ float gentle_factor(float value, unsigned scratch, unsigned threads, const Sync& sync) {
    constexpr unsigned PRECISION = SameType<T, __half>::VALUE ? 10 : 7, LEAST_NORMAL = 127 - 14, MOST_THREADS = 512;
    const unsigned thread = threadIdx.x, lane = thread % WARP;
    auto factor_of = [](unsigned tried) { return 1.0f + float(tried) / MOST_THREADS; };
    const float mine = factor_of(thread);
    float lost = 0.0f;
#pragma unroll 1
    for (int i = 0; i < VALUES; ++i) {
        const float scaled = __shfl_sync(FULL_WARP, value, i) * mine;
        const float off = fabsf(Word<T>::get(Word<T>::pack(scaled, 0.0f), 0) - scaled);
        const unsigned exponent = max(__float_as_uint(scaled) >> 23 & 255u, LEAST_NORMAL) - PRECISION;
        lost = fmaf(off, __uint_as_float(exponent << 23) - off, lost);
    }
    lost *= __frcp_rn(mine * mine);
    // The least of them; who tried it is in the bits that count least.
    auto least_of = [](unsigned v) { return ~warp_max(~v); };
    const unsigned own = least_of((__float_as_uint(lost) & ~(MOST_THREADS - 1)) | thread);
    if (lane == 0) store_shared(scratch + thread / WARP * 4, __uint_as_float(own));
    sync();
    const unsigned least = least_of(lane < threads / WARP ? shared_at<unsigned>(scratch + lane * 4) : 0xffffffffu);
    sync();
    return factor_of(least % MOST_THREADS);
}

// A lane's value for the table of a decoder that is told `values` or, without, those of `codebook`; see codebook_value.
template <typename Decoder, typename Sync>
__device__ __forceinline__ float table_value(
    unsigned table, const float* values, const Values& codebook, unsigned threads, const Sync& sync, float& power) {
    const float mine = codebook_value<Decoder::VALUES>(values, codebook, power);
    if constexpr (RoundsBothWays<Decoder>::VALUE) {
        if (values) {
            const float factor = gentle_factor<typename Decoder::Type, Decoder::VALUES>(mine, table, threads, sync);
            power *= factor;
            return mine * factor;
        }
    }
    return mine;
}
