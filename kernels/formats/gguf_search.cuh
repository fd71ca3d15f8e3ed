// The searches for the scales of GGUF's types, the twins of kbitcupy/formats/gguf/search.py, bit for bit.
//
// A search belongs to one lane: its numbers, and the codes that are tried, stay in registers as floats. Sums run over
// the elements in ascending order, and nothing is contracted. A weight is a function of the number of an element.
// Codes are not kept while better ones are looked for: what they come from is.
#pragma once
#include "formats/gguf_numbers.cuh"

// Numbers below this have no scale.
constexpr float NOTHING = 1e-15f;
// With steps beyond this a number of steps may be infinite.
constexpr float STEEP = 1e30f;

// ---- codes -------------------------------------------------------------------------------------------------------

// The nearest integer, half to even; never -0, NaN only for that. Beyond 2^22 in magnitude it is no integer, but it
// keeps the order.
__device__ __forceinline__ float nearest_integer(float y) { return __fsub_rn(__fadd_rn(y, ROUNDER), ROUNDER); }

// The nearest integer of 0 to LARGEST. Numbers that are not negative have the order of their bits as integers have it,
// and those of other numbers are negative: one instruction cuts at both ends.
template <int LARGEST>
__device__ __forceinline__ float positive_code(float y) {
    const int bits = __float_as_int(nearest_integer(y));
    return __int_as_float(max(min(bits, __float_as_int(static_cast<float>(LARGEST))), 0));
}

// The nearest integer of -LARGEST to LARGEST - 1; BELOW and ABOVE say at which ends it may have to be cut.
template <int LARGEST, bool BELOW = true, bool ABOVE = true>
__device__ __forceinline__ float signed_code(float y) {
    constexpr float LOWEST = -LARGEST, HIGHEST = LARGEST - 1;
    const float code = nearest_integer(y), cut = BELOW ? fmaxf(code, LOWEST) : code;
    return ABOVE ? fminf(cut, HIGHEST) : cut;
}

// a / divisor, where that is a half times an integer: neither 0 nor infinite nor NaN. Rounded as a division is, but for
// quotients below 2^-100, which may be anything as small. The reciprocal is correctly rounded, and so is the quotient
// once it is one of the two floats around the true one (Markstein), which the first correction sees to.
struct Divisor {
    float divisor, reciprocal;

    __device__ __forceinline__ explicit Divisor(float d) : divisor(d), reciprocal(ieee::divide(1.0f, d)) {}
    __device__ __forceinline__ float operator()(float a) const {
        const float q = __fmul_rn(a, reciprocal);
        const float better = __fmaf_rn(__fmaf_rn(-q, divisor, a), reciprocal, q);
        return __fmaf_rn(__fmaf_rn(-better, divisor, a), reciprocal, better);
    }
};

__device__ __forceinline__ bool is_usual(float a) { return fabsf(a) <= STEEP; }

// ---- the first number of largest magnitude -----------------------------------------------------------------------

template <int SIZE>
__device__ __forceinline__ float signed_max(const float (&x)[SIZE]) {
    float found = 0.0f;
#pragma unroll
    for (int i = 0; i < SIZE; ++i)
        if (ieee::magnitude_bits(x[i]) > ieee::magnitude_bits(found)) found = x[i];
    return found;
}

// ---- a scale and a minimum ---------------------------------------------------------------------------------------

// code * scale + low comes near a sub-block; the codes are the nearest of 0 to LARGEST to step * (x - from).
struct Range {
    float scale, low, step, from;

    // The codes, where a step that is not finite counts as 0, and so does a number of steps that is not.
    template <int LARGEST, int SIZE>
    __device__ __forceinline__ static void codes_of(
        const float (&x)[SIZE], float step, float from, float (&code)[SIZE]) {
        if (is_usual(step)) {
#pragma unroll
            for (int i = 0; i < SIZE; ++i)
                code[i] = positive_code<LARGEST>(ieee::multiply(step, ieee::subtract(x[i], from)));
        } else {
#pragma unroll
            for (int i = 0; i < SIZE; ++i)
                code[i] = positive_code<LARGEST>(
                    ieee::finite(ieee::multiply(ieee::finite(step), ieee::subtract(x[i], from))));
        }
    }
};

