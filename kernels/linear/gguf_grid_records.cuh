// Decoders for the streaming products of GGUF's types whose groups of elements are entries of a grid; what their
// members are stands in linear/gguf_records.cuh, the bytes in formats/gguf_grids.cuh, whose grids these use.
//
// Entries of tables have copies, of which each lane reads its own: fewer of them meet in a bank then.
#pragma once
#include "formats/gguf_grids.cuh"
#include "linear/gguf_records.cuh"

// Bit e of up to eight as bit 4 e.
__host__ __device__ constexpr unsigned nibbles_of(unsigned bits) {
    unsigned all = 0;
    for (int e = 0; e < 8; ++e) all |= (bits >> e & 1u) << 4 * e;
    return all;
}
constexpr int SIGN_COPIES = 16;

// ---- two bits: three magnitudes --------------------------------------------------------------------------------

// The elements that selectors of a permutation name, 64 in the middle: three positive ones, or the `negative` ones,
// which are those from 4 on.
__host__ __device__ constexpr unsigned iq2_values(bool negative) {
    return negative ? 0x00404040u - IQ2_VALUES : 0x00404040u + IQ2_VALUES;
}

// A nibble for each element, the selector of its byte.
struct IQ2Base : RecordBase {
    static constexpr int BIAS = 64;
    float d;
    template <typename Record>
    __device__ __forceinline__ void load_d(const Record& record) {
        d = __fmul_rn(half_of(record.narrow, 0), 0.125f);
    }
    __device__ __forceinline__ float outer() const { return d; }
    __device__ __forceinline__ static unsigned signs_word(unsigned signs) { return nibbles_of(signs) << 2; }
    __device__ __forceinline__ static unsigned values(unsigned selectors) {
        return permuted(iq2_values(false), iq2_values(true), selectors);
    }
};

// fields: d, qs
struct IQ2_XXS_Record : IQ2Base {
    using Layout = RecordLayout<IQ2_XXS_Record>;
    static constexpr int FIELDS = 2, SUB = 32, ORDER = BY_EIGHT;
    static constexpr int COPIES = 32, SIGNS = SIGN_COPIES, GRID = 256 * COPIES, TABLE = GRID + 128 * SIGNS;
    __host__ __device__ static constexpr int bytes(int i) { return i ? 64 : 2; }
    __device__ __forceinline__ static unsigned table_word(int i) {
        return i < GRID ? IQ2_XXS_GRID[i / COPIES] : signs_word(signs_of((i - GRID) / SIGNS));
    }
    unsigned entry[4], more[4];

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = Layout::at(1) + 32 * half + 8 * j;
            more[j] = record.word(at + 4);
            entry[j] = table.template word<COPIES, 256>(0, record.word(at), 8 * t) |
                       table.template word<SIGNS, 128>(GRID, more[j], 7 * t);
        }
        load_d(record);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return values(entry[s / 2] >> s % 2 * 16); }
    __device__ __forceinline__ float factor(int j) const { return odd_of(more[j] >> 28); }
};

// What the other two share: the scales of a half, a nibble for each 16 elements.
struct IQ2Halves : IQ2Base {
    static constexpr int SUB = 16;
    unsigned entry[8], scales;
    __device__ __forceinline__ unsigned codes(int s) const { return values(entry[s]); }
    __device__ __forceinline__ float factor(int j) const { return odd_of(scales >> 4 * j & 15u); }
};

// fields: d, qs, scales
struct IQ2_XS_Record : IQ2Halves {
    using Layout = RecordLayout<IQ2_XS_Record>;
    static constexpr int FIELDS = 3;
    static constexpr int COPIES = 16, SIGNS = SIGN_COPIES, GRID = 512 * COPIES, TABLE = GRID + 128 * SIGNS;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 2 : i == 1 ? 64 : 8; }
    __device__ __forceinline__ static unsigned table_word(int i) {
        return i < GRID ? IQ2_XS_GRID[i / COPIES] : signs_word(signs_of((i - GRID) / SIGNS));
    }

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned q = record.pair(Layout::at(1) + 32 * half + 4 * i + t / 2 * 2);
            const unsigned all =
                table.template word<COPIES, 512>(0, q, 0) | table.template word<SIGNS, 128>(GRID, q, 9);
            entry[i] = all >> t % 2 * 16;
        }
        scales = record.word(Layout::at(2) + 4 * half), load_d(record);
    }
};

