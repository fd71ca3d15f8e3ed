// Affine integers: how elements share scales, and how eight neighbours are read, rounded, packed and written.
//
//     codes       int8 or uint8 [n], or two 4-bit codes a byte [ceil(n / 2)], the first in the low nibble
//     scale       float32, beside float64 arrays float64, one for each block
//     zero_point  int32, one for each block
//
// A thread works on units of 8 or 16 consecutive elements, which nearly always share one scale. What is not in order (a
// block that ends inside a unit, the end of the array, a scale or an element that the short division is not exact for)
// is left to a careful path, one element after the other.
//
// Unlike the k-bit kernels these keep subnormal numbers, so where one may occur the arithmetic is inline PTX, which
// -ftz=true does not reach.
#pragma once
#include "common.cuh"

constexpr int UNIT = 8;  // elements of a unit, unless it says otherwise

// ---- arithmetic ------------------------------------------------------------------------------------------------

// What an array of T is computed in.
template <typename T>
struct Compute {
    using Type = float;
    using Bits = unsigned;
};
template <>
struct Compute<double> {
    using Type = double;
    using Bits = unsigned long long;
};

__device__ __forceinline__ double to_float(double x) { return x; }

__device__ __forceinline__ float multiply_ieee(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ double multiply_ieee(double a, double b) { return a * b; }
__device__ __forceinline__ double divide_ieee(double x, double y) { return x / y; }

// The larger one; NaN loses.
__device__ __forceinline__ float larger(float a, float b) {
    float r;
    asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float smaller(float a, float b) {
    float r;
    asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ double smaller(double a, double b) { return fmin(a, b); }

__device__ __forceinline__ float narrow(double x, float) {
    float r;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(x));
    return r;
}
__device__ __forceinline__ double narrow(double x, double) { return x; }
__device__ __forceinline__ double widen(float x) {
    double r;
    asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ double widen(double x) { return x; }

// Magnitudes in the order of their bits.
__device__ __forceinline__ unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ unsigned long long magnitude_bits(double x) {
    return __double_as_longlong(x) & 0x7fffffffffffffffull;
}
__device__ __forceinline__ float from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ double from_bits(unsigned long long bits) { return __longlong_as_double(bits); }
__device__ __forceinline__ unsigned largest_finite(float) { return 0x7f7fffffu; }
__device__ __forceinline__ unsigned long long largest_finite(double) { return 0x7fefffffffffffffull; }

__device__ __forceinline__ unsigned all_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ unsigned long long all_bits(double x) { return __double_as_longlong(x); }

// A scale that is not a positive finite number counts as 0.
__device__ __forceinline__ float usable(float s) { return __float_as_uint(s) - 1u < 0x7f7fffffu ? s : 0.0f; }
__device__ __forceinline__ double usable(double s) {
    return __double_as_longlong(s) - 1ull < 0x7fefffffffffffffull ? s : 0.0;
}

// rint(x / s), not clamped, by the contract; NaN stays. s is usable.
template <typename C>
__device__ __forceinline__ C steps_of(C x, C s) {
    return magnitude_bits(s) == 0 ? C(0) : C(rint(divide_ieee(x, s)));
}

// Within the range, NaN to 0.
template <typename C>
__device__ __forceinline__ C clamped(C steps, C low, C high) {
    return steps != steps ? C(0) : steps < low ? low : steps > high ? high : steps;
}

// Added to a float below 2^22 in magnitude, this leaves its nearest integer in the low bits of the sum.
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23

// ---- geometry --------------------------------------------------------------------------------------------------

// a / divisor for a < 2^31, as a product: magic = ceil(2^shift / divisor), shift = 31 + ceil(log2(divisor)).
struct ShortDivision {
    unsigned magic;
    int shift;
    __device__ __forceinline__ unsigned operator()(unsigned a) const {
        return static_cast<unsigned>(static_cast<unsigned long long>(a) * magic >> shift);
    }
};

// Element i has scale number i / row * per_row + i % row / run. Passed by value, made by the host.
struct Geometry {
    long long n, row, run, per_row;
    long long count;               // scales
    long long columns, rows;       // COLUMNS: the array as a matrix whose rows are whole periods of the scales
    ShortDivision by_row, by_run;  // valid unless `wide`
    int wide;                      // row is below 8, or from 2^30 on: divide in 64 bits
    int qmin, qmax;
    int margin;         // a mask begins so far from the ends of the range
    int zero, divisor;  // ranges that are found: zero point if symmetric; what the width of the range is divided by
    int symmetric;

    __device__ __forceinline__ long long index(long long i) const {
        const long long r = i / row;
        return r * per_row + (i - r * row) / run;
    }
};

// The tiles of a thread block: a run of neighbours (see Share in kbit.cu for why).
struct Run {
    long long first, end;
    __device__ __forceinline__ explicit Run(long long tiles) {
        const long long run = tiles <= gridDim.x ? 1 : (tiles + gridDim.x - 1) / gridDim.x;
        first = blockIdx.x * run;
        end = min(tiles, first + run);
    }
};

// ---- scales ----------------------------------------------------------------------------------------------------

// Where scales and zero points come from: an array, or one value where the pointer is null.
template <typename C>
struct Source {
    const C* scale;
    const int* zero_point;
    C scale_value;
    int zero_value;

    // Entry first + offset, as it is stored (see usable), or within the range.
    __device__ __forceinline__ C scale_at(long long first, unsigned offset = 0) const {
        return scale ? __ldg(scale + first + offset) : scale_value;
    }
    __device__ __forceinline__ int zero_at(const Geometry& g, long long first, unsigned offset = 0) const {
        return zero_point ? min(max(__ldg(zero_point + first + offset), g.qmin), g.qmax) : zero_value;
    }
};

// 1 / s correctly rounded, for s between 2^-60 and 2^60: what __frcp_rn comes down to in that range.
__device__ __forceinline__ float short_reciprocal(float s) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(s));
    return __fmaf_rn(r, __fmaf_rn(-s, r, 1.0f), r);
}

// Whether the short division by s is exact: neither scale nor inverse nor residual leaves the normal range.
__device__ __forceinline__ bool is_ordinary(float s) {
    constexpr unsigned LOWEST = (127u - 60) << 23, HIGHEST = (127u + 60) << 23;
    return __float_as_uint(s) - LOWEST <= HIGHEST - LOWEST;
}
__device__ __forceinline__ bool is_ordinary(double) { return true; }

// The scales of a unit: one for all, or one for each element.
template <typename C, int N>
struct Scales {
    C scale[N];
    C inverse[N];  // float32 only
    int zero[N];
    bool ordinary =
        true;  // the short division is exact: neither scale nor inverse nor residual leaves the normal range

    // INVERSE: for a short division; then a scale is only to be used while all are ordinary.
    template <bool INVERSE>
    __device__ __forceinline__ void set(int j, C s, int z) {
        zero[j] = z;
        if constexpr (INVERSE && sizeof(C) == 4) {
            ordinary &= is_ordinary(s);
            scale[j] = s, inverse[j] = short_reciprocal(s);
        } else {
            scale[j] = usable(s);
        }
    }
    __device__ __forceinline__ C s(int j) const { return scale[N == 1 ? 0 : j]; }
    __device__ __forceinline__ C r(int j) const { return inverse[N == 1 ? 0 : j]; }
    __device__ __forceinline__ int z(int j) const { return zero[N == 1 ? 0 : j]; }
};

// x / s correctly rounded (Markstein) where the quotient is finite and in the normal range; NaN otherwise, 0 keeps its
// sign.
__device__ __forceinline__ float short_division(float x, float s, float r) {
    const float q = __fmul_rn(x, r);
    return __fmaf_rn(-__fmaf_rn(q, s, -x), r, q);
}

// ---- units -----------------------------------------------------------------------------------------------------

// SIZE elements in registers.
template <typename T, int SIZE = UNIT>
struct Unit {
    using C = typename Compute<T>::Type;
    static constexpr int WORDS = SIZE * sizeof(T) / 4, PER_WORD = sizeof(T) == 2 ? 2 : 1;
    unsigned word[WORDS];

    template <bool ALIGNED>
    __device__ __forceinline__ void load(const T* x) {
        if constexpr (ALIGNED) {
#pragma unroll
            for (int i = 0; i < WORDS / 4; ++i) {
                const uint4 v = __ldcs(reinterpret_cast<const uint4*>(x) + i);
                word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
            }
        } else {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) {
                if constexpr (sizeof(T) == 2) {
                    const unsigned bits = reinterpret_cast<const unsigned short*>(x)[j];
                    word[j / 2] = j % 2 ? word[j / 2] | bits << 16 : bits;
                } else if constexpr (sizeof(T) == 4) {
                    word[j] = reinterpret_cast<const unsigned*>(x)[j];
                } else {
                    set(j, x[j]);
                }
            }
        }
    }
    template <bool ALIGNED>
    __device__ __forceinline__ void store(T* y) const {
        if constexpr (ALIGNED) {
#pragma unroll
            for (int i = 0; i < WORDS / 4; ++i)
                __stcs(
                    reinterpret_cast<uint4*>(y) + i,
                    make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]));
        } else {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) {
                if constexpr (sizeof(T) == 2)
                    reinterpret_cast<unsigned short*>(y)[j] = static_cast<unsigned short>(word[j / 2] >> j % 2 * 16);
                else if constexpr (sizeof(T) == 4) reinterpret_cast<unsigned*>(y)[j] = word[j];
                else y[j] = get(j);
            }
        }
    }
    __device__ __forceinline__ C get(int j) const {
        if constexpr (sizeof(T) == 8) return __hiloint2double(word[2 * j + 1], word[2 * j]);
        else return Word<T>::get(word[j / PER_WORD], j % PER_WORD);
    }
    __device__ __forceinline__ void set(int j, double value) {
        word[2 * j] = __double2loint(value), word[2 * j + 1] = __double2hiint(value);
    }
    // All of them, rounded to T.
    __device__ __forceinline__ void pack(const C (&v)[SIZE]) {
#pragma unroll
        for (int i = 0; i < SIZE / PER_WORD; ++i) {
            if constexpr (sizeof(T) == 8) set(i, v[i]);
            else word[i] = Word<T>::pack(v + i * PER_WORD);
        }
    }
    // Zero in place of the elements whose bit is not set.
    __device__ __forceinline__ void keep(unsigned mask) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
            const bool kept = mask >> j & 1u;
            if constexpr (sizeof(T) == 2) word[j / 2] &= kept ? 0xffffffffu : j % 2 ? 0x0000ffffu : 0xffff0000u;
            else if constexpr (sizeof(T) == 4) word[j] = kept ? word[j] : 0u;
            else if (!kept) set(j, 0.0);
        }
    }
};

