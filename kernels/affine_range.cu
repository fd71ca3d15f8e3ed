// Affine integers that choose their scales and zero points by what the blocks hold (kbitcupy/formats/affine and
// kbitcupy.affine.choose_qparams).
//
//     in two launches    x --> range of each block, joined by atomicMax --> scale, zero_point; then quantize_affine
//     in one             x --> block on chip: range --> scale, zero_point --> codes, x being read once
//
// The range of a block is kept as two magnitudes, max(x, 0) and max(-x, 0), whose bits have the order of the numbers:
// zero bytes are the range of nothing, atomicMax joins ranges, and the range holds 0 as it must. FLOATING: blocks have
// offsets and the range need not hold 0; its ends are kept as keys, which have the order of all numbers (see ordered),
// and on chip as numbers.
#include "affine.cuh"

// a / b correctly rounded, by few instructions where b and the quotient are ordinary.
__device__ __forceinline__ float divide(float a, float b) {
    const float q = short_division(a, b, short_reciprocal(b));
    return is_ordinary(b) && is_ordinary(q) ? q : divide_ieee(a, b);
}
__device__ __forceinline__ double divide(double a, double b) { return divide_ieee(a, b); }

// a / b by 1 / b, as short_division: b is an integer, and nothing leaves the normal range.
__device__ __forceinline__ double quotient(double a, double b, double inverse) {
    const double q = __dmul_rn(a, inverse);
    return __fma_rn(-__fma_rn(q, b, -a), inverse, q);
}

// Bits in the order of the numbers; 0 is below all of them, NaN beyond.
template <typename C>
__device__ __forceinline__ typename Compute<C>::Bits ordered(C x) {
    using Bits = typename Compute<C>::Bits;
    constexpr Bits SIGN = Bits(1) << (sizeof(C) * 8 - 1);
    return x != x ? ~Bits(0) : all_bits(x) & SIGN ? ~all_bits(x) : all_bits(x) | SIGN;
}
// The number of a key; NaN of 0.
template <typename C>
__device__ __forceinline__ C number_of_key(typename Compute<C>::Bits key) {
    using Bits = typename Compute<C>::Bits;
    constexpr Bits SIGN = Bits(1) << (sizeof(C) * 8 - 1);
    return from_bits(key & SIGN ? Bits(key ^ SIGN) : Bits(~key));
}

// A float32 in the type of scales; casts would flush it.
template <typename C>
__device__ __forceinline__ C in_type(float x) {
    if constexpr (sizeof(C) == 8) return widen(x);
    else return x;
}

// Whether a > b; no number is flushed.
__device__ __forceinline__ bool is_larger(float a, float b) { return ieee::less(b, a); }
__device__ __forceinline__ bool is_larger(double a, double b) { return a > b; }

// Whether `sum`, which is a + b rounded, is a + b. What the larger one of the two leaves of the sum is exact.
__device__ __forceinline__ bool is_sum(float sum, float a, float b) {
    int r;
    asm("{ .reg .pred p; .reg .f32 t; sub.rn.f32 t, %1, %2; setp.eq.f32 p, t, %3; sub.rn.f32 t, %1, %3;"
        " setp.eq.and.f32 p, t, %2, p; selp.s32 %0, 1, 0, p; }"
        : "=r"(r)
        : "f"(sum), "f"(a), "f"(b));
    return r != 0;
}

// The number of 16 bits that is nearest by way of float32; the nearest that is not larger, or not smaller.
template <typename C>
__device__ __forceinline__ unsigned nearest_code(C x, int storage) {
    return code_of(narrow(x, 0.0f), storage);
}
template <typename C>
__device__ __forceinline__ unsigned code_below(C x, int storage) {
    const unsigned code = nearest_code(x, storage);
    if (!is_larger(in_type<C>(number_of_code(code, storage)), x) || code == (storage == IN_HALF ? 0xfbffu : 0xff7fu))
        return code;
    return (code & 0x7fffu) == 0 ? 0x8001u : code & 0x8000u ? code + 1 : code - 1;
}
__device__ __forceinline__ unsigned code_above(double x, int storage) { return code_below(-x, storage) ^ 0x8000u; }

// What a range is quantized with.
template <typename C>
struct QParams {
    C scale;
    int zero;     // or the bits of an offset
    bool inside;  // whether all numbers of the range, divided by an ordinary scale, stay within the levels
    bool finite;  // whether the range holds no infinity, which only careful divisions take
};

// The ends of a range of numbers of type T, where blocks have offsets.
template <typename T>
struct Extremes {
    using C = typename Compute<T>::Type;
    C up, down;  // the largest x and -x; NaN of no number

    // Of ends that keep it (see Ends).
    __device__ __forceinline__ bool has_nan() const { return up != up; }

    // Scale and offset by the contract. STORED: in 16 bits, of which g.margin says in what. BITS, where it is known:
    // qmax - qmin is 2^BITS - 1.
    template <bool STORED, int BITS = 0>
    __device__ __forceinline__ QParams<C> choose_qparams(const Geometry& g) const {
        if constexpr (sizeof(C) == 4 && BITS > 0) {
            QParams<float> found;
            if (choose_quickly<STORED, BITS>(g, found)) return found;
        }
        return choose_carefully<STORED, BITS>(g);
    }

