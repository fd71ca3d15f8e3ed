// How linear_tile decodes weights (hopper_sm90a.cu): codes in shared memory to operand A of wgmma.
//
// A lane owns a granule of each of its rows in a stage: 32 k, of which it makes 16 pairs, eight for each half of the
// stage. Either a table of values has the pairs (TileKbit, TileTable4), or arithmetic makes them (TileIntegers).
#pragma once
#include "linear/decoder.cuh"

// Who shares a scale: the elements of a granule, of a block of granules, of a block of whole stages, of a row.
enum Shares { OF_GRANULES, OF_BLOCKS, OF_STAGES, OF_ROWS };
__host__ __device__ constexpr bool is_shared(int shares) { return shares == OF_BLOCKS || shares == OF_STAGES; }

// Which elements are pairs, of eight neighbours, and in which order: neighbours; two apart, 0 2, 1 3, 4 6, 5 7; four
// apart, 0 4, 1 5, 2 6, 3 7. A mask cuts such pairs out of a word of codes, and x has to follow.
//
// TWO_BLOCKS: two apart, where a lane has half of two blocks of 32: its bytes are the codes of both. SPLIT: a byte has
// the codes of two elements 16 apart, which are a pair.
enum Order { NEIGHBOURS, TWO_APART, FOUR_APART, TWO_BLOCKS, SPLIT };

// Which eight elements of half a stage, 64 k, are number c of four of the granule that is its t-th.
template <int ORDER>
__device__ __forceinline__ unsigned x_chunk(unsigned t, unsigned c) {
    return ORDER == TWO_BLOCKS ? c / 2 * 4 + t * 2 + c % 2 : t * 4 + c;
}

// Eight elements of x, neighbours as they come, in that order. SPLIT: four neighbours, and those 16 further on.
template <int ORDER>
__device__ __forceinline__ void arrange(unsigned (&x)[4]) {
    if constexpr (ORDER != NEIGHBOURS) {
        constexpr bool FAR = ORDER == FOUR_APART || ORDER == SPLIT;
        const unsigned a[4] = {x[0], x[FAR ? 1 : 2], x[FAR ? 2 : 1], x[3]};
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __byte_perm(a[i / 2], a[2 + i / 2], i % 2 ? 0x7632 : 0x5410);
    }
}

// WORDS consecutive words of shared memory.
template <int WORDS>
__device__ __forceinline__ void read_shared(unsigned (&w)[WORDS], unsigned address) {
    if constexpr (WORDS == 4) to_words(w, shared_at<uint4>(address));
    else if constexpr (WORDS == 2) to_words(w, shared_at<uint2>(address));
    else
#pragma unroll
        for (int i = 0; i < WORDS; ++i) w[i] = shared_at<unsigned>(address + 4 * i);
}

// Chunk c of a granule of x as `arrange` takes it, of chunks of 16 bytes that stand where `at` says.
template <int ORDER, typename Place>
__device__ __forceinline__ void read_chunk(unsigned (&word)[4], unsigned c, const Place& at) {
    if constexpr (ORDER == SPLIT) {
#pragma unroll
        for (unsigned i = 0; i < 2; ++i) to_words(word + 2 * i, shared_at<uint2>(at(2 * i + c / 2) + c % 2 * 8));
    } else {
        read_shared(word, at(c));
    }
}

// Where the scales of the granules are.
struct TileScales {
    const void* absmax;
    const void* second;  // NESTED: float32[blocks / 256]; of integers their zero points
    const float* nested_offset;
    const float* map;  // the values of its 8-bit codes
    int shift;         // log2 of the granules of a block
};

// By how many granules the scales of a row are ahead of those of the next: blocks of integers begin anew in each row.
template <typename Decoder>
__device__ __forceinline__ int row_granules(int k, const TileScales& from) {
    if constexpr (Decoder::SHARES == OF_ROWS) return 1;
    const int granules = k / GRANULE_K;
    if constexpr (Decoder::ENTRIES > 0 || Decoder::SHARES == OF_GRANULES) return granules;
    else return (granules + (1 << from.shift) - 1) >> from.shift << from.shift;
}

// Beside those of AbsmaxFormat: bytes that are exponents of powers of two, E of 2^(E - 128); see RawHalves, RawSixBits.
enum NibbleScales { E8M0 = FLOAT32 + 16, UE4M3_HALVES, SIX_BITS };

// The scales of a lane's two rows, of granule t: as they are in memory, so that nothing waits for them.
template <typename Decoder>
struct RawScales {
    static constexpr int STAGES = 1;  // whose scales the lanes of a row fetch together
    static constexpr bool BYTES = Decoder::SCALE == E4M4 || Decoder::SCALE == E8M0 || Decoder::NESTED;
    static constexpr int SCALE_BYTES = BYTES ? 1 : Decoder::SCALE == FLOAT16 ? 2 : 4;
    static constexpr int SECOND_BYTES = 0;  // of a block, that are fetched ahead beside its scale
    unsigned code[2];
    float nested[2];

