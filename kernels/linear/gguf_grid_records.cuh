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

// 2 s + 1 of four nibbles, the low ones of a word's bytes.
__device__ __forceinline__ unsigned odd_bytes(unsigned word) { return (word << 1 & 0x1e1e1e1eu) | 0x01010101u; }
__device__ __forceinline__ unsigned byte_of(unsigned word, int i) { return word >> 8 * i & 255u; }

// ---- two bits: three magnitudes --------------------------------------------------------------------------------

__device__ __forceinline__ unsigned iq2_bytes(unsigned entry) { return permuted(IQ2_VALUES, 0, entry); }

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
            signs[j] = table.word(GRID + (more >> 7 * t & 127u)), odd[j] = more >> 27 | 1u;
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

// What the other two share. HALF: a lane has a whole group in two steps, and the scale of its 16; else, where all lanes
// have one factor at a time, half of one in a step.
template <bool HALF>
struct IQ2Base : SignedRecord<8> {
    static constexpr int SUB = 16, ORDER = HALF ? BY_EIGHT : BY_SIXTEEN, ENTRIES = HALF ? 4 : 8;
    unsigned entry[ENTRIES], signs[ENTRIES], odd[2];
    float d;

    // Which of the 16 groups of a half the lane's entry i is of.
    __device__ __forceinline__ static int group(int i, int t) { return HALF ? 4 * i + t : 2 * i + t / 2; }

    __device__ __forceinline__ void load_scales(unsigned scales, int t) {
        if (HALF) odd[0] = odd_bytes(scales >> t / 2 * 4);
        else odd[0] = odd_bytes(scales), odd[1] = odd_bytes(scales >> 4);
    }
    __device__ __forceinline__ unsigned codes(int s) const {
        return iq2_bytes(HALF ? entry[s / 2] >> s % 2 * 16 : entry[s % ENTRIES]);
    }
    __device__ __forceinline__ unsigned flips(int s, int i) const {
        return HALF ? flips_of(signs[s / 2], s % 2 * 4 + i) : flips_of(signs[s % ENTRIES], i);
    }
    __device__ __forceinline__ unsigned scale(int j) const { return byte_of(odd[HALF ? 0 : j % 2], j / 2); }
    __device__ __forceinline__ float factor(int j) const { return static_cast<float>(scale(j)); }
    __device__ __forceinline__ float outer() const { return d; }
};

// fields: d, qs, scales
template <bool HALF>
struct IQ2_XS_Record : IQ2Base<HALF> {
    using Layout = RecordLayout<IQ2_XS_Record>;
    using Inner = typename IQ2Base<HALF>::Inner;
    static constexpr int FIELDS = 3, GRID = 512, TABLE = GRID + 128;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 2 : i == 1 ? 64 : 8; }
    __device__ __forceinline__ static unsigned table_word(int i) {
        return IQ2Base<HALF>::with_signs(IQ2_XS_GRID, GRID, i);
    }

    template <typename Record, typename Table>
    __device__ __forceinline__ void load_codes(
        const Record& record, const Table& table, const Inner&, int t, int half) {
#pragma unroll
        for (int i = 0; i < this->ENTRIES; ++i) {
            const int group = this->group(i, t);
            const unsigned q = record.word(Layout::at(1) + 32 * half + group / 2 * 4) >> group % 2 * 16;
            this->entry[i] = table.word(q & 511u), this->signs[i] = table.word(GRID + (q >> 9 & 127u));
            if (!HALF) this->entry[i] >>= t % 2 * 16, this->signs[i] >>= t % 2 * 4;
        }
        this->load_scales(record.word(Layout::at(2) + 4 * half), t);
    }
    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        Inner inner;
        inner.load(record);
        load_codes(record, table, inner, t, half);
        this->d = inner.d;
    }
};

// fields: d, qs, qh, scales
template <bool HALF>
struct IQ2_S_Record : IQ2Base<HALF> {
    using Layout = RecordLayout<IQ2_S_Record>;
    using Inner = typename IQ2Base<HALF>::Inner;
    static constexpr int FIELDS = 4, TABLE = 1024;
    __host__ __device__ static constexpr int bytes(int i) { return i == 0 ? 2 : i == 1 ? 64 : 8; }
    __device__ __forceinline__ static unsigned table_word(int i) { return IQ2_S_GRID[i]; }

    template <typename Record, typename Table>
    __device__ __forceinline__ void load_codes(
        const Record& record, const Table& table, const Inner&, int t, int half) {
        const unsigned high = record.word(Layout::at(2) + 4 * half);
#pragma unroll
        for (int i = 0; i < this->ENTRIES; ++i) {
            const int group = this->group(i, t), at = Layout::at(1) + 16 * half + group / 4 * 4, shift = group % 4 * 8;
            const unsigned index = (record.word(at) >> shift & 255u) | (high >> 2 * group & 3u) << 8;
            const unsigned signs = this->spread(record.word(at + 32) >> shift & 255u);
            this->entry[i] = table.word(index), this->signs[i] = signs;
            if (!HALF) this->entry[i] >>= t % 2 * 16, this->signs[i] >>= t % 2 * 4;
        }
        this->load_scales(record.word(Layout::at(3) + 4 * half), t);
    }
    template <typename Record, typename Table>
    __device__ __forceinline__ void load(const Record& record, const Table& table, int t, int half) {
        Inner inner;
        inner.load(record);
        load_codes(record, table, inner, t, half);
        this->d = inner.d;
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
                value[2 * j + i] = permuted(IQ3_XXS_VALUES[0], IQ3_XXS_VALUES[1], table.pair(both >> 8 * i & 255u));
            signs[j] = table.word(GRID + (more >> 7 * t & 127u)), odd[j] = more >> 27 | 1u;
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
        const unsigned even = odd_bytes(scales), others = odd_bytes(scales >> 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned both = record.word(Layout::at(1) + 32 * half + 8 * j + t / 2 * 4) >> t % 2 * 16;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned index = (both >> 8 * i & 255u) | (high >> (8 * j + i) & 1u) << 8;
                value[2 * j + i] = permuted(IQ3_S_VALUES[0], IQ3_S_VALUES[1], table.pair(index));
            }
            signs[j] = spread(record.word(Layout::at(3) + 16 * half + 4 * j) >> 8 * t & 255u);
            odd[j] = byte_of(j % 2 ? others : even, j / 2);
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
    return permuted(minus ? 0x00473f37u : 0x00494139u, 0, entry);
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
