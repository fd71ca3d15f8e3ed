// Decoders of integers with scales for the products of few tokens: no table, but arithmetic that is exact in T. What
// their members mean stands in decoder.cuh, and here what they have beside:
//
//     SUBS, SUB                 groups of a row of a k-tile that have scales of their own, and their elements
//     PAIRED                    whether two k-tiles share a record, at the place of the first of them
//     LONG                      whether a group is one or more k-tiles, or the row: `block` elements
//     Scale, Zero               how scales and what stands beside them are stored
//     SCALE_ENTRIES, ZERO_ENTRIES   of these that belong to a k-tile of a row, its record: in shared memory the scales
//                               first, SCALE_BYTES in all
//     Constants                 what stays in registers; constants(codebook) makes them
//     multiply                  as that of decoder.cuh, without the table
//
// A code of 4 or 8 bits is made to a number by its bits: those of a half of 1024 to 2047, or of a bfloat16 of 128 to
// 255, are an integer. Less 1024 (128) and the zero point it is what the code stands for, which T holds exactly. Codes
// in two's complement have their highest bit turned over on the way: u = code ^ flip, and the zero point is higher by
// flip.
//
// Products with such integers are exact, and sums of SUB elements are scaled in fp32: no weight is rounded. A lane has
// SUB / 4 neighbours of each group, so that the four lanes of a row add up what has one scale.
#pragma once
#include "linear/decoder.cuh"

// What stands beside scales: nothing, integers or offsets, which are added in fp32: they never become a T.
enum Zeros { NO_ZEROS, ZERO_POINTS, OFFSETS };
// Which scales count, as when arrays are decoded: positive and finite ones (for OFFSETS all finite ones), or all.
enum ScaleRule { USABLE_SCALES, ALL_SCALES };
// Of codes of 4 bits: neighbours in a byte, or elements i and i + 16 of each 32.
enum CodeOrder { NEIGHBOURS, SPLIT };

// (a & mask) ^ magic in one instruction.
template <unsigned MASK>
__device__ __forceinline__ unsigned masked(unsigned a, unsigned magic) {
    unsigned r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(a), "r"(MASK), "r"(magic));
    return r;
}

// The same for both halves of a word.
__device__ __forceinline__ unsigned twice(unsigned half) { return half * 0x00010001u; }

template <typename T>
__device__ __forceinline__ unsigned add_pairs(unsigned a, unsigned b) {
    return Word<T>::bits(__hadd2(Word<T>::as(a), Word<T>::as(b)));
}
template <typename T>
__device__ __forceinline__ unsigned subtract_pairs(unsigned a, unsigned b) {
    return Word<T>::bits(__hsub2(Word<T>::as(a), Word<T>::as(b)));
}

// Words of codes as pairs of T, each less a zero point of 0 .. 2^BITS - 1 that `Minus` is made of.
template <typename T, int BITS>
struct Codes;

template <>
struct Codes<__half, 4> {
    struct Constants {
        unsigned low, high;  // 1024 in the lower and in the upper nibble of a byte, flipped
    };
    struct Minus {
        unsigned low, high;  // -(1024 + zero), -(64 + zero)
    };
    static __device__ __forceinline__ Constants constants(unsigned flip) {
        return {twice(0x6400u ^ flip), twice(0x6400u ^ flip << 4)};
    }
    static __device__ __forceinline__ Minus minus(unsigned zero) {
        return {twice(zero) + 0xe400e400u, twice(zero << 4) + 0xd400d400u};
    }
    // Pairs of nibbles 0 and 4, 1 and 5, 2 and 6, 3 and 7. The upper nibble of a byte comes as 1024 + 16 u.
    static __device__ __forceinline__ void pairs(unsigned word, Constants with, Minus zero, unsigned (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned bytes = i ? word >> 8 : word;
            a[2 * i] = add_pairs<__half>(masked<0x000f000fu>(bytes, with.low), zero.low);
            a[2 * i + 1] = fma_pairs<__half>(masked<0x00f000f0u>(bytes, with.high), 0x2c002c00u, zero.high);
        }
    }
};

