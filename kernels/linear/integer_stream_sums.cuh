// Sums of integer_stream.cu: of units, scaled; of tiles, which one warp adds up for all that share K; and results.
#pragma once
#include "linear/integer_stream_tokens.cuh"

// Sums of 16 rows and 8 EIGHTS tokens of a warp, as mma lays them out.
//
//     ALONE  of one token: its columns are units, of which eight are scaled at once (spread_units), and their sum
//     counts
template <typename Of, int UNIT, int ADDED_, bool Q8, bool SIGNED, int EIGHTS, bool ALONE>
struct Sums {
    static constexpr int WORDS = ADDED_ == NOTHING ? 1 : 2, TOKENS = 8 * EIGHTS;
    // Units of more than 128 elements may leave what stands beside that float: integers are rounded to floats there.
    static constexpr bool LONG = UNIT > 128;
    static constexpr int FIRST_BITS = LONG ? 0 : Of::FIRST_BITS;
    // Whether FIRST times a scale is exact, so that one fma takes FIRST off and multiplies, rounded once.
    static constexpr bool EXACT = Q8 && (Of::HALF_SCALES || Of::POWERS);
    int part[EIGHTS][4];     // of the unit
    int spread[2][4];        // of one token: of even units, and of odd ones, so that neither waits for the other
    float whole[EIGHTS][4];  // of units that are over

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * EIGHTS; ++i) part[i / 4][i % 4] = 0, whole[i / 4][i % 4] = 0.0f;
    }

    // For the warp that adds them up.
    __device__ __forceinline__ void store(float4* to, int lane) const {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            if constexpr (UNIT == 0)
                to[e * WARP + lane] = make_float4(
                    __int_as_float(part[e][0] / Of::TIMES), __int_as_float(part[e][1] / Of::TIMES),
                    __int_as_float(part[e][2] / Of::TIMES), __int_as_float(part[e][3] / Of::TIMES));
            else to[e * WARP + lane] = make_float4(whole[e][0], whole[e][1], whole[e][2], whole[e][3]);
        }
    }

    // Of 256 k: minima times sums of tokens.
    //
    //     minima   those of this lane's rows and unit t, see Scales
    //     factors  of this lane's rows, of q4_k
    //     pieces   of this lane, see place_of_sum
    __device__ __forceinline__ void add_minima(const float* minima, const float* factors, const unsigned* pieces) {
        const float2 low = *reinterpret_cast<const float2*>(minima);
        const float2 high = *reinterpret_cast<const float2*>(minima + 4 * MINIMA_STEP);
        float2 factor{};
        if constexpr (Of::INNER) factor = *reinterpret_cast<const float2*>(factors);
        const unsigned a[4] = {
            __float_as_uint(low.x), __float_as_uint(low.y), __float_as_uint(high.x), __float_as_uint(high.y)};
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const uint4 piece = *reinterpret_cast<const uint4*>(pieces + e * (WARP * 4));
            float c[4] = {};
            mma_short(c, a, piece.x, piece.z);
            mma_short(c, a, piece.y, piece.w);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float sum;
                if constexpr (Of::INNER) sum = fma_ieee(q < 2 ? factor.x : factor.y, c[q], whole[e][q]);
                else sum = ieee::add(whole[e][q], c[q]);
                if (!ALONE || (threadIdx.x % 4 == 0 && q % 2 == 0)) whole[e][q] = sum;  // the others are of no token
            }
        }
    }

    // One mma, number i of the share, of one token: a unit of its own, number i % 8 of those that share a sum.
    //     x        b of the share, this lane's, where it has that unit; else 0
    //     records  of the share, from those of unit 2t on
    //     scales   of the share, those of this lane's rows, from unit 2t on
    __device__ __forceinline__ void add_unit(
        int i, const unsigned (&parts)[Of::PARTS][4], const unsigned (&x)[Of::SHARE / FRAGMENT_K][4],
        const unsigned* records, const float* scales) {
        static_assert(EIGHTS == 1 && UNIT == MMA_K && WORDS == 1 && Q8, "a sum has one scale of each side");
        const unsigned b0 = x[i / 2][i % 2 * 2], b1 = x[i / 2][i % 2 * 2 + 1];
        int (&c)[4] = spread[i % 2];
        if (i % 8 < 2) mma_from<SIGNED>(c, parts[0], b0, b1, FIRST_BITS, FIRST_BITS, FIRST_BITS, FIRST_BITS);
        else mma_from<SIGNED>(c, parts[0], b0, b1, c[0], c[1], c[2], c[3]);
        if constexpr (Of::TABLE) mma_from<SIGNED>(c, parts[1], b0, b1, c[0], c[1], c[2], c[3]);
        if (i % 8 != 7) return;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int unit = i / 8 * 8 + u;
            const float2 scale = *reinterpret_cast<const float2*>(scales + unit * ROWS_OF_TILE);
            const float of_token = __uint_as_float(records[unit * TOKENS]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float of_row = h ? scale.y : scale.x, number = __int_as_float(spread[u][2 * h + u]);
                float& sum = whole[0][2 * h + u];
                if constexpr (EXACT)
                    sum = fma_ieee(fma_ieee(number, of_row, __fmul_rn(of_row, -Of::FIRST)), of_token, sum);
                else sum = fma_ieee(ieee::multiply(__fsub_rn(number, Of::FIRST), of_token), of_row, sum);
            }
        }
    }

    // One mma, number i of the share, which may begin a unit and may end it.
    //     x        b of the share, this lane's
    //     records  of the share, those of tokens 2t and 2t + 1
    //     scales   of the share, those of this lane's rows
    //     large    whether FIRST times a power may not be finite: then it is taken off ahead of scales
    __device__ __forceinline__ void add(
        int i, const unsigned (&parts)[Of::PARTS][4], const unsigned (&x)[EIGHTS][Of::SHARE / FRAGMENT_K][4],
        const unsigned* records, const float* scales, bool large = false) {
        const unsigned (&a)[4] = parts[0];
        constexpr int EACH = UNIT ? UNIT : MMA_K;
        const bool begins = UNIT && i * MMA_K % EACH == 0, ends = UNIT && (i + 1) * MMA_K % EACH == 0;
        const int unit = i * MMA_K / EACH;
        float scale[2], other[2], less[2];
        if (ends || (begins && ADDED_ == ZERO_POINTS)) {
            const float* at = scales + unit * (ROWS_OF_TILE * (Of::PAIRED ? 2 : WORDS));
            if constexpr (Of::PAIRED) {
                const float4 both = *reinterpret_cast<const float4*>(at);
                scale[0] = both.x, less[0] = both.y, scale[1] = both.z, less[1] = both.w;
            } else if constexpr (WORDS == 2) {
                const float4 both = *reinterpret_cast<const float4*>(at);
                scale[0] = both.x, other[0] = both.y, scale[1] = both.z, other[1] = both.w;
            } else {
                const float2 both = *reinterpret_cast<const float2*>(at);
                scale[0] = both.x, scale[1] = both.y;
            }
            if constexpr (EXACT && !Of::PAIRED)
#pragma unroll
                for (int h = 0; h < 2; ++h) less[h] = taken_off<Of>(scale[h]);
        }
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const unsigned b0 = x[e][i / 2][i % 2 * 2], b1 = x[e][i / 2][i % 2 * 2 + 1];
            int (&c)[4] = part[e];
            using Entry = Record<ADDED_, Q8>;
            const Entry record(records + (unit * TOKENS + e * 8) * Entry::WORDS);  // read where it is used
            if (!begins) {
                mma_from<SIGNED>(c, a, b0, b1, c[0], c[1], c[2], c[3]);
            } else if constexpr (ADDED_ == ZERO_POINTS) {
                const int z0 = __float_as_int(other[0]), z1 = __float_as_int(other[1]);
                const int s0 = record.other[0], s1 = record.other[1];
                mma_from<SIGNED>(
                    c, a, b0, b1, FIRST_BITS - z0 * s0, FIRST_BITS - z0 * s1, FIRST_BITS - z1 * s0,
                    FIRST_BITS - z1 * s1);
            } else {
                mma_from<SIGNED>(c, a, b0, b1, FIRST_BITS, FIRST_BITS, FIRST_BITS, FIRST_BITS);
            }
            if constexpr (Of::TABLE) mma_from<SIGNED>(c, parts[1], b0, b1, c[0], c[1], c[2], c[3]);
            if (!ends) continue;
            if (EXACT && !large) {
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const float term = fma_ieee(__int_as_float(c[q]), scale[q / 2], less[q / 2]);
                    whole[e][q] = fma_ieee(term, record.scale[q % 2], whole[e][q]);
                }
                continue;
            }
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float sum = LONG ? __fmul_rn(__int2float_rn(c[q]), 1.0f / Of::TIMES)
                                 : __fsub_rn(__int_as_float(c[q]), Of::FIRST);
                if constexpr (Q8) sum = ieee::multiply(sum, record.scale[q % 2]);
                whole[e][q] = fma_ieee(sum, scale[q / 2], whole[e][q]);
                if constexpr (ADDED_ == OFFSETS)
                    whole[e][q] = fma_ieee(other[q / 2], __uint_as_float(record.other[q % 2]), whole[e][q]);
            }
        }
    }
};

