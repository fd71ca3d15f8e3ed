// Quantizers of the format ternary, whose contract is that of kbitcupy/formats/ternary.py.
//
// Codes: a thread has the same 8 neighbours of each field of a block of 128 (4, of float32), so that it writes whole
// bytes and no lane needs the numbers of another:
//
//     x --16 B for each of four fields a lane; 4 or 8 lanes make a line--> registers --8 or 4 B a lane--> codes
//
// A trit is a comparison of magnitudes, as integers, with the least one that is not 0 under the scale: two of 16 bits
// at a time, and nothing is multiplied or flushed.
//
// Scales: sums of |w| in float64, in one order. Four lanes have 256 neighbours; what adds up their sums is a warp's
// worth of threads for blocks of up to 256, a thread block for longer ones, and two more kernels for an array that is
// one block.
#include "common/ieee.cuh"
#include "common/types.cuh"
#include "formats/planes.cuh"

// Of the host (kbitcupy/formats/ternary.py), ahead of this source: THREADS of a block of whoever reads x, LANES of the
// order of sums, SUMMED numbers of each sum, and
//
// struct ScaleBlocks
//     size           elements of x
//     row, run, per_row  element i has scale number i / row * per_row + i % row / run
//     count          scales
static_assert(LANES % (THREADS / 4) == 0 && SUMMED == 256, "a lane's sums are those of the same threads");

#ifdef KBIT_HOST
using Float16 = Half;
#else
using Float16 = __half;
#endif
template <typename T>
struct IsHalf {
    static constexpr bool VALUE = false;
};
template <>
struct IsHalf<Float16> {
    static constexpr bool VALUE = true;
};

__device__ __forceinline__ long long scale_number(const ScaleBlocks& blocks, long long element) {
    const long long r = divide(element, blocks.row);
    return r * blocks.per_row + divide(element - r * blocks.row, blocks.run);
}

// ---- float64 ---------------------------------------------------------------------------------------------------

// Between float32 and float64 with subnormal numbers, which -ftz=true would flush.
#ifdef KBIT_HOST
inline double to_double(float a) {
    const unsigned fraction = __float_as_uint(a) & 0x7fffffu;
    return __float_as_uint(a) << 1 >> 24 == 0 ? static_cast<int>(fraction) * 0x1p-149 : static_cast<double>(a);
}
inline float to_single(double a) {
    const FloatMode mode = float_mode();
    set_float_mode(IEEE_MODE);
    volatile double x = a;
    volatile float rounded = static_cast<float>(x);
    set_float_mode(mode);
    return rounded;
}
#else
__device__ __forceinline__ double to_double(float a) {
    double r;
    asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(a));
    return r;
}
__device__ __forceinline__ float to_single(double a) {
    float r;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(a));
    return r;
}
#endif
__device__ __forceinline__ float to_single(float a) { return a; }

// ---- codes -----------------------------------------------------------------------------------------------------

constexpr unsigned NEVER = 0x80000000u;  // beyond all magnitudes

__device__ __forceinline__ bool is_one(float magnitude, float inverse, bool away) {
    const float quotient = ieee::multiply(magnitude, inverse);
    return away ? quotient >= 0.5f : quotient > 0.5f;
}

// The bits of the least float32 that is 1 under a scale.
__device__ __forceinline__ unsigned least_one(float scale, bool away) {
    const unsigned bits = __float_as_uint(usable(scale));
    if (bits == 0) return NEVER;
    const float inverse = ieee::divide(1.0f, scale);
    if (__float_as_uint(inverse) == 0x7f800000u) return 1;
    // It is half the scale or a neighbour, of 1 / scale with 24 bits; beyond 2^126 that has 22 of them.
    const int below = static_cast<int>(__float_as_uint(ieee::multiply(scale, 0.5f))) - (bits > 0x7e800000u ? 16 : 2);
    unsigned least = max(below, 1);
#pragma unroll 1
    while (!is_one(__uint_as_float(least), inverse, away)) ++least;
    return least;
}

// The same as the bits of T: rounded up.
template <typename T>
__device__ __forceinline__ unsigned least_as(unsigned bits) {
    if constexpr (sizeof(T) == 4) {
        return bits;
    } else if constexpr (!IsHalf<T>::VALUE) {
        return (bits + 0xffffu) >> 16;
    } else {
        if (bits == NEVER) return 0x8000u;
        if (bits >= 0x38800000u) return min((bits - 0x38000000u + 0x1fffu) >> 13, 0x7c00u);
        const float units = ieee::multiply(__uint_as_float(bits), 0x1p24f);  // of subnormal halves
        const unsigned whole = static_cast<unsigned>(units);
        return max(whole + (static_cast<float>(whole) < units), 1u);
    }
}