// One number as it is stored.
template <typename T>
__device__ __forceinline__ T stored(typename Compute<T>::Type v) {
    if constexpr (sizeof(T) == 2) {
        const float both[2] = {v, 0.0f};
        return Word<T>::element(Word<T>::pack(both), 0);
    } else {
        return v;
    }
}

// SIZE codes of 8 or 4 bits in registers, as they lie in memory.
template <int BITS, int SIZE = UNIT>
struct Codes {
    static constexpr int BYTES = SIZE * BITS / 8, WORDS = BYTES / 4;
    unsigned word[WORDS];

    // Low bits of integers.
    __device__ __forceinline__ void pack(const int (&q)[SIZE]) {
        unsigned four[SIZE / 4];
#pragma unroll
        for (int h = 0; h < SIZE / 4; ++h)
            four[h] = __byte_perm(
                __byte_perm(q[4 * h], q[4 * h + 1], 0x0040), __byte_perm(q[4 * h + 2], q[4 * h + 3], 0x0040), 0x5410);
        if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = four[i];
        } else {
#pragma unroll
            for (int h = 0; h < SIZE / 4; ++h) four[h] &= 0x0f0f0f0fu, four[h] |= four[h] >> 4;  // pairs of nibbles
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = __byte_perm(four[2 * i], four[2 * i + 1], 0x6420);
        }
    }
    // As 2^23 + (code + offset), offset being 0 or 2^(BITS - 1), that is: without a sign. As floats these are exact.
    __device__ __forceinline__ void unpack(bool with_sign, float (&v)[SIZE]) const {
        const unsigned flip = !with_sign ? 0u : BITS == 8 ? 0x80808080u : 0x08080808u;
#pragma unroll
        for (int e = 0; e < SIZE; e += 8) {
            unsigned four[2];
            if constexpr (BITS == 8) four[0] = word[e / 4] ^ flip, four[1] = word[e / 4 + 1] ^ flip;
            else four[0] = word[e / 8] & 0x0f0f0f0fu ^ flip, four[1] = word[e / 8] >> 4 & 0x0f0f0f0fu ^ flip;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int half = BITS == 8 ? j / 4 : j % 2, byte = BITS == 8 ? j % 4 : j / 2;
                v[e + j] = __uint_as_float(__byte_perm(four[half], 0x4b000000u, 0x7440 | byte));
            }
        }
    }
    template <bool ALIGNED>
    __device__ __forceinline__ void load(const unsigned char* codes) {
        if constexpr (!ALIGNED) {
#pragma unroll
            for (int i = 0; i < BYTES; ++i)
                word[i / 4] = i % 4 ? word[i / 4] | unsigned(codes[i]) << i % 4 * 8 : unsigned(codes[i]);
        } else if constexpr (WORDS == 2) {
            const uint2 v = __ldcs(reinterpret_cast<const uint2*>(codes));
            word[0] = v.x, word[1] = v.y;
        } else {
            static_assert(WORDS == 1, "codes are read 8 at a time");
            word[0] = __ldcs(reinterpret_cast<const unsigned*>(codes));
        }
    }
    template <bool ALIGNED>
    __device__ __forceinline__ void store(unsigned char* codes) const {
        if constexpr (!ALIGNED) {
#pragma unroll
            for (int i = 0; i < BYTES; ++i) codes[i] = static_cast<unsigned char>(word[i / 4] >> i % 4 * 8);
        } else if constexpr (WORDS == 4) {
            __stcs(reinterpret_cast<uint4*>(codes), make_uint4(word[0], word[1], word[2], word[3]));
        } else if constexpr (WORDS == 2) {
            __stcs(reinterpret_cast<uint2*>(codes), make_uint2(word[0], word[1]));
        } else {
            __stcs(reinterpret_cast<unsigned*>(codes), word[0]);
        }
    }
    // The code of one element.
    __device__ __forceinline__ static int at(const unsigned char* codes, long long i, bool with_sign) {
        const int code = BITS == 8 ? codes[i] : codes[i / 2] >> i % 2 * 4 & 15;
        const int half = BITS == 8 ? 128 : 8;
        return with_sign ? (code ^ half) - half : code;
    }
};

