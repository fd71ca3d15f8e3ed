// Scales of integer_stream.cu, and zero points or minima beside them: of a share of K and 16 rows, loaded a tile ahead.
#pragma once
#include "linear/integer_stream_weights.cuh"

// What FIRST, with which a sum begins, becomes by a scale that the sum is multiplied by, and has to be taken off. A
// power of two may be subnormal.
template <typename Of>
__device__ __forceinline__ float taken_off(float scale) {
    return Of::POWERS ? ieee::multiply(scale, -Of::FIRST) : __fmul_rn(scale, -Of::FIRST);
}

// The scales of a share, of 16 rows, and what stands beside them: a tile ahead in the registers of a warp, of which
// each lane has half a row, then in shared memory, [unit][row].
//     Of      how codes lie
//     UNIT    elements of a row that share all scales, or what divides them
//     INNER   whether they are those of q4_k's blocks: behind the scales of units stand there, for each 256 k, what
//             minima are multiplied by, [row], and minima, [unit][row], MINIMA_STEP apart
//     HALVES  whether they are halves, of which any counts
//     TIMES   what zero points are multiplied by
template <typename Of, int UNIT, int ADDED_, bool HALVES>
struct Scales {
    static constexpr bool INNER = Of::INNER;
    static constexpr int SHARE = Of::SHARE, TIMES = Of::TIMES;
    static constexpr int UNITS = UNIT ? SHARE / UNIT : 1, ENTRIES = UNITS / 2 > 0 ? UNITS / 2 : 1;
    static constexpr int WORDS = INNER || ADDED_ == NOTHING ? 1 : 2;  // of an entry in shared memory
    static constexpr int FACTORS = UNITS * ROWS_OF_TILE * WORDS, BLOCKS = INNER ? SHARE / 256 : 0;
    static constexpr int MINIMA = FACTORS + BLOCKS * ROWS_OF_TILE;
    static constexpr int BYTES = UNIT ? (MINIMA + BLOCKS * MINIMA_OF_BLOCK) * 4 : 0;
    static constexpr int OF_LANE = BLOCKS / 2;
    unsigned
        raw[INNER    ? 4 * OF_LANE
            : HALVES ? ENTRIES / 2
                     : ENTRIES],
        beside[INNER || ADDED_ == NOTHING ? 1 : ENTRIES];

    // Of row `row` and the share that begins at `k`; what is beyond the end of the row is 0.
    __device__ __forceinline__ void load(
        const IntegerWeight& w, const Cut& cut, long long row, int k, int depth, int half) {
        if constexpr (INNER) {
            static_assert(SHARE % 512 == 0, "a lane has whole blocks of 256");
#pragma unroll
            for (int b = 0; b < OF_LANE; ++b) {
                const int at = k + (half * OF_LANE + b) * 256;
#pragma unroll
                for (int i = 0; i < 4; ++i) raw[4 * b + i] = 0;
                if (at >= depth) continue;
                const long long block = row * (depth / 256) + at / 256;
                raw[4 * b] = load_word(w.scales + 4 * block);
#pragma unroll
                for (int i = 0; i < 3; ++i) raw[4 * b + 1 + i] = load_word(w.beside + 12 * block + 4 * i);
            }
        } else {
            constexpr int EACH = UNIT ? UNIT : 1;
            // Of a single unit one lane has all, the other has those of the next and drops them.
            const int unit = k / EACH + half * ENTRIES, there = (depth - k + EACH - 1) / EACH - half * ENTRIES;
            const unsigned long long scales = w.scales + row * cut.row_bytes;
            const unsigned long long others = w.beside + row * cut.beside_bytes;
            const bool wide = !HALVES && w.scale_dtype == FLOAT32_BIAS;
            if constexpr (HALVES) {
                if (cut.whole && there >= ENTRIES) {
                    load_words(raw, scales + 2 * unit);
                } else {
                    unsigned each[ENTRIES];
                    load_entries<2>(each, scales, unit, there, cut);
#pragma unroll
                    for (int i = 0; i < ENTRIES / 2; ++i) raw[i] = each[2 * i] | each[2 * i + 1] << 16;
                }
            } else {
                if (wide) load_entries<4>(raw, scales, unit, there, cut);
                else load_entries<2>(raw, scales, unit, there, cut);
            }
            if constexpr (ADDED_ == OFFSETS) {
                if (wide) load_entries<4>(beside, others, unit, there, cut);
                else load_entries<2>(beside, others, unit, there, cut);
            }
            if constexpr (ADDED_ == ZERO_POINTS) {
                if (w.beside_dtype == INT32_ENTRIES) load_entries<4>(beside, others, unit, there, cut);
                else load_entries<1>(beside, others, unit, there, cut);
            }
        }
    }