// fields: d, qs, qh, scales
struct IQ2_S_Record : IQ2Halves {
    using Layout = RecordLayout<IQ2_S_Record>;
    static constexpr int FIELDS = 4;
    static constexpr int COPIES = 8, SIGNS = SIGN_COPIES, GRID = 1024 * COPIES, TABLE = GRID + 256 * SIGNS;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 2 : i == 1 ? 64 : 8; }
    __device__ __forceinline__ static unsigned table_word(int i) {
        return i < GRID ? IQ2_S_GRID[i / COPIES] : signs_word((i - GRID) / SIGNS);
    }

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        const unsigned high = record.word(Layout::at(2) + 4 * half);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int group = 2 * i + t / 2, at = Layout::at(1) + 16 * half + i / 2 * 4, shift = group % 4 * 8;
            const unsigned index = (record.word(at) >> shift & 255u) | (high >> 2 * group & 3u) << 8;
            const unsigned signs = record.word(at + 32) >> shift & 255u;
            const unsigned all = table.template entry<COPIES>(0, index) | table.template entry<SIGNS>(GRID, signs);
            entry[i] = all >> t % 2 * 16;
        }
        scales = record.word(Layout::at(3) + 4 * half), load_d(record);
    }
};

// ---- three bits: eight magnitudes, entries of four -------------------------------------------------------------

// fields: d, qs
struct IQ3_XXS_Record : RecordBase {
    using Layout = RecordLayout<IQ3_XXS_Record>;
    static constexpr bool FLIPS = true;
    static constexpr int FIELDS = 2, SUB = 32, ORDER = BY_EIGHT;
    static constexpr int COPIES = 32, SIGNS = SIGN_COPIES, GRID = 256 * COPIES, TABLE = GRID + 128 * SIGNS;
    __host__ __device__ static constexpr int bytes(int i) { return i ? 96 : 2; }
    // Four bytes an entry; of signs bit e + 2 lies 16 above bit e.
    __device__ __forceinline__ static unsigned table_word(int i) {
        if (i < GRID) {
            const int entry = i / COPIES;
            return permuted(IQ3_XXS_VALUES[0], IQ3_XXS_VALUES[1], IQ3_XXS_GRID[entry / 2] >> entry % 2 * 16);
        }
        const unsigned signs = signs_of((i - GRID) / SIGNS);
        return signs | signs << 14;
    }
    unsigned value[8], signs[4], scales;
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned both = record.pair(Layout::at(1) + 32 * half + 8 * j + 2 * t);
            const unsigned more = record.word(Layout::at(1) + 64 + 16 * half + 4 * j);
#pragma unroll
            for (int i = 0; i < 2; ++i) value[2 * j + i] = table.template word<COPIES, 256>(0, both, 8 * i);
            signs[j] = table.template word<SIGNS, 128>(GRID, more, 7 * t);
            scales = j ? scales | more >> 28 << 4 * j : more >> 28;
        }
        d = __fmul_rn(half_of(record.narrow, 0), 0.25f);
    }
    __device__ __forceinline__ unsigned codes(int s) const { return value[s]; }
    __device__ __forceinline__ unsigned flips(int s, int i) const { return signs[s / 2] << (15 - s % 2 * 4 - i); }
    __device__ __forceinline__ float factor(int j) const { return odd_of(scales >> 4 * j & 15u); }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: d, qs, qh, signs, scales. An element is 2 u - 15 with a nibble u, which is 8 and its digit, or all bits of
// that turned where it is negative. Of eight elements they are nibbles 0, 1, 4 and 5 of a word, and those behind them.
struct IQ3_S_Record : RecordBase {
    using Layout = RecordLayout<IQ3_S_Record>;
    static constexpr int FIELDS = 5, SUB = 32, ORDER = BY_EIGHT, BIAS = 15;
    static constexpr int COPIES = 16, SIGNS = 8, GRID = 512 * COPIES, TABLE = GRID + 256 * SIGNS;
    __host__ __device__ static constexpr int bytes(int i) {
        return i == 0 ? 2 : i == 1 ? 64 : i == 2 ? 8 : i == 3 ? 32 : 4;
    }
    // Four nibbles: those of an octet's first four elements.
    __host__ __device__ static constexpr unsigned placed(unsigned four) {
        return (four & 0xffu) | (four & 0xff00u) << 8;
    }
    __device__ __forceinline__ static unsigned table_word(int i) {
        if (i < GRID) {
            const int entry = i / COPIES;
            return placed(IQ3_S_GRID[entry / 2] >> entry % 2 * 16 & 0xffffu) | 0x00880088u;
        }
        const unsigned all = nibbles_of((i - GRID) / SIGNS) * 15u;
        return placed(all & 0xffffu) | placed(all >> 16) << 8;
    }
    unsigned octet[4], scales;
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        const unsigned high = record.word(Layout::at(2) + 4 * half) >> 2 * t;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned both = record.word(Layout::at(1) + 32 * half + 8 * j + t / 2 * 4) >> t % 2 * 16;
            unsigned four[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                four[i] = table.template entry<COPIES>(0, (both >> 8 * i & 255u) | (high >> (8 * j + i) & 1u) << 8);
            octet[j] = (four[0] | four[1] << 8) ^
                       table.template word<SIGNS, 256>(GRID, record.word(Layout::at(3) + 16 * half + 4 * j), 8 * t);
        }
        scales = record.word(Layout::at(4)) >> 16 * half, d = half_of(record.narrow, 0);
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        const unsigned four = octet[s / 2] >> s % 2 * 8;
        return (four & 0x000f000fu) << 1 | (four & 0x00f000f0u) << 5;
    }
    __device__ __forceinline__ float factor(int j) const { return odd_of(scales >> 4 * j & 15u); }
    __device__ __forceinline__ float outer() const { return d; }
};

