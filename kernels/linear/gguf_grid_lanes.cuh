// Decoders of linear/gguf_lanes.cuh for GGUF's types whose groups of elements are entries of a grid. Grids and signs
// are looked up in shared memory, where an entry has copies, so that fewer lanes meet in a bank.
#pragma once
#include "linear/gguf_grid_records.cuh"
#include "linear/gguf_lanes.cuh"

// 2 s + 1 of two numbers as halves: bits AT to AT + 3 of either half of a word, of which others are masked out. `magic`
// is HALF_MAGIC.
template <int AT, unsigned MASK = 15u>
__device__ __forceinline__ unsigned odd_halves(unsigned word, unsigned magic) {
    static_assert(AT <= 6, "the mantissa of a half");
    // 2^10 + s 2^AT times 2^(1 - AT), less 2^(11 - AT), plus 1.
    constexpr unsigned LEAST = ((26u - AT) << 10) - (AT == 0 ? 1u : 1u << AT);
    return fma_halves((word & halves(MASK << AT)) | magic, power_of_two(1 - AT), halves(LEAST | 0x8000u));
}

// Selectors of permutations: byte i of a word, and byte `other` of a second one.
__host__ __device__ constexpr unsigned byte_and(int i, int other) { return i | (other + 4) * 0x1110u; }

template <int DIVISOR>
struct GridLanes : LanesBase {
    float d;
    template <typename Record>
    __device__ __forceinline__ void fetch_d(const Record& record) {
        d = __fmul_rn(half_of(record.narrow, 0), 1.0f / DIVISOR);
    }
};

// ---- two bits: three magnitudes --------------------------------------------------------------------------------

// Elements are bytes with 64 in the middle, see IQ2Base; lane t has eight octets.
struct IQ2Lanes : GridLanes<8> {
    unsigned entry[4];  // of half of them
    unsigned pair[2];
    unsigned values[2];

    __host__ __device__ static constexpr unsigned kept(int i) { return i == 0 ? HALF_MAGIC : iq2_values(i == 2, 64); }
    template <typename Table>
    __device__ __forceinline__ void keep(const Table& table) {
        values[0] = table.kept[1], values[1] = table.kept[2];
    }
    __device__ __forceinline__ void scale(int s, unsigned odd, int which, unsigned (&a)[2]) const {
        const unsigned bytes = permuted(values[0], values[1], entry[s / 2 % 4] >> s % 2 * 16);
        const unsigned least = multiply_halves(odd, 0x80408040u);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            a[h] = fma_halves(__byte_perm(bytes, 0, h ? 0x4341 : 0x4240), twice(odd, which), twice(least, which));
    }
};

// fields: d, qs
struct IQ2_XXS_Lanes : IQ2Lanes {
    using Layout = RecordLayout<IQ2_XXS_Lanes>;
    using Of = IQ2_XXS_Record;
    static constexpr int FIELDS = 2, SUB = 32, TABLE = Of::TABLE, COPIES = Of::COPIES;
    __host__ __device__ static constexpr int bytes(int i) { return Of::bytes(i); }
    __device__ __forceinline__ static unsigned table_word(int i) { return Of::table_word(i); }
    unsigned word[4];  // of either part of 32 elements four indices, and four numbers of signs and a scale

    template <typename Record>
    __device__ __forceinline__ void fetch(const Record& record, int t) {
        record.words(word, Layout::at(1) + 16 * t), fetch_d(record);
    }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table& table, int half) {
        keep(table);
        if (!half) pair[0] = odd_halves<4>(__byte_perm(word[1], word[3], 0x7733), table.kept[0]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            entry[i] = table.template entry<COPIES>(0, __byte_perm(word[2 * half], 0, byte_and(i, 0))) |
                       table.template word<Of::SIGNS, 128>(Of::GRID, word[2 * half + 1], 7 * i);
    }
    __device__ __forceinline__ void scaled(int s, unsigned (&a)[2]) const { scale(s, pair[0], s / 8, a); }
};

