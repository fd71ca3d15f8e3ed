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

// The elements that selectors of a permutation name, with `middle` in place of 0: three positive ones, or the
// `negative` ones, which are those from 4 on.
__host__ __device__ constexpr unsigned iq2_values(bool negative, unsigned middle) {
    unsigned all = 0;
    for (int i = 0; i < 3; ++i) {
        const unsigned value = IQ2_VALUES >> 8 * i & 255u;
        all |= (middle + (negative ? 256u - value : value) & 255u) << 8 * i;
    }
    return all;
}

// A nibble for each element, the selector of its byte; lane t has an octet of each 32.
struct IQ2Base : RecordBase {
    static constexpr int ORDER = BY_EIGHT;
    static constexpr bool SIGNED = true, WHOLE = true;
    unsigned entry[4];
    float d;
    template <typename Record>
    __device__ __forceinline__ void load_d(const Record& record) {
        d = __fmul_rn(half_of(record.narrow, 0), 0.125f);
    }
    __device__ __forceinline__ float outer() const { return d; }
    __device__ __forceinline__ static unsigned signs_word(unsigned signs) { return nibbles_of(signs) << 2; }
    __device__ __forceinline__ unsigned signed_codes(int s) const {
        return permuted(iq2_values(false, 0), iq2_values(true, 0), entry[s / 2] >> s % 2 * 16);
    }
};

// fields: d, qs
struct IQ2_XXS_Record : IQ2Base {
    using Layout = RecordLayout<IQ2_XXS_Record>;
    static constexpr int FIELDS = 2, SUB = 32;
    static constexpr int COPIES = 32, SIGNS = SIGN_COPIES, GRID = 256 * COPIES, TABLE = GRID + 128 * SIGNS;
    __host__ __device__ static constexpr int bytes(int i) { return i ? 64 : 2; }
    __device__ __forceinline__ static unsigned table_word(int i) {
        return i < GRID ? IQ2_XXS_GRID[i / COPIES] : signs_word(signs_of((i - GRID) / SIGNS));
    }
    unsigned more[4];

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = Layout::at(1) + 32 * half + 8 * j;
            more[j] = record.word(at + 4);
            entry[j] = table.template entry<COPIES>(0, record.byte(at + t)) |
                       table.template word<SIGNS, 128>(GRID, more[j], 7 * t + 32);
        }
        load_d(record);
    }
    __device__ __forceinline__ int whole(int j) const { return more[j] >> 27 | 1; }
};

// What the other two share: the scales of a half, a nibble for each 16 elements.
struct IQ2Halves : IQ2Base {
    static constexpr int SUB = 16;
    unsigned scales;
    __device__ __forceinline__ int whole(int j) const { return ((j ? scales >> (4 * j - 1) : scales << 1) & 30u) | 1u; }
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
        for (int j = 0; j < 4; ++j) {
            const unsigned q = record.pair(Layout::at(1) + 32 * half + 8 * j + 2 * t);
            entry[j] = table.template word<COPIES, 512>(0, q) | table.template word<SIGNS, 128>(GRID, q, 9);
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
        const unsigned high = record.word(Layout::at(2) + 4 * half) >> 2 * t;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = Layout::at(1) + 16 * half + 4 * j + t;
            const unsigned index = __byte_perm(record.byte(at), high, (4 + j) << 4);
            entry[j] =
                table.template word<COPIES, 1024>(0, index) | table.template entry<SIGNS>(GRID, record.byte(at + 32));
        }
        scales = record.word(Layout::at(3) + 4 * half), load_d(record);
    }
};

// ---- three bits: eight magnitudes, entries of four -------------------------------------------------------------

// Signs of an octet: the highest bits of four bytes, and the bits below them.
__host__ __device__ constexpr unsigned two_bits_a_byte(unsigned signs) {
    unsigned all = 0;
    for (int e = 0; e < 4; ++e) all |= (signs >> e & 1u) << (8 * e + 7) | (signs >> (4 + e) & 1u) << (8 * e + 6);
    return all;
}

// fields: d, qs
struct IQ3_XXS_Record : RecordBase {
    using Layout = RecordLayout<IQ3_XXS_Record>;
    static constexpr int FIELDS = 2, SUB = 32, ORDER = BY_EIGHT;
    static constexpr bool SIGNED = true, WHOLE = true;
    static constexpr int COPIES = 32, SIGNS = SIGN_COPIES, GRID = 256 * COPIES, TABLE = GRID + 128 * SIGNS;
    __host__ __device__ static constexpr int bytes(int i) { return i ? 96 : 2; }
    // Four bytes an entry.
    __device__ __forceinline__ static unsigned values_word(int entry) {
        return permuted(IQ3_XXS_VALUES[0], IQ3_XXS_VALUES[1], IQ3_XXS_GRID[entry / 2] >> entry % 2 * 16);
    }
    __device__ __forceinline__ static unsigned table_word(int i) {
        return i < GRID ? values_word(i / COPIES) : two_bits_a_byte(signs_of((i - GRID) / SIGNS));
    }
    unsigned value[8], signs[4], more[4];
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned both = record.pair(Layout::at(1) + 32 * half + 8 * j + 2 * t);
            more[j] = record.word(Layout::at(1) + 64 + 16 * half + 4 * j);
#pragma unroll
            for (int i = 0; i < 2; ++i) value[2 * j + i] = table.template word<COPIES, 256>(0, both, 8 * i);
            signs[j] = table.template word<SIGNS, 128>(GRID, more[j], 7 * t + 32);
        }
        d = __fmul_rn(half_of(record.narrow, 0), 0.25f);
    }
    // Of negative ones, none of which is 0, all bits are turned, and 1 is added.
    __device__ __forceinline__ unsigned signed_codes(int s) const {
        const unsigned negative = sign_bytes(signs[s / 2] << s % 2);
        return (value[s] ^ negative) + (negative & 0x01010101u);
    }
    __device__ __forceinline__ int whole(int j) const { return more[j] >> 27 | 1; }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: d, qs, qh, signs, scales
