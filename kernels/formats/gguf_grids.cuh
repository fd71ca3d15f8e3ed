// GGUF's types whose groups of elements are entries of a grid. The contracts are those of
// kbitcupy/formats/gguf/grids.py. A decoder's planes are the fields of its class, in their order.
//
// Of the host, ahead of this source: the grids, whose entries are the digits of their coordinates, four bits each, the
// first in the lowest: unsigned IQ2_XXS_GRID[256], IQ2_XS_GRID[512], IQ2_S_GRID[1024] and IQ1_GRID[2048] of eight
// coordinates; two entries of four coordinates a word in IQ3_XXS_GRID[128] and IQ3_S_GRID[256].
//
// A group is an octet; four of them, a part of 32 elements, share a scale or two.
#pragma once
#include "formats/gguf_fields.cuh"

// The first three values of a coordinate and the eight of iq3_xxs, a byte each, as __byte_perm looks them up; iq3_s has
// the odd numbers.
constexpr unsigned IQ2_VALUES = 0x002b1908u;
constexpr unsigned IQ3_XXS_VALUES[2] = {0x1c140c04u, 0x3e342c24u}, IQ3_S_VALUES[2] = {0x07050301u, 0x0f0d0b09u};

// Byte `at` of plane i.
__device__ __forceinline__ unsigned load_byte(const Planes& planes, int i, long long at) {
    return __ldg(planes.at<unsigned char>(i) + at);
}

// Number `at` of 16 bits of plane i, which holds such numbers.
__device__ __forceinline__ unsigned load_short(const Planes& planes, int i, long long at) {
    return __ldg(planes.at<unsigned short>(i) + at);
}

// (2 s + 1) as a float, s in the lowest four bits.
__device__ __forceinline__ float odd_of(unsigned s) { return from_byte((s << 1 | 1u) & 31u, 0); }

// A byte of signs by its number: bits 0 to 6 are those of the number, and bit 7 makes their count even.
__device__ __forceinline__ unsigned signs_of(unsigned number) {
    const unsigned bits = number & 127u;
    return bits | (__popc(bits) & 1u) << 7;
}

// Four positive bytes, negated where a bit of `signs` is set, plus 128.
__device__ __forceinline__ unsigned negate_bytes(unsigned bytes, unsigned signs) {
    // Bit i of four goes to bit 8 i, by 7 i places. 0x80 or 0x7f there turns a byte into 128 and that or 127 less that.
    const unsigned negative = (signs & 15u) * 0x00204081u & 0x01010101u;
    return (bytes ^ (0x80808080u - negative)) + negative;
}

// Eight bytes, negated where a bit of `signs` is set, times a scale.
__device__ __forceinline__ void scale_signed(
    float scale, unsigned first, unsigned second, unsigned signs, float (&v)[8]) {
    scale_bytes(scale, negate_bytes(first, signs), negate_bytes(second, signs >> 4), 128, v);
}

// What the types have in common: a grid of so many words.
template <typename F, int WORDS>
struct Grid : FourBlocks<F> {
    static constexpr int TABLE = WORDS;
};

__device__ __forceinline__ unsigned entry_of(const Planes& planes, unsigned index) {
    return reinterpret_cast<const unsigned*>(planes.table)[index];
}
__device__ __forceinline__ unsigned short_entry_of(const Planes& planes, unsigned index) {
    return reinterpret_cast<const unsigned short*>(planes.table)[index];
}

// ---- two bits: three magnitudes --------------------------------------------------------------------------------

// v = d (2 s + 1) / 8 * the magnitudes of an entry with signs; d as the bits of a half.
__device__ __forceinline__ void scale_iq2(
    const Planes& planes, unsigned d, unsigned s, unsigned index, unsigned signs, float (&v)[8]) {
    const unsigned entry = entry_of(planes, index);
    const float scale = __fmul_rn(__fmul_rn(half_of(d, 0), 0.125f), odd_of(s));
    scale_signed(scale, __byte_perm(IQ2_VALUES, 0, entry & 0xffffu), __byte_perm(IQ2_VALUES, 0, entry >> 16), signs, v);
}

// 66 bytes: d, and for each part four indices, four numbers of signs and s in 8 bytes. plane: d, qs
struct IQ2_XXS : Grid<IQ2_XXS, 256> {
    struct Raw {
        unsigned d, word[2];
    };
    __device__ __forceinline__ static const unsigned* entries() { return IQ2_XXS_GRID; }