// Of the sums of 16 rows, as mma lays them out, those of all columns.
__device__ __forceinline__ float4 sum_of_columns(const float4& v) {
    float row[2] = {ieee::add(v.x, v.y), ieee::add(v.z, v.w)};
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int h = 0; h < 2; ++h) row[h] = ieee::add(row[h], __shfl_xor_sync(FULL_WARP, row[h], step));
    return make_float4(row[0], row[0], row[1], row[1]);
}

__device__ __forceinline__ void store_as(void* y, int dtype, long long at, float v) {
    if (dtype == FLOAT32_BIAS) static_cast<float*>(y)[at] = v;
    else if (dtype == FLOAT16_BIAS) static_cast<__half*>(y)[at] = __float2half_rn(v);
    else static_cast<__nv_bfloat16*>(y)[at] = __float2bfloat16_rn(v);
}

// What a lane needs to finish the sums of a row.
struct Finish {
    float scale = 0, offset = 0, bias = 0;
    int zero = 0;

    // y but for the bias, where all of the row is one unit.
    __device__ __forceinline__ float of_row(int sum, float of_token, int of_codes, bool adds) const {
        float total = ieee::multiply(ieee::multiply(__int2float_rn(sum - zero * of_codes), of_token), scale);
        if (adds) total = ieee::add(total, ieee::multiply(ieee::multiply(__int2float_rn(of_codes), of_token), offset));
        return total;
    }

