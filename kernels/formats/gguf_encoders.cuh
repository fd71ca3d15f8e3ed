// How GGUF's types whose scales follow from extremes are quantized: the twins of kbitcupy/formats/gguf, bit for bit.
//
// A lane has 32 numbers, none of them NaN or beyond the range of a half. An encoder is a struct with
//     BLOCK           elements of a block: 32, or those of two or eight neighbouring lanes
//     GROUP           elements that the lane wants the extremes of, 32 or 16
//     STRIPED         whether the lane has a quarter of four rows each instead of a row, see gguf.cu
//     EXCHANGE        words of shared memory for a warp's lanes to exchange bytes
//     FIELDS          fields of a block, and
//     TENSOR_SCALE    the place of a tensor scale behind them, or -1
//     encode<COARSE>(v, extremes, output)    which all lanes of a warp call at the same time. COARSE: without a tensor
//                     scale no number has more than 11 significant bits
#pragma once
#include "formats/gguf_numbers.cuh"

// ---- where results go ----------------------------------------------------------------------------------------------

// N neighbouring bytes, 1 to 16, of an aligned address.
template <int N>
__device__ __forceinline__ void store_bytes(unsigned char* to, const unsigned* word) {
    if constexpr (N == 1) *to = static_cast<unsigned char>(word[0]);
    else if constexpr (N == 2) *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(word[0]);
    else if constexpr (N == 4) *reinterpret_cast<unsigned*>(to) = word[0];
    else if constexpr (N == 8) __stcs(reinterpret_cast<uint2*>(to), make_uint2(word[0], word[1]));
    else __stcs(reinterpret_cast<uint4*>(to), make_uint4(word[0], word[1], word[2], word[3]));
}

// The planes, and a lane's place in them. All lanes of a warp call its functions at the same time.
struct Output {
    Fields fields;
    unsigned* exchange;  // of the warp
    int lane;
    long long row;  // of 32 elements
    bool there;     // whether there is such a row
    bool whole;     // whether there are those of all lanes, and planes begin at multiples of 16 bytes

    __device__ __forceinline__ bool are_aligned(int count) const {
        unsigned long long addresses = 0;
        for (int i = 0; i < count; ++i) addresses |= reinterpret_cast<unsigned long long>(fields.field[i]);
        return (addresses & 15) == 0;
    }

    // N bytes, behind `at` times as many, of those lanes that want it.
    template <int N>
    __device__ __forceinline__ void put_at(int field, long long at, const unsigned* word, bool wanted) const {
        unsigned char* to = fields.field[field] + at * N;
        if (whole) {
            if (wanted) store_bytes<N>(to, word);
        } else if (there && wanted) {
#pragma unroll
            for (int i = 0; i < N; ++i) to[i] = static_cast<unsigned char>(word[i / 4] >> i % 4 * 8);
        }
    }
    template <int N>
    __device__ __forceinline__ void put_at(int field, long long at, unsigned word, bool wanted) const {
        put_at<N>(field, at, &word, wanted);
    }

    // The N bytes of the row.
    template <int N>
    __device__ __forceinline__ void put(int field, const unsigned* word) const {
        if constexpr (N == 32) {
            if (whole) put_pairs(fields.field[field] + row * N, word);
            else put_at<N>(field, row, word, true);
        } else {
            put_at<N>(field, row, word, true);
        }
    }
    template <int N>
    __device__ __forceinline__ void put(int field, unsigned word) const {
        put_at<N>(field, row, &word, true);
    }

    // The N bytes of the block of eight lanes.
    template <int N>
    __device__ __forceinline__ void put_of_8(int field, unsigned word) const {
        put_at<N>(field, row / 8, &word, lane % 8 == 0);
    }

    // 32 bytes of each lane: neighbours exchange halves, so that each store of the two is one piece of 32 bytes.
    __device__ __forceinline__ void put_pairs(unsigned char* to, const unsigned* word) const {
        const bool odd = lane % 2;
        unsigned first[4], second[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned other = __shfl_xor_sync(FULL_WARP, odd ? word[i] : word[4 + i], 1);
            first[i] = odd ? other : word[i], second[i] = odd ? word[4 + i] : other;
        }
        to -= odd ? 16 : 0;
        store_bytes<16>(to, first);
        store_bytes<16>(to + 32, second);
    }
};

__device__ __forceinline__ unsigned half_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }

