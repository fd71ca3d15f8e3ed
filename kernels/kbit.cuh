// The search of k-bit codebooks: how the index of the nearest value is found.
//
//     packed    uint32[blocks * K]   bit e of word b * K + p is bit p of the index of element 32 * b + e
//     absmax    [blocks]             one scale a block: E4M4 (uint8), float16 or float32
//     scale     float32[1]           power of two that multiplies every block scale
#pragma once
#include "common/tiles.cuh"
#include "formats/scales.cuh"

// ---- search ----------------------------------------------------------------------------------------------------

// How the nearest value is found.
enum Search {
    ORDERED,  // ascending values: buckets of thresholds, index = level
    MAPPED,   // any values that are far enough apart: buckets of thresholds, then a map from level to index
    ANY,      // any values: thread blocks find out for themselves which search is right
};

// Of the host (kbitcupy/formats/codebook/search.py), ahead of this source: MAX_BUCKETS, the largest bucket table;
// MAX_COPIES, the most copies of one; TABLE_BYTES, which copies may take; BUCKET_BYTES; and what is known of a
// codebook, by value, so that there is no upload, nothing to keep alive, and a graph may hold it:
//     struct Codebook<K>
//         value        float[2^K]
//         threshold    float[2^K]: ascending, filled up with +inf; see BucketSearch
//         index        unsigned char[2^K]: of each level; not for ORDERED
//         slope        y * slope + 0.5, clamped to [0, 1], walks through the buckets
//         buckets      a power of two; only with ANY a bucket may hold two thresholds. 0: there is no table
//         copies       of the bucket table, a power of two: copy = lane % copies

// A bucket: the only threshold in it (or +inf), and the index on its lower side (bits 0 .. 7) and on its upper one
// (bits 16 .. 23; not used by ORDERED, where it is one more). With ANY bit 31 marks a bucket of more thresholds, and
// the rest of the index is 0.
struct __align__(8) Bucket {
    float threshold;
    unsigned index;
};
static_assert(sizeof(Bucket) == BUCKET_BYTES, "the host reckons with other sizes");

// Table of buckets over y. The bucket number comes from one fused multiply-add and one addition of a power of two,
// whose unit in the last place makes the bits of the fraction fall where an address wants them. Both steps are
// monotone in y, so bucket(y) < bucket(threshold) implies y < threshold: rounding cannot harm.
struct BucketSearch {
    unsigned offset, mask;  // of this lane's copy in the table; of the bits that select a bucket
    float slope, magic;

    template <int K>
    __device__ __forceinline__ BucketSearch(const Codebook<K>& codebook, int lane) {
        const int shift = 31 - __clz(codebook.copies * int(sizeof(Bucket)));  // a bucket's copies are 1 << shift bytes
        const int steps = 31 - __clz(codebook.buckets);
        offset = (lane & (codebook.copies - 1)) * sizeof(Bucket);
        slope = codebook.slope;
        magic = __int_as_float((127 + 23 - shift - steps) << 23);
        mask = (2u * codebook.buckets - 1) << shift;  // 1.0 is a bucket of its own, number `buckets`
    }
    // Byte offset of the bucket of x * factor, factor being slope times whatever x lacks to be y.
    __device__ __forceinline__ unsigned operator()(float x, float factor) const {
        return (__float_as_uint(__fadd_rn(fma_saturate(x, factor, 0.5f), magic)) & mask) | offset;
    }
};

// Every thread of the block helps; `thresholds` and `table` are shared memory. Ends with a barrier.
template <int K, int SEARCH>
__device__ void build_buckets(const Codebook<K>& codebook, const float* thresholds, Bucket* table) {
    const BucketSearch search(codebook, 0);
    const int shift = 31 - __clz(codebook.copies * int(sizeof(Bucket)));
    for (int bucket = threadIdx.x; bucket <= codebook.buckets; bucket += blockDim.x) {
        unsigned level = 0;  // count of thresholds that lie in earlier buckets
#pragma unroll
        for (int step = 1 << (K - 1); step > 0; step >>= 1) {
            const float threshold = thresholds[level + step - 1];
            if (threshold < infinity() && int(search(threshold, search.slope) >> shift) < bucket) level += step;
        }
        const float next = thresholds[level];
        const bool inside = next < infinity() && int(search(next, search.slope) >> shift) == bucket;
        Bucket entry{inside ? next : infinity(), level};
        if (SEARCH != ORDERED) entry.index = codebook.index[level] | codebook.index[inside ? level + 1 : level] << 16;
        if (SEARCH == ANY && inside) {
            const float second = thresholds[level + 1];  // +inf behind the last one
            if (second < infinity() && int(search(second, search.slope) >> shift) == bucket)
                entry = {infinity(), 1u << 31};
        }
        for (int copy = 0; copy < codebook.copies; ++copy) table[bucket * codebook.copies + copy] = entry;
    }
    __syncthreads();
}

// The index of y by bisection of the thresholds of a codebook in shared memory; NaN is below all.
template <int K, int SEARCH>
__device__ __forceinline__ unsigned bisect(const Codebook<K>& codebook, const float* thresholds, float y) {
    unsigned level = 0;
#pragma unroll
    for (int step = 1 << (K - 1); step > 0; step >>= 1)
        if (y > thresholds[level + step - 1]) level += step;
    if (SEARCH == ORDERED) return level;
    return y == y ? codebook.index[level] : 0u;
}

