// Decoders for the streaming products of GGUF's types whose groups of elements are entries of a grid; what their
// members are stands in linear/gguf_records.cuh, the bytes in formats/gguf_grids.cuh, whose grids these use.
#pragma once
#include "formats/gguf_grids.cuh"
#include "linear/gguf_records.cuh"

// Groups whose elements have signs. A magnitude times 2 s + 1 is below 2048; d comes divided.
template <int DIVISOR>
struct SignedRecord : RecordBase {
    static constexpr bool FLIPS = true, INNER = true;
    struct Inner {
        float d;
        static constexpr float dmin = 0.0f;

        template <typename Record>
        __device__ __forceinline__ void load(const Record& record) {
            d = __fmul_rn(half_of(record.narrow, 0), 1.0f / DIVISOR);
        }
    };

    // Entry i of a table: a grid of so many words, and behind it numbers of signs, spread.
    __device__ __forceinline__ static unsigned with_signs(const unsigned* grid, int words, int i) {
        return i < words ? grid[i] : spread(signs_of(i - words));
    }

    // Up to eight bits, of which bit e + 2 lies 16 above bit e.
    __device__ __forceinline__ static unsigned spread(unsigned signs) { return signs | signs << 14; }
    // Bits e and e + 2 of them at 15 and 31.
    __device__ __forceinline__ static unsigned flips_of(unsigned spread, int e) { return spread << (15 - e); }
};

// 2 s + 1, s in the lowest four bits.
__device__ __forceinline__ unsigned odd_integer(unsigned s) { return (s << 1 | 1u) & 31u; }

// ---- two bits: three magnitudes --------------------------------------------------------------------------------

__device__ __forceinline__ unsigned iq2_bytes(unsigned entry) { return __byte_perm(IQ2_VALUES, 0, entry & 0xffffu); }

// fields: d, qs
struct IQ2_XXS_Record : SignedRecord<8> {
    using Layout = RecordLayout<IQ2_XXS_Record>;
    static constexpr int FIELDS = 2, SUB = 32, ORDER = BY_EIGHT, GRID = 256, TABLE = GRID + 128;
    __host__ __device__ static constexpr int bytes(int i) { return i ? 64 : 2; }
    __device__ __forceinline__ static unsigned table_word(int i) { return with_signs(IQ2_XXS_GRID, GRID, i); }
    unsigned entry[4], signs[4], odd[4];
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load_codes(
        const Record& record, const Table& table, const Inner&, int t, int half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = Layout::at(1) + 32 * half + 8 * j;
            const unsigned more = record.word(at + 4);
            entry[j] = table.word(record.word(at) >> 8 * t & 255u);
            signs[j] = table.word(GRID + (more >> 7 * t & 127u)), odd[j] = odd_integer(more >> 28);
        }
    }
    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        Inner inner;
        inner.load(record);
        load_codes(record, table, inner, t, half);
        d = inner.d;
    }
    __device__ __forceinline__ unsigned codes(int s) const { return iq2_bytes(entry[s / 2] >> s % 2 * 16); }
    __device__ __forceinline__ unsigned flips(int s, int i) const { return flips_of(signs[s / 2], s % 2 * 4 + i); }
    __device__ __forceinline__ unsigned scale(int j) const { return odd[j]; }
    __device__ __forceinline__ float factor(int j) const { return static_cast<float>(odd[j]); }
    __device__ __forceinline__ float outer() const { return d; }
};

// What the other two share: two lanes have the halves of an entry.
struct IQ2Base : SignedRecord<8> {
    static constexpr int SUB = 16;
    unsigned entry[8], signs[8], scales;
    float d;

    __device__ __forceinline__ unsigned codes(int s) const { return iq2_bytes(entry[s]); }
    __device__ __forceinline__ unsigned flips(int s, int i) const { return flips_of(signs[s], i); }
    __device__ __forceinline__ unsigned scale(int j) const { return odd_integer(scales >> 4 * j); }
    __device__ __forceinline__ float factor(int j) const { return static_cast<float>(scale(j)); }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: d, qs, scales
struct IQ2_XS_Record : IQ2Base {
    using Layout = RecordLayout<IQ2_XS_Record>;
    static constexpr int FIELDS = 3, GRID = 512, TABLE = GRID + 128;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 2 : i == 1 ? 64 : 8; }
    __device__ __forceinline__ static unsigned table_word(int i) { return with_signs(IQ2_XS_GRID, GRID, i); }