    // Of the granules `at` of the rows, whose first ones are `origin` in the weight.
    __device__ __forceinline__ void fetch(const TileScales& from, const unsigned (&origin)[2], unsigned at) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned block = (origin[i] + at) >> (is_shared(Decoder::SHARES) ? from.shift : 0);
            if constexpr (BYTES)
                asm volatile("ld.global.u8 %0, [%1];"
                             : "=r"(code[i])
                             : "l"(static_cast<const unsigned char*>(from.absmax) + block));
            else if constexpr (Decoder::SCALE == FLOAT16)
                code[i] = static_cast<const unsigned short*>(from.absmax)[block];
            else code[i] = static_cast<const unsigned*>(from.absmax)[block];
            if constexpr (Decoder::NESTED) nested[i] = static_cast<const float*>(from.second)[block / 256];
        }
    }

    __device__ __forceinline__ float value(const TileScales& from, int i) const {
        if (Decoder::SCALE == FLOAT16) return __half2float(__ushort_as_half(code[i]));
        if (Decoder::SCALE == E8M0) return __uint_as_float(max(code[i], 1u) - 1 << 23);
        if (Decoder::NESTED) return __fadd_rn(__fmul_rn(from.map[code[i]], nested[i]), *from.nested_offset);
        return __uint_as_float(code[i]);
    }
};

// Members of a decoder:
//     Type, BITS            of x; of a code
//     SCALE                 how scales are stored, an AbsmaxFormat; NESTED: 8-bit codes of them
//     VALUES, ENTRIES       of the codebook and of the table; LANE_BYTES of a lane's copy in an entry
//     FIELDS                words of a scale group (32 k of a row, what a lane owns in a stage) after unpack
//     SHARES, ORDER         who shares a scale; which elements are pairs
//     Raw, RowScales        scales, as they are in memory: of a lane; of a row in a stage, OFFSETS
//     SCALES                of a lane in a row: 2 where halves of a stage are of different blocks
//     OFFSETS               whether something is added to code times scale, as a product of its own
//     FUSED                 whether it is added to each weight: scale and offset are numbers of T, and code times scale
//                           plus offset, rounded once, is the weight that is decoded
//     CENTRED               whether records of rows can say what is added to each weight as well: what the code whose
//                           weight is closest to zero leaves, which is small
//     Base                  what pairs need beside the codes of a row
//     FACTOR                what the table is multiplied by
//     fill(table, mine, ...)    fill the table from a value a lane, lane i that of index i % VALUES
//     unpack(f)             words of codes to FIELDS words, in place
//     pairs(f, h, ...)      pairs 8 h to 8 h + 7 of the group

// Bit planes of blocks of 32.
template <typename T, int K, int FORMAT>
struct TileKbit {
    using Type = T;
    using Raw = RawScales<TileKbit>;
    using Base = unsigned;  // where the lane's copy stands in an entry of the table
    static constexpr int BITS = K, SCALE = FORMAT, VALUES = 1 << K, FIELDS = K == 5 ? 8 : K == 2 ? 2 : 4;
    static constexpr int ENTRIES = K == 5 ? 32 : K == 3 ? 64 : 256, LANE_BYTES = K == 2 ? 8 : 4;
    static constexpr int SHARES = OF_GRANULES, ORDER = NEIGHBOURS;
    static constexpr int SCALES = 1;
    static constexpr bool OFFSETS = false, FUSED = false, CENTRED = false, NESTED = false;
    static constexpr float FACTOR = FORMAT == E4M4 ? E4m4Pair<T>::FACTOR : 1.0f;

    // Entry: the values of two neighbours, whose bits alternate in the index; of K = 2 those of two such pairs, of
    // K = 5 one value, in the low half of a word, and 128 bytes on in the high half.
    __device__ static void fill(unsigned table, float mine, unsigned thread, unsigned threads) {
        const unsigned rounded = between<T>(mine);
        auto value = [&](int index) { return __shfl_sync(FULL_WARP, rounded, index); };
        // Every second of so many bits: a code of two neighbours.
        auto code = [&](int bits) {
            int found = 0;
#pragma unroll
            for (int p = 0; p < K; ++p) found |= (bits >> 2 * p & 1) << p;
            return found;
        };
        for (unsigned i = thread; i < 2 * ENTRIES; i += threads) {
            const int index = i / 2, part = i % 2;
            if constexpr (K == 5) {
                fill_rounded_halves(table, index, part, value(index));
            } else if constexpr (K == 2) {
                const unsigned v[4] = {
                    value(code(index & 15)), value(code(index >> 1 & 7)), value(code(index >> 4)),
                    value(code(index >> 5))};
                fill_entry<2>(table, index, part, rounded_fours(v));
            } else {
                const int first = code(index), second = code(index >> 1);
                const unsigned low = value(first), high = value(second);
                fill_entry<1>(table, index, part, rounded_pairs(low, high, bits_of_code(first), bits_of_code(second)));
            }
        }
    }

    __device__ __forceinline__ static void unpack(unsigned (&f)[FIELDS]) {
        if constexpr (K == 5) {
            transpose_fields<8>(f);  // byte n of word w: the index of element 8 n + w
        } else {
            // The same on fields of two bits: byte n of word w is the index of the elements 8 n + 2 w and the next.
#pragma unroll
            for (int step = 1; step < FIELDS; step *= 2) {
                const unsigned low = step == 1 ? 0x33333333u : 0x0f0f0f0fu;
#pragma unroll
                for (int p = 0; p < FIELDS; ++p) {
                    if (p & step) continue;
                    const unsigned a = f[p], b = f[p + step];
                    f[p] = select_bits(low, a, b << 2 * step);
                    f[p + step] = select_bits(low, a >> 2 * step, b);
                }
            }
        }
    }

