// Affine integers with given scales: quantize, dequantize, both at once, and their gradients (kbitcupy/formats/affine
// and kbitcupy.affine). Each is an operation on units of neighbouring elements:
//
//     x or codes --8 to 16 B a lane, DEPTH units under way--> registers --> Op::quick for the unit --> 8 to 16 B a lane
//                                                                     \--> Op::careful, element by element
//
// What is not in order goes the careful way, which keeps the quick one short: divisions there are a product and two
// fused multiply-adds, exact while no number leaves the normal range.
//
//
// Template integers that all share (the host chooses them and the grid, see for_each_unit):
//     LAYOUT                   how elements share scales
//     SIZE                     elements of a unit
//     DEPTH, UNITS             units of a thread whose loads are under way at a time, and all of them
// Arguments that all share:
//     scale, scale_value       C[count] (C: float32, float64 beside float64 arrays), or null: scale_value for all
//     zero_point, zero_value   int32[count], or null: zero_value for all
// FLOATING: blocks have offsets, and these are float32 or the bits of one.
#include "affine.cuh"

// Thread blocks that a multiprocessor must have registers for.
template <typename T, int LAYOUT, int RUNS_MOST, int COLUMNS_MOST>
constexpr int RESIDENT = (LAYOUT == RUNS ? RUNS_MOST : COLUMNS_MOST) / (sizeof(T) == 8 ? 4 : 1);

// x  T[n]      codes  int8 or uint8 [n], or uint8[ceil(n / 2)] of 4-bit codes
//
// scale_out, zero_point_out  float32[count] and int32[count], which receive what is used; either may be null
// every, share               thread blocks of which one writes them for all, and how many of them that is
template <typename T, int BITS, int LAYOUT, int SIZE, int DEPTH, int UNITS, bool FLOATING = false>
__global__ void __launch_bounds__(
    EACH_THREADS, RESIDENT<T, LAYOUT, UNITS == 1 && sizeof(T) == 2 && !FLOATING ? 16 : 12, 8>)
    quantize_affine(
        const T* x, unsigned char* codes, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
        const int* zero_point, int zero_value, const __grid_constant__ Geometry g, float* scale_out,
        int* zero_point_out, unsigned every, unsigned share) {
    const Quantize<T, BITS, SIZE, FLOATING> op{
        {{scale, zero_point, scale_value, zero_value}, g, is_aligned(x) && is_aligned(codes)}, x, codes};
    for_each_unit<LAYOUT, DEPTH, UNITS>(op, g);
    if (!scale_out || blockIdx.x % every != 0) return;
    const long long first = (long long)(blockIdx.x / every) * share;
    for (unsigned i = threadIdx.x; i < share && first + i < g.count; i += EACH_THREADS) {
        const Parameters<typename Compute<T>::Type> from = op.source.at(first + i);
        scale_out[first + i] = narrow(from.scale, 0.0f);
        if (zero_point_out) zero_point_out[first + i] = from.zero;
    }
}

// ---- codes to y ------------------------------------------------------------------------------------------------

// How many elements ahead of a read its line is prefetched to the L2 cache, for other thread blocks.
constexpr long long PREFETCH_ELEMENTS = 1 << 21;

template <typename T, int BITS, int SIZE_, bool FLOATING = false>
struct Dequantize : Operation<Dequantize<T, BITS, SIZE_, FLOATING>, T, false, FLOATING> {
    using Base = Operation<Dequantize, T, false, FLOATING>;
    using C = typename Base::C;
    using Base::g;
    static constexpr int SIZE = SIZE_;
    using Data = Codes<BITS, SIZE>;
    const unsigned char* codes;
    T* y;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(long long i, Data& data) const {
        data.template load<ALIGNED>(codes + i * BITS / 8);
        if (ALIGNED && threadIdx.x * Data::BYTES % 128 == 0 && i + PREFETCH_ELEMENTS < g.n)
            prefetch_l2(codes + (i + PREFETCH_ELEMENTS) * BITS / 8);
    }

