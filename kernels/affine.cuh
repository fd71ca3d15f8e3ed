// Affine integers: how elements share scales, and how eight neighbours are read, rounded, packed and written.
//
//     codes       int8 or uint8 [n], or two 4-bit codes a byte [ceil(n / 2)], the first in the low nibble
//     scale       float32, beside float64 arrays float64, one for each block
//     zero_point  int32, one for each block
//     offset      float32, in place of zero_point where a kernel's FLOATING says so: where a zero point is an int, an
//                 offset is the bits of a float
//
// A thread works on units of 4 to 16 consecutive elements, which nearly always share one scale. What is not in order (a
// block that ends inside a unit, the end of the array, a scale or an element that the short division is not exact for)
// is left to a careful path, one element after the other.
//
// Unlike the k-bit kernels these keep subnormal numbers, so where one may occur the arithmetic is inline PTX, which
// -ftz=true does not reach.
#pragma once
#include "common/ieee.cuh"
#include "common/tiles.cuh"

// Of the host (kbitcupy/formats/affine/cuda.py), ahead of this source: UNIT, elements of a unit unless it says
// otherwise; threads of blocks, and what a thread or a thread block takes; struct Geometry, see below.

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
__device__ __forceinline__ float narrow(float x, float) { return x; }
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

// As usable(float).
__device__ __forceinline__ double usable(double s) {
    return __double_as_longlong(s) - 1ull < 0x7fefffffffffffffull ? s : 0.0;
}

// The same of scales beside offsets that codes are multiplied by: any finite number.
__device__ __forceinline__ float finite_or_0(float s) { return ieee::finite(s); }
__device__ __forceinline__ double finite_or_0(double s) { return magnitude_bits(s) <= largest_finite(0.0) ? s : 0.0; }

// x - offset, which is not flushed.
__device__ __forceinline__ float above(float x, float offset) { return ieee::subtract(x, offset); }
__device__ __forceinline__ double above(double x, double offset) { return x - offset; }