// 2 s + 1 of two octets each by nibbles of 16 bits: of the first, and of those behind.
struct IQ2Nibbles : IQ2Lanes {
    static constexpr int SUB = 16;
    unsigned scales;
    template <typename Table>
    __device__ __forceinline__ void expand(const Table& table) {
        pair[0] = odd_halves<0>(scales | scales << 12, table.kept[0]);
        pair[1] = odd_halves<0>(scales >> 8 | scales << 4, table.kept[0]);
    }
    __device__ __forceinline__ void scaled(int s, unsigned (&a)[2]) const { scale(s, pair[s / 8], s / 4 % 2, a); }
};

// fields: d, qs, scales
struct IQ2_XS_Lanes : IQ2Nibbles {
    using Layout = RecordLayout<IQ2_XS_Lanes>;
    using Of = IQ2_XS_Record;
    static constexpr int FIELDS = 3, TABLE = Of::TABLE, COPIES = Of::COPIES;
    __host__ __device__ static constexpr int bytes(int i) { return Of::bytes(i); }
    __device__ __forceinline__ static unsigned table_word(int i) { return Of::table_word(i); }
    unsigned word[4];  // 16 bits an octet: 9 of the index, 7 of the number of signs

    template <typename Record>
    __device__ __forceinline__ void fetch(const Record& record, int t) {
        record.words(word, Layout::at(1) + 16 * t), fetch_d(record);
        scales = record.pair(Layout::at(2) + 2 * t);
    }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table& table, int half) {
        keep(table);
        if (!half) expand(table);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned two = word[2 * half + i / 2], at = i % 2 * 16;
            entry[i] = table.template word<COPIES, 512>(0, two, at) |
                       table.template word<Of::SIGNS, 128>(Of::GRID, two, at + 9);
        }
    }
};

// fields: d, qs, qh, scales
struct IQ2_S_Lanes : IQ2Nibbles {
    using Layout = RecordLayout<IQ2_S_Lanes>;
    using Of = IQ2_S_Record;
    static constexpr int FIELDS = 4, TABLE = Of::TABLE, COPIES = Of::COPIES;
    __host__ __device__ static constexpr int bytes(int i) { return Of::bytes(i); }
    __device__ __forceinline__ static unsigned table_word(int i) { return Of::table_word(i); }
    unsigned low[2], sign[2], high;  // of an octet a byte of the index, a byte of signs, two bits of the index

    template <typename Record>
    __device__ __forceinline__ void fetch(const Record& record, int t) {
        record.words(low, Layout::at(1) + 8 * t), record.words(sign, Layout::at(1) + 32 + 8 * t), fetch_d(record);
        high = record.pair(Layout::at(2) + 2 * t), scales = record.pair(Layout::at(3) + 2 * t);
    }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table& table, int half) {
        keep(table);
        if (!half) expand(table);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            entry[i] = table.template word<COPIES, 1024>(0, __byte_perm(low[half], high >> 2 * i, byte_and(i, half))) |
                       table.template entry<Of::SIGNS>(Of::GRID, __byte_perm(sign[half], 0, byte_and(i, 0)));
    }
};

// ---- three bits: eight magnitudes, entries of four -------------------------------------------------------------

// fields: d, qs
struct IQ3_XXS_Lanes : GridLanes<4> {
    using Layout = RecordLayout<IQ3_XXS_Lanes>;
    using Of = IQ3_XXS_Record;
    static constexpr int FIELDS = 2, SUB = 32, TABLE = Of::TABLE, COPIES = Of::COPIES;
    __host__ __device__ static constexpr int bytes(int i) { return Of::bytes(i); }
    // Of signs bit e + 2 lies 16 above bit e.
    __device__ __forceinline__ static unsigned table_word(int i) {
        if (i < Of::GRID) return Of::values_word(i / COPIES);
        const unsigned signs = signs_of((i - Of::GRID) / Of::SIGNS);
        return signs | signs << 14;
    }
    unsigned word[4], more[2], pair, value[8], signs[4];

