// Decoders of GGUF's types of 4 bits with minima for the products of few tokens (members: decoder.cuh and
// integers.cuh).
//
// q4_1: blocks of 32 elements, d * code + m. q4_k: blocks of 256 elements in 8 sub-blocks of 32, of which an element is
// (d * sc) * code - dmin * mn, codes of 4 and sc and mn of 6 bits.
//
// A k-tile is half a block. Byte 32 p + m of it has the codes of elements 64 p + m and 64 p + 32 + m.
//
// The minima are no part of weights. Lane t has the sum of x over sub-block t of a k-tile, in two bfloat16 which leave
// out 2^-17 of it; one more mma multiplies these by mn, which is exact, and what comes out by dmin in fp32.
#pragma once
#include "linear/integers.cuh"

// A sum as two bfloat16, the rounded one and what it leaves.
__device__ __forceinline__ unsigned in_two_parts(float sum) {
    const float rounded = __bfloat162float(__float2bfloat16_rn(sum));
    return Word<__nv_bfloat16>::pack(rounded, sum - rounded);
}
// The sum of x over sub-block t for the token of row g, in two parts, by mma: here x is A, of whose four words each is
// of that token, and B has ones in column 2j for those of sub-block j.
template <typename T>
__device__ __forceinline__ unsigned sums_of_x(const unsigned (&x)[17]) {
    const int g = opaque(threadIdx.x % WARP) / 4;  // no register of the loop around
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const unsigned ones = g == 2 * j ? ONES<T> : 0u;
        mma<T>(sum, x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3], ones, ones);
    }
    return in_two_parts(sum[0] + sum[2]);
}

// What both types share.
template <typename T>
struct Q4KBase {
    using Type = T;
    using Scale = unsigned;  // d and dmin, two halves
    using Zero = unsigned;   // of the 12 bytes of sc and mn of a block
    static constexpr int SUB = ITEM_K, SUBS = 1, VALUES = 0, ENTRIES = 0, SCALE_ENTRIES = 1, ZERO_ENTRIES = 3;
    static constexpr bool GAPS = false, LONG = true, PAIRED = true, SPREAD_SCALES = false;
    static constexpr int ZEROS_AT = 4, SCALE_BYTES = 16, SCALE_STEP = 0, ITEM_BYTES = ITEM_K / 2, WORDS = 4, FIELDS = 4;
    // Codes are halves as they are, and sums are 2^26 of what they stand for; bfloat16 has no room for such numbers.
    static constexpr bool SUBNORMAL = SameType<T, __half>::VALUE;
    static constexpr float EPILOGUE_SCALE = SUBNORMAL ? 1.4901161193847656e-8f : 1.0f;
    static constexpr int SWIZZLE_PERIOD = 4;
    static constexpr int X_WORDS = 17, MOST_TOGETHER = 2;  // the last word of x: the sum

    __device__ __forceinline__ static void unpack(const unsigned (&word)[2][WORDS], unsigned (&f)[2][FIELDS]) {
#pragma unroll
        for (int i = 0; i < 2 * WORDS; ++i) f[i / WORDS][i % WORDS] = word[i / WORDS][i % WORDS];
    }

    // sc and mn of the four sub-blocks of k-tile `item`, a byte each.
    static __device__ __forceinline__ unsigned scales(uint4 record, int item) {
        return item & 1 ? (record.w & 0x0f0f0f0fu) | (record.y >> 2 & 0x30303030u) : record.y & 0x3f3f3f3fu;
    }
    static __device__ __forceinline__ unsigned minima(uint4 record, int item) {
        return item & 1 ? (record.w >> 4 & 0x0f0f0f0fu) | (record.z >> 2 & 0x30303030u) : record.z & 0x3f3f3f3fu;
    }

    // A lane's minimum of four as the bfloat16 twice, by the selector `own`: a byte as one from 2^33 or 128 on, less
    // that.
    static __device__ __forceinline__ unsigned minimum(unsigned mn, unsigned own) {
        constexpr unsigned UPPER = SUBNORMAL ? 0x50505050u : 0x43434343u;
        return add_pairs<__nv_bfloat16>(__byte_perm(mn, UPPER, own), SUBNORMAL ? 0xd000d000u : 0xc300c300u);
    }