// code * s + offset in float32.
__device__ __forceinline__ float beside_offset(float code, float s, float offset) {
    return ieee::add(multiply_ieee(s, code), offset);
}
__device__ __forceinline__ double beside_offset(float code, double s, double offset) {
    return widen(beside_offset(code, narrow(s, 0.0f), narrow(offset, 0.0f)));
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

// ROUNDER + i, for integers below 2^22 in magnitude.
__device__ __forceinline__ float beside_rounder(int i) { return __int_as_float(0x4b400000 + i); }

// Integers in the low bits of floats: rint(steps) + zero beside a large number.
struct Rounding {
    float rounder, lowest, highest;
    // `offset`, an even number, is added to all; it is in `low` and `high` already.
    __device__ __forceinline__ Rounding(int offset, int low, int high)
        : rounder(beside_rounder(offset)), lowest(beside_rounder(low)), highest(beside_rounder(high)) {}
    __device__ __forceinline__ float operator()(float steps, float zero) const {
        return __fadd_rn(__fadd_rn(steps, rounder), zero);
    }
    __device__ __forceinline__ float clamped(float sum) const { return fminf(fmaxf(sum, lowest), highest); }
    __device__ __forceinline__ bool within(float sum) const { return sum >= lowest && sum <= highest; }
};

// ---- scales of 16 bits -----------------------------------------------------------------------------------------

// In what scales and offsets are stored.
enum Storage { IN_FLOAT, IN_HALF, IN_BFLOAT16 };

// A number of 16 bits as its code, none beyond the largest one.
__device__ __forceinline__ unsigned code_of(float x, int storage) {
    const unsigned code =
        storage == IN_HALF ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return (code & 0x8000u) | min(code & 0x7fffu, storage == IN_HALF ? 0x7bffu : 0x7f7fu);
}
__device__ __forceinline__ float number_of_code(unsigned code, int storage) {
    return storage == IN_HALF ? __half2float(__ushort_as_half(static_cast<unsigned short>(code)))
                              : __uint_as_float(code << 16);
}

// ---- geometry --------------------------------------------------------------------------------------------------

// Element i has scale number i / row * per_row + i % row / run. By value, made by the host:
//     struct Geometry
//         n, row, run, per_row
//         count                     scales
//         columns, rows             COLUMNS: the array as a matrix whose rows are whole periods of the scales
//         inverse                   1 / divisor
//         long_by_row, by_row, by_run    divisions by row and by run, valid unless `wide`: see divided
//         wide                      row is below 8, or from 2^30 on, or run is 1: divide in 64 bits
//         qmin, qmax
//         margin                    a mask begins so far from the ends of the range; STORED: the Storage of scales
//
// Where ranges are found, the last three as bits of the scales' type:
//         zero, divisor             the zero point if symmetric; what the width of a range is divided by
//         symmetric
//         reach                     if symmetric: the most steps from the zero point that a finite number may become
//         largest                   the largest number of the array's type; FLOATING: where ranges end
//         limit                     the largest number that is rounded to a finite one of that type
//         surely                    up to such a scale no level is decoded to more; FLOATING: the largest scale

// a / divisor for a < 2^31, as a product: magic = ceil(2^(32 + shift) / divisor), shift = ceil(log2(divisor)) - 1.
__device__ __forceinline__ unsigned divided(unsigned a, const Division& by) {
    return __umulhi(a, by.magic) >> by.shift;
}

// i / row; not where `wide`. For i from 2^31 to 2^63 the same product in 128 bits.
__device__ __forceinline__ long long row_of(const Geometry& g, long long i) {
    return i >> 31 ? static_cast<long long>(__umul64hi(i, g.long_by_row) >> g.by_row.shift)
                   : divided(static_cast<unsigned>(i), g.by_row);
}

// The number of the scale of element i.
__device__ __forceinline__ long long scale_of(const Geometry& g, long long i) {
    const long long r = i / g.row;
    return r * g.per_row + (i - r * g.row) / g.run;
}

// ---- scales ----------------------------------------------------------------------------------------------------

// N neighbours, in loads of 16 bytes where they lie for it.
template <typename V, int N>
__device__ __forceinline__ void load_neighbours(const V* from, V (&to)[N]) {
    if (is_aligned(from)) {
        constexpr int EACH = 16 / sizeof(V);
#pragma unroll
        for (int i = 0; i < N / EACH; ++i) {
            const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i);
#pragma unroll
            for (int j = 0; j < EACH; ++j) to[i * EACH + j] = reinterpret_cast<const V*>(&four)[j];
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) to[j] = __ldg(from + j);
    }
}

// A scale and a zero point as they are stored.
template <typename C>
struct Parameters {
    C scale;
    int zero;
};

// Where scales and zero points come from: an array, or one value where the pointer is null.
template <typename C>
struct Source {
    const C* scale;
    const int* zero_point;
    C scale_value;
    int zero_value;

    __device__ __forceinline__ Parameters<C> at(long long i) const {
        return {scale ? __ldg(scale + i) : scale_value, zero_point ? __ldg(zero_point + i) : zero_value};
    }
    // COLUMNS: do set(j, parameters) to the columns from `column` on.
    template <int N, typename Set>
    __device__ __forceinline__ void columns(const Geometry& g, unsigned column, const Set& set) const {
        const unsigned row = static_cast<unsigned>(g.row), run = static_cast<unsigned>(g.run);
        const unsigned c = column < row ? column : column % row;
        if (run == 1 && row % N == 0) {
            C scales[N];
            int zeros[N];
            if (scale) load_neighbours(scale + c, scales);
            if (zero_point) load_neighbours(zero_point + c, zeros);
#pragma unroll
            for (int j = 0; j < N; ++j) set(j, {scale ? scales[j] : scale_value, zero_point ? zeros[j] : zero_value});
        } else {
            unsigned index = c / run, e = c % run;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                set(j, at(index));
                if (++e == run) e = 0, index = index + 1 == g.count ? 0 : index + 1;
            }
        }
    }
};