    // Pairs 8 h to 8 h + 7.
    __device__ __forceinline__ static void pairs(
        const unsigned (&f)[FIELDS], int h, Base lane_offset, unsigned (&pair)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int byte = 2 * h + j / 4;
            if constexpr (K == 5) {
                pair[j] = table_entry(entry_offset(f[j % 4 * 2], byte, lane_offset)) |
                          table_entry<128>(entry_offset(f[j % 4 * 2 + 1], byte, lane_offset));
            } else if constexpr (K == 2) {
                if (j % 4 >= 2) continue;
                const uint2 v = table_entry_pair(entry_offset(f[j % 4], byte, lane_offset));
                pair[j] = v.x, pair[j + 2] = v.y;
            } else {
                pair[j] = table_entry(entry_offset(f[j % 4], byte, lane_offset));
            }
        }
    }
};

template <typename T, int K, int FORMAT>
struct RoundsBothWays<TileKbit<T, K, FORMAT>> {
    static constexpr bool VALUE = true;
};

// Tables of 16 values, two elements a byte, the earlier in its upper half.
template <typename T, bool DOUBLE_QUANT>
struct TileTable4 {
    using Type = T;
    using Raw = RawScales<TileTable4>;
    using Base = unsigned;  // as TileKbit's
    static constexpr int BITS = 4, SCALE = FLOAT32, VALUES = 16, FIELDS = 4, ENTRIES = 256, LANE_BYTES = 4;
    static constexpr int SHARES = OF_BLOCKS, ORDER = NEIGHBOURS;
    static constexpr int SCALES = 1;
    static constexpr bool OFFSETS = false, FUSED = false, CENTRED = false, NESTED = DOUBLE_QUANT;
    static constexpr float FACTOR = 1.0f;

    __device__ static void fill(unsigned table, float mine, unsigned thread, unsigned threads) {
        fill_pairs<T>(table, mine, thread, threads);
    }

    __device__ __forceinline__ static void unpack(unsigned (&)[FIELDS]) {}

    __device__ __forceinline__ static void pairs(
        const unsigned (&f)[FIELDS], int h, Base lane_offset, unsigned (&pair)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) pair[j] = table_entry(entry_offset(f[2 * h + j / 4], j % 4, lane_offset));
    }
};

template <typename T, bool DOUBLE_QUANT>
struct RoundsBothWays<TileTable4<T, DOUBLE_QUANT>> {
    static constexpr bool VALUE = true;
};

// Whether scales are multiplied by as the halves that their bits are, as all of them are in their range: what they are
// times less than those, RawHalves::POWER, multiplies the sums.
template <typename Decoder>
__device__ constexpr bool as_halves() {
    return Decoder::SCALE == UE4M3_HALVES && SameType<typename Decoder::Type, __half>::VALUE;
}

// Scales of GGUF's types: two of 16 elements (nvfp4, UE4M3, half of what a byte stands for); one for 256 elements,
// times the 6 bits less 32 of 32 of them, of which four are in one plane and two in another (iq4_xs).
template <typename Decoder>
struct RawHalves {
    static constexpr int SCALE_BYTES = 2, SECOND_BYTES = 0, STAGES = 1;
    static constexpr float POWER = 128.0f;
    unsigned code[2], next[2];

    __device__ __forceinline__ void fetch(const TileScales& from, const unsigned (&origin)[2], unsigned at) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Both at once: a load of eight rows takes as long as eight loads.
            const unsigned both = static_cast<const unsigned short*>(from.absmax)[origin[i] + at];
            code[i] = both & 0xff, next[i] = both >> 8;
        }
    }

    // The bits of a byte as those of a half, whose exponent counts from 2^8 lower, in both halves of a word.
    __device__ __forceinline__ static unsigned twice(unsigned code) {
        const unsigned bits = code & 0x7f;
        return (bits == 0x7f ? 0u : bits) * 0x00800080u;
    }
    __device__ __forceinline__ static float number(unsigned code) { return Word<__half>::get(twice(code), 0) * POWER; }
    __device__ __forceinline__ float value(const TileScales&, int i) const { return number(code[i]); }
    __device__ __forceinline__ float second(int i) const { return number(next[i]); }
};

// A stage is half of 256 elements, whose numbers lie in three planes: a load of eight rows takes as long as eight
// loads, whatever it brings of each. So the four lanes of a row fetch those of its next four stages, one stage each,
// and hand them to each other.
template <typename Decoder>
struct RawSixBits {
    static constexpr int SCALE_BYTES = 2, SECOND_BYTES = 4, STAGES = 4;
    unsigned code[2], low[2], high[2];  // of the lane's stage, as they are in memory
    unsigned words[2][2];               // of the stages that are multiplied: the lower bits; d and the upper bits
    unsigned own[2][2], sub;            // of this one; which 32 of the 256