// ---- walks -----------------------------------------------------------------------------------------------------

enum Layout {
    RUNS,     // eight neighbours nearly always share a scale
    COLUMNS,  // they do not: scales repeat with a short period, and a thread stays in its columns
};

constexpr int AFFINE_THREADS = 256;

// Where a tile of neighbouring elements lies among the blocks, in 32 bits; not for wide geometries.
struct RunsTile {
    long long first;  // number of a scale at or before that of the tile's first element
    unsigned column;  // of the tile's first element in its row

    __device__ __forceinline__ RunsTile(const Geometry& g, long long base) {
        const long long row = base >> 31 ? base / g.row : g.by_row(static_cast<unsigned>(base));
        first = row * g.per_row;
        column = static_cast<unsigned>(base - row * g.row);
    }
    // The number of the scale at `local`, less `first`, and the elements from there to the end of its run.
    __device__ __forceinline__ unsigned locate(const Geometry& g, int local, unsigned& rest) const {
        const unsigned length = static_cast<unsigned>(g.row), run = static_cast<unsigned>(g.run);
        const unsigned at = column + local, r = g.by_row(at), c = at - r * length;
        unsigned offset = r * static_cast<unsigned>(g.per_row);
        rest = length - c;
        if (run != length) {
            const unsigned k = g.by_run(c);
            offset += k, rest = min(rest, (k + 1) * run - c);
        }
        return offset;
    }
};