// ---- extremes ------------------------------------------------------------------------------------------------------

// The largest and the smallest of some numbers; NaN where one is. Of zeros the sign may be any of theirs.
struct Extremes {
    float high, low;

    __device__ __forceinline__ unsigned magnitude() const {
        return max(ieee::magnitude_bits(high), ieee::magnitude_bits(low));
    }
    __device__ __forceinline__ bool within_half() const { return magnitude() <= LARGEST_HALF; }
};

template <int GROUP>
__device__ __forceinline__ Extremes extremes_of(const float (&v)[32], int group) {
    Extremes e{v[group * GROUP], v[group * GROUP]};
#pragma unroll
    for (int i = 1; i < GROUP; ++i) {
        e.high = ieee::larger_or_nan(e.high, v[group * GROUP + i]);
        e.low = ieee::smaller_or_nan(e.low, v[group * GROUP + i]);
    }
    return e;
}

// The extremes of numbers as they are stored, two at a time where two are a word.
template <typename T>
struct Numbers {
    template <int GROUP>
    __device__ __forceinline__ static Extremes extremes(const unsigned* word, int group) {
        constexpr int WORDS = GROUP / Word<T>::COUNT;
        word += group * WORDS;
        unsigned high = word[0], low = word[0];
#pragma unroll
        for (int i = 1; i < WORDS; ++i) high = larger(high, word[i]), low = smaller(low, word[i]);
        if constexpr (Word<T>::COUNT == 1) return {Word<T>::get(high, 0), Word<T>::get(low, 0)};
        return {
            ieee::larger_or_nan(Word<T>::get(high, 0), Word<T>::get(high, 1)),
            ieee::smaller_or_nan(Word<T>::get(low, 0), Word<T>::get(low, 1))};
    }
    __device__ __forceinline__ static unsigned larger(unsigned a, unsigned b) {
        if constexpr (Word<T>::COUNT == 1)
            return __float_as_uint(ieee::larger_or_nan(__uint_as_float(a), __uint_as_float(b)));
        else return Word<T>::bits(__hmax2_nan(Word<T>::as(a), Word<T>::as(b)));
    }
    __device__ __forceinline__ static unsigned smaller(unsigned a, unsigned b) {
        if constexpr (Word<T>::COUNT == 1)
            return __float_as_uint(ieee::smaller_or_nan(__uint_as_float(a), __uint_as_float(b)));
        else return Word<T>::bits(__hmin2_nan(Word<T>::as(a), Word<T>::as(b)));
    }
};

// The first number of largest magnitude; +0 where all are zero. The search is for blocks that have it with both signs.
__device__ __forceinline__ float signed_max(const float (&v)[32], const Extremes& e) {
    const unsigned high = ieee::magnitude_bits(e.high), low = ieee::magnitude_bits(e.low);
    float found = high > low ? e.high : e.low;
    if (high == low && __float_as_uint(e.high) != __float_as_uint(e.low)) {
#pragma unroll
        for (int i = 31; i >= 0; --i) found = ieee::if_magnitude(v[i], __uint_as_float(high), found);
    }
    return high == 0 && low == 0 ? 0.0f : found;
}

// The least number, of zeros the first one.
__device__ __forceinline__ float first_min(const float (&v)[32], const Extremes& e) {
    float found = e.low;
    if (ieee::is_zero(found)) {
#pragma unroll
        for (int i = 31; i >= 0; --i)
            if (ieee::is_zero(v[i])) found = v[i];
    }
    return found;
}

// The largest of the numbers that the eight lanes of a block have, which are not negative, in each of them.
__device__ __forceinline__ unsigned largest_of_8(unsigned bits) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(FULL_WARP, bits, step));
    return bits;
}

// ---- scales and codes ----------------------------------------------------------------------------------------------

// 1 / d, and 0 for 0. Where that overflows (d under 2^-128, which is 0 as a half) a quotient is no number, and its code
// is that of 0 before anything is added.
struct Factor {
    float value;
    bool overflows;

    __device__ __forceinline__ explicit Factor(float d) {
        value = ieee::reciprocal(d);
        overflows = ieee::magnitude_bits(value) >= 0x7f800000u;
        if (overflows) value = 0.0f;
    }
};

// The whole number below x, from 0 to 2^22, in the low bits.
__device__ __forceinline__ unsigned whole_bits(float x) { return __float_as_uint(__fadd_rz(x, 8388608.0f)); }