    __device__ __forceinline__ static Raw load(const Planes& planes, const Place& at) {
        Raw raw;
        load_words(planes, 1, at.of(64, at.part / 4 * 8), planes.size / 4, raw.word);
        raw.d = load_short(planes, 0, at.of(1, 0));
        return raw;
    }
    __device__ __forceinline__ static void decode_raw(const Planes& planes, const Raw& raw, int group, float (&v)[8]) {
        const int within = group % 4;
        const unsigned index = raw.word[0] >> within * 8 & 255u;
        scale_iq2(planes, raw.d, raw.word[1] >> 28, index, signs_of(raw.word[1] >> within * 7), v);
    }
};

// 74 bytes: d; index and number of signs of a group in 16 bits; s of two groups in 4. plane: d, qs, scales
struct IQ2_XS : Grid<IQ2_XS, 512> {
    struct Raw {
        unsigned d, q, scales;
    };
    __device__ __forceinline__ static const unsigned* entries() { return IQ2_XS_GRID; }

    __device__ __forceinline__ static Raw load(const Planes& planes, const Place& at) {
        return {
            load_short(planes, 0, at.of(1, 0)), load_short(planes, 1, at.of(32, at.part)),
            load_byte(planes, 2, at.of(8, at.part / 4))};
    }
    __device__ __forceinline__ static void decode_raw(const Planes& planes, const Raw& raw, int group, float (&v)[8]) {
        const unsigned s = raw.scales >> group % 4 / 2 * 4 & 15u;
        scale_iq2(planes, raw.d, s, raw.q & 511u, signs_of(raw.q >> 9), v);
    }
};

// 82 bytes: d; 8 bits of the index of a group, then its signs; two more bits of the index; s of two groups in 4. plane:
// d, qs, qh, scales
struct IQ2_S : Grouped<IQ2_S, 4, 8> {
    static constexpr int TABLE = 1024;
    __device__ __forceinline__ static const unsigned* entries() { return IQ2_S_GRID; }

    // The octets of every second part, or one octet: what a block has of parts is loaded once.
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const long long block = octet >> 5;
        const int group = static_cast<int>(octet) & 31, part = group / 4, within = group % 4;
        unsigned low[N], signs[N], high[2], scales[2];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            low[j] = load_byte(planes, 1, block * 64 + group + j * 8);
            signs[j] = load_byte(planes, 1, block * 64 + 32 + group + j * 8);
        }
        load_words(planes, 2, block * 8, planes.size / 32, high);
        load_words(planes, 3, block * 8, planes.size / 32, scales);
        const unsigned d = load_short(planes, 0, block);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const bool second = N == 1 ? part >= 4 : j >= 2;
            const int byte = N == 1 ? part % 4 : part % 2 + j % 2 * 2;
            const unsigned more = (second ? high[1] : high[0]) >> (byte * 8 + within * 2);
            const unsigned s = (second ? scales[1] : scales[0]) >> (byte * 8 + within / 2 * 4);
            scale_iq2(planes, d, s & 15u, low[j] | (more & 3u) << 8, signs[j], v[j]);
        }
    }
};

// ---- three bits: eight magnitudes, entries of four -------------------------------------------------------------

// v = scale * the magnitudes of two entries with signs.
__device__ __forceinline__ void scale_iq3(
    const Planes& planes, float scale, const unsigned (&values)[2], unsigned first, unsigned second, unsigned signs,
    float (&v)[8]) {
    const unsigned a = short_entry_of(planes, first), b = short_entry_of(planes, second);
    scale_signed(scale, __byte_perm(values[0], values[1], a), __byte_perm(values[0], values[1], b), signs, v);
}

// 98 bytes: d; two indices a group; for each part four numbers of signs and s in 4 bytes. plane: d, qs
struct IQ3_XXS : Grid<IQ3_XXS, 128> {
    struct Raw {
        unsigned d, both, word[1];
    };
    __device__ __forceinline__ static const unsigned* entries() { return IQ3_XXS_GRID; }

    __device__ __forceinline__ static Raw load(const Planes& planes, const Place& at) {
        Raw raw;
        raw.both = load_pair(planes, 1, at.of(96, at.part * 2));
        load_each(planes, 1, at.of(96, 64 + at.part / 4 * 4), raw.word);
        raw.d = load_short(planes, 0, at.of(1, 0));
        return raw;
    }
    __device__ __forceinline__ static void decode_raw(const Planes& planes, const Raw& raw, int group, float (&v)[8]) {
        const float scale = __fmul_rn(__fmul_rn(half_of(raw.d, 0), 0.25f), odd_of(raw.word[0] >> 28));
        const unsigned signs = signs_of(raw.word[0] >> group % 4 * 7);
        scale_iq3(planes, scale, IQ3_XXS_VALUES, raw.both & 255u, raw.both >> 8, signs, v);
    }
};