    template <bool ALIGNED, int N>
    __device__ __forceinline__ bool quick(long long i, const Data& data, const Scales<C, N>& scales) const {
        if (!scales.usable) return false;
        float biased[SIZE];
        data.unpack(g.qmin < 0, biased);
        const float offset = __int_as_float(0x4b000000 + (g.qmin < 0 ? 1 << (BITS - 1) : 0));  // 2^23 + ...
        C v[SIZE];
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
            if constexpr (FLOATING) {
                v[j] = beside_offset(__fsub_rn(biased[j], offset), scales.s(j), scales.z(j));
            } else {
                const float bias = __fadd_rn(offset, float(scales.z(j)));
                v[j] = multiply_ieee(scales.s(j), C(__fsub_rn(biased[j], bias)));
            }
        }
        Unit<T, SIZE> unit;
        unit.pack(v);
        unit.template store<ALIGNED>(y + i);
        return true;
    }

    __device__ __forceinline__ void one(const ElementIterator<C, FLOATING>& at) const {
        const int code = Codes<BITS>::at(codes, at.element, g.qmin < 0);
        if constexpr (FLOATING) y[at.element] = stored<T>(beside_offset(float(code), at.scale, at.zero));
        else y[at.element] = stored<T>(multiply_ieee(at.scale, C(code) - at.zero));
    }
};

// codes  as above      y  T[n]
template <typename T, int BITS, int LAYOUT, int SIZE, int DEPTH, int UNITS, bool FLOATING = false>
__global__ void __launch_bounds__(EACH_THREADS, RESIDENT<T, LAYOUT, 8, 8>) dequantize_affine(
    const unsigned char* codes, T* y, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
    const int* zero_point, int zero_value, const __grid_constant__ Geometry g) {
    const Dequantize<T, BITS, SIZE, FLOATING> op{
        {{scale, zero_point, scale_value, zero_value}, g, is_aligned(codes) && is_aligned(y)}, codes, y};
    for_each_unit<LAYOUT, DEPTH, UNITS>(op, g);
}

// ---- both at once ----------------------------------------------------------------------------------------------

template <typename T, int SIZE_>
struct FakeQuantize : Operation<FakeQuantize<T, SIZE_>, T, true> {
    using Base = Operation<FakeQuantize, T, true>;
    using C = typename Base::C;
    using Base::g;
    static constexpr int SIZE = SIZE_;
    using Data = Unit<T, SIZE>;
    const T* x;
    T* y;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(long long i, Data& data) const {
        data.template load<ALIGNED>(x + i);
    }

    template <bool ALIGNED, int N>
    __device__ __forceinline__ bool quick(long long i, const Data& data, const Scales<C, N>& scales) const {
        C v[SIZE];
        bool usable = scales.usable;
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) v[j] = once(data.get(j), scales.s(j), scales.z(j));
        } else {
            const Rounding rounding(0, g.qmin, g.qmax);
            usable &= data.divide(scales, [&](int j, float steps) {
                const float level = __fsub_rn(rounding.clamped(rounding(steps, scales.z(j))), ROUNDER);
                v[j] = multiply_ieee(scales.s(j), __fsub_rn(level, scales.z(j)));
            });
        }
        if (!usable) return false;
        Data unit;
        unit.pack(v);
        unit.template store<ALIGNED>(y + i);
        return true;
    }

    __device__ __forceinline__ C once(C v, C s, C z) const {
        // + 0: the integer 0 has no sign.
        return multiply_ieee(s, clamped(steps_of(v, s), C(g.qmin) - z, C(g.qmax) - z) + C(0));
    }

    __device__ __forceinline__ void one(const ElementIterator<C, false, true>& at) const {
        y[at.element] = stored<T>(once(to_float(x[at.element]), at.scale, at.zero));
    }
};

// x, y  T[n], may be the same
template <typename T, int LAYOUT, int SIZE, int DEPTH, int UNITS>
__global__ void __launch_bounds__(EACH_THREADS, RESIDENT<T, LAYOUT, 8, 8>) fake_quantize_affine(
    const T* x, T* y, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
    const int* zero_point, int zero_value, const __grid_constant__ Geometry g) {
    const FakeQuantize<T, SIZE> op{
        {{scale, zero_point, scale_value, zero_value}, g, is_aligned(x) && is_aligned(y)}, x, y};
    for_each_unit<LAYOUT, DEPTH, UNITS>(op, g);
}