// What makes codes of the numbers in a word.
template <typename T>
struct Classes {
    static constexpr unsigned COUNT = Word<T>::COUNT, ONES = COUNT == 2 ? 0x10001u : 1u;
    static constexpr unsigned TOP = COUNT == 2 ? 0x8000u : 0x80000000u, SIGNS = TOP * ONES;
    static constexpr unsigned INFINITE = sizeof(T) == 4 ? 0x7f800000u : IsHalf<T>::VALUE ? 0x7c00u : 0x7f80u;
    unsigned to_top;  // added to magnitudes, it carries those to the sign that are 1

    __device__ __forceinline__ explicit Classes(unsigned to_top = 0) : to_top(to_top) {}
    __device__ __forceinline__ Classes(float scale, bool away)
        : to_top((TOP - least_as<T>(least_one(scale, away))) * ONES) {}

    // t + 1 of each number in its two upper bits.
    __device__ __forceinline__ unsigned codes(unsigned word) const {
        const unsigned magnitude = word & ~SIGNS;
        const unsigned one = (magnitude + to_top) & ~(magnitude + (TOP - INFINITE - 1) * ONES) & SIGNS;
        return (one & ~word) | (one ^ SIGNS) >> 1;
    }
};

// The words of 16 bytes.
__device__ __forceinline__ unsigned word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The codes of four chunks, one of each field; `classes` gives those of word i of field f.
template <typename T, typename F>
__device__ __forceinline__ void store_codes(unsigned char* codes, const uint4 (&chunk)[4], const F& classes) {
    unsigned byte[4];  // the upper ones of a word, or of its halves
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        byte[i] = classes(0, i).codes(word_of(chunk[0], i));
#pragma unroll
        for (int f = 1; f < 4; ++f) byte[i] = byte[i] >> 2 | classes(f, i).codes(word_of(chunk[f], i));
    }
    if constexpr (Word<T>::COUNT == 2) {
        const uint2 both = make_uint2(__byte_perm(byte[0], byte[1], 0x7531u), __byte_perm(byte[2], byte[3], 0x7531u));
        __stcs(reinterpret_cast<uint2*>(codes), both);
    } else {
        const unsigned low = __byte_perm(byte[0], byte[1], 0x0073u), high = __byte_perm(byte[2], byte[3], 0x0073u);
        __stcs(reinterpret_cast<unsigned*>(codes), __byte_perm(low, high, 0x5410u));
    }
}

// The codes of a thread one by one: those of elements first + e of each field. `scale` gives the one of an element.
template <typename T, typename F>
__device__ __forceinline__ void store_singly(
    unsigned char* codes, const T* x, long long first, long long size, bool away, const F& scale) {
    constexpr int EACH = 4 * Word<T>::COUNT;
#pragma unroll 1
    for (int e = 0; e < EACH; ++e) {
        unsigned byte = 0;
#pragma unroll 1
        for (int f = 0; f < 4; ++f) {
            const long long i = first + e + f * 32;
            int trit = 0;
            if (i < size) {
                const float w = to_float(x[i]);
                const unsigned least = least_one(scale(i), away);
                const unsigned magnitude = ieee::magnitude_bits(w);
                if (magnitude >= least && magnitude <= 0x7f800000u) trit = __float_as_uint(w) >> 31 ? -1 : 1;
            }
            byte |= static_cast<unsigned>(trit + 1) << 2 * f;
        }
        codes[e] = static_cast<unsigned char>(byte);
    }
}

// Whether a thread has whole vectors of a block of 128, which ends at element `end`.
template <typename T>
__device__ __forceinline__ bool are_vectors(const T* x, const unsigned char* codes, long long end, long long size) {
    const bool aligned = is_aligned(x) && (reinterpret_cast<unsigned long long>(codes) & (4 * Word<T>::COUNT - 1)) == 0;
    return aligned && end <= size;
}