    // Of the granules `at` of the rows, which are those of the lane's stage.
    __device__ __forceinline__ void fetch(const TileScales& from, const unsigned (&origin)[2], unsigned at) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned block = (origin[i] + at) / 8;
            code[i] = static_cast<const unsigned short*>(from.absmax)[block];
            low[i] = static_cast<const unsigned*>(from.second)[block];
            high[i] = reinterpret_cast<const unsigned short*>(from.nested_offset)[block];
        }
    }

    // What was fetched becomes that of the stages that are multiplied.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int i = 0; i < 2; ++i) words[i][0] = low[i], words[i][1] = __byte_perm(code[i], high[i], 0x5410);
    }
    // Take those of stage `turn` of them, whose first granule is `at`.
    __device__ __forceinline__ void take(unsigned turn, unsigned at) {
        sub = at % 8 + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i / 2][i % 2] = __shfl_sync(FULL_WARP, words[i / 2][i % 2], turn, 4);
    }

    __device__ __forceinline__ float value(const TileScales&, int i) const {
        const int inner = (own[i][0] >> sub * 4 & 15) | (own[i][1] >> (16 + sub * 2) & 3) << 4;
        return Word<__half>::get(own[i][1], 0) * float(inner - 32);
    }
};

template <typename Decoder, int SCALE>
struct RawNibbles {
    using Type = RawScales<Decoder>;
};
template <typename Decoder>
struct RawNibbles<Decoder, UE4M3_HALVES> {
    using Type = RawHalves<Decoder>;
};
template <typename Decoder>
struct RawNibbles<Decoder, SIX_BITS> {
    using Type = RawSixBits<Decoder>;
};

// Tables of 16 values of GGUF's types: the earlier element in the lower half of a byte.
template <typename T, int ORDER_, int SCALE_>
struct TileNibbles {
    using Type = T;
    using Raw = typename RawNibbles<TileNibbles, SCALE_>::Type;
    using Base = unsigned;  // as TileKbit's
    static constexpr int BITS = 4, SCALE = SCALE_, VALUES = 16, FIELDS = 4, ENTRIES = 256, LANE_BYTES = 4;
    static constexpr int SHARES = SCALE == SIX_BITS ? OF_BLOCKS : OF_GRANULES, ORDER = ORDER_;
    static constexpr int SCALES = SCALE == UE4M3_HALVES ? 2 : 1;
    static constexpr bool OFFSETS = false, FUSED = false, CENTRED = false, NESTED = false;
    static constexpr float FACTOR = 1.0f;

    __device__ static void fill(unsigned table, float mine, unsigned thread, unsigned threads) {
        for (unsigned i = thread; i < 2 * ENTRIES; i += threads) {
            const int index = i / 2;
            const float first = __shfl_sync(FULL_WARP, mine, index & 15);
            const float second = __shfl_sync(FULL_WARP, mine, index >> 4);
            const unsigned word[1] = {Word<T>::pack(first, second)};
            fill_entry<1>(table, index, i % 2, word);
        }
    }

    __device__ __forceinline__ static void unpack(unsigned (&)[FIELDS]) {}

    __device__ __forceinline__ static void pairs(
        const unsigned (&f)[FIELDS], int h, Base lane_offset, unsigned (&pair)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) pair[j] = table_entry(entry_offset(f[2 * h + j / 4], j % 4, lane_offset));
    }
};

// The lower or upper half of a word twice: as operands are, which instructions take from where it is.
__device__ __forceinline__ unsigned half_twice(unsigned word, int upper) {
    unsigned r;
    if (upper) asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(r) : "r"(word));
    else asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(r) : "r"(word));
    return r;
}

// ---- integers, by arithmetic ---------------------------------------------------------------------------------------

// What stands beside scales: nothing, zero points of a type, or offsets of the scales' type, which are added to code
// times scale; of q4_k, 6 bits for each 32 elements that multiply d and 6 that multiply dmin, which is subtracted.
enum Beside { NO_ZERO_POINTS, INT32_ZERO_POINTS, INT8_ZERO_POINTS, UINT8_ZERO_POINTS, FLOAT_OFFSETS, INNER_OFFSETS };
// Beside those of AbsmaxFormat, of which FLOAT16 is taken as it is: numbers of 16 bits that count where they are finite
// and more than zero, as those of FLOAT32 do; q4_k's two halves for 256 elements, d and dmin; two halves, a scale and
// an offset, as they are.
enum IntegerScales { USABLE_FLOAT16 = FLOAT32 + 1, USABLE_BFLOAT16, INNER_SCALES, FLOAT16_PAIRS };

// Arithmetic on two numbers of T in a register.
template <typename T>
struct Pair;

template <>
struct Pair<__half> {
    static constexpr unsigned RAISED = 0x64006400u;  // 1024, whose last bit counts 1
    __device__ __forceinline__ static unsigned subtract(unsigned a, unsigned b) {
        return Word<__half>::bits(__hsub2(Word<__half>::as(a), Word<__half>::as(b)));
    }
    // a / 16 + b
    __device__ __forceinline__ static unsigned lower(unsigned a, unsigned b) {
        return Word<__half>::bits(__hfma2(Word<__half>::as(a), Word<__half>::as(0x2c002c00u), Word<__half>::as(b)));
    }
};