    // acc -= dmin * mn * x of a k-tile, or of the block that ends with it: of its halves the first has the lower k.
    template <int EIGHTS, bool TOGETHER, bool BLOCK>
    static __device__ __forceinline__ void subtract(
        const unsigned (&mn)[2][2], const float (&dmin)[2], unsigned own, const unsigned (&x)[EIGHTS][X_WORDS],
        unsigned sums, float (&acc)[EIGHTS][4]) {
        unsigned a[2][2] = {};
#pragma unroll
        for (int i = 0; i < (BLOCK ? 4 : 2); ++i) a[i / 2][i % 2] = minimum(mn[i / 2][i % 2], own);
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            float part[4] = {};
            unsigned sum[2] = {};
            if constexpr (!TOGETHER) sum[0] = x[e][16];
            else sum[BLOCK] = shared_at<unsigned>(sums + e * 256);
            if constexpr (BLOCK) sum[0] = shared_at<unsigned>(sums + (e - EIGHTS) * 256);
            mma<__nv_bfloat16>(part, a[0][0], a[0][1], a[1][0], a[1][1], sum[0], sum[1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[e][i] = fmaf(part[i], -dmin[i / 2], acc[e][i]);
        }
    }
    // The selector that puts byte `at` of a word below each of the two bytes of the other one.
    static __device__ __forceinline__ unsigned below(unsigned at) { return 0x4040u + at * 0x0101u; }
};

// Two codes of a word, of its lower or `upper` nibbles, as halves, of which tensor cores multiply subnormal ones, too:
// multiples of 2^-24, of upper nibbles 16 times that. Of bytes 0 and 2 or, `next`, 1 and 3.
__device__ __forceinline__ unsigned nibbles(unsigned word, bool upper, bool next) {
    return (next ? word >> 8 : word) & (upper ? 0x00f000f0u : 0x000f000fu);
}

// The lanes of a row share each sub-block, whose sums are scaled in fp32.
template <typename T>
struct Q4K : Q4KBase<T> {
    using Base = Q4KBase<T>;
    using Base::scales, Base::minima, Base::below, Base::SUBNORMAL;
    using Base::WORDS, Base::FIELDS, Base::X_WORDS, Base::ITEM_BYTES, Base::SCALE_BYTES;
    static constexpr bool ONE_READ = false, MIXED = false;
    static constexpr int LANE_BYTES = 8;

    // With reads of 8 bytes, half of the lanes meet in a bank if they have neighbouring rows.
    __device__ __forceinline__ static int row(int g) { return (g & 1) | (g & 2) << 1 | (g & 4) >> 1; }
    __device__ __forceinline__ static int token(int g) { return apart(g); }

    template <bool>
    __device__ __forceinline__ static void read(unsigned (&word)[WORDS], unsigned row, int swizzle, int t) {
#pragma unroll
        for (int p = 0; p < 2; ++p) to_words(word + 2 * p, shared_at<uint2>(row + ((p * 32 + t * 8) ^ swizzle)));
    }
    __device__ __forceinline__ static void read_swizzled(unsigned (&word)[WORDS], unsigned from, int j, int behind) {
#pragma unroll
        for (int p = 0; p < 2; ++p)
            to_words(word + 2 * p, shared_at<uint2>((from ^ (j * ITEM_BYTES + p * 32)) + behind));
    }