    // The same in float32, where that has no other result than float64; false where it may have. Where the width of the
    // range is a float32, a quotient of it by an integer of 8 bits does not come so close to the middle of two float32
    // that rounding to float64 first would change anything, nor does the sum of two float32.
    template <bool STORED, int BITS>
    __device__ __forceinline__ bool choose_quickly(const Geometry& g, QParams<float>& found) const {
        constexpr float STEPS = (1 << BITS) - 1, HALF = 1 << (BITS - 1);
        const bool with_sign = g.qmin < 0;
        const float width = ieee::add(up, down), scale = short_division(width, STEPS, 1 / STEPS);
        const float offset = ieee::subtract(with_sign ? __fmul_rn(scale, HALF) : 0.0f, down);  // 0 - -0 is 0
        const bool exact = is_sum(width, up, down);
        if (!(is_ordinary(scale) && larger(up, down) <= from_bits(unsigned(g.largest)))) return false;
        if constexpr (STORED) {
            if (sizeof(T) == 2 && !exact) return false;
            return g.margin == IN_HALF ? store_quickly<IN_HALF, BITS>(g, scale, offset, exact, found)
                                       : store_quickly<IN_BFLOAT16, BITS>(g, scale, offset, exact, found);
        }
        // What an offset of so few steps is rounded by moves no number to another level than the first or the last.
        found = {scale, __float_as_int(offset), __fmul_rn(ieee::magnitude(offset), 0x1p-16f) <= scale, true};
        return exact;
    }
    // The offset in 16 bits, and the scale that reaches both ends of the range from there, as stored_offset has them.
    // No bit of a product of a number of 16 bits with a level is lost. Differences of numbers of 16 bits are mostly
    // exact; those of float32 are not, but few lie so close to where what they are rounded to changes.
    template <int STORAGE, int BITS>
    __device__ __forceinline__ bool store_quickly(
        const Geometry& g, float scale, float offset, bool exact, QParams<float>& found) const {
        constexpr float STEPS = (1 << BITS) - 1, HALF = 1 << (BITS - 1);
        const bool with_sign = g.qmin < 0;
        const float least = 2 * number_of_code(1, STORAGE), most = 0.5f * from_bits(unsigned(g.surely));
        float from = rounded<STORAGE>(offset);
        bool sure = scale >= least && scale <= most;
        if (sizeof(T) == 4 && with_sign && !exact) {  // the scale may be 2 ulp off
            const float beside = __fmaf_rn(ieee::magnitude(offset), 0x1p-23f, __fmul_rn(scale, HALF * 0x1p-22f));
            sure = sure && rounded<STORAGE>(__fadd_rn(offset, beside)) == from &&
                   rounded<STORAGE>(__fsub_rn(offset, beside)) == from;
        }
        // The end of a range of numbers of the same type is rounded to itself.
        constexpr bool SAME = SameType<T, __half>::VALUE ? STORAGE == IN_HALF : sizeof(T) == 2 && STORAGE != IN_HALF;
        if (!SAME && !with_sign) from = number_of_code(code_below(offset, STORAGE), STORAGE);
        from = ieee::add(from, 0.0f);
        const float over = ieee::subtract(up, from), under = ieee::add(from, down);  // how far the ends are from there
        const bool over_exact = is_sum(over, up, ieee::negative(from)), under_exact = is_sum(under, from, down);
        float wanted = __fmul_rn(over, with_sign ? 1 / (HALF - 1) : 1 / STEPS);  // about
        if (with_sign) wanted = larger(wanted, __fmul_rn(under, 1 / HALF));
        const float near = rounded<STORAGE>(wanted);
        const float near_over = __fmul_rn(near, with_sign ? HALF - 1 : STEPS), near_under = __fmul_rn(near, HALF);
        const bool next = near_over < over || (with_sign && near_under < under);
        if constexpr (sizeof(T) == 2) {
            sure = sure && over_exact && (under_exact || !with_sign);
        } else {
            sure = sure && (over_exact || is_apart(near_over, over)) &&
                   (under_exact || !with_sign || is_apart(near_under, under));
        }
        const float reaching = next ? behind<STORAGE>(near) : near;
        found = {reaching, __float_as_int(from), with_sign || under <= 0, true};
        return sure && wanted >= least && reaching <= most;
    }
    // The nearest number of 16 bits, and the next one behind a positive one; they may be infinite.
    template <int STORAGE>
    __device__ __forceinline__ static float rounded(float x) {
        if constexpr (STORAGE == IN_HALF) return __half2float(__float2half_rn(x));
        else return __bfloat162float(__float2bfloat16_rn(x));
    }
    template <int STORAGE>
    __device__ __forceinline__ static float behind(float x) {
        if constexpr (STORAGE != IN_HALF) return __uint_as_float(__float_as_uint(x) + 0x10000u);
        else return __half2float(__ushort_as_half(__half_as_ushort(__float2half_rn(x)) + 1));
    }
    // Whether a number is below or above another one that may be an ulp off.
    __device__ __forceinline__ static bool is_apart(float a, float b) {
        return fabsf(__fsub_rn(a, b)) > __fmul_rn(fabsf(b), 0x1p-22f);
    }

    template <bool STORED, int BITS>
    __device__ __forceinline__ QParams<C> choose_carefully(const Geometry& g) const {
        const C end = from_bits(Bits(g.largest)), most = from_bits(Bits(g.surely));
        const bool finite = magnitude_bits(up) <= largest_finite(C(0)) && magnitude_bits(down) <= largest_finite(C(0));
        // Of no number NaN loses, and the ends change places.
        const double upper = widen(smaller(larger(up, C(-end)), end));
        const double lower = -widen(smaller(larger(down, C(-end)), end)), range = upper - lower;
        if (!(upper > lower) && (!STORED || upper < lower)) {
            const float offset = upper < lower ? 0.0f : ieee::add(narrow(lower, 0.0f), 0.0f);
            return {C(1), __float_as_int(offset), true, finite};
        }
        double wanted;
        if constexpr (sizeof(C) == 8) {
            wanted = divide_ieee(range, double(g.divisor));
        } else {
            wanted = quotient(range, double(g.divisor), g.inverse);
        }
        const double limit = widen(most);
        const unsigned bits = __float_as_uint(narrow(wanted > limit ? limit : wanted, 0.0f));
        const unsigned least = !STORED ? 1u : __float_as_uint(number_of_code(1, g.margin));
        const float scale = __uint_as_float(max(bits, least));  // positive
        const double s = widen(scale);
        // Where the scale is as large as it may be, the middle of the range.
        const double first =
            wanted > limit ? __dsub_rn(__dmul_rn(upper + lower, 0.5), __dmul_rn(s, 0.5 * g.divisor)) : lower;
        if constexpr (STORED) {
            const bool equal = upper == lower;
            const double from = equal ? lower : __dsub_rn(first, __dmul_rn(s, double(g.qmin)));
            return stored_offset<BITS>(from, upper, lower, finite, g);
        }
        const float offset = ieee::add(narrow(__dsub_rn(first, __dmul_rn(s, double(g.qmin))), 0.0f), 0.0f);
        const bool inside =
            sizeof(C) == 4 && !(wanted > limit) && __fmul_rn(ieee::magnitude(offset), 0x1p-16f) <= scale;
        return {in_type<C>(scale), __float_as_int(offset), inside, finite};
    }
    // The offset in 16 bits, and the scale that reaches both ends of the range from there.
    template <int BITS>
    __device__ __forceinline__ static QParams<C> stored_offset(
        double wanted, double upper, double lower, bool finite, const Geometry& g) {
        const int storage = g.margin;
        const unsigned code = g.qmin == 0 ? code_below(wanted, storage) : nearest_code(wanted, storage);
        const float offset = ieee::add(number_of_code(code, storage), 0.0f);
        const double from = widen(offset), limit = widen(from_bits(Bits(g.surely)));
        double reached;
        if constexpr (BITS == 0) {
            reached = (upper - from) / double(g.qmax);
            if (g.qmin != 0) reached = fmax(reached, (lower - from) / double(g.qmin));
        } else {
            constexpr double HALF = 1 << (BITS - 1), LAST = HALF - 1, STEPS = 2 * HALF - 1;
            reached = g.qmin != 0 ? fmax(quotient(upper - from, LAST, 1 / LAST), (from - lower) / HALF)
                                  : quotient(upper - from, STEPS, 1 / STEPS);
        }
        const unsigned scale = code_above(fmin(reached, limit), storage);
        const bool exact = upper == lower && from == lower;
        const float found = exact ? 1.0f : number_of_code(scale & 0x8000u ? 1u : max(scale, 1u), storage);
        return {in_type<C>(found), __float_as_int(offset), false, finite};
    }

  private:
    using Bits = typename Compute<C>::Bits;
};

template <typename C, bool FLOATING = false>
struct Range {
    using Bits = typename Compute<C>::Bits;
    Bits high, low;  // FLOATING: the keys of the largest x and -x