// The sum of w * e * e, or of w * |e|, with e = code * scale + low - x.
template <bool SQUARES, int SIZE, typename Weight>
__device__ __forceinline__ float error_of(
    const float (&x)[SIZE], const Weight& weight, const float (&code)[SIZE], float scale, float low) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
        const float e = ieee::subtract(ieee::add(ieee::multiply(scale, code[i]), low), x[i]);
        const float counted = SQUARES ? ieee::multiply(e, e) : ieee::magnitude(e);
        sum = ieee::add(sum, ieee::multiply(weight(i), counted));
    }
    return sum;
}

// Tries a range of LARGEST steps, then of LARGEST + first + each * t steps, t = 0 to LAST, with the scale and the
// minimum that are best for the codes so found; of all that of least error stays, and the next attempts start from its
// minimum.
template <int LARGEST, int LAST, bool SQUARES, int SIZE, typename Weight>
__device__ __forceinline__ Range
find_range(const float (&x)[SIZE], const Weight& weight, const float first, const float each) {
    float low = x[0], high = x[0], sum_w = 0.0f, sum_x = 0.0f;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
        if (ieee::less(x[i], low)) low = x[i];
        if (ieee::less(high, x[i])) high = x[i];
        const float w = weight(i);
        sum_w = ieee::add(sum_w, w), sum_x = ieee::add(sum_x, ieee::multiply(w, x[i]));
    }
    if (ieee::less(0.0f, low)) low = 0.0f;
    Range found = {0.0f, low, 0.0f, low};
    if (!ieee::less(low, high)) return found;  // all the same, and not positive
    float code[SIZE];
    found.step = ieee::divide(static_cast<float>(LARGEST), ieee::subtract(high, low));
    Range::codes_of<LARGEST>(x, found.step, low, code);
    found.scale = ieee::divide(1.0f, found.step);
    float error = error_of<SQUARES>(x, weight, code, found.scale, low);
#pragma unroll 1
    for (float t = 0.0f; t <= static_cast<float>(LAST); t += 1.0f) {
        const float range = __fadd_rn(__fadd_rn(first, __fmul_rn(each, t)), static_cast<float>(LARGEST));
        const float step = ieee::divide(range, ieee::subtract(high, found.low));
        Range::codes_of<LARGEST>(x, step, found.low, code);
        float sum_l = 0.0f, sum_ll = 0.0f, sum_xl = 0.0f;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const float weighted = ieee::multiply(weight(i), code[i]);
            sum_l = ieee::add(sum_l, weighted);
            sum_ll = ieee::add(sum_ll, ieee::multiply(weighted, code[i]));
            sum_xl = ieee::add(sum_xl, ieee::multiply(weighted, x[i]));
        }
        const float determinant = ieee::subtract(ieee::multiply(sum_w, sum_ll), ieee::multiply(sum_l, sum_l));
        if (!ieee::less(0.0f, determinant)) continue;
        float scale = ieee::subtract(ieee::multiply(sum_w, sum_xl), ieee::multiply(sum_x, sum_l));
        float below = ieee::subtract(ieee::multiply(sum_ll, sum_x), ieee::multiply(sum_l, sum_xl));
        below = ieee::divide(below, determinant);
        const bool above = ieee::less(0.0f, below);
        if (above) below = 0.0f;
        scale = ieee::divide(above ? sum_xl : scale, above ? sum_ll : determinant);
        const float new_error = error_of<SQUARES>(x, weight, code, scale, below);
        if (ieee::less(new_error, error)) error = new_error, found = {scale, below, step, found.low};
    }
    return found;
}

// ---- a scale of either sign --------------------------------------------------------------------------------------

// code * scale comes near a sub-block; the codes are those of step * x, and the lowest where there is nothing.
struct Scale {
    float scale, step;
    bool nothing;

    template <int LARGEST>
    __device__ __forceinline__ float code(float x) const {
        return nothing ? -static_cast<float>(LARGEST) : signed_code<LARGEST>(ieee::multiply(step, x));
    }
};

// The sums that a scale is made of.
struct Sums {
    float xl, ll;  // of (w * x) * code, of (w * code) * code

    __device__ __forceinline__ float scale() const { return ieee::divide(xl, ll); }
    // Whether they are better than those that gave `best`.
    __device__ __forceinline__ bool beat(float best) const {
        return ieee::less(0.0f, ll) && ieee::less(ieee::multiply(best, ll), ieee::multiply(xl, xl));
    }
};