// ---- gradients -------------------------------------------------------------------------------------------------

// dx = dy, divided by the scale (DIVIDE), where rint(x / scale) is within the range less the margin; x null:
// everywhere.
template <typename T, bool DIVIDE, int SIZE_>
struct Backward : Operation<Backward<T, DIVIDE, SIZE_>, T, true> {
    using Base = Operation<Backward, T, true>;
    using C = typename Base::C;
    using Base::g;
    static constexpr int SIZE = SIZE_;
    struct Data {
        Unit<T, SIZE> dy, x;
    };
    const T* dy;
    const T* x;
    T* dx;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(long long i, Data& data) const {
        data.dy.template load<ALIGNED>(dy + i);
        if (x) data.x.template load<ALIGNED>(x + i);
    }

    template <bool ALIGNED, int N>
    __device__ __forceinline__ bool quick(long long i, Data& data, const Scales<C, N>& scales) const {
        bool usable = scales.usable;
        if (x) {
            if constexpr (sizeof(T) == 8) {
#pragma unroll
                for (int j = 0; j < SIZE; ++j) data.dy.drop(j, !within(data.x.get(j), scales.s(j), scales.z(j)));
            } else {
                const Rounding rounding(0, g.qmin + g.margin, g.qmax - g.margin);
                usable &= data.x.divide(scales, [&](int j, float steps) {
                    data.dy.drop(j, !rounding.within(rounding(steps, scales.z(j))));
                });
            }
        }
        if constexpr (DIVIDE) usable &= divide(data.dy, scales);
        if (!usable) return false;
        data.dy.template store<ALIGNED>(dx + i);
        return true;
    }

    // dy / scale; false where the short division will not do.
    template <int N>
    __device__ __forceinline__ bool divide(Unit<T, SIZE>& unit, const Scales<C, N>& scales) const {
        C v[SIZE];
        bool usable = true;
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) v[j] = over(unit.get(j), ::usable(scales.s(j)));
        } else if constexpr (SameType<T, __half>::VALUE) {  // all but infinities are in the range of the short division
            usable = unit.divide(scales, [&](int j, float quotient) { v[j] = quotient; });
        } else {
            bool near_one = true;  // magnitudes from 2^-60 to 2^60, whose quotient is in that range, or 0
#pragma unroll
            for (int j = 0; j < SIZE; ++j) {
                const float number = unit.get(j);
                v[j] = short_division(number, scales.s(j), scales.r(j));
                const unsigned bits = magnitude_bits(number);
                near_one &= bits - (67u << 23) <= (120u << 23) || bits == 0;
            }
            if (!near_one) {
#pragma unroll
                for (int j = 0; j < SIZE; ++j) v[j] = divide_ieee(unit.get(j), scales.s(j));
            }
        }
        unit.pack(v);
        return usable;
    }

    __device__ __forceinline__ bool within(C v, C s, C z) const {
        const C steps = steps_of(v, s);
        return magnitude_bits(s) != 0 && steps >= C(g.qmin + g.margin) - z && steps <= C(g.qmax - g.margin) - z;
    }
    __device__ __forceinline__ C over(C v, C s) const { return magnitude_bits(s) != 0 ? divide_ieee(v, s) : C(0); }

    __device__ __forceinline__ void one(const ElementIterator<C, false, true>& at) const {
        const bool inside = !x || within(to_float(x[at.element]), at.scale, at.zero);
        T value = dy[at.element];
        if (DIVIDE) value = stored<T>(over(to_float(value), at.scale));
        dx[at.element] = inside ? value : T(0.0f);
    }
};

// dy, dx  T[n], may be the same      x  T[n], or null: no mask
template <typename T, int LAYOUT, int SIZE, int DEPTH, int UNITS>
__global__ void __launch_bounds__(EACH_THREADS, RESIDENT<T, LAYOUT, 8, 6>) quantize_backward_affine(
    const T* dy, const T* x, T* dx, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
    const int* zero_point, int zero_value, const __grid_constant__ Geometry g) {
    const bool aligned = is_aligned(dy) && is_aligned(x) && is_aligned(dx);
    const Backward<T, true, SIZE> op{{{scale, zero_point, scale_value, zero_value}, g, aligned}, dy, x, dx};
    for_each_unit<LAYOUT, DEPTH, UNITS>(op, g);
}