    // Eight elements each, those of a sub-block.
    __device__ __forceinline__ static constexpr int x_at(int j, int t) { return j * 32 + t * 8; }
    __device__ __forceinline__ static void load_x_global(
        unsigned (&word)[X_WORDS], const T* x, bool there, int left, int t) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            load_global_if(word + 4 * j, reinterpret_cast<const uint4*>(x + x_at(j, t)), there && x_at(j, t) < left);
    }
    template <typename Address>
    __device__ __forceinline__ static void load_x_shared(unsigned (&word)[X_WORDS], const Address& address, int t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) to_words(word + 4 * j, shared_at<uint4>(address(x_at(j, t))));
    }
    __host__ __device__ static constexpr int k_of(int t, int s, int i) {
        return s / 2 * 32 + t * 8 + s % 2 * 4 + i / 2 + i % 2 * 2;
    }
    __device__ __forceinline__ static void arrange_x(unsigned (&x)[X_WORDS]) {
        x[16] = sums_of_x<T>(x);
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            const unsigned a = x[j], b = x[j + 1];
            x[j] = __byte_perm(a, b, 0x5410), x[j + 1] = __byte_perm(a, b, 0x7632);
        }
    }

    // Two codes of a word: of its lower or `upper` nibbles, of bytes 0 and 2 or, `next`, 1 and 3. As bfloat16 they
    // become the lowest bits of 128, which is taken off.
    static __device__ __forceinline__ unsigned pair(unsigned word, bool upper, bool next, unsigned tops) {
        if constexpr (SUBNORMAL) return nibbles(word, upper, next);
        else return add_pairs<T>(masked<0x000f000fu>(word >> (upper * 4 + next * 8), tops), 0xc300c300u);
    }
    // What a byte is added to, to be a float: it counts as 2^-23 of TOP, and UNIT of that is 1, or 2^50 beside codes
    // that are multiples of 2^-24. Beside those of upper nibbles, which are 16 times too large, it is UPPER of TOP.
    static constexpr float TOP = SUBNORMAL ? 9.444732965739290427392e21f : 128.0f;  // 2^73, 2^7
    static constexpr float UPPER = SUBNORMAL ? 0.0625f : 1.0f, UNIT = SUBNORMAL ? 1.0f : 8388608.0f / TOP;

    struct Constants {
        unsigned own;   // the selector of the sub-block whose sum a lane has
        unsigned tops;  // upper bytes of TOP and of UPPER of it, or two bfloat16 of 128, in a register of its own:
                        // permutations have room for one constant
    };
    static __device__ __forceinline__ Constants constants(const Values&) {
        return {opaque(below(threadIdx.x & 3)), opaque(SUBNORMAL ? 0x64006200u : 0x43004300u)};
    }

    template <int EIGHTS, bool TOGETHER>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][X_WORDS], const Constants& with, unsigned record,
        unsigned eight, unsigned sums, int item, const NoTokenScales&, float (&acc)[EIGHTS][4]) {
        static_assert(names_every_k<Q4K>(), "fragments have every k once");
        if (TOGETHER) record -= item % 2 * SCALE_BYTES;  // two k-tiles share it
        // Minima go by blocks where that saves most, with more tokens; else by k-tiles.
        constexpr bool BLOCK = TOGETHER && EIGHTS > 1;
        unsigned sc[2], mn[2][2];
        float step[2], dmin[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 stored = shared_at<uint4>(record + i * eight);
            const float d = Word<__half>::get(stored.x, 0);
            step[i] = d * UNIT, dmin[i] = Word<__half>::get(stored.x, 1);
            sc[i] = scales(stored, item);
            mn[0][i] = minima(stored, BLOCK ? 0 : item), mn[1][i] = minima(stored, 1);
        }
        if (!BLOCK || item % 2) Base::template subtract<EIGHTS, TOGETHER, BLOCK>(mn, dmin, with.own, x, sums, acc);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float part[EIGHTS][4] = {};
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                unsigned a[2][2];
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i / 2][i % 2] = pair(f[i / 2][j / 2 * 2 + w], j % 2, i % 2, with.tops);
                const int s = 2 * j + w;
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e)
                    mma<T>(part[e], a[0][0], a[1][0], a[0][1], a[1][1], x[e][2 * s], x[e][2 * s + 1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // A byte as a float from TOP on, less that; both are exact.
                const float high =
                    __uint_as_float(__byte_perm(sc[i], with.tops, (j % 2 && SUBNORMAL ? 0x5440 : 0x7440) + j));
                const float scale = (high - (j % 2 ? TOP * UPPER : TOP)) * step[i];
#pragma unroll
                for (int e = 0; e < 2 * EIGHTS; ++e)
                    acc[e / 2][2 * i + e % 2] = fmaf(part[e / 2][2 * i + e % 2], scale, acc[e / 2][2 * i + e % 2]);
            }
        }
    }
};