template <>
struct Pair<__nv_bfloat16> {
    static constexpr unsigned RAISED = 0x43004300u;  // 128, whose last bit counts 1
    __device__ __forceinline__ static unsigned subtract(unsigned a, unsigned b) {
        return Word<__nv_bfloat16>::bits(__hsub2(Word<__nv_bfloat16>::as(a), Word<__nv_bfloat16>::as(b)));
    }
};

// The scales of integers, and their zero points.
template <typename Decoder>
struct RawIntegers {
    static constexpr int STAGES = 1;
    static constexpr bool PAIRS = Decoder::SCALE == FLOAT16_PAIRS;
    static constexpr int SCALE_BYTES = Decoder::SCALE == FLOAT32 || PAIRS ? 4 : 2;
    static constexpr int SECOND_BYTES = PAIRS                                  ? 0
                                        : Decoder::OFFSETS                     ? SCALE_BYTES
                                        : Decoder::POINTS == NO_ZERO_POINTS    ? 0
                                        : Decoder::POINTS == INT32_ZERO_POINTS ? 4
                                                                               : 1;
    unsigned code[2];
    int point[2];

    __device__ __forceinline__ void fetch(const TileScales& from, const unsigned (&origin)[2], unsigned at) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned block = (origin[i] + at) >> (is_shared(Decoder::SHARES) ? from.shift : 0);
            if constexpr (PAIRS) {
                const unsigned both = static_cast<const unsigned*>(from.absmax)[block];
                code[i] = both & 0xffffu, point[i] = both >> 16;
                continue;
            }
            if constexpr (Decoder::SCALE == FLOAT32) code[i] = static_cast<const unsigned*>(from.absmax)[block];
            else code[i] = static_cast<const unsigned short*>(from.absmax)[block];
            if constexpr (Decoder::POINTS == INT32_ZERO_POINTS) point[i] = static_cast<const int*>(from.second)[block];
            if constexpr (Decoder::OFFSETS && Decoder::SCALE == FLOAT32)
                point[i] = static_cast<const int*>(from.second)[block];
            if constexpr (Decoder::OFFSETS && Decoder::SCALE != FLOAT32)
                point[i] = static_cast<const unsigned short*>(from.second)[block];
            if constexpr (Decoder::POINTS == INT8_ZERO_POINTS)
                point[i] = static_cast<const signed char*>(from.second)[block];
            if constexpr (Decoder::POINTS == UINT8_ZERO_POINTS)
                point[i] = static_cast<const unsigned char*>(from.second)[block];
        }
    }

    __device__ __forceinline__ static float number(unsigned bits) {
        if (Decoder::SCALE == FLOAT32) return __uint_as_float(bits);
        if (Decoder::SCALE == USABLE_BFLOAT16) return __uint_as_float(bits << 16);
        return __half2float(__ushort_as_half(bits));
    }

    // One of GGUF is taken as it is, one beside an offset may be negative.
    __device__ __forceinline__ float value(const TileScales&, int i) const {
        const float s = number(code[i]);
        if (Decoder::SCALE == FLOAT16 || PAIRS) return s;
        if (Decoder::OFFSETS) return (__float_as_uint(s) & 0x7fffffffu) < 0x7f800000u ? s : 0.0f;
        return usable(s);
    }

    // OFFSETS: the scale of the second half of a stage, and what is added to code less the middle one, times scale;
    // FUSED: to code times scale.
    __device__ __forceinline__ void offset(const TileScales& from, int i, float& second, float& added) const {
        second = value(from, i), added = added_to(second, number(point[i]));
    }
    __device__ __forceinline__ static float added_to(float scale, float offset) {
        return Decoder::SIGNED || Decoder::FUSED ? offset : fmaf(scale, 1 << (Decoder::BITS - 1), offset);
    }

    // The code of zero, from 0 on.
    __device__ __forceinline__ int zero(int i) const {
        constexpr int MIDDLE = 1 << (Decoder::BITS - 1), LOWEST = Decoder::SIGNED ? -MIDDLE : 0;
        if constexpr (Decoder::FUSED) return 0;
        else if constexpr (Decoder::POINTS == NO_ZERO_POINTS || Decoder::OFFSETS) return MIDDLE;
        else return min(max(point[i], LOWEST), LOWEST + 2 * MIDDLE - 1) - LOWEST;
    }
};

// COUNT numbers from number `first` on, the last of them as often as there are too few: at once where they lie so, as a
// load of 32 rows takes as long as 32 loads.
template <int COUNT, typename N>
__device__ __forceinline__ void load_numbers(unsigned (&to)[COUNT], const N* from, unsigned first, unsigned last) {
    constexpr int BYTES = COUNT * sizeof(N);
    if (COUNT > 1 && reinterpret_cast<unsigned long long>(from + first) % BYTES == 0 && first + COUNT - 1 <= last) {
        unsigned word[(BYTES + 3) / 4];
        if constexpr (BYTES == 16) to_words(word, *reinterpret_cast<const uint4*>(from + first));
        else if constexpr (BYTES == 8) to_words(word, *reinterpret_cast<const uint2*>(from + first));
        else word[0] = *reinterpret_cast<const unsigned*>(from + first);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            if constexpr (sizeof(N) == 4) to[j] = word[j];
            else to[j] = word[j / 2] >> j % 2 * 16 & 0xffffu;
        }
    } else {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) to[j] = from[min(first + j, last)];
    }
}

