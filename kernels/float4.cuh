// Blockwise tables of bitsandbytes: how a row of 32 elements is encoded, and how codes are decoded.
//
//     packed           uint8[(n + 1) / 2]   codes of elements 2i (high nibble) and 2i + 1
//     codes            uint8[n]             of the dynamic map
//     absmax           float32[blocks], or uint8[blocks] with double quantization:
//     nested_absmax    float32[blocks / 256]
//     nested_offset    float32[1]           absmax = map[code] * nested_absmax + nested_offset
//
// A block is 2^block_log2 elements, 16 to 4096: half a row, one row or up to 128.
#pragma once
#include "common.cuh"

constexpr int NESTED_LOG2 = 8;  // absmax that are quantized together

// ---- absmax ----------------------------------------------------------------------------------------------------

// Number of the block that an element belongs to, and the scale of it.
template <bool NESTED>
struct BlockScale {
    const void* absmax;
    const float* nested_absmax;
    const float* nested_offset;
    const float* map;  // float32[256], the dynamic map
    int block_log2;

    __device__ __forceinline__ float operator()(long long element) const {
        const long long block = element >> block_log2;
        if constexpr (NESTED) {
            const unsigned char code = static_cast<const unsigned char*>(absmax)[block];
            return __fadd_rn(__fmul_rn(map[code], nested_absmax[block >> NESTED_LOG2]), *nested_offset);
        } else {
            return static_cast<const float*>(absmax)[block];
        }
    }
};

// The scales that a row needs for its two halves, and the quotients' factors.
struct RowScale {
    float absmax[2];
    float reciprocal[2];
};

// max|x| of the blocks that the lane's row lies in. In a block of more than a tile, WARPS warps with a tile each meet
// in `shared`, float[WARPS]: then all of the thread block must call this.
template <typename T, int WARPS>
__device__ __forceinline__ RowScale
scale_row(unsigned (&row)[Tile<T>::WORDS], int block_log2, float* shared, int lane, int warp) {
    constexpr int HALF = Tile<T>::WORDS / 2;
    unsigned magnitude[2] = {};
#pragma unroll
    for (int i = 0; i < 2 * HALF; ++i) magnitude[i / HALF] = Word<T>::larger_magnitude(magnitude[i / HALF], row[i]);
    RowScale scale;
    scale.absmax[0] = flush(Word<T>::largest(magnitude[0]));
    scale.absmax[1] = flush(Word<T>::largest(magnitude[1]));
    if (block_log2 > 4) {
        float a = fmaxf(scale.absmax[0], scale.absmax[1]);
        const int lanes = min(1 << (block_log2 - 5), WARP);
        for (int step = 1; step < lanes; step *= 2) a = fmaxf(a, __shfl_xor_sync(FULL_WARP, a, step));
        if (block_log2 > 10) {
            const int warps = 1 << (block_log2 - 10), first = warp & -warps;
            if (lane == 0) shared[warp] = a;
            __syncthreads();
            a = shared[first];
            for (int i = 1; i < warps; ++i) a = fmaxf(a, shared[first + i]);
            __syncthreads();
        }
        scale.absmax[0] = scale.absmax[1] = a;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float a = scale.absmax[h];
        // The reciprocal would be subnormal: the same block, scaled down, has the same quotients.
        if (!SameType<T, __half>::VALUE && a > 0x1p126f && a < infinity()) {
            a = __fmul_rn(a, 0x1p-64f);
#pragma unroll
            for (int i = h * HALF; i < (h + 1) * HALF; ++i) row[i] = Word<T>::scale(row[i], 0x1p-64f);
        }
        scale.reciprocal[h] = __frcp_rn(a);
    }
    return scale;
}

// Write the absmax of the blocks that begin in a row. `row` counts from the start of the array.
__device__ __forceinline__ void store_absmax(
    float* absmax, long long row, long long blocks, int block_log2, const RowScale& scale) {
    if (block_log2 == 4) {
        if (2 * row < blocks) absmax[2 * row] = scale.absmax[0];
        if (2 * row + 1 < blocks) absmax[2 * row + 1] = scale.absmax[1];
    } else if ((row & ((1 << (block_log2 - 5)) - 1)) == 0) {
        const long long block = row >> (block_log2 - 5);
        if (block < blocks) absmax[block] = scale.absmax[0];
    }
}