template <typename T, int LAYOUT, int SIZE, int DEPTH, int UNITS>
__global__ void __launch_bounds__(EACH_THREADS, RESIDENT<T, LAYOUT, 8, 6>) fake_quantize_backward_affine(
    const T* dy, const T* x, T* dx, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value,
    const int* zero_point, int zero_value, const __grid_constant__ Geometry g) {
    const bool aligned = is_aligned(dy) && is_aligned(x) && is_aligned(dx);
    const Backward<T, false, SIZE> op{{{scale, zero_point, scale_value, zero_value}, g, aligned}, dy, x, dx};
    for_each_unit<LAYOUT, DEPTH, UNITS>(op, g);
}

template <typename T, int SIZE_>
struct Multiply : Operation<Multiply<T, SIZE_>, T, false> {
    using Base = Operation<Multiply, T, false>;
    using C = typename Base::C;
    using Base::g;
    static constexpr int SIZE = SIZE_;
    using Data = Unit<T, SIZE>;
    const T* dy;
    T* dq;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(long long i, Data& data) const {
        data.template load<ALIGNED>(dy + i);
    }

    template <bool ALIGNED, int N>
    __device__ __forceinline__ bool quick(long long i, Data& data, const Scales<C, N>& scales) const {
        if (!scales.usable) return false;
        C v[SIZE];
#pragma unroll
        for (int j = 0; j < SIZE; ++j) v[j] = multiply_ieee(data.get(j), scales.s(j));
        data.pack(v);
        data.template store<ALIGNED>(dq + i);
        return true;
    }

    __device__ __forceinline__ void one(const ElementIterator<C>& at) const {
        dq[at.element] = stored<T>(multiply_ieee(to_float(dy[at.element]), at.scale));
    }
};

// dy, dq  T[n], may be the same
template <typename T, int LAYOUT, int SIZE, int DEPTH, int UNITS>
__global__ void __launch_bounds__(EACH_THREADS, RESIDENT<T, LAYOUT, 8, 8>) dequantize_backward_affine(
    const T* dy, T* dq, const typename Compute<T>::Type* scale, typename Compute<T>::Type scale_value, const int*, int,
    const __grid_constant__ Geometry g) {
    const Multiply<T, SIZE> op{{{scale, nullptr, scale_value, 0}, g, is_aligned(dy) && is_aligned(dq)}, dy, dq};
    for_each_unit<LAYOUT, DEPTH, UNITS>(op, g);
}

// ---- scales of another precision -------------------------------------------------------------------------------

// given, scale  [n], one of them float32 and the other float64 or of 16 bits, in which each number is the nearest and
//               none is infinite. CuPy's own cast flushes the subnormal numbers of float32.
template <typename From, typename To>
__global__ void convert_scales_affine(const From* given, To* scale, long long n) {
    constexpr int FROM = SameType<From, __half>::VALUE ? IN_HALF : IN_BFLOAT16;
    constexpr int TO = SameType<To, __half>::VALUE ? IN_HALF : IN_BFLOAT16;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        if constexpr (sizeof(To) == 8) scale[i] = widen(given[i]);
        else if constexpr (sizeof(From) == 2)
            scale[i] = number_of_code(reinterpret_cast<const unsigned short*>(given)[i], FROM);
        else if constexpr (sizeof(To) == 2)
            reinterpret_cast<unsigned short*>(scale)[i] = static_cast<unsigned short>(code_of(given[i], TO));
        else scale[i] = narrow(given[i], To(0));
    }
}

// given, rounded  C[n]: numbers, and as which they are stored in 16 bits
// positive        whether those above 0 stay above 0
template <typename C>
__global__ void round_scales_affine(const C* given, C* rounded, long long n, int storage, int positive) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const unsigned code = code_of(given[i], storage);
        const bool lost = positive && code == 0 && all_bits(given[i]) != 0;
        rounded[i] = number_of_code(lost ? 1u : code, storage);
    }
}
