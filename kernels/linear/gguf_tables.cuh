// Decoders of GGUF's types whose codes of 4 bits stand for 16 numbers, for the products of few tokens: iq4_nl, iq4_xs,
// mxfp4 and nvfp4 (members: decoder.cuh). A byte of codes is the index of a pair of numbers, the lower nibble first.
// Scales are multiplied in fp32, or where nothing is rounded with the weights.
#pragma once
#include "linear/codebook.cuh"
#include "linear/integers.cuh"
#include "linear/token_halves.cuh"

// A whole table of pairs of 16 values, the first of a pair in the lower four bits of the index.
template <typename T>
__device__ __forceinline__ void fill_low_first(unsigned table, float mine, unsigned thread, unsigned threads) {
    for (unsigned i = thread; i < 2 * 256; i += threads) {
        const int index = i / 2;
        const float first = __shfl_sync(FULL_WARP, mine, index & 15);
        const float second = __shfl_sync(FULL_WARP, mine, index >> 4);
        const unsigned word[1] = {Word<T>::pack(first, second)};
        fill_entry<1>(table, index, i % 2, word);
    }
}

// acc += scale * part, for both rows of a lane.
template <int EIGHTS>
__device__ __forceinline__ void add_parts(
    const float (&part)[EIGHTS][4], const float (&scale)[2], float (&acc)[EIGHTS][4]) {
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[e][i] = fmaf(part[e][i], scale[i / 2], acc[e][i]);
}

// Step s of a sub-block: two bytes of row g's word, and of row g + 8's.
template <typename T, int EIGHTS>
__device__ __forceinline__ void look_up_step(
    const unsigned (&word)[2], int byte, const unsigned (&x)[EIGHTS][16], int s, unsigned lane,
    float (&part)[EIGHTS][4]) {
    unsigned a[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i / 2][i % 2] = table_entry(entry_offset(word[i / 2], byte + i % 2, lane));
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) mma<T>(part[e], a[0][0], a[1][0], a[0][1], a[1][1], x[e][2 * s], x[e][2 * s + 1]);
}

// The larger one of e and 1. The compiler would select between e - 1 and 0, which takes two instructions more.
__device__ __forceinline__ unsigned at_least_one(unsigned e) {
    unsigned larger;
    asm("max.u32 %0, %1, 1;" : "=r"(larger) : "r"(e));
    return larger;
}

// Blocks of 32. Scale_ __half, or unsigned char: e of a power of two, 2^(e - 128). ORDER NEIGHBOURS, or SPLIT: a byte
// has elements i and i + 16, and so have pairs.
template <typename T, typename Scale_, int ORDER>
struct PairTable : Affine<T, 4, 32, __half, NO_ZEROS, __half, ALL_SCALES, ORDER> {
    using Base = Affine<T, 4, 32, __half, NO_ZEROS, __half, ALL_SCALES, ORDER>;
    using Base::FIELDS, Base::SUBS;
    static constexpr int VALUES = 16, ENTRIES = 256, SCALE_BYTES = SUBS * int(sizeof(Scale_));
    static constexpr bool GAPS = true;

    template <bool ONE>
    __device__ static void fill(unsigned table, float mine, unsigned thread, unsigned threads) {
        fill_low_first<T>(table, mine, thread, threads);
    }
    __device__ __forceinline__ static unsigned lane_offset(int lane) { return lane * 4; }

    __host__ __device__ static constexpr int k_of(int t, int s, int i) {
        if (ORDER == SPLIT) return s / 2 * 32 + i % 2 * 16 + 4 * t + s % 2 * 2 + i / 2;
        return s / 2 * 32 + 8 * t + s % 2 * 4 + i;
    }
    __device__ __forceinline__ static void arrange_x(unsigned (&x)[16]) {
        if constexpr (ORDER == SPLIT) {
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
                const unsigned a = x[j], b = x[j + 1], c = x[j + 2], d = x[j + 3];
                x[j] = __byte_perm(a, c, 0x5410), x[j + 1] = __byte_perm(a, c, 0x7632);
                x[j + 2] = __byte_perm(b, d, 0x5410), x[j + 3] = __byte_perm(b, d, 0x7632);
            }
        }
    }

    // Scale j of a record of them; 2^-127 and less are zero.
    static __device__ __forceinline__ float scale_of(const unsigned (&word)[SCALE_BYTES / 4], int j) {
        if constexpr (SameType<Scale_, __half>::VALUE) return Word<__half>::get(word[j / 2], j % 2);
        else return __uint_as_float(at_least_one(__byte_perm(word[0], 0, 0x4440 + j)) * 0x00800000u - 0x00800000u);
    }

    template <int EIGHTS, typename Tokens>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        const Tokens& tokens, float (&acc)[EIGHTS][4]) {
        static_assert(names_every_k<PairTable>(), "fragments have every k once");
        unsigned stored[2][SCALE_BYTES / 4];
#pragma unroll
        for (int i = 0; i < 2 * (SCALE_BYTES / 4); ++i)
            stored[i % 2][i / 2] = shared_at<unsigned>(scales + i % 2 * eight + i / 2 * 4);
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            float part[EIGHTS][4] = {};
            const unsigned word[2] = {f[0][j], f[1][j]};
#pragma unroll
            for (int h = 0; h < 2; ++h) look_up_step<T, EIGHTS>(word, 2 * h, x, 2 * j + h, lane, part);
            tokens.template scale<EIGHTS>(part, j);
            const float scale[2] = {scale_of(stored[0], j), scale_of(stored[1], j)};
            add_parts<EIGHTS>(part, scale, acc);
        }
    }
};