// ---- search in a table of 16 -----------------------------------------------------------------------------------

enum Search {
    ORDERED,    // code = level: buckets of y
    MAGNITUDE,  // FP4: buckets of |y|, then the sign
    ANY,        // bisection, then a map from level to code
};

// What the host knows of a table, passed by value.
struct Table4 {
    float value[16];          // by code
    float threshold[64];      // of each bucket: the only one inside, or +inf
    float ordered[16];        // all thresholds, ascending, filled up with +inf
    unsigned char level[64];  // of each bucket: what its numbers up to the threshold have
    unsigned char code[16];   // by level
};

// An entry of the search table in shared memory, which holds COPIES of each, for lanes to read without bank conflicts.
struct __align__(8) Bucket {
    float threshold;
    unsigned level;
};
constexpr int COPIES = 16;

// Byte offset of the bucket of y. Adding 2^12 leaves y in the low bits of the sum, in units of 2^-11: 2^-7 of a bucket,
// and a bucket's copies are 2^7 bytes. NaN has all bits set and gets the last bucket, which no number reaches.
template <int SEARCH>
__device__ __forceinline__ unsigned bucket_of(float y) {
    constexpr float MAGIC = SEARCH == ORDERED ? 6145.0f : 4096.0f;  // + 2^11, + 1: -1 gets bucket 0
    constexpr unsigned FIELDS = SEARCH == ORDERED ? 64 : 32;
    return __float_as_uint(__fadd_rn(SEARCH == ORDERED ? y : fabsf(y), MAGIC)) & (FIELDS - 1) * (COPIES * 8);
}

constexpr int TABLE4_BYTES = 64 * COPIES * sizeof(Bucket);

// Every thread of the block helps; the caller synchronises.
template <int SEARCH>
__device__ __forceinline__ void build_table4(const Table4& table, void* shared) {
    if (SEARCH == ANY) {
        for (int i = threadIdx.x; i < 16; i += blockDim.x) {
            static_cast<float*>(shared)[i] = table.ordered[i];
            static_cast<unsigned*>(shared)[16 + i] = table.code[i];
        }
    } else {
        constexpr int FIELDS = SEARCH == ORDERED ? 64 : 32;
        for (int i = threadIdx.x; i < FIELDS * COPIES; i += blockDim.x)
            static_cast<Bucket*>(shared)[i] = Bucket{table.threshold[i / COPIES], table.level[i / COPIES]};
    }
}