    template <typename Record, typename Table>
    __device__ __forceinline__ void load_codes(
        const Record& record, const Table& table, const Inner&, int t, int half) {
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const unsigned q = record.word(Layout::at(1) + 32 * half + 4 * s) >> t / 2 * 16;
            entry[s] = table.word(q & 511u) >> t % 2 * 16, signs[s] = table.word(GRID + (q >> 9 & 127u)) >> t % 2 * 4;
        }
        scales = record.word(Layout::at(2) + 4 * half);
    }
    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        Inner inner;
        inner.load(record);
        load_codes(record, table, inner, t, half);
        d = inner.d;
    }
};

// fields: d, qs, qh, scales
struct IQ2_S_Record : IQ2Base {
    using Layout = RecordLayout<IQ2_S_Record>;
    static constexpr int FIELDS = 4, TABLE = 1024;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 2 : i == 1 ? 64 : 8; }
    __device__ __forceinline__ static unsigned table_word(int i) { return IQ2_S_GRID[i]; }

    template <typename Record, typename Table>
    __device__ __forceinline__ void load_codes(
        const Record& record, const Table& table, const Inner&, int t, int half) {
        const unsigned high = record.word(Layout::at(2) + 4 * half) >> t / 2 * 2;
        const int index_at = t / 2 * 8, signs_at = t / 2 * 8 + t % 2 * 4;
#pragma unroll
        for (int s = 0; s < 8; s += 2) {
            const int at = Layout::at(1) + 16 * half + s * 2;
            const unsigned low = record.word(at) >> index_at, signs_of_two = record.word(at + 32) >> signs_at;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned index = (low >> 16 * i & 255u) | (high >> 4 * (s + i) & 3u) << 8;
                entry[s + i] = table.word(index) >> t % 2 * 16;
                signs[s + i] = spread(signs_of_two >> 16 * i & 15u);
            }
        }
        scales = record.word(Layout::at(3) + 4 * half);
    }
    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        Inner inner;
        inner.load(record);
        load_codes(record, table, inner, t, half);
        d = inner.d;
    }
};

// ---- three bits: eight magnitudes, entries of four -------------------------------------------------------------

template <int DIVISOR>
struct IQ3Base : SignedRecord<DIVISOR> {
    static constexpr int SUB = 32, ORDER = BY_EIGHT;
    unsigned value[8], signs[4], odd[4];
    float d;

    __device__ __forceinline__ unsigned codes(int s) const { return value[s]; }
    __device__ __forceinline__ unsigned flips(int s, int i) const {
        return this->flips_of(signs[s / 2], s % 2 * 4 + i);
    }
    __device__ __forceinline__ unsigned scale(int j) const { return odd[j]; }
    __device__ __forceinline__ float factor(int j) const { return static_cast<float>(odd[j]); }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: d, qs
struct IQ3_XXS_Record : IQ3Base<4> {
    using Layout = RecordLayout<IQ3_XXS_Record>;
    static constexpr int FIELDS = 2, GRID = 128, TABLE = GRID + 128;
    __host__ __device__ static constexpr int bytes(int i) { return i ? 96 : 2; }
    __device__ __forceinline__ static unsigned table_word(int i) { return with_signs(IQ3_XXS_GRID, GRID, i); }

    template <typename Record, typename Table>
    __device__ __forceinline__ void load_codes(
        const Record& record, const Table& table, const Inner&, int t, int half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned both = record.word(Layout::at(1) + 32 * half + 8 * j + t / 2 * 4) >> t % 2 * 16;
            const unsigned more = record.word(Layout::at(1) + 64 + 16 * half + 4 * j);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                value[2 * j + i] = __byte_perm(IQ3_XXS_VALUES[0], IQ3_XXS_VALUES[1], table.pair(both >> 8 * i & 255u));
            signs[j] = table.word(GRID + (more >> 7 * t & 127u)), odd[j] = odd_integer(more >> 28);
        }
    }
    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        Inner inner;
        inner.load(record);
        load_codes(record, table, inner, t, half);
        d = inner.d;
    }
};

// fields: d, qs, qh, signs, scales
struct IQ3_S_Record : IQ3Base<1> {
    using Layout = RecordLayout<IQ3_S_Record>;
    static constexpr int FIELDS = 5, TABLE = 256;
    __host__ __device__ static constexpr int bytes(int i) {
        return i == 0 ? 2 : i == 1 ? 64 : i == 2 ? 8 : i == 3 ? 32 : 4;
    }
    __device__ __forceinline__ static unsigned table_word(int i) { return IQ3_S_GRID[i]; }

