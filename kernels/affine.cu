// Kernels of affine integers with given scales: each an operation on units of eight elements (see for_each_unit).
//
// Arguments that all share:
//     scale, scale_value       C[count] (C: float32, float64 beside float64 arrays), or null: scale_value for all
//     zero_point, zero_value   int32[count], or null: zero_value for all
#include "affine.cuh"

// Thread blocks that a multiprocessor must have registers for.
template <typename T, int LAYOUT>
constexpr int RESIDENT = sizeof(T) == 8 ? 1 : 4 >> (LAYOUT == COLUMNS);

// x  T[n]      codes  int8 or uint8 [n], or uint8[ceil(n / 2)] of 4-bit codes
template <typename T, int BITS, int LAYOUT>
__global__ void __launch_bounds__(AFFINE_THREADS, RESIDENT<T, LAYOUT>) quantize_affine(
    const T* x, unsigned char* codes, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
    const int* zero_point, int zero_value, const __grid_constant__ Geometry g) {
    // Two loads a thread next to each other make one store, and share what there is to do for a scale.
    constexpr int SIZE = LAYOUT == RUNS && sizeof(T) == 2 ? 2 * UNIT : UNIT;
    const Quantize<T, BITS, SIZE> op{
        x, codes, {scale, zero_point, scale_value, zero_value}, g, is_aligned(x) && is_aligned(codes)};
    for_each_unit<LAYOUT>(op, g);
}

// ---- codes to y ------------------------------------------------------------------------------------------------

template <typename T, int BITS>
struct Dequantize {
    using Compute = typename ::Compute<T>::Type;
    static constexpr int SIZE = UNIT;
    using Data = Codes<BITS>;
    static constexpr int DEPTH = sizeof(T) == 8 ? 1 : 4;
    const unsigned char* codes;
    T* y;
    Source<Compute> source;
    const Geometry& g;
    bool aligned;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(long long i, Data& data) const {
        data.template load<ALIGNED>(codes + i * BITS / 8);
    }

    template <int N>
    __device__ __forceinline__ void scales(int j, long long first, unsigned offset, Scales<Compute, N>& scales) const {
        scales.template set<false>(j, source.scale_at(first, offset), source.zero_at(g, first, offset));
    }

    template <bool ALIGNED, int N>
    __device__ __forceinline__ bool quick(long long i, const Data& data, const Scales<Compute, N>& scales) const {
        float biased[UNIT];
        data.unpack(g.qmin < 0, biased);
        Compute v[UNIT];
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            const float bias = 8388608.0f + float((g.qmin < 0 ? 1 << (BITS - 1) : 0) + scales.z(j));
            v[j] = multiply_ieee(scales.s(j), Compute(__fsub_rn(biased[j], bias)));
        }
        Unit<T> unit;
        unit.pack(v);
        unit.template store<ALIGNED>(y + i);
        return true;
    }

    __device__ __forceinline__ void careful(long long i, int count) const {
#pragma unroll 1
        for (long long e = i; e < i + count; ++e) {
            const long long index = g.index(e);
            const int steps = Codes<BITS>::at(codes, e, g.qmin < 0) - source.zero_at(g, index);
            y[e] = stored<T>(multiply_ieee(usable(source.scale_at(index)), Compute(steps)));
        }
    }
};

// codes  as above      y  T[n]
template <typename T, int BITS, int LAYOUT>
__global__ void __launch_bounds__(AFFINE_THREADS, RESIDENT<T, LAYOUT>) dequantize_affine(
    const unsigned char* codes, T* y, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
    const int* zero_point, int zero_value, const __grid_constant__ Geometry g) {
    const Dequantize<T, BITS> op{
        codes, y, {scale, zero_point, scale_value, zero_value}, g, is_aligned(codes) && is_aligned(y)};
    for_each_unit<LAYOUT>(op, g);
}

// ---- both at once ----------------------------------------------------------------------------------------------