// The sums of a step's codes; `weighted` is w * x.
template <int LARGEST, bool BELOW, bool ABOVE, int SIZE, typename Weight>
__device__ __forceinline__ Sums
sums_of(const float (&x)[SIZE], const Weight& weight, const float (&weighted)[SIZE], float step) {
    Sums sums = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
        const float code = signed_code<LARGEST, BELOW, ABOVE>(ieee::multiply(step, x[i]));
        sums.xl = ieee::add(sums.xl, ieee::multiply(weighted[i], code));
        sums.ll = ieee::add(sums.ll, ieee::multiply(ieee::multiply(weight(i), code), code));
    }
    return sums;
}

// Tries the steps -(LARGEST + t / 10) / m, t = -9 to -1 and 1 to 9, after that of t = 0, where m is the number of
// largest magnitude. No number is further than LARGEST + t / 10 from 0: up to t = -6 no code is beyond LARGEST - 1, and
// up to t = 4 none is below -LARGEST.
template <int LARGEST, int SIZE, typename Weight>
__device__ __forceinline__ Scale find_scale(const float (&x)[SIZE], const Weight& weight) {
    const float longest = signed_max(x);
    if (ieee::less(ieee::magnitude(longest), NOTHING)) return {0.0f, 0.0f, true};
    float weighted[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; ++i) weighted[i] = ieee::multiply(weight(i), x[i]);
    Scale found = {0.0f, ieee::divide(-static_cast<float>(LARGEST), longest), false};
    const Sums first = sums_of<LARGEST, false, true>(x, weight, weighted, found.step);
    if (!ieee::is_zero(first.ll)) found.scale = first.scale();
    float best = ieee::multiply(found.scale, first.xl);
    const auto step_of = [&](float t) {
        return ieee::divide(-__fadd_rn(static_cast<float>(LARGEST), __fmul_rn(0.1f, t)), longest);
    };
    const auto compare = [&](float step, const Sums& sums) {
        if (!sums.beat(best)) return;
        found.step = step, found.scale = sums.scale();
        best = ieee::multiply(found.scale, sums.xl);
    };
#pragma unroll 1
    for (float t = -9.0f; t <= -6.0f; t += 1.0f) {
        const float step = step_of(t);
        compare(step, sums_of<LARGEST, false, false>(x, weight, weighted, step));
    }
#pragma unroll 1
    for (float t = -5.0f; t <= 4.0f; t += t == -1.0f ? 2.0f : 1.0f) {
        const float step = step_of(t);
        compare(step, sums_of<LARGEST, false, true>(x, weight, weighted, step));
    }
#pragma unroll 1
    for (float t = 5.0f; t <= 9.0f; t += 1.0f) {
        const float step = step_of(t);
        compare(step, sums_of<LARGEST, true, true>(x, weight, weighted, step));
    }
    return found;
}

// ---- codes made better one by one --------------------------------------------------------------------------------

// Beyond this ggml's rounding wraps.
constexpr float FURTHEST = 4194303.0f;

// A code as a byte has it: where a number is negative after all, ggml's is.
__device__ __forceinline__ float as_byte(float code) { return static_cast<float>(static_cast<int>(code) & 255); }

// Up to 5 sweeps over the elements: each takes the nearest of LOWEST to LARGEST to what is best for it while the others
// stay. Gives the scale. With LOWEST = 0 the others must have a code that is not 0; codes become bytes, which are what
// sums are made less by, while it is codes before that are added.
template <int LOWEST, int LARGEST, int SIZE, typename Weight>
__device__ __forceinline__ float sweep(const float (&x)[SIZE], const Weight& weight, float (&code)[SIZE]) {
    Sums sums = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
        sums.xl = ieee::add(sums.xl, ieee::multiply(ieee::multiply(weight(i), x[i]), code[i]));
        sums.ll = ieee::add(sums.ll, ieee::multiply(ieee::multiply(weight(i), code[i]), code[i]));
        if (LOWEST == 0) code[i] = as_byte(code[i]);
    }
    constexpr float LEAST = LOWEST == 0 ? -FURTHEST : LOWEST;
    bool changed = true;