    template <typename Record>
    __device__ __forceinline__ void fetch(const Record& record, int t) {
        record.words(word, Layout::at(1) + 16 * t), record.words(more, Layout::at(1) + 64 + 8 * t), fetch_d(record);
    }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table& table, int half) {
        if (!half) pair = odd_halves<4>(__byte_perm(more[0], more[1], 0x7733), table.kept[0]);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            value[i] = table.template entry<COPIES>(0, __byte_perm(word[2 * half + i / 4], 0, byte_and(i % 4, 0)));
#pragma unroll
        for (int i = 0; i < 4; ++i) signs[i] = table.template word<Of::SIGNS, 128>(Of::GRID, more[half], 7 * i);
    }
    __device__ __forceinline__ void scaled(int s, unsigned (&a)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = multiply_halves(__byte_perm(value[s % 8], 0, h ? 0x4341 : 0x4240), twice(pair, s / 8));
            a[h] ^= signs[s / 2 % 4] << (15 - s % 2 * 4 - h) & 0x80008000u;
        }
    }
};

// fields: d, qs, qh, signs, scales. An element is 2 u - 15 with a nibble u, which is 8 and its digit, or all bits of
// that turned where it is negative. Of eight elements they are nibbles 0, 1, 4 and 5 of a word, and those behind them.
struct IQ3_S_Lanes : GridLanes<8> {
    using Layout = RecordLayout<IQ3_S_Lanes>;
    using Of = IQ3_S_Record;
    static constexpr int FIELDS = 5, SUB = 32, TABLE = Of::TABLE, COPIES = Of::COPIES;
    __host__ __device__ static constexpr int bytes(int i) { return Of::bytes(i); }
    // Four nibbles: those of an octet's first four elements.
    __host__ __device__ static constexpr unsigned placed(unsigned four) {
        return (four & 0xffu) | (four & 0xff00u) << 8;
    }
    __device__ __forceinline__ static unsigned table_word(int i) {
        if (i < Of::GRID) {
            const int entry = i / COPIES;
            return placed(IQ3_S_GRID[entry / 2] >> entry % 2 * 16 & 0xffffu) | 0x00880088u;
        }
        const unsigned all = nibbles_of((i - Of::GRID) / Of::SIGNS) * 15u;
        return placed(all & 0xffffu) | placed(all >> 16) << 8;
    }
    unsigned word[4], sign[2], high, scales, pair, octet[4];

    template <typename Record>
    __device__ __forceinline__ void fetch(const Record& record, int t) {
        record.words(word, Layout::at(1) + 16 * t), record.words(sign, Layout::at(3) + 8 * t), fetch_d(record);
        high = record.pair(Layout::at(2) + 2 * t), scales = record.word(Layout::at(4)) >> 8 * t & 255u;
    }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table& table, int half) {
        if (!half) pair = odd_halves<0>(scales | scales << 12, table.kept[0]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned four[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int at = i * 2 + e;
                four[e] = table.template word<COPIES, 512>(
                    0, __byte_perm(word[2 * half + at / 4], high >> at, byte_and(at % 4, half)));
            }
            octet[i] = (four[1] * 256u + four[0]) ^
                       table.template entry<Of::SIGNS>(Of::GRID, __byte_perm(sign[half], 0, byte_and(i, 0)));
        }
    }
    __device__ __forceinline__ void scaled(int s, unsigned (&a)[2]) const {
        // 8 (2 u - 15): what u is multiplied with at bit 0, and at bit 4.
        const unsigned first = multiply_halves(pair, power_of_two(4)), least = multiply_halves(pair, 0x80788078u);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            a[h] = fma_halves(
                octet[s / 2 % 4] >> s % 2 * 8 & 0x000f000fu << 4 * h, twice(h ? pair : first, s / 8),
                twice(least, s / 8));
    }
};

// ---- one bit: -1, 0 and 1, moved by an eighth ------------------------------------------------------------------

// An element is 8 u - 8 and one more or less, u of two bits: of eight elements bits 0, 2, 16, 18, and those 4 above.
struct IQ1Lanes : GridLanes<64> {
    static constexpr int COPIES = IQ1Base::COPIES, TABLE = IQ1Base::TABLE;
    unsigned entry[4];