template <>
struct Codes<__nv_bfloat16, 4> {
    struct Constants {
        unsigned magic;  // 128, flipped
    };
    struct Minus {
        unsigned both;  // -(128 + zero)
    };
    static __device__ __forceinline__ Constants constants(unsigned flip) { return {twice(0x4300u ^ flip)}; }
    static __device__ __forceinline__ Minus minus(unsigned zero) { return {twice(zero) + 0xc300c300u}; }
    static __device__ __forceinline__ void pairs(unsigned word, Constants with, Minus zero, unsigned (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = add_pairs<__nv_bfloat16>(masked<0x000f000fu>(word >> 4 * i, with.magic), zero.both);
    }
};

template <>
struct Codes<__half, 8> {
    struct Constants {
        unsigned flip, magic;  // of all bytes; the upper bytes of 1024
    };
    struct Minus {
        unsigned both;  // -(1024 + zero)
    };
    static __device__ __forceinline__ Constants constants(unsigned flip) { return {flip * 0x01010101u, 0x64646464u}; }
    static __device__ __forceinline__ Minus minus(unsigned zero) { return {twice(zero) + 0xe400e400u}; }
    // Pairs of bytes 0 and 1, 2 and 3.
    static __device__ __forceinline__ void pairs(unsigned word, Constants with, Minus zero, unsigned (&a)[2]) {
        const unsigned turned = word ^ with.flip;
        a[0] = add_pairs<__half>(__byte_perm(turned, with.magic, 0x4140), zero.both);
        a[1] = add_pairs<__half>(__byte_perm(turned, with.magic, 0x4342), zero.both);
    }
};

template <>
struct Codes<__nv_bfloat16, 8> {
    struct Constants {
        unsigned low, high;  // 128, and 256 where the highest bit is not set, 128 where it is
    };
    struct Minus {
        unsigned both;  // 128 - zero
    };
    static __device__ __forceinline__ Constants constants(unsigned flip) {
        return {0x43004300u, twice(0x4380u ^ flip)};
    }
    static __device__ __forceinline__ Minus minus(unsigned zero) {
        const float v = 128.0f - float(zero);
        return {Word<__nv_bfloat16>::pack(v, v)};
    }
    // Pairs of bytes 0 and 2, 1 and 3. Seven bits are what a bfloat16 has room for: 128 + u % 128 less 128 or 256 is u
    // - 128.
    static __device__ __forceinline__ void pairs(unsigned word, Constants with, Minus zero, unsigned (&a)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned bytes = i ? word >> 8 : word;
            const unsigned low = masked<0x007f007fu>(bytes, with.low), high = masked<0x00800080u>(bytes, with.high);
            a[i] = subtract_pairs<__nv_bfloat16>(low, high);
            if (zero.both) a[i] = add_pairs<__nv_bfloat16>(a[i], zero.both);
        }
    }
};

// A number with a name for the preprocessor's sake: 1 in both halves of a word.
template <typename T>
constexpr unsigned ONES = SameType<T, __half>::VALUE ? 0x3c003c00u : 0x3f803f80u;

// Whether k_of of a decoder names every k of a k-tile once.
template <typename Decoder>
__host__ __device__ constexpr bool names_every_k() {
    bool seen[ITEM_K] = {};
    for (int at = 0; at < ITEM_K; ++at) {
        const int k = Decoder::k_of(at % 4, at / 16, at / 4 % 4);
        if (k < 0 || k >= ITEM_K || seen[k]) return false;
        seen[k] = true;
    }
    return true;
}

// The bytes by which a part of a record can be copied at once.
__host__ __device__ constexpr int piece_of(int bytes) {
    return bytes == 0 || bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : bytes;
}
// `bytes`, rounded up to a multiple.
__host__ __device__ constexpr int rounded_up(int bytes, int multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}
// Where the second part of a record begins, and the bytes of both: each begins where it can be copied to.
__host__ __device__ constexpr int second_part(int scales, int zeros) {
    return zeros ? rounded_up(scales, piece_of(zeros)) : scales;
}
__host__ __device__ constexpr int record_bytes(int scales, int zeros) {
    const int one = piece_of(scales), other = zeros ? piece_of(zeros) : 4, most = one > other ? one : other;
    return rounded_up(second_part(scales, zeros) + zeros, most > 4 ? most : 4);
}

// Neighbours four apart: the swizzle of x puts those tokens in different halves of 128 bytes, of which four lanes that
// share a group read one.
__device__ __forceinline__ int apart(int g) { return g >> 1 | (g & 1) << 2; }