// Do `op` to all units. An Op has
//     SIZE               elements of a unit
//     Data               registers of a unit
//     DEPTH              units whose loads a thread has under way
//     aligned            whether all arrays begin at a multiple of 16 bytes
//     load<ALIGNED>(i, data)            reads the unit that begins with element i
//     scales(j, first, offset, scales)  sets entry j to scale number first + offset
//     quick<ALIGNED>(i, data, scales)   does a unit; false where it must be done carefully
//     careful(i, count)                 does count elements one by one
template <int LAYOUT, typename Op>
__device__ __forceinline__ void for_each_unit(const Op& op, const Geometry& g) {
    constexpr int DEPTH = Op::DEPTH, SIZE = Op::SIZE, STEP = AFFINE_THREADS * SIZE;
    if constexpr (LAYOUT == RUNS) {
        constexpr long long TILE_SIZE = (long long)STEP * DEPTH;
        const int mine = threadIdx.x * SIZE;
        const Run tiles((g.n + TILE_SIZE - 1) / TILE_SIZE);
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            const long long base = tile * TILE_SIZE;
            if (g.wide) {
                for (int local = mine; local < TILE_SIZE && base + local < g.n; local += STEP)
                    op.careful(base + local, static_cast<int>(min((long long)SIZE, g.n - base - local)));
                continue;
            }
            const RunsTile place(g, base);
            // The scales of the unit at `local`; false where it has more than one.
            auto find = [&](int local, Scales<typename Op::Compute, 1>& scales) {
                unsigned rest;
                const unsigned offset = place.locate(g, local, rest);
                op.scales(0, place.first, offset, scales);
                return rest >= SIZE;
            };
            unsigned left = 0;  // bit u: unit u is not done
            if (op.aligned && base + TILE_SIZE <= g.n) {
                typename Op::Data data[DEPTH];
#pragma unroll
                for (int u = 0; u < DEPTH; ++u) op.template load<true>(base + mine + u * STEP, data[u]);
#pragma unroll
                for (int u = 0; u < DEPTH; ++u) {
                    Scales<typename Op::Compute, 1> scales;
                    if (!find(mine + u * STEP, scales) ||
                        !op.template quick<true>(base + mine + u * STEP, data[u], scales))
                        left |= 1u << u;
                }
            } else {
#pragma unroll 1
                for (int u = 0; u < DEPTH; ++u) {
                    const int local = mine + u * STEP;
                    bool done = base + local >= g.n;
                    if (base + local + SIZE <= g.n) {
                        typename Op::Data data;
                        op.template load<false>(base + local, data);
                        Scales<typename Op::Compute, 1> scales;
                        done = find(local, scales) && op.template quick<false>(base + local, data, scales);
                    }
                    if (!done) left |= 1u << u;
                }
            }
            for (; left; left &= left - 1) {
                const long long i = base + mine + (__ffs(left) - 1) * STEP;
                op.careful(i, static_cast<int>(min((long long)SIZE, g.n - i)));
            }
        }
    } else {
        constexpr int ROWS = 2 * DEPTH;  // that a thread does with one set of scales
        static_assert(SIZE == UNIT, "columns go by eight");
        const long long across = (g.columns + STEP - 1) / STEP;
        const Run tiles((g.rows + ROWS - 1) / ROWS * across);
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            const long long first = tile / across * ROWS;
            const long long column = tile % across * STEP + threadIdx.x * UNIT;
            if (column >= g.columns) continue;
            Scales<typename Op::Compute, UNIT> scales;
            unsigned c = static_cast<unsigned>(column % g.row);
            unsigned index = c / static_cast<unsigned>(g.run), e = c % static_cast<unsigned>(g.run);
#pragma unroll
            for (int j = 0; j < UNIT; ++j) {
                op.scales(j, 0, index, scales);
                if (++e == g.run) e = 0, index = index + 1 == g.count ? 0 : index + 1;
            }
            unsigned left = 0;  // bit r: row r is not done
            if (op.aligned && (first + ROWS) * g.columns <= g.n) {
#pragma unroll 1
                for (int batch = 0; batch < ROWS; batch += DEPTH) {
                    typename Op::Data data[DEPTH];
#pragma unroll
                    for (int u = 0; u < DEPTH; ++u)
                        op.template load<true>((first + batch + u) * g.columns + column, data[u]);
#pragma unroll
                    for (int u = 0; u < DEPTH; ++u)
                        if (!op.template quick<true>((first + batch + u) * g.columns + column, data[u], scales))
                            left |= 1u << (batch + u);
                }
            } else {
#pragma unroll 1
                for (int r = 0; r < ROWS; ++r) {
                    const long long i = (first + r) * g.columns + column;
                    bool done = false;
                    if (i + UNIT <= g.n) {
                        typename Op::Data data;
                        op.template load<false>(i, data);
                        done = op.template quick<false>(i, data, scales);
                    }
                    if (!done) left |= 1u << r;
                }
            }
            for (; left; left &= left - 1) {
                const long long i = (first + __ffs(left) - 1) * g.columns + column;
                op.careful(i, static_cast<int>(min((long long)UNIT, g.n - i)));
            }
        }
    }
}