    template <typename Record, typename Table>
    __device__ __forceinline__ void load_codes(
        const Record& record, const Table& table, const Inner&, int t, int half) {
        const unsigned high = record.word(Layout::at(2) + 4 * half) >> 2 * t;
        const unsigned scales = record.word(Layout::at(4)) >> 16 * half;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned both = record.word(Layout::at(1) + 32 * half + 8 * j + t / 2 * 4) >> t % 2 * 16;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned index = (both >> 8 * i & 255u) | (high >> (8 * j + i) & 1u) << 8;
                value[2 * j + i] = __byte_perm(IQ3_S_VALUES[0], IQ3_S_VALUES[1], table.pair(index));
            }
            signs[j] = spread(record.word(Layout::at(3) + 16 * half + 4 * j) >> 8 * t & 255u);
            odd[j] = odd_integer(scales >> 4 * j);
        }
    }
    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        Inner inner;
        inner.load(record);
        load_codes(record, table, inner, t, half);
        d = inner.d;
    }
};

// ---- one bit: -1, 0 and 1, moved by an eighth ------------------------------------------------------------------

// 8 times a coordinate and 1 more, or less where `minus`, and 64.
__device__ __forceinline__ unsigned iq1_bytes(unsigned entry, bool minus) {
    return __byte_perm(minus ? 0x00473f37u : 0x00494139u, 0, entry & 0xffffu);
}

// fields: d, qs, qh
struct IQ1_S_Record : RecordBase {
    using Layout = RecordLayout<IQ1_S_Record>;
    static constexpr int FIELDS = 3, SUB = 32, BIAS = 64, ORDER = BY_EIGHT, TABLE = 2048;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 2 : i == 1 ? 32 : 16; }
    __device__ __forceinline__ static unsigned table_word(int i) { return IQ1_GRID[i]; }
    unsigned entry[4], more[4];
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            more[j] = record.word(Layout::at(2) + 8 * half + j / 2 * 4) >> j % 2 * 16;
            const unsigned low = record.word(Layout::at(1) + 16 * half + 4 * j) >> 8 * t & 255u;
            entry[j] = table.word(low | (more[j] >> 3 * t & 7u) << 8);
        }
        d = __fmul_rn(half_of(record.narrow, 0), 0.125f);
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        return iq1_bytes(entry[s / 2] >> s % 2 * 16, (more[s / 2] & 0x8000u) != 0);
    }
    __device__ __forceinline__ float factor(int j) const { return odd_of(more[j] >> 12 & 7u); }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: qs, qh, scales
struct IQ1_M_Record : RecordBase {
    using Layout = RecordLayout<IQ1_M_Record>;
    static constexpr int FIELDS = 3, SUB = 16, BIAS = 64, TABLE = 2048;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 32 : i == 1 ? 16 : 8; }
    __device__ __forceinline__ static unsigned table_word(int i) { return IQ1_GRID[i]; }
    unsigned entry[8], more[2], scales;
    float d;

    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        const unsigned words[2] = {record.word(Layout::at(2)), record.word(Layout::at(2) + 4)};
        const unsigned all =
            (words[0] >> 12 & 0xfu) | (words[0] >> 24 & 0xf0u) | (words[1] >> 4 & 0xf00u) | (words[1] >> 16 & 0xf000u);
        d = __fmul_rn(half_of(all, 0), 0.125f), scales = words[half];
#pragma unroll
        for (int i = 0; i < 2; ++i) more[i] = record.word(Layout::at(1) + 8 * half + 4 * i) >> t / 2 * 4;
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const unsigned low = record.word(Layout::at(0) + 16 * half + s / 2 * 4) >> s % 2 * 16 >> t / 2 * 8 & 255u;
            entry[s] = table.word(low | (more[s / 4] >> s % 4 * 8 & 7u) << 8) >> t % 2 * 16;
        }
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        return iq1_bytes(entry[s], (more[s / 4] >> s % 4 * 8 & 8u) != 0);
    }
    __device__ __forceinline__ float factor(int j) const { return odd_of(scales >> (j / 4 * 16 + j % 4 * 3) & 7u); }
    __device__ __forceinline__ float outer() const { return d; }
};