// Iterators over elements, with the scale (0 where it does not count) and zero point of each: here those of one block.
template <typename C>
struct BlockIterator {
    C scale, zero;
    __device__ __forceinline__ void next() {}
};

// An offset from its bits.
template <typename C>
__device__ __forceinline__ C offset_of(int bits) {
    if constexpr (sizeof(C) == 8) return widen(__int_as_float(bits));
    else return __int_as_float(bits);
}

// The same through blocks as they come. DIVIDE: by scales, which have to be positive.
template <typename C, bool FLOATING = false, bool DIVIDE = false>
struct ElementIterator {
    const Source<C>& source;
    const Geometry& g;
    long long element, rest;  // `rest`: elements from here to the end of the run
    C scale, zero;

    __device__ __forceinline__ ElementIterator(const Source<C>& source, const Geometry& g, long long i)
        : source(source), g(g) {
        go(i);
    }
    __device__ __forceinline__ void go(long long i) {
        const long long r = i / g.row, c = i - r * g.row, k = c / g.run;
        element = i, rest = min(g.row - c, (k + 1) * g.run - c);
        const Parameters<C> from = source.at(r * g.per_row + k);
        if constexpr (FLOATING) {
            scale = DIVIDE ? usable(from.scale) : finite_or_0(from.scale), zero = offset_of<C>(from.zero);
        } else {
            scale = usable(from.scale), zero = C(min(max(from.zero, g.qmin), g.qmax));
        }
    }
    __device__ __forceinline__ void next() {
        ++element;
        if (--rest == 0 && element < g.n) go(element);
    }
};