// The 8-bit scale of nvfp4 as a number of T, twice in a register: its bits where T has exponent and mantissa, which
// makes 1 / FACTOR of half of it, subnormals included. Bit 7 does not count; 0x7f is 0.
template <typename T>
struct Ue4m3Pair {
    static constexpr bool HALF = SameType<T, __half>::VALUE;
    static constexpr float FACTOR = HALF ? 128.0f : 6.64613997892457936e35f;  // 2^7, 2^119
    __device__ __forceinline__ static unsigned of(unsigned byte) {
        return byte == 0x7f ? 0u : (byte & 0x7fu) * (HALF ? 0x00800080u : 0x00100010u);
    }
};

// nvfp4: 8-bit floats as the scales of 16. A value of the table has two bits and a scale four: their product is a
// number of T, no weight is rounded. A lane has two blocks to itself.
template <typename T>
struct PairTable16 : Kbit<T, 4, E4M4> {
    using Base = Kbit<T, 4, E4M4>;
    using Base::FIELDS, Base::WORDS;
    static constexpr int VALUES = 16, SCALE_BYTES = ITEM_K / 16, SCALE_STEP = ROW / 16;

    template <bool ONE>
    __device__ static void fill(unsigned table, float mine, unsigned thread, unsigned threads) {
        fill_low_first<T>(table, mine * Ue4m3Pair<T>::FACTOR, thread, threads);
    }
    __device__ __forceinline__ static void arrange_x(unsigned (&)[16]) {}
    __device__ __forceinline__ static void unpack(const unsigned (&word)[2][WORDS], unsigned (&f)[2][FIELDS]) {
#pragma unroll
        for (int i = 0; i < 2 * WORDS; ++i) f[i / WORDS][i % WORDS] = word[i / WORDS][i % WORDS];
    }

    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        const NoTokenScales&, float (&acc)[EIGHTS][4]) {
        unsigned scale[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned both = shared_at<unsigned short>(scales + i * eight);
            scale[i][0] = Ue4m3Pair<T>::of(both & 255u), scale[i][1] = Ue4m3Pair<T>::of(both >> 8);
        }
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            unsigned a[2][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned pair = table_entry(entry_offset(f[i / 2][s / 2], s % 2 * 2 + i % 2, lane));
                a[i / 2][i % 2] = Word<T>::multiply(pair, scale[i / 2][s / 4]);
            }
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
                mma<T>(acc[e], a[0][0], a[1][0], a[0][1], a[1][1], x[e][2 * s], x[e][2 * s + 1]);
        }
    }
};

// nvfp4 for tokens with scales of 32, which lanes share: those of a row have eight neighbours each, so that two of them
// have a scale together.
template <typename T>
struct SharedTable16 : PairTable<T, unsigned char, NEIGHBOURS> {
    using Base = PairTable<T, unsigned char, NEIGHBOURS>;
    using Base::FIELDS, Base::SUBS;
    static constexpr int SCALE_BYTES = ITEM_K / 16;

    template <bool ONE>
    __device__ static void fill(unsigned table, float mine, unsigned thread, unsigned threads) {
        fill_low_first<T>(table, mine * Ue4m3Pair<T>::FACTOR, thread, threads);
    }

    static constexpr unsigned SHIFT = Ue4m3Pair<T>::HALF ? 0x0080u : 0x0010u;

    // Scales without their bits 7; 0x7f is no number and 0, but 0xff is one.
    __device__ __forceinline__ static unsigned numbers_of(unsigned bytes) {
        const unsigned lower = bytes & 0x7f7f7f7fu, none = lower + 0x01010101u & ~bytes & 0x80808080u;
        return lower & ~(none - (none >> 7));
    }
    __device__ __forceinline__ static unsigned two_of(unsigned bytes) {
        return numbers_of(__byte_perm(bytes, 0, 0x4140)) * SHIFT;
    }
};