template <typename T>
struct FakeQuantize {
    using Compute = typename ::Compute<T>::Type;
    static constexpr int SIZE = UNIT;
    using Data = Unit<T>;
    static constexpr int DEPTH = UNITS_UNDER_WAY<T>;
    const T* x;
    T* y;
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
        Compute v[UNIT];
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (int j = 0; j < UNIT; ++j) v[j] = once(data.get(j), scales.s(j), scales.z(j));
        } else {
            float bad = 0.0f;
#pragma unroll
            for (int j = 0; j < UNIT; ++j) {
                const float steps = short_division(data.get(j), scales.s(j), scales.r(j));
                bad = __fmaf_rn(steps, 0.0f, bad);
                const float low = float(g.qmin - scales.z(j)), high = float(g.qmax - scales.z(j));
                const float whole = __fsub_rn(__fadd_rn(fminf(fmaxf(steps, low), high), ROUNDER), ROUNDER);
                v[j] = multiply_ieee(scales.s(j), whole);
            }
            if (!(scales.ordinary && bad == 0.0f)) return false;
        }
        Unit<T> unit;
        unit.pack(v);
        unit.template store<ALIGNED>(y + i);
        return true;
    }

    __device__ __forceinline__ Compute once(Compute v, Compute s, int z) const {
        // + 0: the integer 0 has no sign.
        return multiply_ieee(s, clamped(steps_of(v, s), Compute(g.qmin - z), Compute(g.qmax - z)) + Compute(0));
    }

    __device__ __forceinline__ void careful(long long i, int count) const {
#pragma unroll 1
        for (long long e = i; e < i + count; ++e) {
            const long long index = g.index(e);
            y[e] = stored<T>(once(to_float(x[e]), usable(source.scale_at(index)), source.zero_at(g, index)));
        }
    }
};

// x, y  T[n], may be the same
template <typename T, int LAYOUT>
__global__ void __launch_bounds__(AFFINE_THREADS, RESIDENT<T, LAYOUT>) fake_quantize_affine(
    const T* x, T* y, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
    const int* zero_point, int zero_value, const __grid_constant__ Geometry g) {
    const FakeQuantize<T> op{x, y, {scale, zero_point, scale_value, zero_value}, g, is_aligned(x) && is_aligned(y)};
    for_each_unit<LAYOUT>(op, g);
}

// ---- gradients -------------------------------------------------------------------------------------------------

// dx = dy, divided by the scale (DIVIDE), where rint(x / scale) is within the range less the margin; x null:
// everywhere.
template <typename T, bool DIVIDE>
struct Backward {
    using Compute = typename ::Compute<T>::Type;
    static constexpr int SIZE = UNIT;
    struct Data {
        Unit<T> dy, x;
    };
    static constexpr int DEPTH = UNITS_UNDER_WAY<T> > 1 ? UNITS_UNDER_WAY<T> / 2 : 1;
    const T* dy;
    const T* x;
    T* dx;
    Source<Compute> source;
    const Geometry& g;
    bool aligned;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(long long i, Data& data) const {
        data.dy.template load<ALIGNED>(dy + i);
        if (x) data.x.template load<ALIGNED>(x + i);
    }

    template <int N>
    __device__ __forceinline__ void scales(int j, long long first, unsigned offset, Scales<Compute, N>& scales) const {
        scales.template set<true>(j, source.scale_at(first, offset), source.zero_at(g, first, offset));
    }

    template <bool ALIGNED, int N>
    __device__ __forceinline__ bool quick(long long i, Data& data, const Scales<Compute, N>& scales) const {
        unsigned mask = 0;
        float bad = 0.0f;
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            bool inside = true;
            if constexpr (sizeof(T) == 8) {
                if (x) inside = within(data.x.get(j), scales.s(j), scales.z(j));
            } else if (x) {
                const float steps = short_division(data.x.get(j), scales.s(j), scales.r(j));
                bad = __fmaf_rn(steps, 0.0f, bad);
                // One step beyond the ends, so that what lies outside does not come out as an end.
                const float low = float(g.qmin + g.margin - scales.z(j)), high = float(g.qmax - g.margin - scales.z(j));
                const float near = fminf(fmaxf(steps, __fsub_rn(low, 1.0f)), __fadd_rn(high, 1.0f));
                const float whole = __fsub_rn(__fadd_rn(near, ROUNDER), ROUNDER);
                inside = whole >= low && whole <= high;
            }
            mask |= unsigned(inside) << j;
        }
        if (sizeof(T) < 8 && x && !(scales.ordinary && bad == 0.0f)) return false;
        if constexpr (DIVIDE) {
            Compute v[UNIT];
#pragma unroll
            for (int j = 0; j < UNIT; ++j) {
                // Every float16 has a quotient in the range of the short division, infinities excepted.
                if constexpr (SameType<T, __half>::VALUE) {
                    v[j] = short_division(data.dy.get(j), scales.s(j), scales.r(j));
                    bad = __fmaf_rn(v[j], 0.0f, bad);
                } else {
                    v[j] = over(data.dy.get(j), usable(scales.s(j)));
                }
            }
            if (SameType<T, __half>::VALUE && !(scales.ordinary && bad == 0.0f)) return false;
            data.dy.pack(v);
        }
        data.dy.keep(mask);
        data.dy.template store<ALIGNED>(dx + i);
        return true;
    }

    __device__ __forceinline__ bool within(Compute v, Compute s, int z) const {
        const Compute steps = steps_of(v, s);
        return magnitude_bits(s) != 0 && steps >= Compute(g.qmin + g.margin - z) &&
               steps <= Compute(g.qmax - g.margin - z);
    }
    __device__ __forceinline__ Compute over(Compute v, Compute s) const {
        return magnitude_bits(s) != 0 ? divide_ieee(v, s) : Compute(0);
    }

    __device__ __forceinline__ void careful(long long i, int count) const {
#pragma unroll 1
        for (long long e = i; e < i + count; ++e) {
            const long long index = g.index(e);
            const Compute s = usable(source.scale_at(index));
            const bool inside = !x || within(to_float(x[e]), s, source.zero_at(g, index));
            T value = dy[e];
            if (DIVIDE) value = stored<T>(over(to_float(value), s));
            dx[e] = inside ? value : T(0.0f);
        }
    }
};

