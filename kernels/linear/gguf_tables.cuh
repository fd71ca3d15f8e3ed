// Decoders of GGUF's types whose codes of 4 bits stand for 16 numbers, for the products of few tokens: iq4_nl, mxfp4
// and nvfp4 (members: decoder.cuh). A byte of codes is the index of a pair of numbers, the lower nibble first. Scales
// are copied as they are stored, and multiplied in fp32.
#pragma once
#include "linear/integers.cuh"

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

    // Scale j of a record of them.
    static __device__ __forceinline__ float scale_of(const unsigned (&word)[SCALE_BYTES / 4], int j) {
        if constexpr (SameType<Scale_, __half>::VALUE) return Word<__half>::get(word[j / 2], j % 2);
        else return __uint_as_float(max(word[0] >> 8 * j & 255u, 1u) - 1 << 23);  // 2^-127 and less are zero
    }

    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        float (&acc)[EIGHTS][4]) {
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
            const float scale[2] = {scale_of(stored[0], j), scale_of(stored[1], j)};
            add_parts<EIGHTS>(part, scale, acc);
        }
    }
};

// nvfp4: an 8-bit float as the scale of 16, whose exponent and mantissa are those of a half that is 2^7 times smaller
// than half of it; 0x7f is 0.
template <typename T>
struct PairTable16 : Table4<T, 16> {
    using Base = Table4<T, 16>;
    using Base::FIELDS, Base::SUBS;
    static constexpr int SCALE_BYTES = SUBS;
    static constexpr bool SPREAD_SCALES = false;
    static constexpr float EPILOGUE_SCALE = 128.0f;

    template <bool ONE>
    __device__ static void fill(unsigned table, float mine, unsigned thread, unsigned threads) {
        fill_low_first<T>(table, mine, thread, threads);
    }

    static __device__ __forceinline__ float scale_of(unsigned word, int j) {
        const unsigned byte = word >> 8 * j & 255u;
        return byte == 0x7f ? 0.0f : Word<__half>::get((byte & 0x7f) << 7, 0);
    }

    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        float (&acc)[EIGHTS][4]) {
        uint2 stored[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) stored[i] = shared_at<uint2>(scales + i * eight);
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            float part[EIGHTS][4] = {}, scale[2];
            const unsigned word[2] = {f[0][j / 2], f[1][j / 2]};
            look_up_step<T, EIGHTS>(word, j % 2 * 2, x, j, lane, part);
#pragma unroll
            for (int i = 0; i < 2; ++i) scale[i] = scale_of(j < 4 ? stored[i].x : stored[i].y, j % 4);
            add_parts<EIGHTS>(part, scale, acc);
        }
    }
};
