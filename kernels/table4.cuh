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
#include "common/tiles.cuh"
#include "formats/dynamic_map.cuh"

// Of the host (kbitcupy/formats/codebook), ahead of this source: numbers, and structs that are passed by value.
constexpr int NESTED_LOG2 = 8;  // absmax that are quantized together
static_assert(1 << NESTED_LOG2 == NESTED_BLOCK, "the host reckons with other blocks");

// ---- absmax ----------------------------------------------------------------------------------------------------

// The scales that a row needs for its two halves, and the quotients' factors.
struct RowScale {
    float absmax[2];
    float reciprocal[2];
    bool finite;  // whether the row is: NaN is no absmax
};

// The factor of quotients by `a`. Where it would be subnormal, the words are scaled down: they have the same quotients.
template <typename T, int WORDS>
__device__ __forceinline__ float reciprocal_of(float a, unsigned* word) {
    if (!SameType<T, __half>::VALUE && a > 0x1p126f && a < infinity()) {
        a = __fmul_rn(a, 0x1p-64f);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word[i] = Word<T>::scale(word[i], 0x1p-64f);
    }
    return __frcp_rn(a);
}

// max|x| of the blocks that the lane's row lies in. Of a block of more than a tile neighbouring warps have a tile each
// and exchange their absmax through `shared`, a float for each warp: then all of the thread block must call this, and
// calls in turn must alternate between two such places, so that one barrier is enough.
template <typename T>
__device__ __forceinline__ RowScale
scale_row(unsigned (&row)[Tile<T>::WORDS], int block_log2, float* shared, int lane, int warp) {
    constexpr int HALF = Tile<T>::WORDS / 2;
    unsigned magnitude[2] = {};
#pragma unroll
    for (int i = 0; i < 2 * HALF; ++i) magnitude[i / HALF] = Word<T>::largest_or_nan(magnitude[i / HALF], row[i]);
    RowScale scale;
    scale.finite = Word<T>::is_finite(Word<T>::largest_or_nan(magnitude[0], magnitude[1]));
    if (!scale.finite) {
        magnitude[0] = magnitude[1] = 0;
#pragma unroll
        for (int i = 0; i < 2 * HALF; ++i) magnitude[i / HALF] = Word<T>::larger_magnitude(magnitude[i / HALF], row[i]);
    }
    if (block_log2 == 4) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scale.absmax[h] = flush(Word<T>::largest(magnitude[h]));
            scale.reciprocal[h] = reciprocal_of<T, HALF>(scale.absmax[h], row + h * HALF);
        }
        return scale;
    }
    float a = flush(Word<T>::largest(Word<T>::larger_magnitude(magnitude[0], magnitude[1])));
#pragma unroll
    for (int log2 = 0; log2 < 5; ++log2)
        if (block_log2 > 5 + log2) a = fmaxf(a, __shfl_xor_sync(FULL_WARP, a, 1 << log2));
    if (block_log2 > 10) {
        // Two or four warps: their places alternate, so that one barrier is enough.
        const int others = (1 << (block_log2 - 10)) - 1;
        if (lane == 0) shared[warp] = a;
        __syncthreads();
#pragma unroll
        for (int i = 1; i < 4; ++i) a = fmaxf(a, shared[warp ^ (i & others)]);
    }
    scale.absmax[0] = scale.absmax[1] = a;
    scale.reciprocal[0] = scale.reciprocal[1] = reciprocal_of<T, 2 * HALF>(a, row);
    return scale;
}

// Write the absmax of the blocks that begin in a row. `row` counts from the start of the array.
__device__ __forceinline__ void store_absmax(
    float* absmax, long long row, long long blocks, int block_log2, const RowScale& scale) {
    if (block_log2 == 4) {
        if (2 * row < blocks) absmax[2 * row] = scale.absmax[0];
        if (2 * row + 1 < blocks) absmax[2 * row + 1] = scale.absmax[1];
    } else if ((unsigned(row) & ((1u << (block_log2 - 5)) - 1)) == 0) {
        const long long block = row >> (block_log2 - 5);
        if (block < blocks) absmax[block] = scale.absmax[0];
    }
}

// ---- search in a table of 16 -----------------------------------------------------------------------------------

enum Search {
    ORDERED,  // code = level
    FP4,      // levels of the signed values of FP4
    ANY,      // bisection, then a map from level to code
};

// What the host knows of a table:
//     struct Table4
//         value       float[16]: by code
//         threshold   float[64]: of each bucket the only one inside, or +inf
//         ordered     float[16]: all thresholds, ascending, filled up with +inf
//         level       unsigned char[64]: of each bucket, what its numbers up to the threshold have
//         code        unsigned char[16]: by level

// An entry of the search table in shared memory, which holds COPIES of each, for lanes to read without bank conflicts.
struct __align__(8) Bucket {
    float threshold;
    unsigned level;
};
constexpr int COPIES = 16;