// The lowest byte of each of four words.
__device__ __forceinline__ unsigned low_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// ... and the highest.
__device__ __forceinline__ unsigned high_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}

// The nearest whole number, halves away from zero, for magnitudes up to 2^22.
__device__ __forceinline__ int to_nearest_away(float x) {
    const float half = __uint_as_float((__float_as_uint(x) & 0x80000000u) | 0x3f000000u);
    return static_cast<int>(__fadd_rz(x, half));  // rounded toward zero, the sum reaches no whole number
}

// Codes of 32 numbers as bytes, in order.
template <typename Code>
__device__ __forceinline__ void codes_of(const float (&v)[32], unsigned (&byte)[8], const Code& code) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        byte[i] = low_bytes(code(v[4 * i]), code(v[4 * i + 1]), code(v[4 * i + 2]), code(v[4 * i + 3]));
}

// Bytes of 4 bits, element i beside i + 16.
__device__ __forceinline__ void join_halves(const unsigned (&byte)[8], unsigned (&word)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = byte[i] + byte[i + 4] * 16;
}

// Bytes of 5 bits: `word` gets the lower four, the result has the fifth of element i at bit i.
__device__ __forceinline__ unsigned split_fifth(const unsigned (&byte)[8], unsigned (&word)[4]) {
    unsigned high = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i)
        // Bits 4, 12, 20 and 28 come to bits 28 to 31, and nothing else comes there.
        high = high << 4 | (byte[i] & 0x10101010u) * 0x01020408u >> 28;
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = (byte[i] & 0x0f0f0f0fu) | (byte[i + 4] & 0x0f0f0f0fu) << 4;
    return high;
}

// Codes around the middle, which is that of 0: the number of largest magnitude has code 0.
template <int MIDDLE>
__device__ __forceinline__ float centred(const float (&v)[32], const Extremes& e, unsigned (&byte)[8]) {
    const float d = ieee::multiply(signed_max(v, e), -1.0f / MIDDLE);  // a power of two
    const Factor factor(d);
    const float offset = factor.overflows ? 0.0f : MIDDLE + 0.5f;
    codes_of(v, byte, [&](float x) {
        const float q = ieee::add(ieee::multiply(x, factor.value), offset);  // .49 at least
        return whole_bits(fminf(q, 2 * MIDDLE - 1));
    });
    return d;
}

// Codes from the minimum on. None is over LARGEST: the last quotient is LARGEST and a few roundings.
template <int LARGEST>
__device__ __forceinline__ unsigned from_minimum(const float (&v)[32], const Extremes& e, unsigned (&byte)[8]) {
    const float low = first_min(v, e);
    const float range = ieee::subtract(e.high, e.low);
    const float d = ieee::is_zero(range) ? 0.0f : ieee::divide(range, LARGEST);
    const Factor factor(d);
    codes_of(v, byte, [&](float x) {
        return whole_bits(ieee::add(ieee::multiply(ieee::subtract(x, low), factor.value), 0.5f));
    });
    return half_bits(d) | half_bits(low) << 16;
}

// Codes of which 127 is the largest magnitude.
__device__ __forceinline__ float signed_bytes(const float (&v)[32], const Extremes& e, unsigned (&byte)[8], int& sum) {
    const float d = ieee::divide(__uint_as_float(e.magnitude()), 127.0f);
    const Factor factor(d);
    sum = 0;
    codes_of(v, byte, [&](float x) {
        const int q = to_nearest_away(ieee::multiply(x, factor.value));
        sum += q;
        return static_cast<unsigned>(q);
    });
    return d;
}

// ---- 32 elements of integers ---------------------------------------------------------------------------------------

struct Rows32 {
    static constexpr int BLOCK = 32, GROUP = 32, EXCHANGE = 0, FIELDS = 2, TENSOR_SCALE = -1;
    static constexpr bool STRIPED = false;
};

struct Q4_0Encoder : Rows32 {
    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        unsigned byte[8], word[4];
        const float d = centred<8>(v, e[0], byte);
        join_halves(byte, word);
        output.put<2>(0, half_bits(d));
        output.put<16>(1, word);
    }
};

struct Q4_1Encoder : Rows32 {
    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        unsigned byte[8], word[4];
        const unsigned scales = from_minimum<15>(v, e[0], byte);
        join_halves(byte, word);
        output.put<4>(0, scales);
        output.put<16>(1, word);
    }
};