// dy, dx  T[n], may be the same      x  T[n], or null: no mask
template <typename T, int LAYOUT>
__global__ void __launch_bounds__(AFFINE_THREADS, RESIDENT<T, LAYOUT>) quantize_backward_affine(
    const T* dy, const T* x, T* dx, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
    const int* zero_point, int zero_value, const __grid_constant__ Geometry g) {
    const bool aligned = is_aligned(dy) && is_aligned(x) && is_aligned(dx);
    const Backward<T, true> op{dy, x, dx, {scale, zero_point, scale_value, zero_value}, g, aligned};
    for_each_unit<LAYOUT>(op, g);
}

template <typename T, int LAYOUT>
__global__ void __launch_bounds__(AFFINE_THREADS, RESIDENT<T, LAYOUT>) fake_quantize_backward_affine(
    const T* dy, const T* x, T* dx, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
    const int* zero_point, int zero_value, const __grid_constant__ Geometry g) {
    const bool aligned = is_aligned(dy) && is_aligned(x) && is_aligned(dx);
    const Backward<T, false> op{dy, x, dx, {scale, zero_point, scale_value, zero_value}, g, aligned};
    for_each_unit<LAYOUT>(op, g);
}

template <typename T>
struct Multiply {
    using Compute = typename ::Compute<T>::Type;
    static constexpr int SIZE = UNIT;
    using Data = Unit<T>;
    static constexpr int DEPTH = UNITS_UNDER_WAY<T>;
    const T* dy;
    T* dq;
    Source<Compute> source;
    const Geometry& g;
    bool aligned;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(long long i, Data& data) const {
        data.template load<ALIGNED>(dy + i);
    }

    template <int N>
    __device__ __forceinline__ void scales(int j, long long first, unsigned offset, Scales<Compute, N>& scales) const {
        scales.template set<false>(j, source.scale_at(first, offset), 0);
    }

    template <bool ALIGNED, int N>
    __device__ __forceinline__ bool quick(long long i, Data& data, const Scales<Compute, N>& scales) const {
        Compute v[UNIT];
#pragma unroll
        for (int j = 0; j < UNIT; ++j) v[j] = multiply_ieee(data.get(j), scales.s(j));
        data.pack(v);
        data.template store<ALIGNED>(dq + i);
        return true;
    }

    __device__ __forceinline__ void careful(long long i, int count) const {
#pragma unroll 1
        for (long long e = i; e < i + count; ++e)
            dq[e] = stored<T>(multiply_ieee(to_float(dy[e]), usable(source.scale_at(g.index(e)))));
    }
};

// dy, dq  T[n], may be the same
template <typename T, int LAYOUT>
__global__ void __launch_bounds__(AFFINE_THREADS, RESIDENT<T, LAYOUT>) dequantize_backward_affine(
    const T* dy, T* dq, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value, const int*, int,
    const __grid_constant__ Geometry g) {
    const Multiply<T> op{dy, dq, {scale, nullptr, scale_value, 0}, g, is_aligned(dy) && is_aligned(dq)};
    for_each_unit<LAYOUT>(op, g);
}

// ---- scales of another precision -------------------------------------------------------------------------------

// given, scale  [n], one float32 and the other float64. CuPy's own cast flushes the subnormal numbers of float32.
template <typename From, typename To>
__global__ void convert_scales_affine(const From* given, To* scale, long long n) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        if constexpr (sizeof(To) == 8) scale[i] = widen(given[i]);
        else scale[i] = narrow(given[i], To(0));
    }
}