    __device__ __forceinline__ void load_bias(const void* biases, int kind, int row) {
        bias = -0.0f;  // changes no number
        if (kind != 0)
            bias = float_of(
                load_entry(reinterpret_cast<unsigned long long>(biases), kind == FLOAT32_BIAS ? 4 : 2, row), kind);
    }

    // Of row `row` of all members and a group of it; `less` is what codes were lowered by.
    __device__ __forceinline__ void load(const IntegerWeight& w, const Cut& cut, long long row, int group, int less) {
        zero = w.zero - less;
        const int bytes = w.scale_dtype == FLOAT32_BIAS ? 4 : 2;
        scale = float_of(load_entry(w.scales + row * cut.row_bytes, bytes, group), w.scale_dtype);
        if (w.added == OFFSETS) {
            scale = ieee::finite(scale);
            offset = float_of(load_entry(w.beside + row * cut.row_bytes, bytes, group), w.scale_dtype);
            return;
        }
        if (w.positive) scale = usable(scale);
        if (w.added == ZERO_POINTS) {
            const int lowest = -(w.is_signed << (w.bits - 1));
            const int point = integer_of(
                load_entry(w.beside + row * cut.beside_bytes, w.beside_dtype == INT32_ENTRIES ? 4 : 1, group),
                w.beside_dtype);
            zero = min(max(point, lowest), lowest + (1 << w.bits) - 1) - less;
        }
    }
};