// A block's d and m are two halves side by side. m is exact as two bfloat16, and so are its products with sums of x:
// one more mma adds them, in which lane t has sub-block t. Codes are halves as they are, and sums UNIT times what they
// stand for, but for tokens with scales of their own, of which the product with that may be none of float32.
template <typename T>
struct Q4_1 : Affine<T, 4, 32, unsigned, NO_ZEROS, unsigned, ALL_SCALES, SPLIT> {
    using Base = Affine<T, 4, 32, unsigned, NO_ZEROS, unsigned, ALL_SCALES, SPLIT>;
    using Codes = typename Base::Codes;
    using Base::FIELDS, Base::SUBS;
    static constexpr int X_WORDS = 17;  // the last word of x: the sum
    static constexpr bool SUBNORMAL = SameType<T, __half>::VALUE;
    static constexpr float UNIT = SUBNORMAL ? 5.9604644775390625e-8f : 1.0f, EPILOGUE_SCALE = 1.0f / UNIT;  // 2^-24

    __device__ __forceinline__ static void arrange_x(unsigned (&x)[X_WORDS]) {
        x[16] = sums_of_x<T>(x);
        Base::arrange_x(x);
    }

    // The pairs of codes of a word.
    template <bool AS_THEY_ARE>
    static __device__ __forceinline__ void pairs(
        unsigned word, const typename Codes::Constants& codes, const typename Codes::Minus& minus, unsigned (&a)[4]) {
        if constexpr (AS_THEY_ARE) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = nibbles(word >> 4 * i, false, false);
        } else {
            Codes::pairs(word, codes, minus, a);
        }
    }

    struct Constants {
        typename Codes::Constants codes;
        typename Codes::Minus minus;
    };
    static __device__ __forceinline__ Constants constants(const Values&) {
        return {Codes::constants(0), Codes::minus(0)};
    }

    // acc += m * sums of x.
    template <int EIGHTS>
    static __device__ __forceinline__ void add_minima(
        const unsigned (&x)[EIGHTS][X_WORDS], unsigned record, unsigned eight, float (&acc)[EIGHTS][4]) {
        unsigned m[2][2];
        const unsigned own = record + opaque(threadIdx.x % 4) * 4 + 2;  // of the sub-block whose sum a lane has
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float all = Word<__half>::get(shared_at<unsigned short>(own + i * eight), 0) * UNIT;
            const unsigned upper = __float_as_uint(all) & 0xffff0000u;
            m[i][0] = __byte_perm(upper, 0, 0x3232);
            m[i][1] = __byte_perm(__float_as_uint(all - __uint_as_float(upper)), 0, 0x3232);
        }
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
            mma<__nv_bfloat16>(acc[e], m[0][0], m[1][0], m[0][1], m[1][1], x[e][16], x[e][16]);
    }

    template <int EIGHTS, bool, typename Tokens>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][X_WORDS], const Constants& with, unsigned record,
        unsigned eight, unsigned, int, const Tokens& tokens, float (&acc)[EIGHTS][4]) {
        // Tokens with scales of their own have no sums over a k-tile: those of each 32 are made with the products.
        constexpr bool BLOCKED = !SameType<Tokens, NoTokenScales>::VALUE;
        if constexpr (!BLOCKED) add_minima<EIGHTS>(x, record, eight, acc);
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            float part[EIGHTS][4] = {}, sum[EIGHTS][4] = {};
            unsigned a[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) pairs<SUBNORMAL && !BLOCKED>(f[i][j], with.codes, with.minus, a[i]);
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) {
                    const int s = 2 * j + h;
                    mma<T>(
                        part[e], a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1], x[e][2 * s],
                        x[e][2 * s + 1]);
                    if constexpr (BLOCKED)
                        mma<T>(sum[e], ONES<T>, ONES<T>, ONES<T>, ONES<T>, x[e][2 * s], x[e][2 * s + 1]);
                }
            tokens.template scale<EIGHTS>(part, j), tokens.template scale<EIGHTS>(sum, j);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned both = shared_at<unsigned>(record + i * eight + 4 * j);
                const float scale = Word<__half>::get(both, 0), minimum = Word<__half>::get(both, 1);
#pragma unroll
                for (int e = 0; e < 2 * EIGHTS; ++e) {
                    float& to = acc[e / 2][2 * i + e % 2];
                    to = fmaf(part[e / 2][2 * i + e % 2], scale, to);
                    if constexpr (BLOCKED) to = fmaf(sum[e / 2][e % 2], minimum, to);
                }
            }
        }
    }
};

template <typename T>
struct Blocked<Q4_1<T>> : Q4_1<T> {
    static constexpr float EPILOGUE_SCALE = 1.0f;
};