// The same where each 32 elements are added up: what tokens are then integers have is halves.
//
// Some of the 32s of a k-tile, WORKED_OUT, a bit for each, take their codes as what they are, E2M1, which are the upper
// bits of halves 2^14 times smaller: that takes three instructions more for eight codes than the table does and none of
// its four reads, of which shared memory has no more to give where all are looked up.
template <>
struct Blocked<SharedTable16<__half>> : SharedTable16<__half> {
    using Base = SharedTable16<__half>;
    using Base::FIELDS, Base::SUBS;
    static constexpr unsigned WORKED_OUT = 0x3;
    __device__ __forceinline__ static constexpr bool worked_out(int j) { return WORKED_OUT >> j & 1; }

    // Whether one of four scales may be no number, or not be what its lower seven bits say; and all four without that.
    __device__ __forceinline__ static bool unsettled(unsigned bytes) { return bytes & 0x80808080u; }
    __device__ __forceinline__ static unsigned suspects(unsigned bytes, unsigned others) {
        return others | bytes | bytes + 0x01010101u;
    }
    __device__ __forceinline__ static unsigned settled(unsigned bytes) { return numbers_of(bytes); }

    // Codes that are worked out come in another order: 0 and 4, 2 and 6, 1 and 5, 3 and 7.
    __device__ __forceinline__ static void arrange_x(unsigned (&x)[16]) {
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            if (!worked_out(j)) continue;
            const unsigned a = x[4 * j], b = x[4 * j + 1], c = x[4 * j + 2], d = x[4 * j + 3];
            x[4 * j] = __byte_perm(a, c, 0x5410), x[4 * j + 1] = __byte_perm(b, d, 0x5410);
            x[4 * j + 2] = __byte_perm(a, c, 0x7632), x[4 * j + 3] = __byte_perm(b, d, 0x7632);
        }
    }
    // The eight codes of a word as halves, 2^-15 of what they stand for.
    __device__ __forceinline__ static void work_out(unsigned word, unsigned (&pair)[4]) {
        const unsigned even = word << 1 & 0x0e0e0e0eu | word << 4 & 0x80808080u;
        const unsigned odd = word >> 3 & 0x0e0e0e0eu | word & 0x80808080u;
        pair[0] = __byte_perm(even, 0, 0x2404), pair[1] = __byte_perm(even, 0, 0x3414);
        pair[2] = __byte_perm(odd, 0, 0x2404), pair[3] = __byte_perm(odd, 0, 0x3414);
    }
    // By what scales of weights, of 32s 2 jj and 2 jj + 1, are larger there, that no product is subnormal; and by what
    // scales of tokens then have to be. The table has 2^4 of what codes stand for.
    __device__ __forceinline__ static constexpr unsigned raise(int jj) {
        return (worked_out(2 * jj) ? 0x7400u : 0x3c00u) | (worked_out(2 * jj + 1) ? 0x74000000u : 0x3c000000u);
    }
    __device__ __forceinline__ static float token_factor(int block) { return worked_out(block % SUBS) ? 32.0f : 1.0f; }

    // The lower or the upper of two scales, twice.
    __device__ __forceinline__ static unsigned scale_of(unsigned two, bool upper) {
        const __half2 both = Word<__half>::as(two);
        return Word<__half>::bits(upper ? __high2half2(both) : __low2half2(both));
    }
    // 32 elements: a word of row g, and of row g + 8, times these.
    __device__ __forceinline__ static void decode(
        const unsigned (&word)[2], const unsigned (&two)[2], int j, unsigned lane, unsigned (&pair)[2][4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (worked_out(j)) {
                work_out(word[i], pair[i]);
            } else {
#pragma unroll
                for (int at = 0; at < 4; ++at) pair[i][at] = table_entry(entry_offset(word[i], at, lane));
            }
#pragma unroll
            for (int at = 0; at < 4; ++at) pair[i][at] = Word<__half>::multiply(pair[i][at], scale_of(two[i], j % 2));
        }
    }

    // Scales are settled. Of each 32 elements lanes with the upper eight of 16 neighbours have the second one. 16
    // tokens are the rows of mma, so that a lane has sums of two of them and not of four.
    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        const PairedTokenScales& tokens, float (&acc)[EIGHTS][4]) {
        static_assert(ENTRY_STRIDE == 256, "bit 3 of a lane's place is bit 1 of its number");
        const unsigned turn = 7 + (lane & 8) * 3;
        const uint2 stored[2] = {shared_at<uint2>(scales), shared_at<uint2>(scales + eight)};
#pragma unroll
        for (int jj = 0; jj < SUBS / 2; ++jj) {
            unsigned two[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned bytes = jj ? stored[i].y : stored[i].x;
                two[i] = __funnelshift_l(bytes, bytes, turn) & 0x3f803f80u;
                if (worked_out(2 * jj) || worked_out(2 * jj + 1)) two[i] = Word<__half>::multiply(two[i], raise(jj));
            }
            uint4 of_tokens;
#pragma unroll
            for (int j = 2 * jj; j < 2 * jj + 2; ++j) {
                float part[EIGHTS][4] = {};
                const unsigned word[2] = {f[0][j], f[1][j]};
                unsigned a[2][4];
                decode(word, two, j, lane, a);
#pragma unroll
                for (int h = 0; h < 4; h += 2) {
                    const int at = 4 * j + h;
                    if constexpr (EIGHTS == 1) {
                        mma<__half>(part[0], a[0][h], a[1][h], a[0][h + 1], a[1][h + 1], x[0][at], x[0][at + 1]);
                    } else {
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            mma<__half>(part[i], x[0][at], x[1][at], x[0][at + 1], x[1][at + 1], a[i][h], a[i][h + 1]);
                    }
                }
                if (j % 2 == 0) of_tokens = tokens.template load<EIGHTS>(jj);
                tokens.template add<EIGHTS>(part, of_tokens, j % 2, acc);
            }
        }
    }
};
template <>
struct ByMatrices<Blocked<SharedTable16<__half>>> {
    static constexpr bool VALUE = true;
};