// The entries of a Source from one on.
template <typename C>
struct SourcePart {
    const Source<C>& source;
    const C* scale;
    const int* zero_point;
    __device__ __forceinline__ SourcePart(const Source<C>& source, long long first)
        : source(source), scale(opaque(source.scale + first)), zero_point(opaque(source.zero_point + first)) {}
    __device__ __forceinline__ Parameters<C> operator[](unsigned i) const {
        return {
            source.scale ? __ldg(scale + i) : source.scale_value,
            source.zero_point ? __ldg(zero_point + i) : source.zero_value};
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

// Whether no number that a short division takes, less the offset, has too large a quotient.
__device__ __forceinline__ bool is_near(float offset) { return magnitude_bits(offset) < (127u + 60) << 23; }
__device__ __forceinline__ bool is_near(double) { return true; }

// The scales of a unit: one for all, or one for each element.
template <typename C, int N>
struct Scales {
    C scale[N];
    C inverse[N];  // float32 only
    C zero[N];
    bool usable = true;

    // INVERSE: for a short division, usable only where that is exact: while neither scale nor inverse nor residual
    // leaves the normal range.
    template <bool INVERSE, bool FLOATING>
    __device__ __forceinline__ void set(int j, C s, int z) {
        if constexpr (FLOATING) zero[j] = offset_of<C>(z);
        else if constexpr (sizeof(C) == 4) zero[j] = __fsub_rn(beside_rounder(z), ROUNDER);
        else zero[j] = C(z);
        if constexpr (INVERSE && sizeof(C) == 4) {
            usable &= is_ordinary(s);
            if constexpr (FLOATING) usable &= is_near(zero[j]);
            scale[j] = s, inverse[j] = short_reciprocal(s);
        } else {
            scale[j] = FLOATING && !INVERSE ? finite_or_0(s) : ::usable(s);
        }
    }
    __device__ __forceinline__ C s(int j) const { return scale[N == 1 ? 0 : j]; }
    __device__ __forceinline__ C r(int j) const { return inverse[N == 1 ? 0 : j]; }
    __device__ __forceinline__ C z(int j) const { return zero[N == 1 ? 0 : j]; }
};

// x / s correctly rounded (Markstein) where the quotient is finite and in the normal range; NaN otherwise, 0 keeps its
// sign.
__device__ __forceinline__ float short_division(float x, float s, float r) {
    const float q = __fmul_rn(x, r);
    return __fmaf_rn(-__fmaf_rn(q, s, -x), r, q);
}

// ---- units -----------------------------------------------------------------------------------------------------

// Whether all quotients of a unit are finite: one instruction for each, or for two elements where a quotient of a
// finite number cannot overflow.
template <typename T>
struct Finite {
    float sum = 0.0f;  // NaN if not
    __device__ __forceinline__ void add(unsigned) {}
    __device__ __forceinline__ void add_quotient(float q) { sum = __fmaf_rn(q, 0.0f, sum); }
    __device__ __forceinline__ bool all() const { return sum == 0.0f; }
};
template <>
struct Finite<__half> {
    __half2 sum = Word<__half>::as(0u);
    __device__ __forceinline__ void add(unsigned word) {
        sum = __hfma2(Word<__half>::as(word), Word<__half>::as(0u), sum);
    }
    __device__ __forceinline__ void add_quotient(float) {}
    __device__ __forceinline__ bool all() const {
        return (*reinterpret_cast<const unsigned*>(&sum) & 0x7fff7fffu) == 0;
    }
};
#if __CUDA_ARCH__ >= 800
// The sum of squares stays finite unless an element is beyond 2^63. Divided by an ordinary scale, no other overflows.
template <>
struct Finite<__nv_bfloat16> {
    __nv_bfloat162 sum = Word<__nv_bfloat16>::as(0u);
    __device__ __forceinline__ void add(unsigned word) {
        sum = __hfma2(Word<__nv_bfloat16>::as(word), Word<__nv_bfloat16>::as(word), sum);
    }
    __device__ __forceinline__ void add_quotient(float) {}
    __device__ __forceinline__ bool all() const {
        const unsigned bits = *reinterpret_cast<const unsigned*>(&sum);
        return (bits & 0x7f800000u) != 0x7f800000u && (bits & 0x7f80u) != 0x7f80u;
    }
};
#endif

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
    // Have `use` take each element's number and its quotient, rounded by the short division; whether that holds for
    // all. FLOATING: less the offset, where a small difference may be flushed, as its quotient is rounded to 0.
    template <bool FLOATING = false, typename Scales, typename Use>
    __device__ __forceinline__ bool divide(const Scales& scales, const Use& use) const {
        Finite<T> finite;
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
            if (j % PER_WORD == 0) finite.add(word[j / PER_WORD]);
            const float number = FLOATING ? __fsub_rn(get(j), scales.z(j)) : get(j);
            const float quotient = short_division(number, scales.s(j), scales.r(j));
            finite.add_quotient(quotient);
            use(j, quotient);
        }
        return finite.all();
    }
    // The elements from i * UNIT on.
    __device__ __forceinline__ Unit<T> part(int i) const {
        Unit<T> found;
#pragma unroll
        for (int j = 0; j < found.WORDS; ++j) found.word[j] = word[i * found.WORDS + j];
        return found;
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
    // Zero in place of element j, if so.
    __device__ __forceinline__ void drop(int j, bool so) {
        if constexpr (sizeof(T) == 2)
            word[j / 2] = so ? word[j / 2] & (j % 2 ? 0x0000ffffu : 0xffff0000u) : word[j / 2];
        else if constexpr (sizeof(T) == 4) word[j] = so ? 0u : word[j];
        else if (so) set(j, 0.0);
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
    static constexpr int BYTES = SIZE * BITS / 8, WORDS = (BYTES + 3) / 4;
    unsigned word[WORDS];

    // The low bytes of four words.
    __device__ __forceinline__ static unsigned low_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
        return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
    }
    // Codes in the low bytes of words; of 4 bits these hold nothing else.
    __device__ __forceinline__ void pack_bytes(const unsigned (&q)[SIZE]) {
        constexpr int SHARE = 8 / BITS;
        unsigned byte[BYTES];
#pragma unroll
        for (int i = 0; i < BYTES; ++i) byte[i] = BITS == 8 ? q[i] : q[SHARE * i] + q[SHARE * i + SHARE - 1] * 16;
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            word[i] = BYTES == 2 ? __byte_perm(byte[0], byte[1], 0x0040)
                                 : low_bytes(byte[4 * i], byte[4 * i + 1], byte[4 * i + 2], byte[4 * i + 3]);
    }
    // Codes that integers in words, and `correction`, add up to.
    __device__ __forceinline__ void pack_sums(const unsigned (&q)[SIZE], int correction) {
        constexpr int PER_WORD = 32 / BITS;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            word[i] = correction * (BITS == 8 ? 0x01010101u : 0x11111111u);
#pragma unroll
            for (int j = 0; j < PER_WORD && i * PER_WORD + j < SIZE; ++j) word[i] += q[i * PER_WORD + j] << j * BITS;
        }
    }
    // Codes without a sign as codes with one, for an offset of 2^(BITS - 1); offset 0: as they are.
    __device__ __forceinline__ void flip(int offset) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word[i] ^= offset * (BITS == 8 ? 0x01010101u : 0x11111111u);
    }
    // As 2^23 + (code + offset), offset being 0 or 2^(BITS - 1), that is: without a sign. As floats these are exact.
    __device__ __forceinline__ void unpack(bool with_sign, float (&v)[SIZE]) const {
        const unsigned flip = !with_sign ? 0u : BITS == 8 ? 0x80808080u : 0x08080808u;
#pragma unroll
        for (int e = 0; e < SIZE; e += 32 / BITS) {
            const unsigned w = word[e * BITS / 32];
            const unsigned even = (BITS == 8 ? w : w & 0x0f0f0f0fu) ^ flip, odd = (w >> 4 & 0x0f0f0f0fu) ^ flip;
#pragma unroll
            for (int j = 0; j < 32 / BITS && e + j < SIZE; ++j) {
                const int byte = BITS == 8 ? j : j / 2;
                v[e + j] =
                    __uint_as_float(__byte_perm(BITS == 8 || j % 2 == 0 ? even : odd, 0x4b000000u, 0x7440 | byte));
            }
        }
    }
    template <bool ALIGNED>
    __device__ __forceinline__ void load(const unsigned char* codes) {
        if constexpr (!ALIGNED) {
#pragma unroll
            for (int i = 0; i < BYTES; ++i)
                word[i / 4] = i % 4 ? word[i / 4] | unsigned(codes[i]) << i % 4 * 8 : unsigned(codes[i]);
        } else if constexpr (BYTES == 16) {
            const uint4 v = __ldcs(reinterpret_cast<const uint4*>(codes));
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        } else if constexpr (BYTES == 8) {
            const uint2 v = __ldcs(reinterpret_cast<const uint2*>(codes));
            word[0] = v.x, word[1] = v.y;
        } else if constexpr (BYTES == 4) {
            word[0] = __ldcs(reinterpret_cast<const unsigned*>(codes));
        } else {
            static_assert(BYTES == 2, "codes are read whole");
            word[0] = __ldcs(reinterpret_cast<const unsigned short*>(codes));
        }
    }
    template <bool ALIGNED>
    __device__ __forceinline__ void store(unsigned char* codes) const {
        if constexpr (!ALIGNED) {
#pragma unroll
            for (int i = 0; i < BYTES; ++i) codes[i] = static_cast<unsigned char>(word[i / 4] >> i % 4 * 8);
        } else if constexpr (BYTES == 16) {
            __stcs(reinterpret_cast<uint4*>(codes), make_uint4(word[0], word[1], word[2], word[3]));
        } else if constexpr (BYTES == 8) {
            __stcs(reinterpret_cast<uint2*>(codes), make_uint2(word[0], word[1]));
        } else if constexpr (BYTES == 4) {
            __stcs(reinterpret_cast<unsigned*>(codes), word[0]);
        } else {
            static_assert(BYTES == 2, "codes are written whole");
            __stcs(reinterpret_cast<unsigned short*>(codes), static_cast<unsigned short>(word[0]));
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
    RUNS,     // the elements of a unit nearly always share a scale
    COLUMNS,  // they do not: scales repeat with a short period, and a thread stays in its columns
};

// Where a tile of neighbouring elements lies among the blocks, in 32 bits; not for wide geometries.
struct RunsTile {
    long long first;  // number of a scale at or before that of the tile's first element
    unsigned column;  // of the tile's first element in its row

    __device__ __forceinline__ RunsTile(const Geometry& g, long long base, long long row)
        : first(row * g.per_row), column(static_cast<unsigned>(base - row * g.row)) {}
    // The same with fewer registers and, beyond 2^31 elements, more instructions.
    __device__ __forceinline__ RunsTile(const Geometry& g, long long base)
        : RunsTile(g, base, base >> 31 ? base / g.row : divided(static_cast<unsigned>(base), g.by_row)) {}
    // The number of the scale at `local`, less `first`, and the elements from there to the end of its run. STRAIGHT:
    // without a branch where a row is one run, so that loads before it stay before it.
    template <bool STRAIGHT = false>
    __device__ __forceinline__ unsigned locate(const Geometry& g, int local, unsigned& rest) const {
        const unsigned length = static_cast<unsigned>(g.row), run = static_cast<unsigned>(g.run);
        const unsigned at = column + local, r = divided(at, g.by_row), c = at - r * length;
        unsigned offset = r * static_cast<unsigned>(g.per_row);
        rest = length - c;
        if (STRAIGHT || run != length) {
            const unsigned k = divided(c, g.by_run);
            offset += k, rest = min(rest, (k + 1) * run - c);
        }
        return offset;
    }
};

// What is common to all operations Op on units. An Op also has
//     SIZE               elements of a unit
//     Data               registers of a unit
//     load<ALIGNED>(i, data)            reads the unit that begins with element i
//     quick<ALIGNED>(i, data, scales)   does a unit; false where it must be done carefully
//     one(at)                           does element at.element, by at.scale and at.zero
// INVERSE: it divides by scales (see Scales). FLOATING: blocks have offsets in place of zero points.
template <typename Op, typename T, bool INVERSE, bool FLOATING = false>
struct Operation {
    using C = typename Compute<T>::Type;
    Source<C> source;
    const Geometry& g;
    bool aligned;  // all arrays begin at a multiple of 16 bytes

    template <int N>
    __device__ __forceinline__ void prepare(int j, Parameters<C> from, Scales<C, N>& scales) const {
        const int zero = FLOATING ? from.zero : min(max(from.zero, g.qmin), g.qmax);
        scales.template set<INVERSE, FLOATING>(j, from.scale, zero);
    }
    // Do `count` elements from i on, one after the other.
    __device__ __forceinline__ void careful(long long i, int count) const {
        ElementIterator<C, FLOATING, INVERSE> at(source, g, i);
#pragma unroll 1
        for (; count > 0; --count, at.next()) static_cast<const Op*>(this)->one(at);
    }
};

// RUNS: a thread does UNITS units, EACH_THREADS * SIZE elements from each other, and has all their loads under way.
template <int UNITS, typename Op>
__device__ __forceinline__ void for_each_unit_of_runs(const Op& op, const Geometry& g) {
    using C = typename Op::C;
    constexpr int SIZE = Op::SIZE, STEP = EACH_THREADS * SIZE;
    const long long base = (long long)blockIdx.x * (STEP * UNITS), mine = base + threadIdx.x * SIZE;
    if (op.aligned && !g.wide && base + STEP * UNITS <= g.n) {
        typename Op::Data data[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) op.template load<true>(mine + u * STEP, data[u]);
        const RunsTile place(g, base, row_of(g, base));
        const SourcePart<C> source(op.source, place.first);
        Parameters<C> parameters[UNITS];
        unsigned rest[UNITS], left = 0;  // bit u: unit u is not done
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            parameters[u] = source[place.locate<true>(g, threadIdx.x * SIZE + u * STEP, rest[u])];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            Scales<C, 1> scales;
            scales.usable = rest[u] >= SIZE;
            op.prepare(0, parameters[u], scales);
            if (!op.template quick<true>(mine + u * STEP, data[u], scales)) left |= 1u << u;
        }
        for (; left; left &= left - 1) op.careful(mine + (__ffs(left) - 1) * STEP, SIZE);
        return;
    }
    const RunsTile place(g, base);
    for (int u = 0; u < UNITS && mine + u * STEP < g.n; ++u) {
        const long long i = mine + u * STEP;
        bool done = false;
        if (!g.wide && i + SIZE <= g.n) {
            typename Op::Data data;
            op.template load<false>(i, data);
            Scales<C, 1> scales;
            unsigned rest;
            const unsigned offset = place.locate(g, threadIdx.x * SIZE + u * STEP, rest);
            scales.usable = rest >= SIZE;
            op.prepare(0, op.source.at(place.first + offset), scales);
            done = op.template quick<false>(i, data, scales);
        }
        if (!done) op.careful(i, static_cast<int>(min((long long)SIZE, g.n - i)));
    }
}