// x       T[size]
// codes   uint8[ceil(size / 128) * 32]
// scale   float32[count]
// away    how halves are rounded
// SHARED  neighbours, from multiples of it on, that surely have one scale: 128, 8 or 1
template <typename T, int SHARED>
__global__ void __launch_bounds__(THREADS) quantize_ternary(
    const T* x, unsigned char* codes, const float* scale, int away, const __grid_constant__ ScaleBlocks blocks) {
    constexpr int EACH = 4 * Word<T>::COUNT, PARTS = 32 / EACH;
    const long long unit = (long long)blockIdx.x * THREADS + threadIdx.x, block = unit / PARTS;
    const int within = static_cast<int>(unit % PARTS) * EACH;
    const long long first = block * 128 + within;
    if (block * 128 >= blocks.size) return;
    codes += block * 32 + within;
    if (SHARED > 1 && are_vectors(x, codes, block * 128 + 128, blocks.size)) {
        uint4 chunk[4];
#pragma unroll
        for (int f = 0; f < 4; ++f) chunk[f] = __ldcs(reinterpret_cast<const uint4*>(x + first + f * 32));
        if constexpr (SHARED == 128) {
            const Classes<T> classes(scale[scale_number(blocks, first)], away != 0);
            store_codes<T>(codes, chunk, [&](int, int) { return classes; });
        } else {
            const Classes<T> classes[4] = {
                {scale[scale_number(blocks, first)], away != 0},
                {scale[scale_number(blocks, first + 32)], away != 0},
                {scale[scale_number(blocks, first + 64)], away != 0},
                {scale[scale_number(blocks, first + 96)], away != 0}};
            store_codes<T>(codes, chunk, [&](int f, int) { return classes[f]; });
        }
        return;
    }
    store_singly(codes, x, first, blocks.size, away != 0, [&](long long i) { return scale[scale_number(blocks, i)]; });
}

// The same with groups of 32 to 256 elements, one behind the other. The elements of a warp lie in at most 32 of them:
// each lane makes the classes of one, and all fetch those of their chunks from the lanes that have them.
//
// x        T[size]
// codes    uint8[ceil(size / 128) * 32]
// given    float32[size / run], of which `scale` becomes what is usable; null: `scale` is there
// scale    float32[size / run]
// run      elements of a group
// inverse  2^64 / run, rounded up
// OCTETS   whether run is a multiple of 8
template <typename T, bool OCTETS>
__global__ void __launch_bounds__(THREADS) quantize_groups_ternary(
    const T* x, unsigned char* codes, const float* given, float* scale, int away, long long size, int run,
    unsigned long long inverse) {
    constexpr int EACH = 4 * Word<T>::COUNT, PARTS = 32 / EACH, SPAN = WARP / PARTS * 128;  // elements of a warp
    const int lane = threadIdx.x % WARP, place = lane / PARTS * 128 + lane % PARTS * EACH;
    const long long begin = ((long long)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) * SPAN;
    const long long end = begin + (lane / PARTS + 1) * 128;
    if (begin >= size) return;
    codes += begin / 4 + lane * EACH;
    uint4 chunk[4];
    const bool whole = are_vectors(x, codes, end, size);
    if (whole)
#pragma unroll
        for (int f = 0; f < 4; ++f) chunk[f] = __ldcs(reinterpret_cast<const uint4*>(x + begin + place + f * 32));

    const long long group = static_cast<long long>(__umul64hi(begin, inverse)), number = group + lane;
    const int at = static_cast<int>(begin - group * run) + place;  // from the first element of that group on
    const float* scales = given == nullptr ? scale : given;
    Classes<T> own;
    if (number * run < min(size, begin + SPAN)) {
        const float s = scales[number];
        own = Classes<T>(s, away != 0);
        if (given != nullptr) scale[number] = usable(s);
    }
    // Of each chunk the classes, the elements until the next group begins, and the classes there.
    Classes<T> classes[4], next[4];
    int until[4];
    const unsigned divisor = static_cast<unsigned>(inverse >> 44) + 1;  // 2^20 / run: exact for `at`
#pragma unroll
    for (int f = 0; f < 4; ++f) {
        const int g = static_cast<int>((at + 32 * f) * divisor >> 20);
        classes[f].to_top = __shfl_sync(FULL_WARP, own.to_top, g);
        if constexpr (!OCTETS) {
            next[f].to_top = __shfl_sync(FULL_WARP, own.to_top, (g + 1) % WARP);
            until[f] = (g + 1) * run - (at + 32 * f);
        }
    }
    if (whole) {
        store_codes<T>(codes, chunk, [&](int f, int i) {
            constexpr int COUNT = Word<T>::COUNT;
            if (OCTETS || until[f] >= (i + 1) * COUNT) return classes[f];
            if (until[f] <= i * COUNT) return next[f];
            return Classes<T>(__byte_perm(classes[f].to_top, next[f].to_top, 0x7610u));
        });
    } else if (end - 128 < size) {
        const auto scale_of = [&](long long i) { return scales[__umul64hi(i, inverse)]; };
        store_singly(codes, x, begin + place, size, away != 0, scale_of);
    }
}