    __device__ __forceinline__ void store(const IntegerWeight& w, float* to, int row, int half, int less) const {
        if (UNITS == 1 && half == 1) return;
        if constexpr (INNER) {
            // Four inner scales in the bytes of a word, those of the lower sub-blocks and of the upper ones.
            constexpr unsigned SIX = 0x3f3f3f3fu, FOUR = 0x0f0f0f0fu, TWO = 0x30303030u;
#pragma unroll
            for (int b = 0; b < OF_LANE; ++b) {
                const unsigned *const r = raw + 4 * b, low = r[1], least_low = r[2], high = r[3];
                const float d = to_float(Word<__half>::element(r[0], 0)), m = to_float(Word<__half>::element(r[0], 1));
                const unsigned scale[2] = {low & SIX, (high & FOUR) | (low >> 2 & TWO)};
                const unsigned least[2] = {least_low & SIX, (high >> 4 & FOUR) | (least_low >> 2 & TWO)};
                const int block = half * OF_LANE + b;
                const float raised = ieee::multiply(d, TIMES);
                float* const minima = to + MINIMA + block * MINIMA_OF_BLOCK + Of::lanes(row) * 2 + row / 8;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    to[(block * 8 + i) * ROWS_OF_TILE + place_of(row)] =
                        ieee::multiply(Of::low(i) ? raised : d, byte_of(scale[i / 4], i % 4));
                    minima[i * MINIMA_STEP] = byte_of(least[i / 4], i % 4);
                }
                to[FACTORS + block * ROWS_OF_TILE + place_of(row)] = ieee::negative(m);
            }
        } else if constexpr (HALVES) {
#pragma unroll
            for (int i = 0; i < ENTRIES; ++i)
                to[(half * ENTRIES + i) * ROWS_OF_TILE + place_of(row)] =
                    to_float(Word<__half>::element(raw[i / 2], i % 2));
        } else if (w.scale_dtype == FLOAT16_BIAS) {
            store_entries<FLOAT16_BIAS>(w, to, row, half, less);
        } else if (w.scale_dtype == FLOAT32_BIAS) {
            store_entries<FLOAT32_BIAS>(w, to, row, half, less);
        } else {
            store_entries<BFLOAT16_BIAS>(w, to, row, half, less);
        }
    }

  private:
    // Byte i of a word: below what has the float 2^23 in its last bits.
    __device__ __forceinline__ static float byte_of(unsigned word, int i) {
        return __fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)), 8388608.0f);
    }

    template <int DTYPE>
    __device__ __forceinline__ void store_entries(
        const IntegerWeight& w, float* to, int row, int half, int less) const {
        const int lowest = -(w.is_signed << (w.bits - 1)), highest = lowest + (1 << w.bits) - 1;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            float scale = float_of(raw[i], DTYPE);
            const int at = (half * ENTRIES + i) * ROWS_OF_TILE + place_of(row);
            if (ADDED_ != OFFSETS && w.positive) scale = usable(scale);
            if constexpr (ADDED_ == OFFSETS) {
                reinterpret_cast<float2*>(to)[at] = make_float2(ieee::finite(scale), float_of(beside[i], DTYPE));
            } else if constexpr (ADDED_ == ZERO_POINTS) {
                const int zero = min(max(integer_of(beside[i], w.beside_dtype), lowest), highest) - less;
                reinterpret_cast<float2*>(to)[at] = make_float2(scale, __int_as_float(zero * TIMES));
            } else {
                to[at] = scale;
            }
        }
    }
};