// Scales and offsets of the four granules of a row in a stage.
template <typename Decoder>
struct RowIntegers {
    using Raw = RawIntegers<Decoder>;
    static constexpr int BLOCKS = Decoder::SHARES == OF_GRANULES ? 4 : Decoder::SHARES == OF_BLOCKS ? 2 : 1;
    unsigned scale[BLOCKS], beside[BLOCKS];

    // From granule `at` on of a row of so many, which is the first or follows the one before; where x is zero, beyond
    // them, any numbers will do.
    __device__ __forceinline__ void fetch(
        const TileScales& from, unsigned origin, unsigned at, unsigned granules, bool) {
        const int shift = is_shared(Decoder::SHARES) ? from.shift : 0;
        const unsigned last = (origin + granules - 1) >> shift, first = min((origin + at) >> shift, last);
        if constexpr (Decoder::SCALE == FLOAT32 || Raw::PAIRS) {
            load_numbers(scale, static_cast<const unsigned*>(from.absmax), first, last);
            if constexpr (!Raw::PAIRS) load_numbers(beside, static_cast<const unsigned*>(from.second), first, last);
        } else {
            load_numbers(scale, static_cast<const unsigned short*>(from.absmax), first, last);
            load_numbers(beside, static_cast<const unsigned short*>(from.second), first, last);
        }
    }

    __device__ __forceinline__ void take(unsigned) {}

    __device__ __forceinline__ float scale_of(int b) const {
        const float s = Raw::number(Raw::PAIRS ? scale[b] & 0xffffu : scale[b]);
        return Raw::PAIRS || (__float_as_uint(s) & 0x7fffffffu) < 0x7f800000u ? s : 0.0f;
    }
    __device__ __forceinline__ float added_of(int b) const {
        return Raw::added_to(scale_of(b), Raw::number(Raw::PAIRS ? scale[b] >> 16 : beside[b]));
    }

    // No scale is larger, and nothing that is added.
    __device__ __forceinline__ float bound() const {
        float largest = 0.0f;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) largest = fmaxf(largest, fmaxf(fabsf(scale_of(b)), fabsf(added_of(b))));
        return largest;
    }

    // Scales, and what is added times the elements of a granule, both times `down`.
    __device__ __forceinline__ void numbers(float down, float (&s)[4], float (&all)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int b = j * BLOCKS / 4;
            s[j] = scale_of(b) * down, all[j] = added_of(b) * (down * GRANULE_K);
        }
    }
};

// The scales of q4_k. A lane has codes of two blocks of 32 of half a block of 256, and the offset of one of the four.
template <typename Decoder>
struct RawInner {
    static constexpr int SCALE_BYTES = 4, SECOND_BYTES = 12, STAGES = 1;
    unsigned pair[2], word[2][3];
    bool late;  // whether it is the second half

    __device__ __forceinline__ void fetch(const TileScales& from, const unsigned (&origin)[2], unsigned at) {
        late = at / 4 % 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned block = (origin[i] + at) >> from.shift;
            pair[i] = static_cast<const unsigned*>(from.absmax)[block];
            const unsigned* words = static_cast<const unsigned*>(from.second) + 3ull * block;
#pragma unroll
            for (int w = 0; w < 3; ++w) word[i][w] = words[w];
        }
    }

    // Byte j of a word as a float.
    __device__ __forceinline__ static float byte_of(unsigned bytes, unsigned j) {
        return __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440u + j)) - 8388608.0f;
    }

    // The scales, or minima, of the four blocks of the first or second half.
    __device__ __forceinline__ static unsigned bytes_of(const unsigned (&w)[3], bool late, bool minima) {
        const unsigned last = minima ? w[2] >> 4 : w[2];
        return late ? (last & 0x0f0f0f0fu) | (w[minima] >> 2 & 0x30303030u) : w[minima] & 0x3f3f3f3fu;
    }
    __device__ __forceinline__ unsigned bytes(int i, bool minima) const { return bytes_of(word[i], late, minima); }

    __device__ __forceinline__ float value(const TileScales&, int i) const {
        return Word<__half>::get(pair[i], 0) * byte_of(bytes(i, false), threadIdx.x & 2);
    }

    __device__ __forceinline__ void offset(const TileScales&, int i, float& second, float& added) const {
        const unsigned t = threadIdx.x % 4, scales = bytes(i, false);
        const float d = Word<__half>::get(pair[i], 0),
                    least = Word<__half>::get(pair[i], 1) * byte_of(bytes(i, true), t);
        second = d * byte_of(scales, t | 1);
        added = fmaf(d * byte_of(scales, t), 8.0f, -least);  // 8 is the middle code
    }

    __device__ __forceinline__ int zero(int) const { return 8; }
};

// Those of a row, as RowIntegers has them: half a block of 256. Two blocks are loaded at a time, each number of both at
// once where rows are whole pairs of blocks: a load of 32 rows takes as long as 32 loads.
template <typename Decoder>
struct RowInner {
    using Raw = RawInner<Decoder>;
    unsigned two[4][2];      // d and dmin, and the words of 6-bit numbers, of both blocks
    unsigned pair, word[3];  // of this one
    bool late;

    __device__ __forceinline__ void fetch(
        const TileScales& from, unsigned origin, unsigned at, unsigned granules, bool first) {
        if (at % 16 == 0 || first) load(from, origin, min(at, granules - 1) / 16 * 16, granules);
    }