// ---- one bit: -1, 0 and 1, moved by an eighth ------------------------------------------------------------------

// An element is 8 u - 8 and one more or less, u of two bits: of eight elements bits 0, 2, 16, 18, and those 4 above.
struct IQ1Base : RecordBase {
    static constexpr int BIAS = 64, COPIES = 1, TABLE = 2048 * COPIES;
    __device__ __forceinline__ static unsigned table_word(int i) {
        unsigned all = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e)
            all |= (IQ1_GRID[i / COPIES] >> 4 * e & 3u) << (e / 4 * 4 + e % 2 * 2 + e / 2 % 2 * 16);
        return all;
    }
    // 64 and elements, of which the first four are those of an octet.
    __device__ __forceinline__ static unsigned iq1_bytes(unsigned entry, bool minus) {
        return ((entry & 0x00030003u) << 3 | (entry & 0x000c000cu) << 9) + (minus ? 0x37373737u : 0x39393939u);
    }
    float d;
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: d, qs, qh
struct IQ1_S_Record : IQ1Base {
    using Layout = RecordLayout<IQ1_S_Record>;
    static constexpr int FIELDS = 3, SUB = 32, ORDER = BY_EIGHT;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 2 : i == 1 ? 32 : 16; }
    unsigned entry[4], more[4];

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            more[j] = record.word(Layout::at(2) + 8 * half + j / 2 * 4) >> j % 2 * 16;
            const unsigned low = record.word(Layout::at(1) + 16 * half + 4 * j) >> 8 * t & 255u;
            entry[j] = table.template entry<COPIES>(0, low | (more[j] >> 3 * t & 7u) << 8);
        }
        d = __fmul_rn(half_of(record.narrow, 0), 0.125f);
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        return iq1_bytes(entry[s / 2] >> s % 2 * 4, (more[s / 2] & 0x8000u) != 0);
    }
    __device__ __forceinline__ float factor(int j) const { return odd_of(more[j] >> 12 & 7u); }
};

// fields: qs, qh, scales
struct IQ1_M_Record : IQ1Base {
    using Layout = RecordLayout<IQ1_M_Record>;
    static constexpr int FIELDS = 3, SUB = 16;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 32 : i == 1 ? 16 : 8; }
    // d of the upper four of each 16 bits.
    __device__ __forceinline__ static float d_of(const unsigned (&words)[2]) {
        const unsigned upper = __byte_perm(words[0], words[1], 0x7531) & 0xf0f0f0f0u, two = upper >> 4 | upper >> 8;
        return half_of(__byte_perm(two, 0, 0x4420), 0);
    }
    unsigned entry[8], more[2], scales;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        const unsigned words[2] = {record.word(Layout::at(2)), record.word(Layout::at(2) + 4)};
        d = __fmul_rn(d_of(words), 0.125f), scales = words[half];
#pragma unroll
        for (int i = 0; i < 2; ++i) more[i] = record.word(Layout::at(1) + 8 * half + 4 * i) >> t / 2 * 4;
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const unsigned low = record.word(Layout::at(0) + 16 * half + s / 2 * 4) >> s % 2 * 16 >> t / 2 * 8 & 255u;
            const unsigned all = table.template entry<COPIES>(0, low | (more[s / 4] >> s % 4 * 8 & 7u) << 8);
            entry[s] = all >> t % 2 * 4;
        }
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        return iq1_bytes(entry[s], (more[s / 4] >> s % 4 * 8 & 8u) != 0);
    }
    __device__ __forceinline__ float factor(int j) const { return odd_of(scales >> (j / 4 * 16 + j % 4 * 3) & 7u); }
};