struct Q5_0Encoder : Rows32 {
    static constexpr int FIELDS = 3;
    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        unsigned byte[8], word[4];
        const float d = centred<16>(v, e[0], byte);
        const unsigned high = split_fifth(byte, word);
        output.put<2>(0, half_bits(d));
        output.put<4>(1, high);
        output.put<16>(2, word);
    }
};

struct Q5_1Encoder : Rows32 {
    static constexpr int FIELDS = 3;
    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        unsigned byte[8], word[4];
        const unsigned scales = from_minimum<31>(v, e[0], byte), high = split_fifth(byte, word);
        output.put<4>(0, scales);
        output.put<4>(1, high);
        output.put<16>(2, word);
    }
};

struct Q8_0Encoder : Rows32 {
    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        unsigned byte[8];
        int sum;
        const float d = signed_bytes(v, e[0], byte, sum);
        output.put<2>(0, half_bits(d));
        output.put<32>(1, byte);
    }
};

struct Q8_1Encoder : Rows32 {
    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        unsigned byte[8];
        int sum;
        const float d = signed_bytes(v, e[0], byte, sum);
        output.put<4>(0, half_bits(d) | half_bits(ieee::multiply(static_cast<float>(sum), d)) << 16);
        output.put<32>(1, byte);
    }
};

// ---- 256 elements --------------------------------------------------------------------------------------------------

struct Rows256 : Rows32 {
    static constexpr int BLOCK = 256;
};

struct Q8_KEncoder : Rows256 {
    static constexpr int FIELDS = 3;

    // The number of largest magnitude of eight lanes, the first of them; no zero has a sign.
    __device__ __forceinline__ static float first_of_8(float number, int lane) {
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
            const float other = __shfl_xor_sync(FULL_WARP, number, step);
            const unsigned mine = ieee::magnitude_bits(number), its = ieee::magnitude_bits(other);
            if (its > mine || (its == mine && (lane & step))) number = other;
        }
        return number;
    }

    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        const float longest = first_of_8(signed_max(v, e[0]), output.lane);
        const bool zero = ieee::is_zero(longest);
        const float inverse = zero ? 0.0f : ieee::divide(-127.0f, longest);
        const float factor = ieee::finite(inverse);
        unsigned byte[8], sums[2] = {};
        int number = 0;
        codes_of(v, byte, [&](float x) {
            // 1.5 * 2^23: the nearest whole number, half to even, in the low 22 bits
            const unsigned bits = __float_as_uint(__fadd_rn(ieee::multiply(factor, x), 12582912.0f));
            sums[number++ / 16] += bits;
            return bits;
        });
        output.put_of_8<4>(0, __float_as_uint(zero ? 0.0f : ieee::divide(1.0f, inverse)));
        output.put<32>(1, byte);
        output.put<4>(2, (sums[0] & 0xffff) | sums[1] << 16);
    }
};

// -1, 0 and 1, the two's complement.
__device__ __forceinline__ unsigned ternary(float x, float factor) {
    return static_cast<unsigned>(to_nearest_away(ieee::multiply(x, factor)));
}

struct TQ2_0Encoder : Rows256 {
    static constexpr bool STRIPED = true;

    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        const float d = __uint_as_float(largest_of_8(e[0].magnitude()));
        const Factor factor(d);
        // Every field is one more than its number, which may borrow from those above it until all are added.
        unsigned word[2] = {0x55555555u, 0x55555555u};
#pragma unroll
        for (int i = 0; i < 32; ++i) word[i % 8 / 4] += ternary(v[i], factor.value) << (i % 4 * 8 + i / 8 * 2);
        output.put<8>(0, word);
        output.put_of_8<2>(1, half_bits(d));
    }
};

// Of the eight lanes of a block, 0 to 4 have the digits of bytes 0 to 31; 5 to 7 those of the next 16 bytes, two digits
// each and one, and lane 7 four of the last 4 bytes, too.
struct TQ1_0Encoder : Rows256 {
    // Rows of 8 words, and 8 words more behind each 8 rows, so that lanes which read in columns meet no others.
    static constexpr int FIELDS = 3, EXCHANGE = 4 * 72;