    // Of ends that keep it (see Ends).
    __device__ __forceinline__ bool has_nan() const {
        return FLOATING ? high == ~Bits(0) : max(high, low) > largest_finite(C(0)) + 1;
    }
    __device__ __forceinline__ void join(const Range& other) {
        high = max(high, other.high), low = max(low, other.low);
    }
    // (up + down) / divisor, the sum and the quotient in float64.
    __device__ __forceinline__ static double width(C up, C down, const Geometry& g) {
        if constexpr (sizeof(C) == 8) {
            return divide_ieee(fmin(up + down, from_bits(largest_finite(0.0))), double(g.divisor));
        } else {  // as quotient, which has these in another order
            const double sum = widen(up) + widen(down), q = __dmul_rn(sum, g.inverse);
            return __fma_rn(-__fma_rn(q, double(g.divisor), -sum), g.inverse, q);
        }
    }
    // The scale as it is stored; a positive one stays so.
    template <bool STORED>
    __device__ __forceinline__ static C as_stored(C scale, const Geometry& g) {
        if constexpr (!STORED) return scale;
        const unsigned code = nearest_code(widen(scale), g.margin);
        return in_type<C>(number_of_code(magnitude_bits(scale) != 0 ? max(code, 1u) : code, g.margin));
    }
    // The scale, or the largest one for which all levels are decoded to finite numbers.
    template <bool STORED>
    __device__ __forceinline__ static QParams<C> kept_finite(const QParams<C>& found, const Geometry& g) {
        if (all_bits(found.scale) <= Bits(g.surely)) return found;
        const C reach = C(g.symmetric ? g.reach : max(g.qmax - found.zero, found.zero - g.qmin));
        const C limit = from_bits(Bits(g.limit));
        if (!(multiply_ieee(found.scale, reach) > limit)) return found;
        Bits most = all_bits(divide_ieee(limit, reach));
        if (multiply_ieee(from_bits(most), reach) > limit) --most;
        if constexpr (STORED) {
            const unsigned code = code_below(widen(from_bits(most)), g.margin);
            return {in_type<C>(number_of_code(code, g.margin)), found.zero, false, found.finite};
        }
        return {from_bits(most), found.zero, false, found.finite};
    }
    // Scale and zero point by the contract; infinities count as the largest finite number. STORED: in 16 bits, of which
    // g.margin says in what.
    template <bool STORED = false, int BITS = 0>
    __device__ __forceinline__ QParams<C> choose_qparams(const Geometry& g) const {
        if constexpr (FLOATING)
            return Extremes<C>{number_of_key<C>(high), number_of_key<C>(low)}.template choose_qparams<STORED, BITS>(g);
        const C up = from_bits(min(high, Bits(g.largest))), down = from_bits(min(low, Bits(g.largest)));
        if ((high | low) == 0) return {C(1), g.symmetric ? g.zero : g.qmin, true, true};
        const bool finite = max(high, low) <= Bits(g.largest);
        if (g.symmetric) {
            const C most = larger(up, down), scale = as_stored<STORED>(divide(most, C(g.divisor)), g);
            bool inside = g.zero - g.divisor >= g.qmin;
            if constexpr (STORED) inside = inside && C(rint(divide(most, scale))) <= C(g.divisor);
            return kept_finite<STORED>({scale, g.zero, inside, finite}, g);
        }
        const C scale =
            as_stored<STORED>(smaller(narrow(width(up, down, g), C(0)), from_bits(largest_finite(C(0)))), g);
        const C s = usable(scale);
        if (magnitude_bits(s) == 0) return {scale, g.qmin, false, finite};
        const int zero = g.qmin + int(smaller(C(rint(divide(down, s))), C(g.qmax - g.qmin)));
        bool inside = C(rint(divide(up, s))) <= C(g.qmax - zero);
        // The smallest number becomes qmin, but under a scale that was rounded it may be below.
        if constexpr (STORED) inside = inside && C(rint(divide(down, s))) <= C(zero - g.qmin);
        return kept_finite<STORED>({scale, zero, inside, finite}, g);
    }
};

// The range of a block on chip.
template <typename T, bool FLOATING>
struct OnChip {
    using Type = Range<typename Compute<T>::Type>;
};
template <typename T>
struct OnChip<T, true> {
    using Type = Extremes<T>;
};

// The largest number of the warp, in every lane.
__device__ __forceinline__ unsigned warp_largest(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, x);
#else
    return warp_max(x);