#pragma unroll 1
    for (int round = 0; round < 5 && changed; ++round) {
        changed = false;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const float w = weight(i), wx = ieee::multiply(w, x[i]);
            Sums rest;
            rest.xl = ieee::subtract(sums.xl, ieee::multiply(wx, code[i]));
            rest.ll = ieee::subtract(sums.ll, ieee::multiply(ieee::multiply(w, code[i]), code[i]));
            if (!ieee::less(0.0f, rest.xl) || (LOWEST == 0 && !ieee::less(0.0f, rest.ll))) continue;
            const float y = nearest_integer(ieee::finite(ieee::divide(ieee::multiply(x[i], rest.ll), rest.xl)));
            const float found = fminf(fmaxf(y, LEAST), static_cast<float>(LARGEST));
            if (found == code[i]) continue;
            rest.xl = ieee::add(rest.xl, ieee::multiply(wx, found));
            rest.ll = ieee::add(rest.ll, ieee::multiply(ieee::multiply(w, found), found));
            const float before = ieee::multiply(ieee::multiply(sums.xl, sums.xl), rest.ll);
            const float now = ieee::multiply(ieee::multiply(rest.xl, rest.xl), sums.ll);
            if (ieee::less(0.0f, rest.ll) && ieee::less(before, now))
                sums = rest, code[i] = LOWEST == 0 ? as_byte(found) : found, changed = true;
        }
    }
    return ieee::less(0.0f, sums.ll) ? sums.scale() : 0.0f;
}

// A scale and codes of -LARGEST to LARGEST - 1, the lowest where there is nothing; weights x * x.
template <int LARGEST, int SIZE>
__device__ __forceinline__ float refine_scale(const float (&x)[SIZE], float (&code)[SIZE]) {
    const float longest = signed_max(x);
    const bool nothing = ieee::less(ieee::magnitude(longest), NOTHING);
    const float step = ieee::divide(-static_cast<float>(LARGEST), longest);
#pragma unroll
    for (int i = 0; i < SIZE; ++i)
        code[i] = nothing ? -static_cast<float>(LARGEST) : signed_code<LARGEST>(ieee::multiply(step, x[i]));
    if (nothing) return 0.0f;
    return sweep<-LARGEST, LARGEST - 1>(x, [&](int i) { return ieee::multiply(x[i], x[i]); }, code);
}

// A scale and codes of 0 to LARGEST of numbers that are not negative: the best of 9 steps, the first of which has codes
// as bytes, then sweeps.
template <int LARGEST, int SIZE, typename Weight>
__device__ __forceinline__ float find_positive_scale(
    const float (&x)[SIZE], const Weight& weight, float (&code)[SIZE]) {
    float high = 0.0f;
#pragma unroll
    for (int i = 0; i < SIZE; ++i)
        if (ieee::less(high, x[i])) high = x[i];
    const auto code_of = [&](float step, int i) {
        return fminf(fmaxf(nearest_integer(ieee::multiply(step, x[i])), -FURTHEST), static_cast<float>(LARGEST));
    };
    const bool nothing = ieee::less(high, NOTHING);
    float best = ieee::divide(static_cast<float>(LARGEST), high), error = 0.0f;
#pragma unroll 1
    for (int number = 0; number <= 8 && !nothing; ++number) {  // t = 0, -4 to -1 and 1 to 4
        const float t = static_cast<float>(number == 0 ? 0 : number <= 4 ? number - 5 : number - 4);
        const float step = ieee::divide(__fadd_rn(__fmul_rn(0.1f, t), static_cast<float>(LARGEST)), high);
        const float scale = ieee::divide(1.0f, step);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const float tried = code_of(step, i);
            const float e = ieee::subtract(x[i], ieee::multiply(scale, number == 0 ? as_byte(tried) : tried));
            sum = ieee::add(sum, ieee::multiply(ieee::multiply(weight(i), e), e));
        }
        if (number == 0 || ieee::less(sum, error)) error = sum, best = step;
    }
#pragma unroll
    for (int i = 0; i < SIZE; ++i) code[i] = nothing ? 0.0f : code_of(best, i);
    return nothing ? 0.0f : sweep<0, LARGEST>(x, weight, code);
}

// ---- the table of iq4 --------------------------------------------------------------------------------------------

