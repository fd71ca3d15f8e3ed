// k-bit blockwise codebook: how one block of 32 is encoded and decoded.
//
//     packed    uint32[blocks * K]   bit e of word b * K + p is bit p of the index of element 32 * b + e
//     absmax    [blocks]             one scale a block: E4M4 (uint8), float16 or float32
//     scale     float32[1]           power of two that multiplies every block scale
#pragma once
#include "common.cuh"

// ---- block scales ----------------------------------------------------------------------------------------------

enum AbsmaxFormat { E4M4, FLOAT16, FLOAT32 };

// One byte e << 4 | m: 2^(e - bias) * (1 + m / 16), or m * 2^(-bias - 3) where e = 0. Values from 2^(16 - bias) on
// saturate, and the mantissa is clamped at 15 instead of carried, as in bitsandbytes.
__device__ __forceinline__ unsigned char encode_e4m4(float x, int bias) {
    if (!(x > 0.0f)) return 0;
    unsigned bits = __float_as_uint(x);
    int exponent = int(bits >> 23) - 127 + bias;
    if (exponent > 15) return 0xff;
    unsigned mantissa;
    if (exponent <= 0) {
        mantissa = unsigned(__float2int_rn(__fmul_rn(x, __int_as_float((bias + 3 + 127) << 23))));
        exponent = 0;
    } else {
        unsigned fraction = bits & 0x7fffffu;
        mantissa = (fraction + 0x3ffffu + ((fraction >> 19) & 1u)) >> 19;  // half to even at bit 19
    }
    return static_cast<unsigned char>(exponent << 4 | min(mantissa, 15u));
}

__device__ __forceinline__ float decode_e4m4(unsigned code, int bias) {
    unsigned exponent = code >> 4, mantissa = code & 15u;
    if (exponent == 0) return __fmul_rn(float(mantissa), __int_as_float((127 - bias - 3) << 23));
    return __uint_as_float((exponent + 127 - bias) << 23 | mantissa << 19);
}

constexpr int E4M4_BIAS = 11;

template <int FORMAT>
struct Absmax;

template <>
struct Absmax<E4M4> {
    using Code = unsigned char;
    static constexpr float LOW = 0.0625f, HIGH = 31.0f;  // the tensor scale is 1 while the largest absmax is in here
    __device__ __forceinline__ static Code encode(float x) { return encode_e4m4(x, E4M4_BIAS); }
    __device__ __forceinline__ static float decode(Code code) { return decode_e4m4(code, E4M4_BIAS); }
    // Exponent of the tensor scale that brings `largest` into (15.5, 31].
    __device__ __forceinline__ static int exponent(unsigned bits) {
        return int(bits >> 23) - 127 - ((bits & 0x7fffffu) <= 0x780000u ? 4 : 3);
    }
};

template <>
struct Absmax<FLOAT16> {
    using Code = __half;
    static constexpr float LOW = 0.0625f, HIGH = 65504.0f;
    __device__ __forceinline__ static Code encode(float x) { return __float2half_rn(x); }
    __device__ __forceinline__ static float decode(Code code) { return __half2float(code); }
    // ... into (2^14, 2^15].
    __device__ __forceinline__ static int exponent(unsigned bits) {
        return int(bits >> 23) - 127 - ((bits & 0x7fffffu) == 0 ? 15 : 14);
    }
};

template <>
struct Absmax<FLOAT32> {
    using Code = float;
    static constexpr float LOW = 0.0f, HIGH = 3.40282347e38f;
    __device__ __forceinline__ static Code encode(float x) { return x; }
    __device__ __forceinline__ static float decode(Code code) { return code; }
    __device__ __forceinline__ static int exponent(unsigned) { return 0; }
};

// The tensor scale for the largest finite absmax of a tensor (0 when it has none).
template <int FORMAT>
__device__ __forceinline__ float tensor_scale_of(float largest) {
    using A = Absmax<FORMAT>;
    if (largest == 0.0f || (largest >= A::LOW && largest <= A::HIGH)) return 1.0f;
    int exponent = max(A::exponent(__float_as_uint(largest)), -126);
    return __int_as_float((exponent + 127) << 23);
}