// BITS 4 or 8; SUB 32, 64 or ITEM_K, where a group is one or more k-tiles; Scale_ float, __half or __nv_bfloat16; of a
// ZERO_POINTS Zero_ is the integer, of OFFSETS it is Scale_.
template <
    typename T, int BITS, int SUB_, typename Scale_, int ZEROS = NO_ZEROS, typename Zero_ = Scale_,
    int RULE = USABLE_SCALES, int ORDER = NEIGHBOURS>
struct Affine {
    using Type = T;
    using Scale = Scale_;
    using Zero = Zero_;
    using Codes = ::Codes<T, BITS>;
    static constexpr int SUB = SUB_, SUBS = ITEM_K / SUB, VALUES = 0, ENTRIES = 0;
    static constexpr bool GAPS = false, LONG = SUBS == 1, PAIRED = false;
    static constexpr int SCALE_ENTRIES = SUBS, ZERO_ENTRIES = ZEROS == NO_ZEROS ? 0 : SUBS;
    static constexpr int SCALE_PART = SCALE_ENTRIES * sizeof(Scale), ZERO_PART = ZERO_ENTRIES * sizeof(Zero);
    static constexpr int ZEROS_AT = second_part(SCALE_PART, ZERO_PART);
    static constexpr int SCALE_BYTES = record_bytes(SCALE_PART, ZERO_PART);
    static constexpr int ITEM_BYTES = ITEM_K * BITS / 8, LANE_BYTES = SUB / 4 * BITS / 8, WORDS = ITEM_BYTES / 16;
    static constexpr int FIELDS = WORDS, SCALE_STEP = 0, X_WORDS = 16;
    static constexpr int MOST_TOGETHER = BITS == 4 ? 2 : 1;
    static constexpr bool SPREAD_SCALES = false, ONE_READ = BITS == 4 && LONG, MIXED = false;
    static constexpr float EPILOGUE_SCALE = 1.0f;
    static constexpr int SWIZZLE_PERIOD = ITEM_BYTES == 128 ? 8 : LONG ? 1 : 4;
    static constexpr int PIECE = LANE_BYTES < 16 ? LANE_BYTES : 16, PIECES = LANE_BYTES / PIECE;
    static_assert(ORDER == NEIGHBOURS || (BITS == 4 && SUB == 32), "split codes are those of 32 elements");

    // Which row the lanes g have, so that those which read together meet in no bank.
    __device__ __forceinline__ static int row(int g) {
        if (LANE_BYTES == 16 && BITS == 8) return (g & 1) << 2 | g >> 1;
        if (LANE_BYTES == 8 && BITS == 8) return (g & 3) << 1 | g >> 2;
        if (LANE_BYTES == 8) return (g & 1) | (g & 2) << 1 | (g & 4) >> 1;
        return g;
    }

    __device__ __forceinline__ static int token(int g) { return LONG ? g : apart(g); }

    // `address(byte)` is that of a byte of the lane's, less t * LANE_BYTES.
    template <typename Address>
    __device__ __forceinline__ static void read_pieces(unsigned (&word)[WORDS], const Address& address) {
#pragma unroll
        for (int i = 0; i < SUBS * PIECES; ++i) {
            const unsigned source = address(i / PIECES * (4 * LANE_BYTES) + i % PIECES * PIECE);
            if constexpr (PIECE == 16) to_words(word + 4 * i, shared_at<uint4>(source));
            else if constexpr (PIECE == 8) to_words(word + 2 * i, shared_at<uint2>(source));
            else word[i] = shared_at<unsigned>(source);
        }
    }

    template <bool MINE>
    __device__ __forceinline__ static void read(unsigned (&word)[WORDS], unsigned row, int swizzle, int t) {
        read_pieces(word, [&](int at) { return MINE ? row + at : row + ((t * LANE_BYTES + at) ^ swizzle); });
    }

    __device__ __forceinline__ static void read_swizzled(unsigned (&word)[WORDS], unsigned from, int j, int behind) {
        read_pieces(word, [&](int at) { return (from ^ (j * ITEM_BYTES + at)) + behind; });
    }

    // The element of a k-tile with which eight of x begin, or with SPLIT four.
    __device__ __forceinline__ static constexpr int x_at(int i, int t) {
        if (ORDER == SPLIT) return i / 2 * 32 + i % 2 * 16 + t * 4;
        return i * 8 / (SUB / 4) * SUB + t * (SUB / 4) + i * 8 % (SUB / 4);
    }