#endif
}
__device__ __forceinline__ unsigned long long warp_largest(unsigned long long x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

// Join the ranges of `lanes` neighbouring lanes, a power of two up to 32.
template <typename C, bool FLOATING>
__device__ __forceinline__ void join_lanes(Range<C, FLOATING>& range, int lanes, bool both) {
    if (lanes == WARP) {
        range.high = warp_largest(range.high);
        if (both) range.low = warp_largest(range.low);
        return;
    }
    for (int step = lanes / 2; step > 0; step /= 2) {
        range.high = max(range.high, __shfl_xor_sync(FULL_WARP, range.high, step));
        if (both) range.low = max(range.low, __shfl_xor_sync(FULL_WARP, range.low, step));
    }
}

// The same of numbers; a NaN, whose sign is not set, stays.
template <typename T>
__device__ __forceinline__ void join_warp(Extremes<T>& range) {
    auto largest = [](float x) {
        const unsigned key = __float_as_uint(x) ^ (static_cast<unsigned>(__float_as_int(x) >> 31) | 0x80000000u);
        return number_of_key<float>(warp_largest(key));
    };
    range.up = largest(range.up), range.down = largest(range.down);
}
template <typename T>
__device__ __forceinline__ void join_lanes(Extremes<T>& range, int lanes, bool) {
    if (lanes == WARP) {
        join_warp(range);
        return;
    }
    for (int step = lanes / 2; step > 0; step /= 2) {
        range.up = ieee::larger_or_nan(range.up, __shfl_xor_sync(FULL_WARP, range.up, step));
        range.down = ieee::larger_or_nan(range.down, __shfl_xor_sync(FULL_WARP, range.down, step));
    }
}

// The range of elements that are added in pieces of a unit: a register of two 16-bit elements, or one element.
// STRICT: a NaN stays, beyond all numbers; else it is ignored.
template <typename T, bool STRICT, bool FLOATING = false>
struct Ends {
    using C = typename Compute<T>::Type;
    static constexpr int PIECE = 1;                         // elements of a piece
    C high = FLOATING ? -C(infinity()) : C(0), low = high;  // the largest x and -x

    __device__ __forceinline__ static C larger_one(C a, C b) {
        if constexpr (FLOATING && STRICT && sizeof(C) == 4) return ieee::larger_or_nan(a, b);
        const C found = larger(a, b);
        return STRICT && a != a ? a : STRICT && b != b ? b : found;
    }
    // BOTH: as the range wants it; else the larger end is the largest magnitude.
    template <bool BOTH, int SIZE>
    __device__ __forceinline__ void add(const Unit<T, SIZE>& unit, int piece) {
        constexpr auto SIGN = typename Compute<C>::Bits(1) << (sizeof(C) * 8 - 1);
        const C v = unit.get(piece);
        if constexpr (!BOTH) high = larger_one(high, from_bits(magnitude_bits(v)));
        else high = larger_one(high, v), low = larger_one(low, from_bits(all_bits(v) ^ SIGN));
    }
    __device__ __forceinline__ Range<C, FLOATING> of(int) const {
        if constexpr (FLOATING) return {ordered(high), ordered(low)};
        else return {magnitude_bits(high), magnitude_bits(low)};
    }
    // FLOATING: those of `lanes` neighbouring lanes, a power of two up to 32.
    __device__ __forceinline__ Extremes<T> of_lanes(int lanes) const {
        Extremes<T> found{high, low};
        join_lanes(found, lanes, true);
        return found;
    }
};

// INFINITE  the bits of two infinities
template <typename T, bool STRICT, bool FLOATING, unsigned INFINITE>
struct PairEnds {
    static constexpr int PIECE = 2;
    unsigned high = FLOATING ? INFINITE | 0x80008000u : 0u,
             low = FLOATING ? INFINITE : 0u;  // the largest and the smallest x

    template <bool BOTH, int SIZE>
    __device__ __forceinline__ void add(const Unit<T, SIZE>& unit, int piece) {
        const auto pair = Word<T>::as(unit.word[piece]), down = Word<T>::as(low);
        high = larger_ones(high, unit.word[piece]);
        const auto less = STRICT ? __hmin2_nan(down, pair) : __hmin2(down, pair);
        low = *reinterpret_cast<const unsigned*>(&less);
    }
    __device__ __forceinline__ static unsigned larger_ones(unsigned a, unsigned b) {
        const auto one = Word<T>::as(a), other = Word<T>::as(b);
        const auto more = STRICT ? __hmax2_nan(one, other) : __hmax2(one, other);
        return *reinterpret_cast<const unsigned*>(&more);
    }
    __device__ __forceinline__ Range<float, FLOATING> of(int j) const {
        if constexpr (FLOATING) return {ordered(Word<T>::get(high, j)), ordered(ieee::negative(Word<T>::get(low, j)))};
        else return {magnitude_bits(Word<T>::get(high, j)), magnitude_bits(Word<T>::get(low, j))};
    }
    // FLOATING: those of `lanes` neighbouring lanes; both go from lane to lane in one register.
    __device__ __forceinline__ Extremes<T> of_lanes(int lanes) const {
        const unsigned even = __byte_perm(high, low ^ 0x80008000u, 0x5410);
        const unsigned odd = __byte_perm(high, low ^ 0x80008000u, 0x7632);
        unsigned found = larger_ones(even, odd);
        if (lanes < WARP) {
            for (int step = lanes / 2; step > 0; step /= 2)
                found = larger_ones(found, __shfl_xor_sync(FULL_WARP, found, step));
        }
        Extremes<T> range{Word<T>::get(found, 0), Word<T>::get(found, 1)};
        if (lanes == WARP) join_warp(range);
        return range;
    }
};
template <bool STRICT, bool FLOATING>
struct Ends<__half, STRICT, FLOATING> : PairEnds<__half, STRICT, FLOATING, 0x7c007c00u> {};
template <bool STRICT, bool FLOATING>
struct Ends<__nv_bfloat16, STRICT, FLOATING> : PairEnds<__nv_bfloat16, STRICT, FLOATING, 0x7f807f80u> {};

// The ranges of the columns of units that lie below each other.
template <bool BOTH, typename T, bool FLOATING, int PIECES, int COUNT>
__device__ __forceinline__ void add_columns(Ends<T, false, FLOATING> (&ends)[PIECES], const Unit<T> (&unit)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) ends[piece].template add<BOTH>(unit[i], piece);
    }
}

// The range of units.
template <typename T, bool STRICT, bool FLOATING = false>
struct RangeOf {
    using C = typename Compute<T>::Type;
    Ends<T, STRICT, FLOATING> ends;
    template <int SIZE>
    __device__ __forceinline__ void add(const Unit<T, SIZE>& unit, bool both) {
        constexpr int PIECES = SIZE / Ends<T, STRICT, FLOATING>::PIECE;
        if (FLOATING || both) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) ends.template add<true>(unit, i);
        } else {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) ends.template add<false>(unit, i);
        }
    }
    __device__ __forceinline__ Range<C, FLOATING> range(bool both) const {
        Range<C, FLOATING> range = ends.of(0);
        if constexpr (Ends<T, STRICT, FLOATING>::PIECE == 2) range.join(ends.of(1));
        if (!FLOATING && !both) range.high = max(range.high, range.low);
        return range;
    }
};

template <bool FLOATING, typename T>
__device__ __forceinline__ Range<typename Compute<T>::Type, FLOATING> range_of(T x) {
    using C = typename Compute<T>::Type;
    const C v = to_float(x);
    if constexpr (FLOATING) {
        if (v != v) return {0, 0};
        constexpr auto SIGN = typename Compute<C>::Bits(1) << (sizeof(C) * 8 - 1);
        return {ordered(v), ordered(from_bits(all_bits(v) ^ SIGN))};  // a negation might flush
    }
    return {magnitude_bits(larger(v, C(0))), magnitude_bits(smaller(v, C(0)))};
}

// The range of neighbouring lanes on chip: FLOATING as numbers.
template <typename T, bool STRICT, bool FLOATING>
__device__ __forceinline__ auto range_of_lanes(const RangeOf<T, STRICT, FLOATING>& gather, int lanes, bool both) {
    if constexpr (FLOATING) {
        return gather.ends.of_lanes(lanes);
    } else {
        Range<typename Compute<T>::Type> range = gather.range(both);
        join_lanes(range, lanes, both);
        return range;
    }
}

template <typename T>
__device__ __forceinline__ void load_unit(Unit<T>& unit, const T* x, bool aligned) {
    if (aligned) unit.template load<true>(x);
    else unit.template load<false>(x);
}

// ---- ranges in memory --------------------------------------------------------------------------------------------

// Join `range` to those of block `index`. Most ranges change nothing, which a look at the memory finds out for less.
template <typename C, bool FLOATING>
__device__ __forceinline__ void join_block(
    typename Compute<C>::Bits* high, typename Compute<C>::Bits* low, long long index, Range<C, FLOATING> range) {
    using Bits = typename Compute<C>::Bits;
    if (!FLOATING && !low) range.high = max(range.high, range.low);
    if (range.high > *static_cast<volatile Bits*>(high + index)) atomicMax(high + index, range.high);
    if (low && range.low > *static_cast<volatile Bits*>(low + index)) atomicMax(low + index, range.low);
}