// A scale that is given, for all blocks or each of them; what is no positive finite number counts as 0.
//
// given  S[1] or S[count], or null: `value` is meant
// each   0 where there is one
template <typename S>
__global__ void __launch_bounds__(THREADS)
    give_ternary(const S* given, float value, long long each, float* scale, long long count) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i < count) scale[i] = usable(given ? to_single(given[i * each]) : value);
}

// ---- scales ----------------------------------------------------------------------------------------------------

// What is made of the |w| of a block: its mean, not below eps; the largest; the mean, and a threshold to begin with;
// the mean of those above the threshold, and the next one.
enum Rule { MEAN, LARGEST, FIRST, ABOVE };

template <int RULE>
__device__ __forceinline__ double join(double a, double b) {
    return RULE == LARGEST ? (a < b ? b : a) : a + b;
}

// Neighbours as four lanes have them, 32 * CHUNKS of them: chunk b of lane a begins at element 32 * b + 8 * a.
template <typename T, int CHUNKS>
struct Neighbours {
    static constexpr int COUNT = Word<T>::COUNT, WORDS = 8 / COUNT;
    unsigned word[CHUNKS][WORDS];

    __device__ __forceinline__ void load_chunk(int b, const T* x) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 four = __ldcs(reinterpret_cast<const uint4*>(x + 32 * b) + i / 4);
            word[b][i] = four.x, word[b][i + 1] = four.y, word[b][i + 2] = four.z, word[b][i + 3] = four.w;
        }
    }
    __device__ __forceinline__ void load_whole(const T* x) {
#pragma unroll
        for (int b = 0; b < CHUNKS; ++b) load_chunk(b, x);
    }
    // `count` from the first of this lane on, and zeros behind.
    __device__ __forceinline__ void load_part(const T* x, long long count) {
        const bool aligned = is_aligned(x);
#pragma unroll
        for (int b = 0; b < CHUNKS; ++b) {
            if (aligned && 32 * b + 8 <= count) {
                load_chunk(b, x);
                continue;
            }
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                word[b][i] = 0;
#pragma unroll
                for (int e = 0; e < COUNT; ++e) {
                    const int at = 32 * b + i * COUNT + e;
                    if (at < count) word[b][i] |= bits_of(x + at) << e * 16;
                }
            }
        }
    }
    __device__ __forceinline__ static unsigned bits_of(const T* x) {
        if constexpr (sizeof(T) == 4) return *reinterpret_cast<const unsigned*>(x);
        else return *reinterpret_cast<const unsigned short*>(x);
    }
    // |w| of element e of chunk b as float32 bits; CAREFUL: 0 for NaN, and the largest finite number for infinities.
    template <bool CAREFUL>
    __device__ __forceinline__ unsigned magnitude(int b, int e) const {
        const unsigned bits = ieee::magnitude_bits(Word<T>::get(word[b][e / COUNT], e % COUNT));
        if (!CAREFUL) return bits;
        return bits > 0x7f800000u ? 0u : min(bits, 0x7f7fffffu);
    }

    // This lane's part of the tree: over the chunks, for each element of one.
    template <int RULE, bool CAREFUL>
    __device__ __forceinline__ void add(double (&sum)[8], unsigned floor, int& kept) const {
        kept = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            double v[CHUNKS];
#pragma unroll
            for (int b = 0; b < CHUNKS; ++b) {
                unsigned bits = magnitude<CAREFUL>(b, e);
                if (RULE == ABOVE) kept += bits > floor, bits = bits > floor ? bits : 0u;
                v[b] = to_double(__uint_as_float(bits));
            }
#pragma unroll
            for (int half = CHUNKS / 2; half > 0; half /= 2)
#pragma unroll
                for (int b = 0; b < half; ++b) v[b] = join<RULE>(v[b], v[b + half]);
            sum[e] = v[0];
        }
    }
};