    template <int ALL>
    __device__ __forceinline__ static void load_x_global(
        unsigned (&word)[ALL], const T* x, bool there, int left, int t) {
        using Vector = typename PieceOf<ORDER == SPLIT ? 8 : 16>::Type;
        constexpr int SIZE = sizeof(Vector) / 4;
#pragma unroll
        for (int i = 0; i < 16 / SIZE; ++i)
            load_global_if(
                word + i * SIZE, reinterpret_cast<const Vector*>(x + x_at(i, t)), there && x_at(i, t) < left);
    }

    template <int ALL, typename Address>
    __device__ __forceinline__ static void load_x_shared(unsigned (&word)[ALL], const Address& address, int t) {
        using Vector = typename PieceOf<ORDER == SPLIT ? 8 : 16>::Type;
        constexpr int SIZE = sizeof(Vector) / 4;
#pragma unroll
        for (int i = 0; i < 16 / SIZE; ++i) to_words(word + i * SIZE, shared_at<Vector>(address(x_at(i, t))));
    }

    // Which element a lane multiplies in step s, as number i of four: of row g the pair for k lo, then that for k hi.
    __host__ __device__ static constexpr int k_of(int t, int s, int i) {
        constexpr bool APART = SameType<T, __nv_bfloat16>::VALUE;  // of bytes: 0 and 2, 1 and 3
        if (BITS == 8) {
            const int byte = APART ? i / 2 + i % 2 * 2 : i, at = 4 * s + byte;
            return at / (SUB / 4) * SUB + t * (SUB / 4) + at % (SUB / 4);
        }
        const int pair = s % 2 * 2 + i / 2, second = i % 2;  // of eight nibbles
        if (ORDER == SPLIT) return s / 2 * 32 + pair % 2 * 16 + 4 * t + pair / 2 + 2 * second;
        const int at = s / 2 * 8 + pair + 4 * second;
        return at / (SUB / 4) * SUB + t * (SUB / 4) + at % (SUB / 4);
    }