// Bytes under way in a thread are what hides the latency of memory; registers limit them.
template <typename T>
constexpr int UNITS_UNDER_WAY = 8 / sizeof(T);

// ---- x to codes ------------------------------------------------------------------------------------------------

// An Op that writes codes.
template <typename T, int BITS, int SIZE_ = UNIT>
struct Quantize {
    using Compute = typename ::Compute<T>::Type;
    static constexpr int SIZE = SIZE_;
    using Data = Unit<T, SIZE>;
    static constexpr int DEPTH = UNITS_UNDER_WAY<T> * UNIT / SIZE;
    const T* x;
    unsigned char* codes;
    Source<Compute> source;
    const Geometry& g;
    bool aligned;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(long long i, Data& data) const {
        data.template load<ALIGNED>(x + i);
    }

    template <int N>
    __device__ __forceinline__ void scales(int j, long long first, unsigned offset, Scales<Compute, N>& scales) const {
        scales.template set<true>(j, source.scale_at(first, offset), source.zero_at(g, first, offset));
    }

    template <bool ALIGNED, int N>
    __device__ __forceinline__ bool quick(long long i, const Data& data, const Scales<Compute, N>& scales) const {
        int q[SIZE];
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) q[j] = level(data.get(j), scales.s(j), scales.z(j));
        } else {
            float bad = 0.0f;  // NaN if any quotient is not finite
#pragma unroll
            for (int j = 0; j < SIZE; ++j) {
                const float steps = short_division(data.get(j), scales.s(j), scales.r(j));
                bad = __fmaf_rn(steps, 0.0f, bad);
                const float low = float(g.qmin - scales.z(j)), high = float(g.qmax - scales.z(j));
                q[j] = __float_as_int(__fadd_rn(fminf(fmaxf(steps, low), high), ROUNDER)) + scales.z(j);
            }
            if (!(scales.ordinary && bad == 0.0f)) return false;
        }
        Codes<BITS, SIZE> packed;
        packed.pack(q);
        packed.template store<ALIGNED>(codes + i * BITS / 8);
        return true;
    }

    __device__ __forceinline__ int level(Compute v, Compute s, int z) const {
        return static_cast<int>(clamped(steps_of(v, s), Compute(g.qmin - z), Compute(g.qmax - z))) + z;
    }

    __device__ __forceinline__ void careful(long long i, int count) const {
#pragma unroll 1
        for (int j = 0; j < count; j += 8 / BITS) {
            unsigned byte = 0;
#pragma unroll 1
            for (int h = 0; h < 8 / BITS && j + h < count; ++h) {
                const long long index = g.index(i + j + h);
                const int q = level(to_float(x[i + j + h]), usable(source.scale_at(index)), source.zero_at(g, index));
                byte |= (q & (1 << BITS) - 1) << h * BITS;
            }
            codes[(i + j) * BITS / 8] = static_cast<unsigned char>(byte);
        }
    }
};