    // Bytes v below 243 as ceil(v * 256 / 243). The factor is 2^32 / 243, rounded up: of no v it comes to the next one.
    __device__ __forceinline__ static unsigned fractions(unsigned word) {
        unsigned byte[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) byte[i] = (word >> 8 * i & 0xff) * 17674763u + 0xffffffu;
        return high_bytes(byte[0], byte[1], byte[2], byte[3]);
    }

    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        const float d = __uint_as_float(largest_of_8(e[0].magnitude()));
        const Factor factor(d);
        unsigned byte[8];
#pragma unroll
        for (int i = 0; i < 32; ++i)
            byte[i / 4] = (i % 4 ? byte[i / 4] : 0x01010101u) + (ternary(v[i], factor.value) << i % 4 * 8);
        // No byte of a product or a sum is over 242.
        const int lane = output.lane % 8;
        const unsigned last = byte[4] * 81 + byte[5] * 27 + byte[6] * 9 + byte[7] * 3;
        const unsigned first_power = lane == 0 || lane == 5   ? 81
                                     : lane == 1              ? 27
                                     : lane == 2 || lane == 6 ? 9
                                     : lane == 3              ? 3
                                                              : 1;
        const unsigned second_power = lane == 5 ? 27 : lane == 6 ? 3 : 0;  // of words 4 to 7, beside words 0 to 3
        uint4* mine = reinterpret_cast<uint4*>(output.exchange + output.lane / 8 * 72 + lane * 8);
        unsigned part[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            part[i] = byte[i] * first_power + byte[i + 4] * second_power;
            part[i + 4] = byte[i + 4] * first_power;
        }
        mine[0] = make_uint4(part[0], part[1], part[2], part[3]);
        mine[1] = make_uint4(part[4], part[5], part[6], part[7]);
        __syncwarp();
        const unsigned* column = output.exchange + output.lane / 8 * 72 + lane;
        unsigned sum = 0;
#pragma unroll
        for (int i = 0; i < 5; ++i) sum += column[i * 8];
        const long long block = output.row / 8;
        output.put_at<4>(0, block * 12 + lane, fractions(sum), true);
        sum = column[5 * 8] + column[6 * 8] + column[7 * 8];  // of lanes 0 to 3
        // Of the lanes that have nothing else to do one has the last word.
        const unsigned word = fractions(lane == 7 ? last : sum);
        output.put_at<4>(0, block * 12 + 8 + lane, word, lane < 4);
        output.put_at<4>(1, block, word, lane == 7);
        output.put_of_8<2>(2, half_bits(d));
        __syncwarp();
    }
};

// ---- 4-bit floats --------------------------------------------------------------------------------------------------

// 1 / a, which may be wrong by 2^-22 of it.
__device__ __forceinline__ float approximate_reciprocal(float a) {
#ifdef KBIT_HOST
    return 1.0f / a;
#else
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
#endif
}

// The first of the 16 codes with the least |F * A - x|, where F is 0 1 2 3 4 6 8 12, then their negatives: the rounded
// distances of two neighbours are both exact where they are about the same, so that |x| is compared with the middle
// between them, which itself has the code of lesser magnitude, and code 8, -0, is never the first.
//
// |x| times 2^-127 / A is a float, or a subnormal number, whose bits 22 and up are the code if what lies behind them
// is rounded, half down: the floats of these few bits are E2M1's. The product may be rounded up, as that crosses no
// middle.
struct Float4 {
    float factor;  // 2^-127 / A
    float twice;   // 2 * A

    // Bits 22 to 24. CHECKED: the factor may be up to 2^-12 too small, so that the code is that, or the next one.
    template <bool CHECKED>
    __device__ __forceinline__ unsigned code(float x) const {
        constexpr unsigned HALF = 0x200000, ONE = 0x400000, TOP = 7 * ONE;
        unsigned bits = min(__float_as_uint(ieee::multiply_up(x, factor)), TOP) + (HALF - 1);
        if (CHECKED) {
            const float middle = ieee::multiply(__uint_as_float((bits & ~(ONE - 1)) + HALF), 0x1p126f);
            if (ieee::less(ieee::multiply(middle, twice), ieee::magnitude(x))) bits = min(bits + ONE, TOP + HALF);
        }
        return bits;
    }