// float32 as integers of the same order (-0.0 and 0.0 are the same one), and back.
__device__ __forceinline__ int ordered(float x) {
    const int bits = __float_as_int(x);
    return bits < 0 ? -(bits & 0x7fffffff) : bits;
}
__device__ __forceinline__ float unordered(int i) { return __int_as_float(i < 0 ? -i | int(0x80000000u) : i); }

// The largest float32 that belongs to the lower one of two neighbouring levels, by bisection: `below` belongs to it,
// `above` to the upper one.
__device__ inline float threshold_between(float low, float high, bool tie_is_low) {
    int below = ordered(low), above = ordered(high);
    while (unsigned(above) - unsigned(below) > 1) {
        const int middle = below + int((unsigned(above) - unsigned(below)) / 2);
        const float to_low = __fsub_rn(unordered(middle), low), to_high = __fsub_rn(high, unordered(middle));
        if (to_low < to_high || (to_low == to_high && tie_is_low)) below = middle;
        else above = middle;
    }
    return unordered(below);
}

// For values that only the device knows, what Codebook in tables.py and BucketSearch of the family find on the host.
// Every thread of the block helps; `codebook` and `scratch` (2^(K+1) numbers) are shared memory. Ends with a barrier.
// Returns whether thresholds find the nearest value; `buckets` is 0 where no table helps.
template <int K>
__device__ bool analyse(const float* values, Codebook<K>& codebook, float* scratch) {
    constexpr int SIZE = 1 << K;
    float* const distinct = scratch;      // the values, NaN where an earlier one is equal
    float* const level = scratch + SIZE;  // ascending, filled up with +inf
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) codebook.value[i] = flush(values[i]), level[i] = infinity();
    if (threadIdx.x == 0) codebook.buckets = 0;
    __syncthreads();
    bool regular = true;
    float reach = 1.0f;
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) {
        const float value = codebook.value[i];
        bool seen = false;
#pragma unroll 4
        for (int j = 0; j < SIZE; ++j) {
            seen |= j < i && codebook.value[j] == value;
            reach = fmaxf(reach, fabsf(codebook.value[j]));
        }
        distinct[i] = seen ? __int_as_float(0x7fffffff) : value;
        regular &= fabsf(value) < infinity();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) {
        const float value = distinct[i];
        int number = 0;
#pragma unroll 4
        for (int j = 0; j < SIZE; ++j) number += distinct[j] < value;
        if (value == value) level[number] = value, codebook.index[number] = i;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) {
        const float low = level[i], high = i + 1 < SIZE ? level[i + 1] : infinity();
        codebook.threshold[i] = infinity();
        if (high < infinity()) {
            const float gap = __fsub_rn(high, low);
            const float threshold = threshold_between(low, high, codebook.index[i] < codebook.index[i + 1]);
            codebook.threshold[i] = threshold;
            regular &= gap >= 0x1p-18f * reach && gap < infinity() && fabsf(threshold) >= 0x1p-40f;
        }
    }
    if (!__syncthreads_and(regular)) return false;

    const float* const threshold = codebook.threshold;
    const unsigned count = bisect<K, ORDERED>(codebook, threshold, 3.40282347e38f);
    const float farthest = count == 0 ? 0.0f : fmaxf(fabsf(threshold[0]), fabsf(threshold[count - 1]));
    // slope = 2^-p with every threshold inside (-2^(p-1), 2^(p-1)).
    const int p = (__float_as_int(fmaxf(farthest, 0.5f)) >> 23) - 127 + 2;
    if (p > 126) return true;
    const float slope = __int_as_float((127 - p) << 23);
    int buckets = 1;
    for (; buckets < MAX_BUCKETS; buckets *= 2) {
        bool together = false;
        for (int i = threadIdx.x; i + 1 < count; i += blockDim.x)
            together |= int(__fmaf_rn(threshold[i], slope, 0.5f) * buckets) ==
                        int(__fmaf_rn(threshold[i + 1], slope, 0.5f) * buckets);
        if (!__syncthreads_or(together)) break;
    }
    if (threadIdx.x == 0) {
        codebook.slope = slope, codebook.buckets = buckets;
        codebook.copies = max(1, min(MAX_COPIES, TABLE_BYTES / BUCKET_BYTES / buckets));
    }
    __syncthreads();
    return true;
}

// The nearest of any 2^K values in shared memory: the first with the smallest |y - value|, NaN never wins.
template <int K>
struct FullSearch {
    const float* value;
    float lowest, highest;
    bool clamp;  // bring y into the codebook first (the format's rule, not the flat functions')

    __device__ __forceinline__ void find_extremes() {
        lowest = infinity(), highest = -infinity();
        for (int i = 0; i < (1 << K); ++i) lowest = fminf(lowest, value[i]), highest = fmaxf(highest, value[i]);
    }
    __device__ __forceinline__ unsigned operator()(float y) const {
        if (clamp) y = y < lowest ? lowest : y > highest ? highest : y;
        unsigned best = 0;
        float smallest = infinity();
#pragma unroll 4
        for (int i = 0; i < (1 << K); ++i) {
            const float distance = fabsf(__fsub_rn(y, value[i]));
            if (distance < smallest) smallest = distance, best = i;
        }
        return best;
    }
};