// 6-bit scales in bytes: 128 + code as a float, whose last bits they are, less 128 + 32, times `step`; `less` is what
// that takes off.
struct InnerCodes {
    static constexpr float LESS = -160.0f;
    __device__ __forceinline__ static float scale(unsigned codes, unsigned byte, float step, float less) {
        return fmaf(__uint_as_float(__byte_perm(codes, 0x43000000u, 0x7044u | byte << 8)), step, less);
    }
};

// iq4_xs: 6-bit scales of 32 in blocks of 256, which come as floats (InnerScales of pipeline.cuh).
template <typename T>
struct InnerPairTable : PairTable<T, __half, SPLIT> {
    using Base = PairTable<T, __half, SPLIT>;
    using Base::FIELDS, Base::SUBS;
    static constexpr int SCALE_BYTES = SUBS * 4;
    static constexpr bool SPREAD_SCALES = true;

    template <int EIGHTS, typename Tokens>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        const Tokens& tokens, float (&acc)[EIGHTS][4]) {
        uint2 two[2];
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            if (j % 2 == 0) {
                two[0] = shared_at<uint2>(scales + 4 * j), two[1] = shared_at<uint2>(scales + 4 * j + eight);
            }
            float part[EIGHTS][4] = {};
            const unsigned word[2] = {f[0][j], f[1][j]};
#pragma unroll
            for (int h = 0; h < 2; ++h) look_up_step<T, EIGHTS>(word, 2 * h, x, 2 * j + h, lane, part);
            tokens.template scale<EIGHTS>(part, j);
            const float scale[2] = {
                __uint_as_float(j % 2 ? two[0].y : two[0].x), __uint_as_float(j % 2 ? two[1].y : two[1].x)};
            add_parts<EIGHTS>(part, scale, acc);
        }
    }
};

// The largest half of a part has HALF_EXPONENT: sums are multiplied by what numbers are more than halves.
template <typename T>
struct InHalves<PairTable16<T>> : PairTable16<T> {
    using Base = PairTable16<T>;
    using Base::FIELDS;
    __device__ __forceinline__ static float power_of(unsigned exponent) {
        return __uint_as_float(exponent - HALF_EXPONENT << 23);
    }
    // Sums of a k-tile at a time: tensor cores cut off what does not fit the sum so far.
    template <int EIGHTS, typename Tokens>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        const Tokens& tokens, float (&acc)[EIGHTS][4]) {
        float part[EIGHTS][4] = {};
        Base::template multiply<EIGHTS>(f, x, lane, scales, eight, tokens, part);
#pragma unroll
        for (int i = 0; i < 4 * EIGHTS; ++i) acc[i / 4][i % 4] += part[i / 4][i % 4];
    }
};

template <typename Base>
struct KnownValues<InHalves<Base>> : KnownValues<Base> {};
template <typename T, typename Scale, int ORDER>
struct KnownValues<PairTable<T, Scale, ORDER>> {
    static constexpr bool VALUE = true;
};
template <typename T>
struct KnownValues<PairTable16<T>> {
    static constexpr bool VALUE = true;
};
template <typename T>
struct KnownValues<SharedTable16<T>> {
    static constexpr bool VALUE = true;
};
template <typename T>
struct KnownValues<InnerPairTable<T>> {
    static constexpr bool VALUE = true;
};