// ... those of blocks of 256 k, of which a row has a whole number; a lane has those of half a share.
//
//     MINIMA4          d and m of 32, halves; behind the scales of units their minima, as those of q4_k
//     TABLE4           of 32 a byte: the e of 2^(e - 128)
//     TABLE_HALVES4    of 32 a half; INNER_: of 256 a half, of 32 six bits less 32, four of them in `beside` and two in
//                      `high`
template <typename Of, int CODES, bool INNER_>
struct BlockScales {
    static constexpr int SHARE = Of::SHARE, EACH = 8, BLOCKS = SHARE / 256;  // units of a block
    static constexpr int WORDS = Of::PAIRED ? 2 : 1;
    static constexpr bool SHORT = Of::POWERS && !Of::PAIRED;  // whether plain powers are worked out the short way
    static constexpr int OF_LANE = BLOCKS / 2, FACTORS = 0, MINIMA = BLOCKS * EACH * ROWS_OF_TILE * WORDS;
    static constexpr int BYTES = (MINIMA + (Of::MINIMA ? BLOCKS * MINIMA_OF_BLOCK : 0)) * 4;
    static constexpr int RAW = Of::MINIMA ? 8 : INNER_ ? 1 : CODES == TABLE4 ? 2 : 4;  // words of a block
    static_assert(SHARE % 512 == 0, "a lane has whole blocks of 256");
    unsigned raw[OF_LANE][RAW];
    unsigned narrow[INNER_ ? 2 : 1];  // with INNER_ the halves of all blocks of the lane, and their upper bits

    // See Scales.
    __device__ __forceinline__ void load(const IntegerWeight& w, const Cut&, unsigned row, int k, int depth, int half) {
        if constexpr (INNER_) {
            load_inner(w, row, k + half * OF_LANE * 256, depth);
        } else {
#pragma unroll
            for (int b = 0; b < OF_LANE; ++b) {
                const int at = k + (half * OF_LANE + b) * 256;
#pragma unroll
                for (int i = 0; i < RAW; ++i) raw[b][i] = 0;
                if (at < depth) load_words(raw[b], w.scales + 4 * RAW * place_of_block(row, at, depth));
            }
        }
    }