// COLUMNS: a thread stays in the columns of one unit for UNITS rows, with their scales in registers and the loads of
// DEPTH rows under way. Thread blocks go along the rows first.
template <int DEPTH, int UNITS, typename Op>
__device__ __forceinline__ void for_each_unit_of_columns(const Op& op, const Geometry& g) {
    using C = typename Op::C;
    constexpr int SIZE = Op::SIZE, STEP = EACH_THREADS * SIZE;
    static_assert(UNITS % DEPTH == 0 && UNITS <= 32, "a bit for each row");
    const unsigned across = static_cast<unsigned>((g.columns + STEP - 1) / STEP), slab = blockIdx.x / across;
    const unsigned column = (blockIdx.x - slab * across) * STEP + threadIdx.x * SIZE;
    if (column >= g.columns) return;
    const long long first = (long long)slab * UNITS, begin = first * g.columns + column;
    const bool whole = op.aligned && (first + UNITS) * g.columns <= g.n;
    typename Op::Data data[DEPTH];
    if (whole) {
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) op.template load<true>(begin + u * g.columns, data[u]);
    }
    Scales<C, SIZE> scales;
    op.source.template columns<SIZE>(g, column, [&](int j, Parameters<C> from) { op.prepare(j, from, scales); });
    unsigned left = 0;  // bit r: row r is not done
    if (whole) {
        long long i = begin;
#pragma unroll 1
        for (int batch = 0; batch < UNITS; batch += DEPTH) {
#pragma unroll
            for (int u = 0; u < DEPTH; ++u, i += g.columns) {
                // As soon as a unit is done its registers take the one that is DEPTH rows on.
                if (!op.template quick<true>(i, data[u], scales)) left |= 1u << (batch + u);
                if (batch + DEPTH < UNITS) op.template load<true>(i + DEPTH * g.columns, data[u]);
            }
        }
    } else {
#pragma unroll 1
        for (int r = 0; r < UNITS && begin + r * g.columns < g.n; ++r) {
            const long long i = begin + r * g.columns;
            bool done = false;
            if (i + SIZE <= g.n) {
                op.template load<false>(i, data[0]);
                done = op.template quick<false>(i, data[0], scales);
            }
            if (!done) left |= 1u << r;
        }
    }
    for (; left; left &= left - 1) {
        const long long i = begin + (__ffs(left) - 1) * g.columns;
        op.careful(i, static_cast<int>(min((long long)SIZE, g.n - i)));
    }
}