// The rest of the tree, over four lanes: each keeps half of what two have, then a quarter.
template <int RULE>
__device__ __forceinline__ double join_lanes(const double (&sum)[8], int lane) {
    double half[4], two[2];
    const bool upper = lane & 2, odd = lane & 1;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const double other = __shfl_xor_sync(FULL_WARP, upper ? sum[e] : sum[e + 4], 2);
        half[e] = join<RULE>(upper ? sum[e + 4] : sum[e], other);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const double other = __shfl_xor_sync(FULL_WARP, odd ? half[e] : half[e + 2], 1);
        two[e] = join<RULE>(odd ? half[e + 2] : half[e], other);
    }
#pragma unroll
    for (int step = 2; step > 0; step /= 2)
#pragma unroll
        for (int e = 0; e < 2; ++e) two[e] = join<RULE>(two[e], __shfl_xor_sync(FULL_WARP, two[e], step));
    return join<RULE>(two[0], two[1]);
}

struct Total {
    double sum;
    long long kept;  // numbers above the threshold
};

// The total of the `count` numbers, 32 * CHUNKS at the most, from x on: all four lanes have it. All lanes of a warp
// call it.
template <typename T, int RULE, int CHUNKS = SUMMED / 32>
__device__ __forceinline__ Total total_of(const T* x, long long count, unsigned floor) {
    const int lane = threadIdx.x % 4;
    Neighbours<T, CHUNKS> numbers;
    x += lane * 8;
    if (count >= 32 * CHUNKS && is_aligned(x)) numbers.load_whole(x);
    else numbers.load_part(x, count - lane * 8);
    double sum[8];
    int kept;
    constexpr bool CAREFUL = RULE == LARGEST;
    numbers.template add<RULE, CAREFUL>(sum, floor, kept);
    double total = join_lanes<RULE>(sum, lane);
    if constexpr (!CAREFUL) {
        int strange = !(total < infinity());  // a number was
#pragma unroll
        for (int step = 16; step > 2; step /= 2) strange |= __shfl_xor_sync(FULL_WARP, strange, step);
        if (strange) {
            numbers.template add<RULE, true>(sum, floor, kept);
            total = join_lanes<RULE>(sum, lane);
        }
    }
    if (RULE == ABOVE) {
        kept += __shfl_xor_sync(FULL_WARP, kept, 2);
        kept += __shfl_xor_sync(FULL_WARP, kept, 1);
    }
    return {total, kept};
}

// Scale and next threshold from the total of a block's `size` numbers.
template <int RULE>
__device__ __forceinline__ void finish(Total total, long long size, float eps, float* scale, float* floor) {
    if constexpr (RULE == LARGEST) {
        *scale = to_single(total.sum);
    } else if constexpr (RULE == ABOVE) {
        if (total.kept > 0) *scale = to_single(total.sum / static_cast<double>(total.kept));
        *floor = ieee::multiply(*scale, 0.5f);
    } else {
        const float mean = to_single(total.sum / static_cast<double>(size));
        if (RULE == MEAN) *scale = __uint_as_float(max(__float_as_uint(mean), __float_as_uint(eps)));
        else *scale = mean, *floor = ieee::multiply(0.7f, mean);
    }
}

// The elements of a scale: the first, and how many.
struct Extent {
    long long first, size;

    __device__ __forceinline__ Extent(const ScaleBlocks& blocks, long long number) {
        const long long r = divide(number, blocks.per_row), column = (number - r * blocks.per_row) * blocks.run;
        first = r * blocks.row + column, size = min(blocks.run, blocks.row - column);
    }
};

// Blocks of up to 32 * CHUNKS numbers: four lanes have one.
//
// x      T[size]
// scale  float32[count], read by ABOVE
// floor  float32[count], of FIRST and ABOVE
template <typename T, int RULE, int CHUNKS>
__global__ void __launch_bounds__(THREADS) short_scales_ternary(
    const T* x, float* scale, float* floor, float eps, const __grid_constant__ ScaleBlocks blocks) {
    const long long number = ((long long)blockIdx.x * THREADS + threadIdx.x) / 4;
    const bool there = number < blocks.count;
    const Extent extent(blocks, there ? number : 0);
    const unsigned above = RULE == ABOVE && there ? __float_as_uint(floor[number]) : 0u;
    const Total total = total_of<T, RULE, CHUNKS>(x + extent.first, there ? extent.size : 0, above);
    if (there && threadIdx.x % 4 == 0) finish<RULE>(total, extent.size, eps, scale + number, floor + number);
}