    // See Scales; `plain`: powers are, see unusual().
    __device__ __forceinline__ void store(
        const IntegerWeight&, float* to, int row, int half, int, bool plain = false) const {
#pragma unroll
        for (int b = 0; b < OF_LANE; ++b) {
            const int block = half * OF_LANE + b;
            float* const scales = to + (block * EACH * ROWS_OF_TILE + place_of(row)) * WORDS;
            const auto put = [&](int unit, float scale) {
                float* const at = scales + unit * ROWS_OF_TILE * WORDS;
                if constexpr (Of::PAIRED) *reinterpret_cast<float2*>(at) = make_float2(scale, taken_off<Of>(scale));
                else *at = scale;
            };
            const unsigned (&r)[RAW] = raw[b];
            if constexpr (Of::MINIMA) {
                float* const minima = to + MINIMA + block * MINIMA_OF_BLOCK + Of::lanes(row) * 2 + row / 8;
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    put(i, to_float(Word<__half>::element(r[i], 0)));
                    minima[i * MINIMA_STEP] = to_float(Word<__half>::element(r[i], 1));
                }
            } else if constexpr (INNER_) {
                store_inner(put, b);
            } else if constexpr (CODES == TABLE_HALVES4) {
#pragma unroll
                for (int i = 0; i < EACH; ++i) put(i, to_float(Word<__half>::element(r[i / 2], i % 2)));
            } else {
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    put(i, plain ? plain_power_of(r[i / 4], i % 4) : power_of(r[i / 4] >> i % 4 * 8 & 255u));
            }
        }
    }

    // Of powers: whether one of the lane's is 2^64 or more, its e having both of its upper bits; or subnormal, its e
    // having none but the lowest. `zero` may depend on what comes before scales are waited for.
    __device__ __forceinline__ bool unusual(unsigned zero) {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < OF_LANE * RAW; ++i) {
            unsigned& r = raw[i / RAW][i % RAW];
            if constexpr (SHORT) r |= zero;
            bits |= r & r << 1;
            if constexpr (SHORT) bits |= ((r & 0xfefefefeu) - 0x01010101u) & ~(r & 0xfefefefeu);
        }
        return (bits & 0x80808080u) != 0;
    }

  private:
    // Among those of all rows the one with element `at` of a row.
    __device__ __forceinline__ static unsigned long long place_of_block(unsigned row, int at, int depth) {
        return static_cast<unsigned long long>(row) * (static_cast<unsigned>(depth) / 256) + at / 256;
    }

    // 2^(e - 128), which may be subnormal: for e of 0 and 1 the second number is the greater one.
    __device__ __forceinline__ static float power_of(unsigned byte) {
        const int e = static_cast<int>(byte);
        return __int_as_float(max(e * 0x00800000 - 0x00800000, e * 0x00200000 + 0x00200000));
    }

    // ... of e that is byte i of a word, none of whose is less than 2.
    __device__ __forceinline__ static float plain_power_of(unsigned word, int i) {
        const unsigned lower = word - 0x01010101u;
        return __uint_as_float((i == 3 ? lower >> 1 : lower << (23 - i * 8)) & 0x7f800000u);
    }

    // All blocks of the lane, which are in the row or not. What is loaded is not put together here: that would wait for
    // it.
    __device__ __forceinline__ void load_inner(const IntegerWeight& w, unsigned row, int at, int depth) {
        const unsigned long long place = place_of_block(row, at, depth);
        const bool there = at < depth;
        static_assert(OF_LANE <= 2, "halves fill a word");
        narrow[0] = load_if<2 * OF_LANE>(w.scales + 2 * place, there);
        narrow[1] = load_if<2 * OF_LANE>(w.high + 2 * place, there);
#pragma unroll
        for (int b = 0; b < OF_LANE; ++b) raw[b][0] = load_if<4>(w.beside + 4 * (place + b), there);
    }

    template <typename P>
    __device__ __forceinline__ void store_inner(const P& put, int b) const {
        // Upper bits of two sub-blocks in each byte, then those of the even ones and of the odd ones.
        const unsigned spread = __byte_perm(narrow[1], 0, b ? 0x4342 : 0x4140), low = raw[b][0];
        const unsigned high = (spread | spread << 4) & 0x0f0f0f0fu;
        const unsigned scale[2] = {
            (low & 0x0f0f0f0fu) | (high << 4 & 0x30303030u), (low >> 4 & 0x0f0f0f0fu) | (high << 2 & 0x30303030u)};
        const float d = to_float(Word<__half>::element(narrow[0], b));
#pragma unroll
        for (int i = 0; i < EACH; ++i) put(i, ieee::multiply(d, __fsub_rn(raised(scale[i % 2], i / 2), 8388640.0f)));
    }

    // Byte i of a word, more by 2^23.
    __device__ __forceinline__ static float raised(unsigned word, int i) {
        return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i));
    }
};

template <typename Of, int CODES, int UNIT, int ADDED_, bool = Of::BLOCKS>
struct ScalesOf {
    using Type = Scales<Of, UNIT, ADDED_, CODES == HALVES4>;
};
template <typename Of, int CODES, int UNIT, int ADDED_>
struct ScalesOf<Of, CODES, UNIT, ADDED_, true> {
    using Type = BlockScales<Of, CODES, ADDED_ == INNER>;
};