// Do `op` to all units. The grid has a thread block for every EACH_THREADS * UNITS of them.
template <int LAYOUT, int DEPTH, int UNITS, typename Op>
__device__ __forceinline__ void for_each_unit(const Op& op, const Geometry& g) {
    if constexpr (LAYOUT == RUNS) {
        static_assert(DEPTH == UNITS, "all loads are under way at once");
        for_each_unit_of_runs<UNITS>(op, g);
    } else {
        for_each_unit_of_columns<DEPTH, UNITS>(op, g);
    }
}

// ---- x to codes ------------------------------------------------------------------------------------------------

template <typename T, int BITS, int SIZE_ = UNIT, bool FLOATING = false>
struct Quantize : Operation<Quantize<T, BITS, SIZE_, FLOATING>, T, true, FLOATING> {
    using Base = Operation<Quantize, T, true, FLOATING>;
    using C = typename Base::C;
    using Base::g;
    using Base::source;
    static constexpr int SIZE = SIZE_;
    using Data = Unit<T, SIZE>;
    const T* x;
    unsigned char* codes;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(long long i, Data& data) const {
        data.template load<ALIGNED>(x + i);
    }

    template <bool ALIGNED, int N>
    __device__ __forceinline__ bool quick(long long i, const Data& data, const Scales<C, N>& scales) const {
        const int offset = BITS == 4 && g.qmin < 0 ? 8 : 0;  // makes 4-bit codes positive, which lets them be added up
        unsigned q[SIZE];
        bool usable = scales.usable;
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) q[j] = level(data.get(j), scales.s(j), scales.z(j)) + offset;
        } else {
            // An even number moves no tie.
            const int zero = source.zero_value;
            if (FLOATING) usable &= levels<true>(data, scales, offset, offset, q);
            else if (N == 1 && !source.zero_point && zero % 2 == 0)
                usable &= levels<true>(data, scales, offset + zero, offset, q);
            else usable &= levels<false>(data, scales, offset, offset, q);
        }
        if (!usable) return false;
        Codes<BITS, SIZE> packed;
        packed.pack_bytes(q);
        packed.flip(offset);
        packed.template store<ALIGNED>(codes + i * BITS / 8);
        return true;
    }

    // Levels, with `offset` added, in the low bits of words; false where the short division will not do. ALL: `added`
    // holds the zero point of all elements, or there is none.
    template <bool ALL, int N>
    __device__ __forceinline__ bool levels(
        const Data& data, const Scales<C, N>& scales, int added, int offset, unsigned (&q)[SIZE]) const {
        const Rounding rounding(added, g.qmin + offset, g.qmax + offset);
        return data.template divide<FLOATING>(scales, [&](int j, float steps) {
            const float sum = ALL ? __fadd_rn(steps, rounding.rounder) : rounding(steps, scales.z(j));
            q[j] = __float_as_uint(rounding.clamped(sum));
        });
    }

    __device__ __forceinline__ int level(C v, C s, C z) const {
        if constexpr (FLOATING) return static_cast<int>(clamped(steps_of(above(v, z), s), C(g.qmin), C(g.qmax)));
        else return static_cast<int>(clamped(steps_of(v, s), C(g.qmin) - z, C(g.qmax) - z) + z);
    }

    // In place of that of all operations: codes of 4 bits share a byte.
    __device__ __forceinline__ void careful(long long i, int count) const {
        ElementIterator<C, FLOATING, true> at(source, g, i);
        one_by_one(i, count, at);
    }
    // `at` steps through scales and zero points (see ElementIterator).
    template <typename At>
    __device__ __forceinline__ void one_by_one(long long i, int count, At& at) const {
#pragma unroll 1
        for (int j = 0; j < count; j += 8 / BITS) {
            unsigned byte = 0;
#pragma unroll 1
            for (int h = 0; h < 8 / BITS && j + h < count; ++h, at.next()) {
                const int q = level(to_float(x[i + j + h]), at.scale, at.zero);
                byte |= (q & (1 << BITS) - 1) << h * BITS;
            }
            codes[(i + j) * BITS / 8] = static_cast<unsigned char>(byte);
        }
    }
};