    // From the order of memory to that of k_of.
    template <int ALL>
    __device__ __forceinline__ static void arrange_x(unsigned (&x)[ALL]) {
        if constexpr (BITS == 4) {
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
                const unsigned a = x[j], b = x[j + 1], c = x[j + 2], d = x[j + 3];
                if constexpr (ORDER == SPLIT) {
                    x[j] = __byte_perm(a, b, 0x5410), x[j + 1] = __byte_perm(c, d, 0x5410);
                    x[j + 2] = __byte_perm(a, b, 0x7632), x[j + 3] = __byte_perm(c, d, 0x7632);
                } else {
                    x[j] = __byte_perm(a, c, 0x5410), x[j + 1] = __byte_perm(a, c, 0x7632);
                    x[j + 2] = __byte_perm(b, d, 0x5410), x[j + 3] = __byte_perm(b, d, 0x7632);
                }
            }
        } else if constexpr (SameType<T, __nv_bfloat16>::VALUE) {
#pragma unroll
            for (int j = 0; j < 16; j += 2) {
                const unsigned a = x[j], b = x[j + 1];
                x[j] = __byte_perm(a, b, 0x5410), x[j + 1] = __byte_perm(a, b, 0x7632);
            }
        }
    }

    struct Constants {
        typename Codes::Constants codes;
        typename Codes::Minus minus;  // where all groups have the same
        unsigned flip;
    };
    // The host tells what to flip: 0, or the highest bit of a code.
    static __device__ __forceinline__ Constants constants(const Values& told) {
        // Of GGUF's types it is known: codes of 8 bits are in two's complement.
        const unsigned flip = RULE == ALL_SCALES ? BITS / 8 << 7 : __float_as_uint(told.value[0]);
        const unsigned zero = ZEROS == OFFSETS ? flip : 1u << (BITS - 1);
        return {Codes::constants(flip), Codes::minus(zero), flip};
    }

    __device__ __forceinline__ static void unpack(const unsigned (&word)[2][WORDS], unsigned (&f)[2][FIELDS]) {
#pragma unroll
        for (int i = 0; i < 2 * WORDS; ++i) f[i / WORDS][i % WORDS] = word[i / WORDS][i % WORDS];
    }

    static __device__ __forceinline__ float counted(float scale) {
        if constexpr (RULE == ALL_SCALES) return scale;
        const unsigned bits = __float_as_uint(scale);
        if constexpr (ZEROS == OFFSETS) return (bits & 0x7f800000u) < 0x7f800000u ? scale : 0.0f;
        return bits - 1u < 0x7f7fffffu ? scale : 0.0f;
    }

    // Entries of a record that are read at once: a word of them.
    template <typename Entry>
    static constexpr int AT_ONCE = 4 / int(sizeof(Entry)) < SUBS ? 4 / int(sizeof(Entry)) : SUBS;

    // Of entries j and those behind it.
    template <typename Entry>
    static __device__ __forceinline__ unsigned piece(unsigned at, int j) {
        constexpr int BYTES = AT_ONCE<Entry> * sizeof(Entry);
        const unsigned from = at + j * sizeof(Entry);
        if constexpr (BYTES == 4) return shared_at<unsigned>(from);
        else if constexpr (BYTES == 2) return shared_at<unsigned short>(from);
        else return shared_at<unsigned char>(from);
    }

    // Entry j of that piece.
    template <typename Entry>
    static __device__ __forceinline__ auto entry(unsigned word, int j) {
        const int at = j % AT_ONCE<Entry> * int(sizeof(Entry));
        if constexpr (SameType<Entry, float>::VALUE) return __uint_as_float(word);
        else if constexpr (SameType<Entry, int>::VALUE) return int(word);
        else if constexpr (sizeof(Entry) == 2) return Word<Entry>::get(word, at / 2);
        else return int(Entry(word >> at * 8 & 255u));
    }

    // A tile of 16 rows. `record` is the address of that of row g; that of row g + 8 follows `eight` bytes on.
    template <int EIGHTS, bool, typename Tokens>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], const Constants& with, unsigned record,
        unsigned eight, unsigned, int, const Tokens& tokens, float (&acc)[EIGHTS][4]) {
        static_assert(names_every_k<Affine>(), "fragments have every k once");
        unsigned scales[2], zeros[2];
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (j % AT_ONCE<Scale> == 0) scales[i] = piece<Scale>(record + i * eight, j);
                if (ZEROS != NO_ZEROS && j % AT_ONCE<Zero> == 0)
                    zeros[i] = piece<Zero>(record + i * eight + ZEROS_AT, j);
            }
            typename Codes::Minus minus[2] = {with.minus, with.minus};
            if constexpr (ZEROS == ZERO_POINTS) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int zero = entry<Zero>(zeros[i], j);
                    minus[i] = Codes::minus(min(max(zero + int(with.flip), 0), (1 << BITS) - 1));
                }
            }
            float part[EIGHTS][4] = {}, sum[EIGHTS][4] = {};
            constexpr int STEPS = SUB / 16, PER_WORD = 8 / BITS;
#pragma unroll
            for (int w = j * STEPS / PER_WORD; w < (j + 1) * STEPS / PER_WORD; ++w) {
                unsigned a[2][2 * PER_WORD];
#pragma unroll
                for (int i = 0; i < 2; ++i) Codes::pairs(f[i][w], with.codes, minus[i], a[i]);
#pragma unroll
                for (int h = 0; h < PER_WORD; ++h)
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e) {
                        const int s = w * PER_WORD + h;
                        mma<T>(
                            part[e], a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1], x[e][2 * s],
                            x[e][2 * s + 1]);
                        if constexpr (ZEROS == OFFSETS)
                            mma<T>(sum[e], ONES<T>, ONES<T>, ONES<T>, ONES<T>, x[e][2 * s], x[e][2 * s + 1]);
                    }
            }
            tokens.template scale<EIGHTS>(part, j);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float scale = counted(entry<Scale>(scales[i], j));
#pragma unroll
                for (int e = 0; e < 2 * EIGHTS; ++e)
                    acc[e / 2][2 * i + e % 2] = fmaf(part[e / 2][2 * i + e % 2], scale, acc[e / 2][2 * i + e % 2]);
                if constexpr (ZEROS == OFFSETS) {
                    const float offset = entry<Zero>(zeros[i], j);
#pragma unroll
                    for (int e = 0; e < 2 * EIGHTS; ++e)
                        acc[e / 2][2 * i + e % 2] = fmaf(sum[e / 2][e % 2], offset, acc[e / 2][2 * i + e % 2]);
                }
            }
        }
    }
};