// Byte offset of the bucket of y, floor(16 * (y + 1)). The sum, rounded down, has y in its low bits, in units of 2^-11:
// 2^-7 of a bucket, and a bucket's copies are 2^7 bytes. NaN has all bits set and gets the last bucket, which no number
// reaches.
__device__ __forceinline__ unsigned bucket_of(float y) {
    return __float_as_uint(__fadd_rd(y, 6145.0f)) & 63 * (COPIES * 8);  // 2^12 + 2^11 + 1: -1 gets bucket 0
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
        for (int i = threadIdx.x; i < 64 * COPIES; i += blockDim.x)
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
            const Bucket bucket = *reinterpret_cast<const Bucket*>(table + (bucket_of(y) | lane_offset));
            const float distance = __fsub_rn(bucket.threshold, y);
            word[e / 8] += (bucket.level + (__float_as_uint(distance) >> 31)) << shift;
        }
    }
    if (SEARCH == FP4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Levels 0 .. 7 are those of magnitude 7 .. 0 with the sign bit, levels 8 .. 15 those of magnitude 0 .. 7.
            const unsigned negative = ~word[i] & 0x88888888u;
            word[i] ^= negative - (negative >> 3) ^ 0x88888888u;
            // Magnitudes 0 .. 7 have the codes 0 1 6 7 4 5 2 3.
            word[i] ^= (word[i] & 0x22222222u) << 1;
        }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// ---- the dynamic map -------------------------------------------------------------------------------------------

// The search table in shared memory, with copies for lanes to read it with few bank conflicts: one for each lane leaves
// less room for tiles, and is slower.
constexpr int DYNAMIC_COPIES = 16;
struct DynamicSearch {
    unsigned entry[DYNAMIC_BUCKETS][DYNAMIC_COPIES];
};

__device__ __forceinline__ void build_dynamic(const Dynamic& dynamic, DynamicSearch& search) {
    constexpr int EACH = DYNAMIC_COPIES / 4;
    for (int i = threadIdx.x; i < DYNAMIC_BUCKETS * EACH; i += blockDim.x) {
        const unsigned entry = dynamic.entry[i / EACH];
        reinterpret_cast<uint4*>(search.entry)[i] = make_uint4(entry, entry, entry, entry);
    }
}

// A word from shared memory by its 32-bit address. What was written there must have been synchronised.
__device__ __forceinline__ unsigned load_shared(unsigned address) {
    unsigned v;
    asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

// 0xff in each byte whose element of a row is negative, for elements 4 * w to 4 * w + 3.
template <typename T>
__device__ __forceinline__ unsigned sign_bytes(const unsigned* row, int w) {
    // A selector with bit 3 set spreads the sign of the byte.
    if constexpr (Word<T>::COUNT == 2) {
        unsigned all;
        asm("prmt.b32 %0, %1, %2, 0xfdb9;" : "=r"(all) : "r"(row[2 * w]), "r"(row[2 * w + 1]));
        return all;
    } else {
        unsigned low, high;
        asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(low) : "r"(row[4 * w]), "r"(row[4 * w + 1]));
        asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(high) : "r"(row[4 * w + 2]), "r"(row[4 * w + 3]));
        return __byte_perm(low, high, 0x5410);
    }
}

// The codes of a row, one a byte. `table` is the address of the lane's copy in the search table.
template <typename T>
__device__ __forceinline__ void encode8(
    unsigned (&row)[Tile<T>::WORDS], const RowScale& scale, unsigned table, unsigned (&word)[8]) {
    constexpr int COUNT = Word<T>::COUNT;
    constexpr unsigned NO_SIGN = COUNT == 2 ? 0x7fff7fffu : 0x7fffffffu;
    unsigned zeros = 0;  // a bit for each element that has code 0 without a search
    if (!scale.finite) {
#pragma unroll
        for (int e = 0; e < ROW; ++e) {
            const unsigned half = COUNT == 1 ? ~0u : 0xffffu << e % COUNT * 16;
            if (Word<T>::is_finite(row[e / COUNT] & half)) continue;
            row[e / COUNT] &= ~half;
            zeros |= 1u << e;
        }
    }
    float reciprocal[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const bool zero = scale.absmax[h] == 0.0f;
        reciprocal[h] = zero ? 0.0f : scale.reciprocal[h];
        if (zero) zeros |= 0xffffu << h * 16;
    }
#pragma unroll
    for (int w = 0; w < 8; ++w) {
        unsigned sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int e = 4 * w + i;
            const float x = Word<T>::get(row[e / COUNT] & NO_SIGN, e % COUNT);
            const unsigned bits = __float_as_uint(__fadd_rn(__fmul_rn(x, reciprocal[w / 4]), DYNAMIC_OFFSET));
            sum[i] = bits + load_shared(table + dynamic_bucket(bits) * (DYNAMIC_COPIES * 4));
        }
        const unsigned low = __byte_perm(sum[0], sum[1], 0x0073), high = __byte_perm(sum[2], sum[3], 0x0073);
        word[w] = signed_levels(__byte_perm(low, high, 0x5410), sign_bytes<T>(row, w));
    }
    if (zeros) {
#pragma unroll
        for (int w = 0; w < 8; ++w)
            word[w] &= ~(((zeros >> 4 * w & 15) * 0x204081u & 0x01010101u) * 0xffu);  // bits to bytes
    }
}
