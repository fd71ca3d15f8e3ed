// Weights as operands of the tensor cores.
//
// The product of few tokens and a weight W [N, K] runs as mma m16n8k16: 16 rows of W are the rows of A, 8 tokens the
// columns of B. Lane (g, t), g = lane / 4 and t = lane % 4, holds of A the rows g and g + 8, of B the token g, of the
// result the rows g and g + 8 of the tokens 2t and 2t + 1:
//
//     A   a0 = row g, k lo    a1 = row g + 8, k lo    a2 = row g, k hi    a3 = row g + 8, k hi      two numbers each
//     B   b0 = k lo, token g  b1 = k hi, token g
//
// Which four k of a step a lane holds is free as long as A and B agree. So an item of work is 16 rows x 128 k, and a
// lane owns 32 k of each of its two rows: it decodes them where they are, and takes x in the order in which they come
// out. No weight crosses lanes.
//
// A decoder is a struct with
//     Type                            of x
//     SCALE_BYTES                     of the scales of a row and an item
//     SCALE_STEP                      bytes from the scale of a lane to that of the next one
//     SPREAD_SCALES                   whether the scales may need another place than they are stored at
//     TURNS                           how many pairs of rows are permuted in different ways in shared memory
//     OWN                             whether what a lane reads of an item is one piece of 16 bytes
//     row(g)                          of a tile, which with the row 8 below it is that of the lanes g
//     build(...)                      fill the table of values
//     read(words, row)                what a lane reads of a row and an item, from shared memory
//     load_x, arrange                 the 16 words of x, in the order of multiply
//     unpack(words)                   the first step of decoding
//     multiply(fields, ...)           acc += a tile of 16 rows x tokens
#pragma once
#include "common/mma.cuh"
#include "common/tiles.cuh"
#include "formats/scales.cuh"

// Of the host (kbitcupy/products/fused.py), ahead of this source: ITEM_K and ITEM_ROWS, k and rows of an item; TOKENS
// of an mma; TABLE_START and ENTRY_STRIDE, HEAD and FEW_HEAD, see below; NO_BIAS, OWN_BIAS and FLOAT_BIAS; struct
// Group; and
//     struct Values   the values of a codebook times `power`, and `map`, those of 8-bit scales: passed by value, so
//     that
//                     nothing is uploaded and nothing has to be kept

// The sizes that the host reckons with when it finds out how much shared memory a kernel needs.
template <int ENTRIES, bool GAPS, int ITEM_BYTES, int SCALE_BYTES, bool SWIZZLED>
struct Layout {
    template <typename Decoder>
    static constexpr bool IS_OF =
        Decoder::ENTRIES == ENTRIES && Decoder::GAPS == GAPS && Decoder::ITEM_BYTES == ITEM_BYTES &&
        Decoder::SCALE_BYTES == SCALE_BYTES && (Decoder::TURNS > 1) == SWIZZLED;
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

// 2^-e with e the exponent of `largest`, the largest magnitude of a table: the table then fits the range of half
// precision whatever the codebook.
__device__ __forceinline__ float power_below(float largest) {
    const int exponent = int(__float_as_uint(largest) >> 23);
    return exponent == 0 || exponent > 252 ? 1.0f : __int_as_float((254 - exponent) << 23);
}

// value[lane % (2 HALF)], by selection: where lanes read parameters at different places, they are served one after the
// other.
template <int HALF>
__device__ __forceinline__ float select_value(const float* value, int lane) {
    if constexpr (HALF == 0) {
        return value[0];
    } else {
        const float low = select_value<HALF / 2>(value, lane), high = select_value<HALF / 2>(value + HALF, lane);
        return lane & HALF ? high : low;
    }
}

// Of a codebook, in a plane or by value, number lane % VALUES, times a factor for all: `power`, which brings the
// largest to 1 .. 2. All lanes of a warp are here.
template <int VALUES>
__device__ __forceinline__ float take_value(const float* values, const Values& codebook, float& power) {
    const int lane = threadIdx.x % WARP;
    if (values) {
        wait_for_previous();
        const float value = values[lane % VALUES];
        power = power_below(__uint_as_float(warp_max(__float_as_uint(fabsf(value)))));
        return value * power;
    }
    power = codebook.power;
    return select_value<VALUES / 2>(codebook.value, lane);
}

// ---- shared memory -------------------------------------------------------------------------------------------------

// The table of values stands at a fixed address of the shared window, so that a byte permutation forms the address of
// an entry and no addition is left: entries are 256 bytes apart, byte 1 of the offset is the index, byte 0 the lane,
// which has a copy of its own (no bank conflicts), byte 3 the block's number in its cluster. Entries of 4 bytes leave a
// gap of 128 bytes behind each.
constexpr unsigned TABLE_AT = TABLE_START;
static_assert(ENTRY_STRIDE == 256, "byte 1 of an offset is the index");

__device__ __forceinline__ unsigned entry_offset(unsigned indices, int byte, unsigned lane_offset) {
    return __byte_perm(indices, lane_offset, 0x7504 | byte << 4);
}

// Entry of the table, BEHIND bytes on.
template <int BEHIND = 0>
__device__ __forceinline__ unsigned entry(unsigned offset) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(v) : "r"(offset), "n"(TABLE_AT + BEHIND));
    return v;
}
__device__ __forceinline__ uint2 entry_pair(unsigned offset) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2+%3];" : "=r"(v.x), "=r"(v.y) : "r"(offset), "n"(TABLE_AT));
    return v;
}

// Write one half, `part`, of entry `index` of a table: WARP copies of the words.
template <int WORDS>
__device__ __forceinline__ void fill_entry(unsigned table, int index, int part, const unsigned (&word)[WORDS]) {
    // The chunks of neighbouring entries are written in different order: no bank conflicts.
    constexpr unsigned CHUNKS = WORDS * WARP / 4 / 2;
    const unsigned at = table + index * ENTRY_STRIDE + (part * CHUNKS + index % CHUNKS) * 16;
#pragma unroll
    for (unsigned i = 0; i < CHUNKS; ++i)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %1, %2};" ::"r"(at ^ i * 16), "r"(word[0]), "r"(word[WORDS - 1])
                     : "memory");
}

// Entry `index` for one value: in the low half of a word, `part` 0, and 128 bytes on in the high half, `part` 1.
template <typename T>
__device__ __forceinline__ void fill_halves(unsigned table, int index, int part, float v) {
    const unsigned word[1] = {part ? Word<T>::pack(0.0f, v) : Word<T>::pack(v, 0.0f)};
    fill_entry<1>(table + part * 128, index, 0, word);
    fill_entry<1>(table + part * 128, index, 1, word);
}

// A whole table of pairs of 16 values, the first of a pair in the upper four bits of the index. Each lane brings a
// value: lane i that of index i % 16.
template <typename T>
__device__ __forceinline__ void fill_pairs(unsigned table, float mine, unsigned thread, unsigned threads) {
    for (unsigned i = thread; i < 2 * 256; i += threads) {
        const int index = i / 2;
        const float first = __shfl_sync(FULL_WARP, mine, index >> 4);
        const float second = __shfl_sync(FULL_WARP, mine, index & 15);
        const unsigned word[1] = {Word<T>::pack(first, second)};
        fill_entry<1>(table, index, i % 2, word);
    }
}