    __device__ __forceinline__ void load(const TileScales& from, unsigned origin, unsigned at, unsigned granules) {
        const unsigned block = (origin + at) / 8, next = at + 8 < granules ? 1 : 0;
        const unsigned* pairs = static_cast<const unsigned*>(from.absmax) + block;
        const unsigned* words = static_cast<const unsigned*>(from.second) + 3ull * block;
        const auto addresses =
            reinterpret_cast<unsigned long long>(from.absmax) | reinterpret_cast<unsigned long long>(from.second);
        if (granules % 16 == 0 && addresses % 8 == 0) {
            unsigned w[6];
            to_words(two[0], *reinterpret_cast<const uint2*>(pairs));
#pragma unroll
            for (int i = 0; i < 3; ++i) to_words(w + 2 * i, reinterpret_cast<const uint2*>(words)[i]);
#pragma unroll
            for (int i = 0; i < 6; ++i) two[1 + i % 3][i / 3] = w[i];
        } else {
#pragma unroll
            for (unsigned i = 0; i < 2; ++i) {
                two[0][i] = pairs[i * next];
#pragma unroll
                for (int w = 0; w < 3; ++w) two[1 + w][i] = words[3 * i * next + w];
            }
        }
    }

    // Take the numbers of the stage that begins with granule `at`.
    __device__ __forceinline__ void take(unsigned at) {
        late = at / 4 % 2;
        const bool second = at / 8 % 2;
        pair = second ? two[0][1] : two[0][0];
#pragma unroll
        for (int w = 0; w < 3; ++w) word[w] = second ? two[1 + w][1] : two[1 + w][0];
    }

    __device__ __forceinline__ float bound() const {  // of 8 * 63 d and of 63 dmin
        return fmaxf(fabsf(Word<__half>::get(pair, 0)) * 512.0f, fabsf(Word<__half>::get(pair, 1)) * 64.0f);
    }

    // Byte j of a word times a factor: 2^23 and the byte times it, less 2^23 times it, which is `less`.
    __device__ __forceinline__ static float times(unsigned bytes, int j, float factor, float less) {
        return fmaf(__uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440 + j)), factor, less);
    }

    __device__ __forceinline__ void numbers(float down, float (&s)[4], float (&all)[4]) const {
        const float d = Word<__half>::get(pair, 0) * down, minus = Word<__half>::get(pair, 1) * (down * -GRANULE_K);
        const float d_less = d * -8388608.0f, minus_less = minus * -8388608.0f;
        const unsigned scales = Raw::bytes_of(word, late, false), minima = Raw::bytes_of(word, late, true);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[j] = times(scales, j, d, d_less);
            all[j] = fmaf(s[j], 8.0f * GRANULE_K, times(minima, j, minus, minus_less));  // 8 is the middle code
        }
    }

    // Scales, the code of each block whose weight is closest to zero, and what is added to code less that, times scale.
    __device__ __forceinline__ void centred(float down, float (&s)[4], unsigned (&zero)[4], float (&added)[4]) const {
        constexpr float RAISED = 12582912.0f;  // 1.5 * 2^23, whose last bit counts 1
        const float d = Word<__half>::get(pair, 0) * down, minus = Word<__half>::get(pair, 1) * -down;
        const float d_less = d * -8388608.0f, minus_less = minus * -8388608.0f;
        const unsigned scales = Raw::bytes_of(word, late, false), minima = Raw::bytes_of(word, late, true);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[j] = times(scales, j, d, d_less);
            const float least = times(minima, j, minus, minus_less);
            // What is no number becomes 0.
            const float near = fminf(fmaxf(__fdividef(-least, s[j]), 0.0f), 15.0f) + RAISED;
            zero[j] = __float_as_uint(near) - __float_as_uint(RAISED);
            added[j] = fmaf(s[j], near - RAISED, least);
        }
    }
};

template <typename Decoder, int POINTS>
struct RawOf {
    using Type = RawIntegers<Decoder>;
    using Row = RowIntegers<Decoder>;
};
template <typename Decoder>
struct RawOf<Decoder, INNER_OFFSETS> {
    using Type = RawInner<Decoder>;
    using Row = RowInner<Decoder>;
};