struct IQ3_S_Record : RecordBase {
    using Layout = RecordLayout<IQ3_S_Record>;
    static constexpr int FIELDS = 5, SUB = 32, ORDER = BY_EIGHT;
    static constexpr bool SIGNED = true, WHOLE = true;
    static constexpr int MOST = 465, COPIES = 16, SIGNS = 8, GRID = 512 * COPIES, TABLE = GRID + 256 * SIGNS;
    __host__ __device__ static constexpr int bytes(int i) {
        return i == 0 ? 2 : i == 1 ? 64 : i == 2 ? 8 : i == 3 ? 32 : 4;
    }
    // Four bytes an entry, odd numbers.
    __device__ __forceinline__ static unsigned table_word(int i) {
        if (i >= GRID) return two_bits_a_byte((i - GRID) / SIGNS);
        const int entry = i / COPIES;
        return permuted(IQ3_S_VALUES[0], IQ3_S_VALUES[1], IQ3_S_GRID[entry / 2] >> entry % 2 * 16);
    }
    unsigned value[8], signs[4], scales;
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        const unsigned high = record.word(Layout::at(2) + 4 * half) >> 2 * t;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned both = record.pair(Layout::at(1) + 32 * half + 8 * j + 2 * t);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                value[2 * j + i] = table.template word<COPIES, 512>(0, __byte_perm(both, high >> i, i | (4 + j) << 4));
            signs[j] = table.template entry<SIGNS>(GRID, record.byte(Layout::at(3) + 16 * half + 4 * j + t));
        }
        scales = record.word(Layout::at(4)) >> 16 * half, d = half_of(record.narrow, 0);
    }
    // An odd number with all its bits but the lowest turned is the same with another sign.
    __device__ __forceinline__ unsigned signed_codes(int s) const {
        return value[s] ^ (sign_bytes(signs[s / 2] << s % 2) & 0xfefefefeu);
    }
    __device__ __forceinline__ int whole(int j) const { return ((j ? scales >> (4 * j - 1) : scales << 1) & 30u) | 1u; }
    __device__ __forceinline__ float outer() const { return d; }
};

// ---- one bit: -1, 0 and 1, moved by an eighth ------------------------------------------------------------------

// Eight times an element: a byte.
struct IQ1Base : RecordBase {
    static constexpr int COPIES = 1, TABLE = 2048 * COPIES, ORDER = BY_EIGHT, MOST = 135;
    static constexpr bool SIGNED = true, WHOLE = true;
    __device__ __forceinline__ static unsigned table_word(int i) { return IQ1_GRID[i / COPIES]; }
    // By two bits: -8, 0 and 8, and 1 more, or less where `minus`.
    __device__ __forceinline__ static unsigned iq1_bytes(unsigned entry, bool minus) {
        return permuted(minus ? 0x0007fff7u : 0x000901f9u, 0, entry);
    }
    unsigned entry[4];
    float d;
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: d, qs, qh
struct IQ1_S_Record : IQ1Base {
    using Layout = RecordLayout<IQ1_S_Record>;
    static constexpr int FIELDS = 3, SUB = 32;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 2 : i == 1 ? 32 : 16; }
    unsigned more[4];

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            more[j] = record.pair(Layout::at(2) + 8 * half + 2 * j);
            const unsigned low = record.byte(Layout::at(1) + 16 * half + 4 * j + t);
            entry[j] = table.template word<COPIES, 2048>(0, __byte_perm(low, more[j] >> 3 * t, 0x4440));
        }
        d = __fmul_rn(half_of(record.narrow, 0), 0.125f);
    }
    __device__ __forceinline__ unsigned signed_codes(int s) const {
        return iq1_bytes(entry[s / 2] >> s % 2 * 16, (more[s / 2] & 0x8000u) != 0);
    }
    __device__ __forceinline__ int whole(int j) const { return (more[j] >> 11 & 14u) | 1u; }
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
    unsigned more[2], scales;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        const unsigned words[2] = {record.word(Layout::at(2)), record.word(Layout::at(2) + 4)};
        d = __fmul_rn(d_of(words), 0.125f), scales = words[half];
        // Of an octet a nibble: three bits of the index, and whether an eighth is taken off.
#pragma unroll
        for (int i = 0; i < 2; ++i) more[i] = record.word(Layout::at(1) + 8 * half + 4 * i) >> 4 * t;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned low = record.byte(Layout::at(0) + 16 * half + 4 * j + t);
            entry[j] = table.template word<COPIES, 2048>(0, __byte_perm(low, more[j / 2], (4 + j % 2 * 2) << 4));
        }
    }
    __device__ __forceinline__ unsigned signed_codes(int s) const {
        return iq1_bytes(entry[s / 2] >> s % 2 * 16, (more[s / 4] & 8u << s / 2 % 2 * 16) != 0);
    }
    __device__ __forceinline__ int whole(int j) const {
        const int at = j / 4 * 16 + j % 4 * 3;
        return ((at ? scales >> (at - 1) : scales << 1) & 14u) | 1u;
    }
};