// The codes of a row, two a byte. `lane_offset` is the byte offset of the lane's copy.
template <typename T, int SEARCH>
__device__ __forceinline__ uint4
encode4(const unsigned (&row)[Tile<T>::WORDS], const RowScale& scale, const char* table, unsigned lane_offset) {
    unsigned word[4] = {};
#pragma unroll
    for (int e = 0; e < ROW; ++e) {
        const float x = Word<T>::get(row[e / Word<T>::COUNT], e % Word<T>::COUNT);
        const float y = __fmul_rn(x, scale.reciprocal[e / (ROW / 2)]);
        const int shift = (e % 8 ^ 1) * 4;  // the first of two in the high nibble
        if (SEARCH == ANY) {
            const float* threshold = reinterpret_cast<const float*>(table);
            unsigned level = 0;
#pragma unroll
            for (int step = 8; step > 0; step >>= 1)
                if (y > threshold[level + step - 1]) level += step;
            const unsigned code = y == y ? reinterpret_cast<const unsigned*>(table)[16 + level] : 0u;
            word[e / 8] |= code << shift;
        } else {
            const Bucket bucket = *reinterpret_cast<const Bucket*>(table + (bucket_of<SEARCH>(y) | lane_offset));
            const float distance = __fsub_rn(bucket.threshold, SEARCH == ORDERED ? y : fabsf(y));
            word[e / 8] += (bucket.level + (__float_as_uint(distance) >> 31)) << shift;
            // The sign of numbers below zero, of neither -0 nor NaN.
            if (SEARCH == MAGNITUDE) word[e / 8] |= (__float_as_uint(__fadd_rn(y, 0.0f)) >> 31) << (shift + 3);
        }
    }
    if (SEARCH == MAGNITUDE) {
        // Levels 0 .. 7 have the codes 0 1 6 7 4 5 2 3.
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] ^= (word[i] & 0x22222222u) << 1;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// ---- the dynamic map -------------------------------------------------------------------------------------------

// |y| is searched: its level counts from zero, and the code is 127 plus or minus that. Buckets are ranges of float
// bits, an exponent and six bits of the fraction, so narrow that none holds two thresholds.
constexpr int GUESS_SHIFT = 17;
constexpr unsigned GUESS_BASE = (127 - 23) << 6;
constexpr int GUESSES = (23 << 6) + 1;  // from 2^-23 to 1
struct Dynamic {
    float value[256];              // by code
    float threshold[129];          // between level i and i + 1; +inf
    unsigned char guess[GUESSES];  // 127 + the level that each bucket begins with
};

// The search table in shared memory, thresholds with one copy for each lane.
struct DynamicSearch {
    float threshold[129][WARP];
    unsigned char guess[GUESSES];
};

__device__ __forceinline__ void build_dynamic(const Dynamic& dynamic, DynamicSearch& search) {
    for (int i = threadIdx.x; i < 129 * WARP; i += blockDim.x)
        search.threshold[i / WARP][i % WARP] = dynamic.threshold[i / WARP];
    for (int i = threadIdx.x; i < GUESSES; i += blockDim.x) search.guess[i] = dynamic.guess[i];
}

// The lowest value of the map; what lies below it, and NaN, has its code 0.
constexpr float DYNAMIC_LOWEST = -0.99296874f;

// 0xff in each byte whose number is negative.
__device__ __forceinline__ unsigned sign_bytes(const float (&y)[4]) {
    unsigned low, high;
    // A selector with bit 3 set spreads the sign of the byte.
    asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(low) : "r"(__float_as_uint(y[0])), "r"(__float_as_uint(y[1])));
    asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(high) : "r"(__float_as_uint(y[2])), "r"(__float_as_uint(y[3])));
    return __byte_perm(low, high, 0x5410);
}

// A number and a byte from shared memory by 32-bit addresses. What was written there must have been synchronised.
__device__ __forceinline__ float load_shared(unsigned address) {
    float v;
    asm("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ unsigned load_shared_byte(unsigned address) {
    unsigned v;
    asm("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

// The lane's view of the search table: addresses from which guesses and shifted bits count.
struct DynamicLane {
    unsigned thresholds, guesses;

    __device__ __forceinline__ DynamicLane(const DynamicSearch& search, int lane)
        : thresholds(static_cast<unsigned>(__cvta_generic_to_shared(&search.threshold[0][lane])) - 127 * WARP * 4),
          guesses(static_cast<unsigned>(__cvta_generic_to_shared(search.guess)) - GUESS_BASE) {}

    // The codes of four numbers, one a byte.
    __device__ __forceinline__ unsigned encode(float (&y)[4]) const {
        unsigned code[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            y[i] = fmaxf(y[i], DYNAMIC_LOWEST);
            const float magnitude = fmaxf(fabsf(y[i]), 0x1p-23f);  // still below the first threshold
            const unsigned guess = load_shared_byte(guesses + (__float_as_uint(magnitude) >> GUESS_SHIFT));
            const float distance = __fsub_rn(load_shared(thresholds + guess * (WARP * 4)), magnitude);
            code[i] = guess + (__float_as_uint(distance) >> 31);
        }
        const unsigned negative = sign_bytes(y);
        const unsigned all =
            __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
        // Below zero the code is 254 - code: the complement less one, which no byte is too small for.
        return (all ^ negative) - (negative & 0x01010101u);
    }
};

// The code of one number, with a single copy of the table.
__device__ __forceinline__ unsigned encode_dynamic(float y, const float* threshold, const unsigned char* guess) {
    y = fmaxf(y, DYNAMIC_LOWEST);
    const float magnitude = fmaxf(fabsf(y), 0x1p-23f);
    const unsigned level = guess[(__float_as_uint(magnitude) >> GUESS_SHIFT) - GUESS_BASE] - 127u;
    const unsigned above = level + (magnitude > threshold[level]);
    return y < 0.0f ? 127 - above : 127 + above;
}