// Two sums of a row: integers in the bits of floats where UNIT is 0.
template <int UNIT>
__device__ __forceinline__ void join(float& a, float b) {
    if constexpr (UNIT == 0) a = __int_as_float(__float_as_int(a) + __float_as_int(b));
    else a = ieee::add(a, b);
}
template <int UNIT>
__device__ __forceinline__ void join(float4& a, const float4& b) {
    join<UNIT>(a.x, b.x), join<UNIT>(a.y, b.y), join<UNIT>(a.z, b.z), join<UNIT>(a.w, b.w);
}

// Where the sums of a product go.
struct Output {
    const void* bias;
    int bias_kind, y_kind, channels, tokens, less, depth;
    int above;  // rows before the first
    void* y;    // of this product

    // The sums of rows r and r + 8 of a tile, of tokens m and m + 1.
    template <int UNIT, bool Q8>
    __device__ __forceinline__ void store(
        const IntegerWeight& w, const Cut& cut, const float4& sums, const float2& scale, const int2& of_codes, int r,
        int m) const {
        const float sum[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = r + 8 * h;
            if (row >= channels) continue;
            Finish finish;
            finish.load_bias(bias, bias_kind, row);
            if constexpr (UNIT == 0) finish.load(w, cut, above + row, 0, less);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (m + j >= tokens) continue;
                float total = sum[2 * h + j];
                const float of_token = j ? scale.y : scale.x;
                if constexpr (UNIT == 0)
                    total =
                        finish.of_row(__float_as_int(total), of_token, j ? of_codes.y : of_codes.x, w.added == OFFSETS);
                else if constexpr (!Q8 && UNIT != SHARES) total = ieee::multiply(total, of_token);
                store_as(y, y_kind, static_cast<long long>(m + j) * channels + row, ieee::add(total, finish.bias));
            }
        }
    }

    // The same sums of groups of whole shares, float32, from those of the warps, integers; `first` is the first share.
    __device__ __forceinline__ float4 of_groups(
        const IntegerWeight& w, const Cut& cut, const Tokens& of, const float4* from, int step, int share, int first,
        const float2& scale, int r, int m) const {
        float total[4] = {};
        float4 sum = *from;
        for (int i = 0; i < cut.warps; ++i) {
            if (i % cut.shares == 0) sum = from[i * step];
            else join<0>(sum, from[i * step]);
            const int group = (first + i) / cut.shares, k = group * cut.shares * share;
            if ((i + 1) % cut.shares != 0 || k >= depth) continue;
            const float part[4] = {sum.x, sum.y, sum.z, sum.w};
            for (int j = 0; j < 2; ++j) {
                if (m + j >= tokens) continue;
                int of_codes = 0;
                for (int at = k; at < min(k + cut.shares * share, depth); at += LONG_UNIT)
                    of_codes +=
                        load_anywhere(of.sums + static_cast<long long>(at / LONG_UNIT) * of.padded + of.first + m + j);
                for (int h = 0; h < 2; ++h) {
                    Finish finish;
                    finish.load(w, cut, above + min(r + 8 * h, channels - 1), group, less);
                    const float term = finish.of_row(
                        __float_as_int(part[2 * h + j]), j ? scale.y : scale.x, of_codes, w.added == OFFSETS);
                    total[2 * h + j] = ieee::add(total[2 * h + j], term);
                }
            }
        }
        return make_float4(total[0], total[1], total[2], total[3]);
    }
};