// x          T[n]
// high, low  Bits[count], zero at first; they receive the ranges. low null: high is the larger one of both
template <typename T, int LAYOUT, bool FLOATING = false>
__global__ void __launch_bounds__(
    AFFINE_THREADS, sizeof(T) == 8      ? 2
                    : LAYOUT == COLUMNS ? 3
                                        : 4)
    find_range_affine(
        const T* x, typename Compute<T>::Bits* high, typename Compute<T>::Bits* low,
        const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    const bool aligned = is_aligned(x);
    if constexpr (LAYOUT == RUNS) {
        constexpr int DEPTH = FIND_DEPTH[sizeof(T) / 4];
        constexpr long long TILE_SIZE = (long long)AFFINE_THREADS * UNIT * DEPTH;
        const BlockRun<unsigned> tiles((g.n + TILE_SIZE - 1) / TILE_SIZE);
        long long mine = -1;  // the block whose range is being gathered
        RangeOf<T, false, FLOATING> gather;
        auto flush = [&] {
            Range<C, FLOATING> range = gather.range(low);
            if (__all_sync(FULL_WARP, mine == __shfl_sync(FULL_WARP, mine, 0))) {
                join_lanes(range, WARP, low);
                if (threadIdx.x % WARP != 0) return;
            }
            if (mine >= 0) join_block<C>(high, low, mine, range);
        };
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            Unit<T> unit[DEPTH];
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                const long long i = tile * TILE_SIZE + (u * AFFINE_THREADS + threadIdx.x) * UNIT;
                if (i + UNIT <= g.n) load_unit(unit[u], x + i, aligned);
            }
            const RunsTile place(g, tile * TILE_SIZE);
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                const long long i = tile * TILE_SIZE + (u * AFFINE_THREADS + threadIdx.x) * UNIT;
                unsigned rest = 0;
                long long index =
                    g.wide ? -1 : place.first + place.locate(g, (u * AFFINE_THREADS + threadIdx.x) * UNIT, rest);
                const bool whole = i + UNIT <= g.n && rest >= UNIT;
                if (!whole) index = mine;
                if (__any_sync(FULL_WARP, index != mine)) {
                    flush();
                    mine = index, gather = {};
                }
                if (whole) {
                    gather.add(unit[u], low);
                } else {
#pragma unroll 1
                    for (long long e = i; e < min(i + UNIT, g.n); ++e)
                        join_block<C>(high, low, scale_of(g, e), range_of<FLOATING>(x[e]));
                }
            }
        }
        flush();
    } else {
        constexpr int ROWS = FIND_ROWS, BATCH = sizeof(T) == 2 ? 8 : sizeof(T) == 4 ? 4 : 2;
        constexpr long long WIDTH = AFFINE_THREADS * UNIT;
        constexpr int PITCH = AFFINE_THREADS + 4;  // eight times four banks apart
        using Bits = typename Compute<T>::Bits;
        __shared__ Bits highs[UNIT * PITCH], lows[UNIT * PITCH];
        const long long across = (g.columns + WIDTH - 1) / WIDTH;
        const BlockRun<unsigned> tiles((g.rows + ROWS - 1) / ROWS * across);
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            const long long left = tile % across * WIDTH, column = left + threadIdx.x * UNIT;
            using Pieces = Ends<T, false, FLOATING>;
            Pieces ends[UNIT / Pieces::PIECE];
            for (int r = 0; r < ROWS && column < g.columns; r += BATCH) {
                const long long i = (tile / across * ROWS + r) * g.columns + column;
                if (i + (BATCH - 1) * g.columns + UNIT <= g.n) {
                    Unit<T> unit[BATCH];
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) load_unit(unit[b], x + i + b * g.columns, aligned);
                    if (FLOATING || low) add_columns<true>(ends, unit);
                    else add_columns<false>(ends, unit);
                } else {
#pragma unroll 1
                    for (int b = 0; b < BATCH; ++b) {
#pragma unroll 1
                        for (long long e = i + b * g.columns; e < min(i + b * g.columns + UNIT, g.n); ++e)
                            join_block<C>(high, low, scale_of(g, e), range_of<FLOATING>(x[e]));
                    }
                }
            }
            // Neighbouring lanes join the ranges of neighbouring columns, which touches the fewest sectors.
            __syncthreads();
#pragma unroll
            for (int j = 0; j < UNIT; ++j) {
                Range<C, FLOATING> range = ends[j / Pieces::PIECE].of(j % Pieces::PIECE);
                if (!FLOATING && !low) range.high = max(range.high, range.low);
                highs[j * PITCH + threadIdx.x] = range.high, lows[j * PITCH + threadIdx.x] = range.low;
            }
            __syncthreads();
            unsigned index[UNIT];
            Bits seen_high[UNIT], seen_low[UNIT];  // one look, so that there is one wait
#pragma unroll
            for (int k = 0; k < UNIT; ++k) {
                const long long c = min(left + k * AFFINE_THREADS + threadIdx.x, g.columns - 1);
                index[k] = static_cast<unsigned>(c % g.row) / static_cast<unsigned>(g.run);
                seen_high[k] = __ldcg(high + index[k]), seen_low[k] = low ? __ldcg(low + index[k]) : 0;
            }
#pragma unroll
            for (int k = 0; k < UNIT; ++k) {
                const int c = k * AFFINE_THREADS + threadIdx.x, place = c % UNIT * PITCH + c / UNIT;
                if (left + c >= g.columns) break;
                if (highs[place] > seen_high[k]) atomicMax(high + index[k], highs[place]);
                if (low && lows[place] > seen_low[k]) atomicMax(low + index[k], lows[place]);
            }
        }
    }
}

// The range of an array that is one block; arguments as above.
template <typename T, bool FLOATING = false>
__global__ void __launch_bounds__(AFFINE_THREADS, 4) find_whole_affine(
    const T* x, typename Compute<T>::Bits* high, typename Compute<T>::Bits* low, const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    constexpr int DEPTH = WHOLE_BYTES / (UNIT * sizeof(T));  // so many bytes of a thread are under way
    constexpr long long TILE_SIZE = (long long)AFFINE_THREADS * UNIT * DEPTH;
    const BlockRun<unsigned> tiles(g.n / TILE_SIZE);
    RangeOf<T, false, FLOATING> gather;
    if (is_aligned(x)) {
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            Unit<T> unit[DEPTH];
#pragma unroll
            for (int u = 0; u < DEPTH; ++u)
                unit[u].template load<true>(x + tile * TILE_SIZE + (u * AFFINE_THREADS + threadIdx.x) * UNIT);
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) gather.add(unit[u], low);
        }
    }
    Range<C, FLOATING> range = gather.range(low);
    // What is left: the end of the array, or all of it.
    const long long step = (long long)gridDim.x * AFFINE_THREADS;
    for (long long i = (is_aligned(x) ? g.n / TILE_SIZE * TILE_SIZE : 0) + blockIdx.x * AFFINE_THREADS + threadIdx.x;
         i < g.n; i += step)
        range.join(range_of<FLOATING>(x[i]));
    __shared__ Range<C, FLOATING> of_warps[AFFINE_THREADS / WARP];
    join_lanes(range, WARP, true);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = range;
    __syncthreads();
    if (threadIdx.x < AFFINE_THREADS / WARP) {
        range = of_warps[threadIdx.x];
        join_block<C>(high, low, 0, range);
    }
}

// scale       C[count], may be the memory of `high`
// zero_point  int32[count], or null
// STORED      scales and offsets will have 16 bits
template <typename C, bool FLOATING = false, bool STORED = false>
__global__ void finish_range_affine(
    const typename Compute<C>::Bits* high, const typename Compute<C>::Bits* low, C* scale, int* zero_point,
    const __grid_constant__ Geometry g) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < g.count; i += step) {
        const Range<C, FLOATING> range{high[i], low ? low[i] : 0};
        const QParams<C> found = range.template choose_qparams<STORED>(g);
        scale[i] = found.scale;
        if (zero_point) zero_point[i] = found.zero;
    }
}

// ---- ranges on chip ------------------------------------------------------------------------------------------------
//
// x is read once where a block stays on chip from the search of its range to its codes. Three kernels share the lengths
// of blocks: 32 elements a lane (up to 1024 elements, a power of two), a team of lanes that holds a block in registers
// (up to 1024, any multiple of eight), a thread block that holds it in shared memory (beyond). What fits none of them
// is read twice: find_range_affine, then quantize_affine.