// ---- search ----------------------------------------------------------------------------------------------------

// What the host knows of a codebook, passed by value: no upload, nothing to keep alive, safe in a graph.
template <int K>
struct Codebook {
    float value[1 << K];
    float threshold[1 << K];  // 2^K - 1 of them, ascending; only for the sorted search
    float slope;              // y * slope + 0.5, clamped to [0, 1], walks through the buckets
    int buckets;              // a power of two; no bucket holds two thresholds
    int copies;               // of the bucket table, a power of two up to 16: copy = lane % copies
};

// A bucket: the only threshold in it (or +inf) and the index on its lower side.
struct Bucket {
    float threshold;
    unsigned index;
};

// Bucket number of y, scaled by `copies`, in the bits that `mask` selects. The conversion is one fused multiply-add
// and one addition of 2^e: the sum's unit in the last place makes the fraction's bits fall where an address wants
// them. Both steps are monotone in y, so bucket(y) < bucket(threshold) implies y < threshold: rounding cannot harm.
struct BucketSearch {
    const char* table;  // this lane's copy
    float slope, magic;
    unsigned mask;

    __device__ __forceinline__ unsigned offset(float y) const {
        return __float_as_uint(__fadd_rn(fma_saturate(y, slope, 0.5f), magic)) & mask;
    }
    __device__ __forceinline__ unsigned operator()(float y) const {
        Bucket bucket = *reinterpret_cast<const Bucket*>(table + offset(y));
        return bucket.index + (y > bucket.threshold ? 1u : 0u);
    }
};

template <int K>
__device__ __forceinline__ BucketSearch make_bucket_search(const Codebook<K>& codebook, char* shared, int lane) {
    BucketSearch search;
    int shift = 31 - __clz(codebook.copies * int(sizeof(Bucket)));  // an entry of all copies is 1 << shift bytes
    int steps = 31 - __clz(codebook.buckets);
    search.table = shared + (lane & (codebook.copies - 1)) * sizeof(Bucket);
    search.slope = codebook.slope;
    search.magic = __int_as_float((127 + 23 - shift - steps) << 23);
    search.mask = (2u * codebook.buckets - 1) << shift;  // 1.0 is a bucket of its own, number `buckets`
    return search;
}

// Every thread of the block helps; `thresholds` and `table` are shared memory. Ends with a barrier.
template <int K>
__device__ void build_buckets(const Codebook<K>& codebook, float* thresholds, Bucket* table) {
    for (int i = threadIdx.x; i < (1 << K); i += blockDim.x)
        thresholds[i] = i < (1 << K) - 1 ? codebook.threshold[i] : infinity();
    __syncthreads();
    BucketSearch search = make_bucket_search(codebook, nullptr, 0);
    int shift = 31 - __clz(codebook.copies * int(sizeof(Bucket)));
    for (int bucket = threadIdx.x; bucket <= codebook.buckets; bucket += blockDim.x) {
        // Count of thresholds that lie in earlier buckets.
        unsigned index = 0;
#pragma unroll
        for (int step = 1 << (K - 1); step > 0; step >>= 1)
            if (int(search.offset(thresholds[index + step - 1]) >> shift) < bucket) index += step;
        float next = thresholds[index];
        bool inside = index < (1 << K) - 1 && int(search.offset(next) >> shift) == bucket;
        for (int copy = 0; copy < codebook.copies; ++copy)
            table[bucket * codebook.copies + copy] = Bucket{inside ? next : infinity(), index};
    }
    __syncthreads();
}

// The nearest of any 2^K values: the first with the smallest |y - value|, NaN never wins.
template <int K>
struct FullSearch {
    const float* value;  // shared memory
    float lowest, highest;
    bool clamp;  // bring y into the codebook first (the format's rule, not the flat functions')

    __device__ __forceinline__ unsigned operator()(float y) const {
        if (clamp) y = y < lowest ? lowest : y > highest ? highest : y;
        unsigned best = 0;
        float smallest = infinity();
        for (int i = 0; i < (1 << K); ++i) {
            float distance = fabsf(__fsub_rn(y, value[i]));
            if (distance < smallest) smallest = distance, best = i;
        }
        return best;
    }
};