    // Eight codes, the first in the lowest bits.
    template <bool CHECKED>
    __device__ __forceinline__ unsigned codes(const float* v) const {
        unsigned byte[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned even = code<CHECKED>(v[2 * i]), odd = code<CHECKED>(v[2 * i + 1]);
            // Both, with the signs above them, in the top byte.
            unsigned top = (__float_as_uint(v[2 * i + 1]) & 0x80000000u) | (odd << 6 & 0x70000000u);
            top |= even << 2 & 0x07000000u;
            byte[i] = top | (__float_as_uint(v[2 * i]) >> 4 & 0x08000000u);
        }
        const unsigned word = high_bytes(byte[0], byte[1], byte[2], byte[3]);
        const unsigned nonzero = (word | word << 1 | word << 2) << 1 & 0x88888888u;
        return word & (nonzero | 0x77777777u);
    }
};

struct MXFP4Encoder : Rows32 {
    // floor(log2(x)) + 125 and not below 0, where log2 is rounded to float32: it is a whole number k for the last
    // floats below 2^k, too.
    __device__ __forceinline__ static int exponent(unsigned bits) {
        const int k = static_cast<int>(bits >> 23) - 126, far = k > 0 ? k - 1 : -k;
        // ln 2 times the largest power of two up to `far`
        const unsigned lifted = far == 0 ? 0u : 0xb17217f7u >> __clz(far) >> 1;
        return max(static_cast<int>((bits + lifted) >> 23) - 2, 0);
    }

    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[1], const Output& output) {
        const int scale = exponent(e[0].magnitude());
        // 2^(1 - scale)
        const Float4 float4{__uint_as_float(scale < 128 ? (128u - scale) << 23 : 1u << (150 - scale)), 0.0f};
        unsigned word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = float4.codes<false>(v + 8 * i);
        output.put<1>(0, static_cast<unsigned>(scale));
        output.put<16>(1, word);
    }
};

struct NVFP4Encoder : Rows32 {
    static constexpr int BLOCK = 64, GROUP = 16, TENSOR_SCALE = 2;

    // UE4M3 of numbers from 0 to 448; from 256 on, or rounded up to that, 448.
    __device__ __forceinline__ static unsigned encode_scale(float v) {
        const unsigned bits = __float_as_uint(v);
        if (bits < 121u << 23) return whole_bits(fminf(__fadd_rn(__fmul_rn(v, 512.0f), 0.5f), 7.0f)) & 7;
        const unsigned code = ((bits + (1u << 19)) >> 20) - (120u << 3);
        return code >= 0x78 ? 0x7e : code;
    }
    // Twice what it stands for over two: the scale A is half of it.
    __device__ __forceinline__ static float decode_scale(unsigned code) {
        if (code < 8) return __fmul_rn(static_cast<float>(code), 0x1p-9f);
        return __uint_as_float((code << 20) + (120u << 23));
    }

    // x / 6, correctly rounded (Markstein) where it is 2^-100 or more; below that its code is 0 in any case.
    __device__ __forceinline__ static float sixth(float x) {
        constexpr float INVERSE = 1.0f / 6.0f;
        const float q = __fmul_rn(x, INVERSE);
        return __fmaf_rn(__fmaf_rn(q, -6.0f, x), INVERSE, q);
    }

    template <bool COARSE>
    __device__ __forceinline__ static void encode(const float (&v)[32], const Extremes (&e)[2], const Output& output) {
        unsigned word[4], scales = 0;
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            const unsigned scale = encode_scale(fminf(sixth(__uint_as_float(e[g].magnitude())), 448.0f));
            const float twice = decode_scale(scale);
            // 2^-126 / twice, less 3 * 2^-14 of it, which is more than what the approximation and a subnormal product
            // are rounded by, and less than 2^-12. A number of 11 bits that is not in the middle of two others is
            // farther away from it than that, as the middle has 7 bits; one that is stays below.
            const float factor = ieee::multiply(approximate_reciprocal(twice), __uint_as_float(0x007ffa00));
            const Float4 float4{scale ? factor : 0.0f, scale ? twice : infinity()};
            if (COARSE && !output.fields.field[TENSOR_SCALE]) {
                word[2 * g] = float4.codes<false>(v + 16 * g), word[2 * g + 1] = float4.codes<false>(v + 16 * g + 8);
            } else {
                word[2 * g] = float4.codes<true>(v + 16 * g), word[2 * g + 1] = float4.codes<true>(v + 16 * g + 8);
            }
            scales |= scale << 8 * g;
        }
        output.put<2>(0, scales);
        output.put<16>(1, word);
    }
};