// Quantizes the units of a block by what the block's own range has given.
template <typename T, int BITS, bool FLOATING = false>
struct BlockQuantizer {
    using C = typename Compute<T>::Type;
    const T* x;
    unsigned char* codes;
    const Geometry& g;
    C s, r;
    int zero;
    bool quick, inside;  // whether all units of the block are quick; see QParams

    __device__ __forceinline__ BlockQuantizer(const T* x, unsigned char* codes, const Geometry& g, QParams<C> found)
        : x(x),
          codes(codes),
          g(g),
          s(found.scale),
          zero(found.zero),
          quick(found.finite && is_ordinary(s)),
          inside(found.inside) {
        if constexpr (sizeof(C) == 4) r = short_reciprocal(s);
        if constexpr (FLOATING) quick = quick && is_near(offset_of<C>(zero));
    }

    template <int SIZE>
    __device__ __forceinline__ float number(const Unit<T, SIZE>& unit, int j) const {
        return FLOATING ? __fsub_rn(unit.get(j), __int_as_float(zero)) : unit.get(j);
    }
    // Numbers of a block of an ordinary scale, whose quotients do not overflow. INSIDE: the block's `inside` is true.
    template <bool INSIDE, int SIZE>
    __device__ __forceinline__ Codes<BITS, SIZE> level_as(const Unit<T, SIZE>& unit) const {
        const int offset = g.qmin < 0 ? 1 << (BITS - 1) : 0;  // makes codes positive, which lets them be added up
        unsigned q[SIZE];
        Codes<BITS, SIZE> packed;
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (int j = 0; j < SIZE; ++j)
                q[j] = int(clamped(steps_of(unit.get(j), s), C(g.qmin - zero), C(g.qmax - zero))) + zero + offset;
            packed.pack_sums(q, 0);
        } else {
            const int point = FLOATING ? 0 : zero;
            const float low = beside_rounder(g.qmin - point), high = beside_rounder(g.qmax - point);
#pragma unroll
            for (int j = 0; j < SIZE; ++j) {
                const float sum = __fadd_rn(short_division(number(unit, j), s, r), ROUNDER);
                q[j] = __float_as_uint(INSIDE ? sum : fminf(fmaxf(sum, low), high));
            }
            packed.pack_sums(q, point + offset - __float_as_int(ROUNDER));
        }
        packed.flip(offset);
        return packed;
    }
    template <int SIZE>
    __device__ __forceinline__ Codes<BITS, SIZE> level(const Unit<T, SIZE>& unit) const {
        return inside ? level_as<true>(unit) : level_as<false>(unit);
    }

    // STORED: scales and offsets as the codes that they have.
    template <bool STORED>
    __device__ __forceinline__ void store_params(long long block, C* scale, int* zero_point) const {
        if constexpr (STORED) store_code(scale, block, s);
        else scale[block] = s;
        if constexpr (STORED && FLOATING) store_code(zero_point, block, __int_as_float(zero));
        else if (zero_point) zero_point[block] = zero;
    }
    __device__ __forceinline__ void store_code(void* to, long long block, float x) const {
        const unsigned code = g.margin == IN_HALF ? __half_as_ushort(__float2half_rn(x)) : __float_as_uint(x) >> 16;
        reinterpret_cast<unsigned short*>(to)[block] = static_cast<unsigned short>(code);
    }

    __device__ __forceinline__ void store(const Unit<T>& unit, long long i) const {
        level(unit).template store<true>(codes + i * BITS / 8);
    }

    __device__ __forceinline__ void careful(long long i, int count) const {
        BlockIterator<C> at{usable(s), FLOATING ? offset_of<C>(zero) : C(zero)};
        Quantize<T, BITS, UNIT, FLOATING>{{{}, g, false}, x, codes}.one_by_one(i, count, at);
    }
};

// Thread blocks of a multiprocessor, with four and with eight units of a thread. The registers that so many of them
// leave a thread are some too few for the code that the compiler makes for compute capability 12.
#if __CUDA_ARCH__ >= 1200
constexpr int FEW_SLOT_BLOCKS = 7, MANY_SLOT_BLOCKS = 6;
#else
constexpr int FEW_SLOT_BLOCKS = 8, MANY_SLOT_BLOCKS = 7;
#endif
// The same where blocks have offsets: with four and with eight units of 16-bit elements, as many as there are without
// offsets (compute capability 7.5 has no threads for ten), but for eight and scales of 16 bits; with 32 elements of
// float32 a lane, for which it is from compute capability 10 on.
constexpr bool MORE_BLOCKS = __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 1200;
constexpr int OFFSET_FEW_BLOCKS = MORE_BLOCKS ? 10 : FEW_SLOT_BLOCKS;
constexpr int OFFSET_MANY_BLOCKS = MORE_BLOCKS ? 8 : MANY_SLOT_BLOCKS;
constexpr int OFFSET_LANE_BLOCKS = __CUDA_ARCH__ >= 1000 ? 2 : 3;

// The ranges of the blocks of a team. Bit v of `full`: slot v holds a unit; others hold zeros, which change nothing but
// FLOATING ranges.
template <bool STRICT, bool FLOATING, typename T, int SLOTS, int EACH, typename OnChip>
__device__ __forceinline__ void ranges_of_units(
    const Unit<T> (&unit)[SLOTS], unsigned full, OnChip (&range)[EACH], int team, bool both) {
    RangeOf<T, STRICT, FLOATING> gather[EACH];
#pragma unroll
    for (int v = 0; v < SLOTS; ++v)
        if (!FLOATING || full >> v & 1) gather[EACH == 1 ? 0 : v].add(unit[v], both);
#pragma unroll
    for (int b = 0; b < EACH; ++b) range[b] = range_of_lanes(gather[b], team, both);
}