// Longer blocks: a thread block has one, of a power of two of threads, as many as have work. Arguments as
// short_scales_ternary.
template <typename T, int RULE>
__global__ void __launch_bounds__(THREADS)
    long_scales_ternary(const T* x, float* scale, float* floor, float eps, const __grid_constant__ ScaleBlocks blocks) {
    __shared__ double lanes[LANES];
    __shared__ long long kept[THREADS / 4];
    const int teams = blockDim.x / 4;
    const int team = threadIdx.x / 4;
    const bool first = threadIdx.x % 4 == 0;
    const Extent extent(blocks, blockIdx.x);
    const unsigned above = RULE == ABOVE ? __float_as_uint(floor[blockIdx.x]) : 0u;
    // Lanes that have no sums would change nothing.
    int used = LANES;
    while (used / 2 * (long long)SUMMED >= extent.size) used /= 2;
    for (int i = threadIdx.x; i < used; i += blockDim.x) lanes[i] = 0.0;
    __syncthreads();
    long long own = 0;
    for (long long begin = 0, at = team; begin < extent.size; begin += teams * SUMMED, at += teams) {
        const long long left = extent.size - at * SUMMED;
        const Total total = total_of<T, RULE>(x + extent.first + at * SUMMED, left, above);
        double& lane = lanes[at % LANES];  // no other team comes to it
        if (first && left > 0) lane = join<RULE>(lane, total.sum), own += total.kept;
    }
    if (first) kept[team] = own;
    for (int half = used / 2; half > 0; half /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < half; i += blockDim.x) lanes[i] = join<RULE>(lanes[i], lanes[i + half]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        Total total{lanes[0], 0};
        for (int i = 0; i < teams; ++i) total.kept += kept[i];
        finish<RULE>(total, extent.size, eps, scale + blockIdx.x, floor + blockIdx.x);
    }
}

// An array that is one block, in three steps. The first: totals of SUMMED numbers each.
//
// x      T[size]
// floor  float32[1]
// sums   float64[ceil(size / SUMMED)]
// kept   int64[ceil(size / SUMMED)]
template <typename T, int RULE>
__global__ void __launch_bounds__(THREADS)
    sums_ternary(const T* x, long long size, const float* floor, double* sums, long long* kept) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) / 4, left = size - at * SUMMED;
    const unsigned above = RULE == ABOVE ? __float_as_uint(*floor) : 0u;
    const Total total = total_of<T, RULE>(left > 0 ? x + at * SUMMED : x, left, above);
    if (left > 0 && threadIdx.x % 4 == 0) {
        sums[at] = total.sum;
        if (RULE == ABOVE) kept[at] = total.kept;
    }
}

// The second: lane i of LANES has the sums i, i + LANES, ... Each adds its own up, one after the other, so that few
// lanes a thread block, with many loads under way, are the fastest.
template <int RULE>
__global__ void __launch_bounds__(WARP)
    lanes_ternary(const double* sums, const long long* kept, long long count, double* lanes, long long* kept_lanes) {
    const int lane = blockIdx.x * WARP + threadIdx.x;
    Total total{0.0, 0};
#pragma unroll 32
    for (long long i = lane; i < count; i += LANES) {
        total.sum = join<RULE>(total.sum, sums[i]);
        if (RULE == ABOVE) total.kept += kept[i];
    }
    lanes[lane] = total.sum;
    if (RULE == ABOVE) kept_lanes[lane] = total.kept;
}

// The third: a tree of the lanes. One thread block.
template <int RULE>
__global__ void __launch_bounds__(LANES)
    finish_ternary(const double* lanes, const long long* kept, long long size, float eps, float* scale, float* floor) {
    __shared__ double tree[LANES];
    __shared__ long long above[LANES];
    tree[threadIdx.x] = lanes[threadIdx.x];
    above[threadIdx.x] = RULE == ABOVE ? kept[threadIdx.x] : 0;
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            tree[threadIdx.x] = join<RULE>(tree[threadIdx.x], tree[threadIdx.x + half]);
            above[threadIdx.x] += above[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) finish<RULE>({tree[0], above[0]}, size, eps, scale, floor);
}