// Integers of 4 or 8 bits less a zero point, exact in T. SIGNED: in two's complement.
//
// With their first bit flipped those are not negative either, and are set into the fraction of a number whose last bit
// counts 1, which is subtracted again together with the zero point. Of codes of 4 bits half of them are taken where
// they stand, four bits up; in bfloat16, whose fraction has 7 bits, all are moved down, and bit 7 of a code counts
// apart.
template <typename T, int BITS_, bool SIGNED_, int ORDER_, int SCALE_, int POINTS_, int SHARES_>
struct TileIntegers {
    using Type = T;
    using Raw = typename RawOf<TileIntegers, POINTS_>::Type;
    using RowScales = typename RawOf<TileIntegers, POINTS_>::Row;
    static constexpr int BITS = BITS_, ORDER = ORDER_, SCALE = SCALE_, POINTS = POINTS_, SHARES = SHARES_;
    static constexpr int VALUES = 0, ENTRIES = 0, LANE_BYTES = 0, FIELDS = 4;
    static constexpr bool FUSED = SCALE == FLOAT16_PAIRS && SameType<T, __half>::VALUE;
    static constexpr bool OFFSETS = (POINTS == FLOAT_OFFSETS || POINTS == INNER_OFFSETS) && !FUSED;
    static constexpr bool CENTRED = POINTS == INNER_OFFSETS;
    static constexpr int SCALES = POINTS == INNER_OFFSETS ? 2 : 1;
    static constexpr bool SIGNED = SIGNED_, NESTED = false, IS_HALF = SameType<T, __half>::VALUE;
    static_assert(BITS == 4 || ORDER == TWO_APART, "bytes are cut out by a mask");
    static constexpr unsigned FLIP = SIGNED ? 0x00010001u << (BITS - 1) : 0u;
    // What codes are set into: at the lower end; four bits up, or the eighth bit.
    static constexpr unsigned LOW = Pair<T>::RAISED ^ (BITS == 8 && !IS_HALF ? 0u : FLIP),
                              HIGH = BITS == 4 ? Pair<T>::RAISED ^ FLIP << 4 : Pair<T>::RAISED ^ 0x00800080u ^ FLIP;

    // Numbers twice in a register. What is subtracted, from codes at the lower end of a fraction and from those four
    // bits up; what codes are set into, which is the same for all: a lane keeps it, as an instruction has room for one
    // constant, the mask.
    struct Base {
        unsigned low, high, raised[2];
    };
    __device__ __forceinline__ static void keep(Base (&base)[2]) {
        const unsigned low = opaque(LOW), high = opaque(HIGH);
#pragma unroll
        for (int i = 0; i < 2; ++i) base[i].raised[0] = low, base[i].raised[1] = high;
    }
    __device__ __forceinline__ static void set(Base& base, int zero) {
        if constexpr (BITS == 8 && !IS_HALF) {
            const float z = __uint_as_float(0x4b000000u | zero) - 8388736.0f;  // 2^23 and 128
            base.low = Word<T>::pack(z, z);
        } else {
            base.low = (Pair<T>::RAISED & 0xffffu | zero) * 0x00010001u;
            base.high = (0xd400u | zero << 4) * 0x00010001u;  // -64 and less
        }
    }

    // The zeros of two blocks, as numbers of T in a word; and of the one of half h.
    __device__ __forceinline__ static unsigned centres(unsigned first, unsigned second) {
        if constexpr (IS_HALF) return 0xd4006400u + first + (second << 20);
        else return Pair<T>::RAISED + first + (second << 16);
    }
    __device__ __forceinline__ static void set_zeros(Base& base, unsigned both, int h) {
        base.low = base.high = half_twice(both, h);
    }

    // Pair q of half h: whether its codes are four bits up.
    __device__ __forceinline__ static constexpr bool is_high(int h, int q) {
        return BITS == 4 && IS_HALF && (ORDER == FOUR_APART ? q % 2 : h);
    }

    // Pairs 8 h to 8 h + 7, to which something is added that `settle` takes off. The words of codes of 8 bits are those
    // of half h.
    __device__ __forceinline__ static void unpack(unsigned (&)[FIELDS]) {}

    __device__ __forceinline__ static void pairs(
        const unsigned (&f)[FIELDS], int h, const Base& base, unsigned (&pair)[8]) {
#pragma unroll
        for (int q = 0; q < 8; ++q) {
            const int w = BITS == 4 && ORDER == FOUR_APART ? 2 * h + q / 4 : q / 2;
            if constexpr (BITS == 8 && IS_HALF && !SIGNED) {
                pair[q] = __byte_perm(f[w], base.raised[0], q % 2 ? 0x5351 : 0x5250);
            } else if constexpr (BITS == 8 && IS_HALF) {
                pair[q] = cut<0x00ff00ffu>(f[w] >> q % 2 * 8, base.raised[0]);
            } else if constexpr (BITS == 8) {
                const unsigned word = f[w] >> q % 2 * 8;
                // 128 and seven bits, less 256 or 128 by the eighth.
                pair[q] =
                    Pair<T>::subtract(cut<0x007f007fu>(word, base.raised[0]), cut<0x00800080u>(word, base.raised[1]));
            } else {
                const int at = ORDER == FOUR_APART ? q % 4 * 4 : q % 2 * 8 + 4 * h;
                pair[q] = is_high(h, q) ? cut<0x00f000f0u>(f[w] >> (at - 4), base.raised[1])
                                        : cut<0x000f000fu>(f[w] >> at, base.raised[0]);
            }
        }
    }

    // The bits of a mask, and others.
    template <unsigned MASK>
    __device__ __forceinline__ static unsigned cut(unsigned word, unsigned others) {
        unsigned r;
        asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(word), "n"(MASK), "r"(others));
        return r;
    }

    __device__ __forceinline__ static unsigned settle(unsigned pair, int h, int q, const Base& base) {
        if constexpr (BITS == 8 && !IS_HALF && (POINTS == NO_ZERO_POINTS || OFFSETS)) return pair;
        if constexpr (IS_HALF && BITS == 4)
            if (is_high(h, q)) return Pair<T>::lower(pair, base.high);
        return Pair<T>::subtract(pair, base.low);
    }
};