// The nearest of the 16 numbers that codes stand for of every number of -128 to 128: halfway between two of them is a
// multiple of 1/2, so that a number needs only be rounded down to one. Halfway, the upper is the nearest.
struct Iq4Table {
    static constexpr int LOWEST = -272, COUNT = 544;  // halves: no attempt has a number beyond 135

    float value[COUNT];
    unsigned char code[COUNT];
};

__host__ __device__ constexpr Iq4Table iq4_table() {
    const int values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    Iq4Table table = {};
    for (int i = 0, code = 0; i < Iq4Table::COUNT; ++i) {
        while (code < 15 && i + Iq4Table::LOWEST >= values[code] + values[code + 1]) ++code;
        table.value[i] = static_cast<float>(values[code]), table.code[i] = static_cast<unsigned char>(code);
    }
    return table;
}
__device__ const Iq4Table IQ4_TABLE = iq4_table();

// The same in shared memory. Lanes look up different entries: with 8 copies of each number side by side no more than
// four of them, of which every eighth takes the same copy, may want the same bank.
struct SharedIq4Table {
    static constexpr int COPIES = 8;

    alignas(16) float value[Iq4Table::COUNT][COPIES];
    unsigned char code[Iq4Table::COUNT];

    // By all threads of a block; they have to meet before it is used.
    __device__ __forceinline__ void build(int thread, int threads) {
        for (int i = thread; i < Iq4Table::COUNT; i += threads) {
            const unsigned bits = __float_as_uint(IQ4_TABLE.value[i]);
#pragma unroll
            for (int copy = 0; copy < COPIES; copy += 4)
                *reinterpret_cast<uint4*>(&value[i][copy]) = make_uint4(bits, bits, bits, bits);
            code[i] = IQ4_TABLE.code[i];
        }
    }
};

// A lane's look at it.
struct Iq4Lookup {
    const SharedIq4Table& table;
    unsigned copy;  // bytes

    __device__ __forceinline__ Iq4Lookup(const SharedIq4Table& table, unsigned lane)
        : table(table), copy(lane % SharedIq4Table::COPIES * 4) {}

    // Bytes to the first copy of the entry of a number within -135 and 135: what is added makes each half of y + 136 as
    // much in the lowest bits of the sum as an entry has bytes. What is less than a half is cut off.
    __device__ __forceinline__ static unsigned offset(float y) {
        constexpr unsigned EACH = sizeof(table.value[0]);
        constexpr float BIAS = 1.5f * (1 << 22) / EACH - Iq4Table::LOWEST / 2;
        return __float_as_uint(ieee::add_down(y, BIAS)) & 1023 * EACH;
    }
    __device__ __forceinline__ float nearest(float y) const {
        return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table.value) + (offset(y) | copy));
    }
    // Of any number; of NaN the last one.
    __device__ __forceinline__ int code_of(float y) const {
        return table.code[offset(fmaxf(fminf(y, 130.0f), -130.0f)) / (4 * SharedIq4Table::COPIES)];
    }
};

// Tries m / 127, then m / (127 - t), t = -7 to 7, where m is the number of largest magnitude: the scale of which the
// table's nearest numbers come near.
template <int SIZE, typename Weight>
__device__ __forceinline__ float find_table_scale(
    const float (&x)[SIZE], const Weight& weight, const Iq4Lookup& table) {
    const float longest = signed_max(x);
    if (ieee::less(ieee::magnitude(longest), NOTHING)) return 0.0f;
    float scale = 0.0f, best = 0.0f;
#pragma unroll 1
    for (int t = -8; t <= 7; ++t) {
        const bool first = t == -8;
        const float step = first ? ieee::divide(1.0f, ieee::divide(longest, 127.0f))
                                 : ieee::divide(static_cast<float>(t - 127), longest);
        Sums sums = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const float near = table.nearest(ieee::multiply(step, x[i])), weighted = ieee::multiply(weight(i), near);
            sums.xl = ieee::add(sums.xl, ieee::multiply(weighted, x[i]));
            sums.ll = ieee::add(sums.ll, ieee::multiply(weighted, near));
        }
        if (sums.beat(best) || (first && ieee::less(0.0f, sums.ll)))
            scale = sums.scale(), best = ieee::multiply(scale, sums.xl);
    }
    return scale;
}