// 110 bytes: d; two indices a group, and a ninth bit of each; a byte of signs; s of a part in 4 bits. plane: d, qs, qh,
// signs, scales
struct IQ3_S : Grid<IQ3_S, 256> {
    struct Raw {
        unsigned d, both, high, signs, scales;
    };
    __device__ __forceinline__ static const unsigned* entries() { return IQ3_S_GRID; }

    __device__ __forceinline__ static Raw load(const Planes& planes, const Place& at) {
        return {
            load_short(planes, 0, at.of(1, 0)), load_pair(planes, 1, at.of(64, at.part * 2)),
            load_byte(planes, 2, at.of(8, at.part / 4)), load_byte(planes, 3, at.of(32, at.part)),
            load_byte(planes, 4, at.of(4, at.part / 8))};
    }
    __device__ __forceinline__ static void decode_raw(const Planes& planes, const Raw& raw, int group, float (&v)[8]) {
        const unsigned high = raw.high >> group % 4 * 2;
        const float scale = __fmul_rn(half_of(raw.d, 0), odd_of(raw.scales >> group / 4 % 2 * 4 & 15u));
        const unsigned first = (raw.both & 255u) | (high & 1u) << 8, second = raw.both >> 8 | (high & 2u) << 7;
        scale_iq3(planes, scale, IQ3_S_VALUES, first, second, raw.signs, v);
    }
};

// ---- one bit: -1, 0 and 1, moved by an eighth ------------------------------------------------------------------

// v = d (2 s + 1) / 8 * (8 * the coordinates of an entry, less 1 where `minus`, and 1 more elsewhere).
__device__ __forceinline__ void scale_iq1(
    const Planes& planes, unsigned d, unsigned s, unsigned index, bool minus, float (&v)[8]) {
    const unsigned entry = entry_of(planes, index);
    const float scale = __fmul_rn(__fmul_rn(half_of(d, 0), 0.125f), odd_of(s));
    const unsigned values = minus ? 0x00877f77u : 0x00898179u;  // and 128
    scale_bytes(scale, __byte_perm(values, 0, entry & 0xffffu), __byte_perm(values, 0, entry >> 16), 128, v);
}

// 50 bytes: d; 8 bits of the index of a group; for each part three more of each, s in 3 bits, which way all are moved.
// plane: d, qs, qh
struct IQ1_S : Grid<IQ1_S, 2048> {
    struct Raw {
        unsigned d, low, more;
    };
    __device__ __forceinline__ static const unsigned* entries() { return IQ1_GRID; }

    __device__ __forceinline__ static Raw load(const Planes& planes, const Place& at) {
        return {
            load_short(planes, 0, at.of(1, 0)), load_byte(planes, 1, at.of(32, at.part)),
            load_short(planes, 2, at.of(8, at.part / 4))};
    }
    __device__ __forceinline__ static void decode_raw(const Planes& planes, const Raw& raw, int group, float (&v)[8]) {
        const unsigned index = raw.low | (raw.more >> group % 4 * 3 & 7u) << 8;
        scale_iq1(planes, raw.d, raw.more >> 12 & 7u, index, (raw.more & 0x8000u) != 0, v);
    }
};

// 56 bytes: 8 bits of the index of a group; three more and which way it is moved in 4 bits; four words of four s of 3
// bits, of two groups each, and of four bits of d. plane: qs, qh, scales
struct IQ1_M : Grid<IQ1_M, 2048> {
    struct Raw {
        unsigned low, more, word[2];
    };
    __device__ __forceinline__ static const unsigned* entries() { return IQ1_GRID; }

    __device__ __forceinline__ static Raw load(const Planes& planes, const Place& at) {
        Raw raw;
        raw.low = load_byte(planes, 0, at.of(32, at.part));
        raw.more = load_byte(planes, 1, at.of(16, at.part / 2));
        load_words(planes, 2, at.of(8, 0), planes.size / 32, raw.word);
        return raw;
    }
    __device__ __forceinline__ static void decode_raw(const Planes& planes, const Raw& raw, int group, float (&v)[8]) {
        const unsigned more = raw.more >> group % 2 * 4;
        const unsigned d = (raw.word[0] >> 12 & 0xfu) | (raw.word[0] >> 24 & 0xf0u) | (raw.word[1] >> 4 & 0xf00u) |
                           (raw.word[1] >> 16 & 0xf000u);
        const unsigned own = (group < 16 ? raw.word[0] : raw.word[1]) >> group / 8 % 2 * 16;
        const unsigned s = own >> group / 2 % 4 * 3 & 7u;
        scale_iq1(planes, d, s, raw.low | (more & 7u) << 8, (more & 8u) != 0, v);
    }
};