// Blocks of up to 1024 elements, which begin at multiples of eight and are made of whole units. A team of threads reads
// a block once: it stays in registers from the search of its range to its codes.
//
// x           T[n], begins at a multiple of 16 bytes
// codes       as quantize_affine, begins at a multiple of 16 bytes
// scale       C[count], or 16-bit codes
// zero_point  int32[count], or null; FLOATING: float32[count], or 16-bit codes
// team        threads of a team: a power of two up to 32
// SLOTS       units of a thread
// EACH        blocks that a team has in its registers: SLOTS of one unit a thread, or 1 of SLOTS units a thread
// STORED      scales and offsets are stored in 16 bits, of which g.margin says in what
template <typename T, int BITS, int SLOTS, int EACH, bool FLOATING = false, bool STORED = false>
__global__ void __launch_bounds__(
    TEAM_THREADS, sizeof(T) == 8   ? 2
                  : EACH > 1       ? 5
                  : SLOTS == 4     ? (FLOATING && sizeof(T) == 2 ? OFFSET_FEW_BLOCKS : FEW_SLOT_BLOCKS)
                  : sizeof(T) == 2 ? (FLOATING && !STORED ? OFFSET_MANY_BLOCKS : MANY_SLOT_BLOCKS)
                                   : 4)
    quantize_dynamic_affine(
        const T* x, unsigned char* codes, typename Compute<T>::Type* scale, int* zero_point, int team,
        const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    static_assert(EACH == 1 || EACH == SLOTS, "a slot is a block, or all are one");
    const bool both = FLOATING || !g.symmetric;
    const int lane = threadIdx.x & (team - 1), teams = TEAM_THREADS / team;
    const long long first = (long long)blockIdx.x * (teams * EACH) + threadIdx.x / team;
    long long begin[EACH];
    int length[EACH];
    Unit<T> unit[SLOTS] = {};
#pragma unroll
    for (int b = 0; b < EACH; ++b) {
        const long long block = first + b * teams;
        begin[b] = block * g.run, length[b] = block < g.count ? int(g.run) : 0;
        if (g.per_row != 1) {  // the last block of a row may be short
            const long long row = block / g.per_row, column = (block - row * g.per_row) * g.run;
            begin[b] = row * g.row + column, length[b] = min((long long)length[b], g.row - column);
        }
    }
    // The element of a block that slot v begins with.
    auto element = [&](int v) { return (EACH == 1 ? v * team + lane : lane) * UNIT; };
    // Where registers are few, slots that have no unit hold one of the block once more, which needs no bit for each.
    constexpr bool REPEATED = FLOATING && SLOTS > 4;
    unsigned full = REPEATED ? ~0u : 0u;
#pragma unroll
    for (int v = 0; v < SLOTS; ++v) {
        const int b = EACH == 1 ? 0 : v;
        if constexpr (REPEATED) {
            if (length[b] > 0) unit[v].template load<true>(x + begin[b] + min(element(v), length[b] - UNIT));
        } else {
            if (element(v) < length[b]) unit[v].template load<true>(x + begin[b] + element(v)), full |= 1u << v;
        }
    }
    typename OnChip<T, FLOATING>::Type range[EACH];
    ranges_of_units<true, FLOATING>(unit, full, range, team, both);
    bool nan = false;
#pragma unroll
    for (int b = 0; b < EACH; ++b) nan |= range[b].has_nan();
    nan = __any_sync(FULL_WARP, nan);
    if (nan) ranges_of_units<false, FLOATING>(unit, full, range, team, both);
#pragma unroll
    for (int b = 0; b < EACH; ++b) {
        if (length[b] == 0) continue;
        const BlockQuantizer<T, BITS, FLOATING> own(x, codes, g, range[b].template choose_qparams<STORED, BITS>(g));
        if (lane == 0) own.template store_params<STORED>(first + b * teams, scale, zero_point);
        if (own.quick && !nan) {
#pragma unroll
            for (int v = 0; v < SLOTS; ++v)
                if ((EACH == 1 || v == b) && element(v) < length[b]) own.store(unit[v], begin[b] + element(v));
        } else {
#pragma unroll 1
            for (int v = 0; v < SLOTS; ++v)
                if ((EACH == 1 || v == b) && element(v) < length[b]) own.careful(begin[b] + element(v), UNIT);
        }
    }
}

// A block in shared memory, as this thread sees it. A warp copies what its lanes read, in order.
template <typename T>
struct Row {
    static constexpr int CHUNKS = UNIT * sizeof(T) / 16;  // of a unit
    int units;
    unsigned place;  // address of this lane's first chunk

    __device__ __forceinline__ Row(const uint4* chunks, int units) : units(units) {
        place = opaque(shared_address(chunks) + threadIdx.x * CHUNKS * 16);
    }
    __device__ __forceinline__ void copy(const T* x) const {
        const int lane = threadIdx.x % WARP, first = (threadIdx.x - lane) * CHUNKS + lane;
        const uint4* source = reinterpret_cast<const uint4*>(x) + first;
        unsigned target = place - lane * (CHUNKS - 1) * 16;
        for (int chunk = first; chunk < units * CHUNKS; chunk += CHUNKS * blockDim.x) {
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i)
                if (i == 0 || chunk + i * WARP < units * CHUNKS)
                    copy_async<16>(target + i * WARP * 16, source + i * WARP);
            target += CHUNKS * blockDim.x * 16, source += CHUNKS * blockDim.x;
        }
    }
    __device__ __forceinline__ static void read(unsigned from, Unit<T>& unit) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const uint4 chunk = shared_at<uint4>(from + i * 16);
            unit.word[4 * i] = chunk.x, unit.word[4 * i + 1] = chunk.y;
            unit.word[4 * i + 2] = chunk.z, unit.word[4 * i + 3] = chunk.w;
        }
    }
    // The range of this warp's units.
    template <bool STRICT, bool FLOATING>
    __device__ __forceinline__ typename OnChip<T, FLOATING>::Type range(bool both) const {
        RangeOf<T, STRICT, FLOATING> gather;
        unsigned from = place;
#pragma unroll 4
        for (int u = threadIdx.x; u < units; u += blockDim.x, from += CHUNKS * blockDim.x * 16) {
            Unit<T> unit;
            read(from, unit);
            gather.add(unit, both);
        }
        return range_of_lanes(gather, WARP, both);
    }
    // Its codes, from where `codes` has those of this thread's first unit.
    template <bool INSIDE, int BITS, bool FLOATING>
    __device__ __forceinline__ void quantize(const BlockQuantizer<T, BITS, FLOATING>& own, unsigned char* codes) const {
        unsigned from = place;
#pragma unroll 1
        for (int u = threadIdx.x; u < units; u += blockDim.x, from += CHUNKS * blockDim.x * 16) {
            Unit<T> unit;
            read(from, unit);
            own.template level_as<INSIDE>(unit).template store<true>(codes);
            codes += blockDim.x * (UNIT * BITS / 8);
        }
    }
};

// The same with a thread block for each block of `run` elements, all of them whole: shared memory holds it, and is read
// once for its range and once for its codes.
//
// Arguments as quantize_dynamic_affine.
template <typename T, int BITS, bool FLOATING = false, bool STORED = false>
__global__ void __launch_bounds__(
    ROW_THREADS, sizeof(T) == 2   ? 3
                 : sizeof(T) == 4 ? 2
                                  : 1)
    quantize_rows_affine(
        const T* x, unsigned char* codes, typename Compute<T>::Type* scale, int* zero_point,
        const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    extern __shared__ __align__(128) uint4 dynamic[];
    using Found = typename OnChip<T, FLOATING>::Type;
    __shared__ Found of_warps[ROW_THREADS / WARP];
    __shared__ QParams<C> found;
    __shared__ bool nan;
    const bool both = FLOATING || !g.symmetric;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const long long first = blockIdx.x * g.run;
    const Row<T> row(dynamic, static_cast<int>(g.run / UNIT));
    row.copy(x + first);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    // The first warp makes scale and zero point of the ranges of all warps.
    auto reduce = [&](Found range) {
        if (lane == 0) of_warps[warp] = range;
        __syncthreads();
        if (warp == 0) {
            range = of_warps[min(lane, warps - 1)];
            join_lanes(range, WARP, both);
            if (lane == 0) found = range.template choose_qparams<STORED, BITS>(g), nan = range.has_nan();
        }
        __syncthreads();
    };
    reduce(row.template range<true, FLOATING>(both));
    const bool careful = nan;
    if (careful) reduce(row.template range<false, FLOATING>(both));
    const BlockQuantizer<T, BITS, FLOATING> own(x, codes, g, found);
    if (threadIdx.x == 0) own.template store_params<STORED>(blockIdx.x, scale, zero_point);
    unsigned char* mine = codes + (first + threadIdx.x * UNIT) * BITS / 8;
    if (careful || !own.quick) {
#pragma unroll 1
        for (int e = threadIdx.x * UNIT; e < g.run; e += blockDim.x * UNIT) own.careful(first + e, UNIT);
    } else if (own.inside) {
        row.template quantize<true>(own, mine);
    } else {
        row.template quantize<false>(own, mine);
    }
}