    __device__ __forceinline__ static unsigned table_word(int i) {
        unsigned all = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e)
            all |= (IQ1_GRID[i / COPIES] >> 4 * e & 3u) << (e / 4 * 4 + e % 2 * 2 + e / 2 % 2 * 16);
        return all;
    }

    // 8 times an element: of an inner scale what u is multiplied with at bit 2 k, and what is added.
    __device__ __forceinline__ static unsigned times(unsigned odd, int k) {
        return k == 3 ? odd : multiply_halves(odd, power_of_two(6 - 2 * k));
    }
    __device__ __forceinline__ static unsigned moved(unsigned odd, unsigned minus) {
        const unsigned eighth = (minus & 0x80008000u) ^ 0x00080008u;
        return fma_halves(odd, eighth, multiply_halves(odd, 0x80408040u));
    }
    __device__ __forceinline__ void scale(
        int s, unsigned odd, int which, unsigned added, int other, unsigned (&a)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int k = s % 2 * 2 + h;
            a[h] = fma_halves(entry[s / 2 % 4] & halves(3u << 2 * k), twice(times(odd, k), which), twice(added, other));
        }
    }
};

// fields: d, qs, qh
struct IQ1_S_Lanes : IQ1Lanes {
    using Layout = RecordLayout<IQ1_S_Lanes>;
    using Of = IQ1_S_Record;
    static constexpr int FIELDS = 3, SUB = 32;
    __host__ __device__ static constexpr int bytes(int i) { return Of::bytes(i); }
    unsigned low[2], more, odd, added;

    template <typename Record>
    __device__ __forceinline__ void fetch(const Record& record, int t) {
        record.words(low, Layout::at(1) + 8 * t), more = record.word(Layout::at(2) + 4 * t), fetch_d(record);
    }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table& table, int half) {
        if (!half) odd = odd_halves<4, 7u>(more >> 8, table.kept[0]), added = moved(odd, more);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            entry[i] =
                table.template word<COPIES, 2048>(0, __byte_perm(low[half], more >> 3 * i, byte_and(i, 2 * half)));
    }
    __device__ __forceinline__ void scaled(int s, unsigned (&a)[2]) const { scale(s, odd, s / 8, added, s / 8, a); }
};

// fields: qs, qh, scales
struct IQ1_M_Lanes : IQ1Lanes {
    using Layout = RecordLayout<IQ1_M_Lanes>;
    using Of = IQ1_M_Record;
    static constexpr int FIELDS = 3, SUB = 16;
    __host__ __device__ static constexpr int bytes(int i) { return Of::bytes(i); }
    unsigned low[2], more, scales;  // nibbles of eight octets, three bits of two octets each
    unsigned odd[2], added[4];      // of two octets each and those 4 behind, of an octet and the one 4 behind

    template <typename Record>
    __device__ __forceinline__ void fetch(const Record& record, int t) {
        record.words(low, Layout::at(0) + 8 * t), more = record.word(Layout::at(1) + 4 * t);
        scales = record.pair(Layout::at(2) + 2 * t);
        unsigned words[2];
        record.words(words, Layout::at(2)), d = __fmul_rn(Of::d_of(words), 1.0f / 64);
    }
    template <typename Table>
    __device__ __forceinline__ void look_up(const Table& table, int half) {
        if (!half) {
            odd[0] = odd_halves<0, 7u>(scales | scales << 10, table.kept[0]);
            odd[1] = odd_halves<0, 7u>(scales >> 3 | scales << 7, table.kept[0]);
#pragma unroll
            for (int i = 0; i < 4; ++i) added[i] = moved(odd[i / 2], more << (12 - 4 * i));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            entry[i] = table.template word<COPIES, 2048>(
                0, __byte_perm(low[half], more >> i % 2 * 4, byte_and(i, 2 * half + i / 2)));
    }
    __device__ __forceinline__ void scaled(int s, unsigned (&a)[2]) const {
        scale(s, odd[s / 4 % 2], s / 8, added[s / 2 % 4], s / 8, a);
    }
};