// Blocks of 32 * 2^j elements, up to 1024: a lane owns 32 elements, so 2^j lanes own a block. What they read passes
// through shared memory, one tile of the warp ahead.
//
// lanes  2^j; the rest as quantize_dynamic_affine
template <typename T, int BITS, bool FLOATING = false, bool STORED = false>
__global__ void __launch_bounds__(
    AFFINE_THREADS, sizeof(T) == 2 ? 4
                    : FLOATING     ? OFFSET_LANE_BLOCKS
                                   : 3)
    quantize_lanes_affine(
        const T* x, unsigned char* codes, float* scale, int* zero_point, int lanes,
        const __grid_constant__ Geometry g) {
    constexpr int WARPS = AFFINE_THREADS / WARP, TILE_CHUNKS = WARP * Tile<T>::CHUNKS;
    extern __shared__ __align__(128) uint4 dynamic[];  // two tiles for each warp
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const bool both = FLOATING || !g.symmetric;
    const long long rows = g.n / ROW, all = (rows + WARP - 1) / WARP, run = (all + gridDim.x - 1) / gridDim.x;
    const long long end = min(all, (blockIdx.x + 1) * run);
    const int shift = __ffs(lanes) - 1;
    long long t = blockIdx.x * run + warp;
    Tile<T> tile{dynamic + warp * 2 * TILE_CHUNKS}, next{tile.chunks + TILE_CHUNKS};
    if (t < end) tile.load(x, t * TILE, g.n, true, lane);
    commit_copies();
    for (; t < end; t += WARPS) {
        if (t + WARPS < end) next.load(x, (t + WARPS) * TILE, g.n, true, lane);
        commit_copies();
        wait_copies<1>();
        __syncwarp();
        Unit<T, ROW> unit;
        tile.read_row(lane, unit.word);
        RangeOf<T, true, FLOATING> gather;
        gather.add(unit, both);
        auto range = range_of_lanes(gather, lanes, both);
        const bool nan = __any_sync(FULL_WARP, range.has_nan());
        if (nan) {
            RangeOf<T, false, FLOATING> numbers;
            numbers.add(unit, both);
            range = range_of_lanes(numbers, lanes, both);
        }
        const BlockQuantizer<T, BITS, FLOATING> own(x, codes, g, range.template choose_qparams<STORED, BITS>(g));
        const long long row = t * WARP + lane;
        if (row < rows && lane % lanes == 0) own.template store_params<STORED>(row >> shift, scale, zero_point);
        if (__all_sync(FULL_WARP, own.quick && !nan)) {
            const Codes<BITS, ROW> packed = own.level(unit);
            __syncwarp();  // every row has been read: the tile's memory now stages the codes
            WordTile<BITS>::store(reinterpret_cast<unsigned*>(codes), t * WARP, rows, tile.chunks, lane, packed.word);
        } else if (row < rows) {
            own.careful(row * ROW, ROW);
        }
        __syncwarp();
        uint4* freed = tile.chunks;
        tile.chunks = next.chunks, next.chunks = freed;
    }
}

// ---- percentiles -----------------------------------------------------------------------------------------------

__device__ __forceinline__ bool has_sign(float x) { return __float_as_uint(x) >> 31; }
__device__ __forceinline__ bool has_sign(double x) { return __double_as_longlong(x) < 0; }

// A key has the order of the numbers, or of their magnitudes; NaN counts as 0.
template <typename C>
__device__ __forceinline__ typename Compute<C>::Bits key_of(C x, bool magnitude, bool negate) {
    using Bits = typename Compute<C>::Bits;
    constexpr Bits SIGN = Bits(1) << (sizeof(C) * 8 - 1);
    const Bits bits = x != x ? 0 : magnitude_bits(x);
    if (magnitude) return bits;
    return has_sign(x) != negate ? ~(bits | SIGN) : bits | SIGN;
}

// The number of rank `rank` (from 0) of a block, by its key, eight bits at a time. The whole thread block takes part.
template <typename T, typename Address>
__device__ typename Compute<T>::Bits select_rank(
    const T* x, Address address, long long size, unsigned long long rank, bool magnitude, bool negate,
    unsigned long long* counts) {
    using Bits = typename Compute<T>::Bits;
    Bits prefix = 0;
    for (int shift = sizeof(Bits) * 8 - 8; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        for (long long e = threadIdx.x; e < size; e += blockDim.x) {
            const Bits key = key_of<typename Compute<T>::Type>(to_float(x[address(e)]), magnitude, negate);
            if ((shift == sizeof(Bits) * 8 - 8 ? Bits(0) : key >> (shift + 8) % (sizeof(Bits) * 8)) == prefix)
                atomicAdd(counts + (key >> shift & 255), 1ull);
        }
        __syncthreads();
        int digit = 0;
        while (rank >= counts[digit]) rank -= counts[digit++];
        prefix = prefix << 8 | digit;
        __syncthreads();
    }
    return prefix;
}

// x           T[n]
// scale       C[count]
// zero_point  int32[count], or null
// fraction    percentile / 100
// period      distance of two runs of a block; 0 where a block is one run
// STORED      as finish_range_affine
template <typename T, bool FLOATING = false, bool STORED = false>
__global__ void percentile_affine(
    const T* x, typename Compute<T>::Type* scale, int* zero_point, double fraction, long long period,
    const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    using Bits = typename Compute<T>::Bits;
    constexpr Bits SIGN = Bits(1) << (sizeof(C) * 8 - 1);
    __shared__ unsigned long long counts[256];
    for (long long block = blockIdx.x; block < g.count; block += gridDim.x) {
        const long long r = period ? 0 : block / g.per_row, column = (block - r * g.per_row) * g.run;
        const long long begin = r * g.row + column, run = min(g.run, g.row - column);
        const long long size = period ? g.n / g.count : run;
        auto address = [&](long long e) { return period ? begin + e / run * period + e % run : begin + e; };
        const unsigned long long rank = max(static_cast<long long>(ceil(fraction * double(size))) - 1, 0ll);
        Range<C, FLOATING> range{};
        if (!FLOATING && g.symmetric) {
            range.high = select_rank(x, address, size, rank, true, false, counts);
        } else {
            // The keys of positive numbers have the upper bit set.
            const Bits high = select_rank(x, address, size, rank, false, false, counts);
            const Bits low = select_rank(x, address, size, rank, false, true, counts);
            if constexpr (FLOATING) range.high = high, range.low = low;
            else range.high = high & SIGN ? high ^ SIGN : 0, range.low = low & SIGN ? low ^ SIGN : 0;
        }
        if (threadIdx.x == 0) {
            const QParams<C> found = range.template choose_qparams<STORED>(g);
            scale[block] = found.scale;
            if (zero_point) zero_point[block] = found.zero;
        }
    }
}
