// How GGUF's types with searched scales are quantized: the twins of kbitcupy/formats/gguf, bit for bit.
//
// LANES lanes of a warp make a block, each with a sub-block of SUB elements:
//
//     lane.weigh(v, mean)      with importance only: of its elements, and the mean of x * x over the row
//     lane.search(shared)      scale and whatever else belongs to the sub-block
//     lane.agree(shared)       what the lanes of the block decide together, all threads of the block at once
//     lane.store(fields, block, writes)   the bytes of the sub-block; all lanes call it, and some may not write
//
// Shared is what a thread block has in shared memory.
#pragma once
#include "formats/gguf_search.cuh"

struct NothingShared {
    __device__ __forceinline__ void build(int, int) {}
};

template <bool CONDITION, typename A, typename B>
struct Choose {
    using Type = A;
};
template <typename A, typename B>
struct Choose<false, A, B> {
    using Type = B;
};

// ---- lanes of a block --------------------------------------------------------------------------------------------

// The largest of LANES lanes' numbers, at least 0.
template <int LANES>
__device__ __forceinline__ float largest_of(float number) {
    unsigned bits = ieee::less(0.0f, number) ? __float_as_uint(number) : 0u;  // in the order of the numbers
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) bits = max(bits, __shfl_xor_sync(FULL_WARP, bits, step));
    return __uint_as_float(bits);
}

// The first of LANES lanes' numbers that has the largest magnitude; +0 where all are 0.
template <int LANES>
__device__ __forceinline__ float longest_of(float number, int lane) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const float other = __shfl_xor_sync(FULL_WARP, number, step);
        const unsigned a = ieee::magnitude_bits(number), b = ieee::magnitude_bits(other);
        if (b > a || (b == a && (lane & step))) number = other;
    }
    return ieee::is_zero(number) ? 0.0f : number;
}

// Lanes whose numbers differ in BIT alone have set different bits of the same words: each keeps half of the words, with
// the bits of both, the upper lane the upper half.
template <int BIT, int WORDS>
__device__ __forceinline__ void halve(int lane, const unsigned (&word)[WORDS], unsigned (&kept)[WORDS / 2]) {
    const bool upper = lane & BIT;
#pragma unroll
    for (int w = 0; w < WORDS / 2; ++w) {
        const unsigned given = upper ? word[w] : word[w + WORDS / 2];
        kept[w] = (upper ? word[w + WORDS / 2] : word[w]) | __shfl_xor_sync(FULL_WARP, given, BIT);
    }
}

// Codes from 0 to 255, or from -`zero` on, as bytes.
template <int SIZE>
__device__ __forceinline__ void to_bytes(const float (&code)[SIZE], int zero, unsigned (&word)[SIZE / 4]) {
    const float shift = __fadd_rn(8388608.0f, static_cast<float>(zero));  // 2^23: the sum's lowest byte is the code
#pragma unroll
    for (int w = 0; w < SIZE / 4; ++w) {
        unsigned byte[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) byte[i] = __float_as_uint(__fadd_rn(code[4 * w + i], shift));
        word[w] = __byte_perm(__byte_perm(byte[0], byte[1], 0x0040), __byte_perm(byte[2], byte[3], 0x0040), 0x5410);
    }
}

template <int SIZE>
__device__ __forceinline__ void to_squares(const float (&x)[SIZE], float (&square)[SIZE]) {
#pragma unroll
    for (int i = 0; i < SIZE; ++i) square[i] = ieee::multiply(x[i], x[i]);
}

__device__ __forceinline__ float as_half(float a) { return __half2float(__float2half_rn(a)); }

// ---- a lane ------------------------------------------------------------------------------------------------------

// A sub-block of SUB elements and, with importance, their weights.
template <int BLOCK_, int SUB_, bool WEIGHED_>
struct Lane {
    static constexpr int BLOCK = BLOCK_, SUB = SUB_, LANES = BLOCK_ / SUB_;
    static constexpr bool WEIGHED = WEIGHED_;
    using Shared = NothingShared;

    int number;  // of the sub-block
    float x[SUB], w[WEIGHED ? SUB : 1];

    // The sum of x * x over the elements of the block, in their order: one lane goes on where the one before it ended.
    __device__ __forceinline__ float sum_of_squares() const {
        float sum = 0.0f;
#pragma unroll 1
        for (int turn = 0; turn < LANES; ++turn) {
            float mine = sum;
#pragma unroll
            for (int i = 0; i < SUB; ++i) mine = ieee::add(mine, ieee::multiply(x[i], x[i]));
            sum = LANES == 1 ? mine : __shfl_sync(FULL_WARP, mine, turn, LANES);
        }
        return sum;
    }

    // w = v * sqrt(mean + x * x)
    __device__ __forceinline__ void weigh_by(const float (&v)[SUB], float mean) {
#pragma unroll
        for (int i = 0; i < SUB; ++i)
            w[i] = ieee::multiply(v[i], ieee::square_root(ieee::add(mean, ieee::multiply(x[i], x[i]))));
    }

    __device__ __forceinline__ float sum_of_weights() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SUB; ++i) sum = ieee::add(sum, w[i]);
        return sum;
    }
};

// Numbers of all lanes of a thread block, and what one lane finds for those of a block.
template <int KINDS>
struct Problems {
    static constexpr int THREADS = 128;

    float number[KINDS][THREADS], weight[THREADS], scale[KINDS][THREADS];

    __device__ __forceinline__ void build(int, int) {}

    // Has a thread for each block and kind find codes of LANES numbers, which take their place.
    template <int LANES, typename Find>
    __device__ __forceinline__ void solve(const Find& find) {
        __syncthreads();
        constexpr int BLOCKS = THREADS / LANES;
        if (threadIdx.x < BLOCKS * KINDS) {
            const int kind = threadIdx.x / BLOCKS, first = threadIdx.x % BLOCKS * LANES;
            float x[LANES], code[LANES];
#pragma unroll
            for (int i = 0; i < LANES; ++i) x[i] = number[kind][first + i];
            scale[kind][first] = find(x, [&](int i) { return weight[first + i]; }, code);
#pragma unroll
            for (int i = 0; i < LANES; ++i) number[kind][first + i] = code[i];
        }
        __syncthreads();
    }
};

// What is found for the scales of a block: codes, and the scale of these.
template <int LARGEST>
struct PositiveScales {
    template <int SIZE, typename Weight>
    __device__ __forceinline__ float operator()(
        const float (&x)[SIZE], const Weight& weight, float (&code)[SIZE]) const {
        return find_positive_scale<LARGEST>(x, weight, code);
    }
};
template <int LARGEST>
struct SignedScales {
    template <int SIZE, typename Weight>
    __device__ __forceinline__ float operator()(
        const float (&x)[SIZE], const Weight& weight, float (&code)[SIZE]) const {
        const Scale found = find_scale<LARGEST>(x, weight);
#pragma unroll
        for (int i = 0; i < SIZE; ++i) code[i] = found.template code<LARGEST>(x[i]);
        return found.scale;
    }
};

// ---- scales and minima: Q2_K, Q4_K and Q5_K ----------------------------------------------------------------------

template <int SUB_, int LARGEST, int LARGEST_SCALE, bool WEIGHED_>
struct RangeLane : Lane<256, SUB_, WEIGHED_> {
    using Base = Lane<256, SUB_, WEIGHED_>;
    static constexpr int SUB = SUB_, LANES = Base::LANES;
    using Shared = typename Choose<WEIGHED_, Problems<2>, NothingShared>::Type;

    Range found;
    float d, dmin;  // before they become halves
    int sc, mn;

    __device__ __forceinline__ void weigh(const float (&v)[SUB], float) {
        this->weigh_by(v, ieee::multiply(this->sum_of_squares(), SUB == 16 ? 1.0f / 256 : 2.0f / 256));
    }

    __device__ __forceinline__ void search(const Shared&) {
        if constexpr (WEIGHED_) {
            found = find_range<LARGEST, 36, true>(this->x, [&](int i) { return this->w[i]; }, -0.9f, 0.05f);
        } else if constexpr (SUB == 16) {
            const auto weight = [&](int i) { return ieee::magnitude(this->x[i]); };
            found = find_range<LARGEST, 15, false>(this->x, weight, -0.5f, 0.1f);
        } else {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < SUB; ++i) squares = ieee::add(squares, ieee::multiply(this->x[i], this->x[i]));
            const float rms = ieee::square_root(ieee::divide(squares, static_cast<float>(SUB)));
            float w[SUB];
#pragma unroll
            for (int i = 0; i < SUB; ++i) w[i] = ieee::add(rms, ieee::magnitude(this->x[i]));
            const auto weight = [&](int i) { return w[i]; };
            found = LARGEST == 15 ? find_range<LARGEST, 20, true>(this->x, weight, -1.0f, 0.1f)
                                  : find_range<LARGEST, 15, true>(this->x, weight, -0.5f, 0.1f);
        }
    }

    __device__ __forceinline__ void agree(Shared& shared) {
        if constexpr (WEIGHED_) {
            const int thread = threadIdx.x, first = thread - this->number;
            shared.number[0][thread] = found.scale, shared.number[1][thread] = ieee::negative(found.low);
            shared.weight[thread] = this->sum_of_weights();
            shared.template solve<LANES>(PositiveScales<LARGEST_SCALE>());
            d = shared.scale[0][first], dmin = shared.scale[1][first];
            sc = static_cast<int>(shared.number[0][thread]), mn = static_cast<int>(shared.number[1][thread]);
            // What is read back of a scale that was negative, whose byte is more than the format has room for.
            if constexpr (LARGEST == 3) {
                mn |= sc >> 4, sc &= 15;
            } else if constexpr (LARGEST == 15) {
                const int before = static_cast<int>(shared.number[0][thread ^ 4]);
                sc = this->number < 4 ? sc & 63 : (sc & 15) | ((before >> 6 | sc >> 4) & 3) << 4;
            } else {
                sc = min(sc, 63);
            }
        } else {
            const float minimum = ieee::negative(found.low);
            const float largest = largest_of<LANES>(found.scale), lowest = largest_of<LANES>(minimum);
            sc = scale_code(found.scale, largest), mn = scale_code(minimum, lowest);
            d = ieee::divide(largest, static_cast<float>(LARGEST_SCALE));
            dmin = ieee::divide(lowest, static_cast<float>(LARGEST_SCALE));
        }
    }

    __device__ __forceinline__ static int scale_code(float number, float largest) {
        const float top = static_cast<float>(LARGEST_SCALE);
        const float step = ieee::less(0.0f, largest) ? ieee::divide(top, largest) : 0.0f;
        return to_code<LARGEST_SCALE>(ieee::multiply(step, number));
    }

    // The codes for what is stored, or those of the search where they decode to nothing.
    __device__ __forceinline__ void final_codes(unsigned (&word)[SUB / 4]) const {
        const float factor = __fmul_rn(as_half(d), static_cast<float>(sc));
        const float offset = __fmul_rn(as_half(dmin), static_cast<float>(mn));
        float code[SUB];
        if (factor == 0.0f) {
            Range::codes_of<LARGEST>(this->x, found.step, found.from, code);
        } else if (is_usual(factor) && is_usual(offset)) {
            const Divisor by(factor);
#pragma unroll
            for (int i = 0; i < SUB; ++i) code[i] = positive_code<LARGEST>(by(ieee::add(this->x[i], offset)));
        } else {
#pragma unroll
            for (int i = 0; i < SUB; ++i) code[i] = 0.0f;
        }
        to_bytes(code, 0, word);
    }

    __device__ __forceinline__ void put_d(int field, const Fields& fields, long long block) const {
        if (this->number == 0) fields.put_half(field, block * 2, d);
        if (this->number == 1) fields.put_half(field, block * 2 + 1, dmin);
    }

    // The 12 bytes of 6-bit scales and minima; `sc_4` and `mn_4` are of lane number ^ 4.
    __device__ __forceinline__ void put_scales(unsigned char* scales, int sc_4, int mn_4) const {
        const int number = this->number;
        if (number < 4) {
            scales[number] = static_cast<unsigned char>(sc | sc_4 >> 4 << 6);
            scales[number + 4] = static_cast<unsigned char>(mn | mn_4 >> 4 << 6);
        } else {
            scales[number + 4] = static_cast<unsigned char>((sc & 15) | mn << 4);
        }
    }
};

template <bool WEIGHED>
struct Q2_KLane : RangeLane<16, 3, 15, WEIGHED> {
    // fields: scales, qs, d and dmin
    __device__ __forceinline__ void store(const Fields& fields, long long block, bool writes) const {
        const int number = this->number;
        unsigned word[4], two[2], one[1];
        this->final_codes(word);
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] <<= number / 2 % 4 * 2;
        halve<4>(number, word, two);
        halve<2>(number, two, one);
        if (!writes) return;
        fields.field[0][block * 16 + number] = static_cast<unsigned char>(this->sc | this->mn << 4);
        const int at = number / 8 * 32 + number % 2 * 16 + number / 4 % 2 * 8 + number / 2 % 2 * 4;
        fields.put_words(1, block * 64 + at, one);
        this->put_d(2, fields, block);
    }
};

template <bool WEIGHED>
struct Q4_KLane : RangeLane<32, 15, 63, WEIGHED> {
    // fields: d and dmin, scales, qs
    __device__ __forceinline__ void store(const Fields& fields, long long block, bool writes) const {
        const int number = this->number;
        unsigned word[8], four[4];
        this->final_codes(word);
#pragma unroll
        for (int i = 0; i < 8; ++i) word[i] <<= number % 2 * 4;
        halve<1>(number, word, four);
        const int sc = __shfl_xor_sync(FULL_WARP, this->sc, 4), mn = __shfl_xor_sync(FULL_WARP, this->mn, 4);
        if (!writes) return;
        this->put_d(0, fields, block);
        this->put_scales(fields.field[1] + block * 12, sc, mn);
        fields.put_words(2, block * 128 + number * 16, four);
    }
};

template <bool WEIGHED>
struct Q5_KLane : RangeLane<32, 31, 63, WEIGHED> {
    // fields: d and dmin, scales, qh, qs
    __device__ __forceinline__ void store(const Fields& fields, long long block, bool writes) const {
        const int number = this->number;
        unsigned word[8], high[8], four[4], high_four[4], two[2], one[1];
        this->final_codes(word);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            high[i] = (word[i] >> 4 & 0x01010101u) << number;
            word[i] = (word[i] & 0x0f0f0f0fu) << number % 2 * 4;
        }
        halve<1>(number, word, four);
        halve<4>(number, high, high_four);
        halve<2>(number, high_four, two);
        halve<1>(number, two, one);
        const int sc = __shfl_xor_sync(FULL_WARP, this->sc, 4), mn = __shfl_xor_sync(FULL_WARP, this->mn, 4);
        if (!writes) return;
        this->put_d(0, fields, block);
        this->put_scales(fields.field[1] + block * 12, sc, mn);
        fields.put_words(2, block * 32 + number * 4, one);
        fields.put_words(3, block * 128 + number * 16, four);
    }
};

// ---- scales alone: Q3_K and Q6_K ---------------------------------------------------------------------------------

// Codes of -LARGEST to LARGEST - 1.
template <int LARGEST, bool WEIGHED_>
struct ScaleLane : Lane<256, 16, WEIGHED_> {
    float d;  // before it becomes a half
    int sc;

    // The codes for what is stored; what there was stays where that decodes to nothing.
    __device__ __forceinline__ void final_codes(float (&code)[16]) const {
        const float factor = __fmul_rn(as_half(d), static_cast<float>(sc));
        if (factor == 0.0f) return;
        if (is_usual(factor)) {
            const Divisor by(factor);
#pragma unroll
            for (int i = 0; i < 16; ++i) code[i] = signed_code<LARGEST>(by(this->x[i]));
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) code[i] = 0.0f;
        }
    }
};

template <bool WEIGHED_>
struct Q3_KLane : ScaleLane<4, WEIGHED_> {
    using Shared = typename Choose<WEIGHED_, Problems<1>, NothingShared>::Type;

    float code[16], scale;

    __device__ __forceinline__ void weigh(const float (&v)[16], float) {
        this->weigh_by(v, ieee::multiply(this->sum_of_squares(), 2.0f / 256));
    }

    __device__ __forceinline__ void search(const Shared&) {
        if constexpr (WEIGHED_) {
            const Scale found = find_scale<4>(this->x, [&](int i) { return this->w[i]; });
            scale = found.scale;
#pragma unroll
            for (int i = 0; i < 16; ++i) code[i] = found.template code<4>(this->x[i]);
        } else {
            scale = refine_scale<4>(this->x, code);
        }
    }

    __device__ __forceinline__ void agree(Shared& shared) {
        if constexpr (WEIGHED_) {
            const int thread = threadIdx.x;
            shared.number[0][thread] = scale, shared.weight[thread] = this->sum_of_weights();
            shared.template solve<16>(SignedScales<32>());
            this->d = shared.scale[0][thread - this->number];
            this->sc = static_cast<int>(shared.number[0][thread]);
        } else {
            const float longest = longest_of<16>(scale, this->number);
            const float step = ieee::divide(-32.0f, longest);
            const bool nothing = ieee::is_zero(longest);
            this->d = nothing ? 0.0f : ieee::divide(1.0f, step);
            this->sc = nothing ? -32 : static_cast<int>(signed_code<32>(ieee::multiply(step, scale)));
        }
    }

    // fields: hmask, qs, scales, d
    __device__ __forceinline__ void store(const Fields& fields, long long block, bool writes) {
        const int number = this->number;
        this->final_codes(code);
        unsigned word[4], high[4], two[2], one[1], high_two[2], high_one[1];
        to_bytes(code, 4, word);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[i] = (word[i] >> 2 & 0x01010101u) << number / 2;
            word[i] = (word[i] & 0x03030303u) << number / 2 % 4 * 2;
        }
        halve<4>(number, word, two);
        halve<2>(number, two, one);
        halve<8>(number, high, high_two);
        halve<4>(number, high_two, high_one);
        high_one[0] |= __shfl_xor_sync(FULL_WARP, high_one[0], 2);
        const unsigned stored = static_cast<unsigned>(this->sc + 32);
        const unsigned low = stored & 15, low_8 = __shfl_xor_sync(FULL_WARP, low, 8);
        unsigned upper = stored >> 4 << number / 4 * 2;
        upper |= __shfl_xor_sync(FULL_WARP, upper, 4);
        upper |= __shfl_xor_sync(FULL_WARP, upper, 8);
        if (!writes) return;
        if (number / 2 % 2 == 0) {
            const int at = number % 2 * 16 + number / 8 * 8 + number / 4 % 2 * 4;
            fields.put_words(0, block * 32 + at, high_one);
        }
        const int at = number / 8 * 32 + number % 2 * 16 + number / 4 % 2 * 8 + number / 2 % 2 * 4;
        fields.put_words(1, block * 64 + at, one);
        unsigned char* scales = fields.field[2] + block * 12;
        if (number < 8) scales[number] = static_cast<unsigned char>(low | low_8 << 4);
        if (number < 4) scales[8 + number] = static_cast<unsigned char>(upper);
        if (number == 0) fields.put_half(3, block, this->d);
    }
};

template <bool WEIGHED_>
struct Q6_KLane : ScaleLane<32, WEIGHED_> {
    using Shared = NothingShared;

    Scale found;
    bool nothing;  // in the whole block

    __device__ __forceinline__ void weigh(const float (&v)[16], float) {
#pragma unroll
        for (int i = 0; i < 16; ++i) this->w[i] = v[i];
    }

    __device__ __forceinline__ void search(const Shared&) {
        if constexpr (WEIGHED_) {
            found = find_scale<32>(this->x, [&](int i) { return this->w[i]; });
        } else {
            float w[16];
            to_squares(this->x, w);
            found = find_scale<32>(this->x, [&](int i) { return w[i]; });
        }
    }

    __device__ __forceinline__ void agree(Shared&) {
        const float longest = longest_of<16>(found.scale, this->number);
        const float step = ieee::divide(-128.0f, longest);
        nothing = ieee::less(ieee::magnitude(longest), NOTHING);
        this->d = nothing ? 0.0f : ieee::divide(1.0f, step);
        const float code = fminf(nearest_integer(ieee::multiply(step, found.scale)), 127.0f);
        this->sc = nothing ? 0 : static_cast<int>(code);
    }

    // fields: ql, qh, scales, d
    __device__ __forceinline__ void store(const Fields& fields, long long block, bool writes) const {
        const int number = this->number;
        float code[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) code[i] = nothing ? -32.0f : found.template code<32>(this->x[i]);
        this->final_codes(code);
        unsigned word[4], high[4], two[2], high_two[2], high_one[1];
        to_bytes(code, 32, word);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[i] = (word[i] >> 4 & 0x03030303u) << number / 2 % 4 * 2;
            word[i] = (word[i] & 0x0f0f0f0fu) << number / 4 % 2 * 4;
        }
        halve<4>(number, word, two);
        halve<4>(number, high, high_two);
        halve<2>(number, high_two, high_one);
        if (!writes) return;
        fields.put_words(0, block * 128 + number / 8 * 64 + number % 4 * 16 + number / 4 % 2 * 8, two);
        const int at = number / 8 * 32 + number % 2 * 16 + number / 4 % 2 * 8 + number / 2 % 2 * 4;
        fields.put_words(1, block * 64 + at, high_one);
        fields.field[2][block * 16 + number] = static_cast<unsigned char>(this->sc);
        if (number == 0) fields.put_half(3, block, this->d);
    }
};

// ---- the table: IQ4_NL and IQ4_XS --------------------------------------------------------------------------------

template <int BLOCK, bool WEIGHED_>
struct TableLane : Lane<BLOCK, 32, WEIGHED_> {
    using Shared = SharedIq4Table;

    float scale;

    __device__ __forceinline__ void weigh(const float (&v)[32], float) {
        this->weigh_by(v, ieee::multiply(this->sum_of_squares(), 2.0f / BLOCK));
    }

    __device__ __forceinline__ void search(const Shared& shared) {
        const Iq4Lookup table(shared, threadIdx.x);
        if constexpr (WEIGHED_) {
            scale = find_table_scale(this->x, [&](int i) { return this->w[i]; }, table);
        } else {
            float w[32];
            to_squares(this->x, w);
            scale = find_table_scale(this->x, [&](int i) { return w[i]; }, table);
        }
    }

    // 16 bytes for the codes of a scale: byte i has those of elements i and i + 16.
    __device__ __forceinline__ void codes_of(const Shared& shared, float scale, unsigned (&word)[4]) const {
        const Iq4Lookup table(shared, threadIdx.x);
        const float step = ieee::reciprocal(scale);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const unsigned code = table.code_of(ieee::multiply(step, this->x[i])) << (i % 4 * 8 + i / 16 * 4);
            word[i % 16 / 4] = code | (i % 4 == 0 && i < 16 ? 0 : word[i % 16 / 4]);
        }
    }
};

template <bool WEIGHED_>
struct IQ4_NLLane : TableLane<32, WEIGHED_> {
    unsigned word[4];

    __device__ __forceinline__ void agree(const SharedIq4Table& table) { this->codes_of(table, this->scale, word); }

    // fields: d, qs
    __device__ __forceinline__ void store(const Fields& fields, long long block, bool writes) const {
        if (!writes) return;
        fields.put_half(0, block, this->scale);
        fields.put_words(1, block * 16, word);
    }
};

template <bool WEIGHED_>
struct IQ4_XSLane : TableLane<256, WEIGHED_> {
    unsigned word[4];
    float d;
    int sc;

    __device__ __forceinline__ void agree(const SharedIq4Table& table) {
        d = ieee::divide(ieee::negative(longest_of<8>(this->scale, this->number)), 32.0f);
        // An infinite step is one of a scale that becomes 0.
        const float steps = ieee::multiply(ieee::reciprocal(d), this->scale);
        const float code = signed_code<32>(ieee::magnitude_bits(steps) == 0x7f800000u ? -32.0f : ieee::finite(steps));
        sc = static_cast<int>(code);
        this->codes_of(table, ieee::multiply(d, code), word);
    }

    // fields: d, high bits of the scales, their low bits, qs
    __device__ __forceinline__ void store(const Fields& fields, long long block, bool writes) const {
        const int number = this->number;
        const unsigned stored = static_cast<unsigned>(sc + 32), low = stored & 15;
        const unsigned low_1 = __shfl_xor_sync(FULL_WARP, low, 1);
        unsigned high = stored >> 4 << number * 2;
#pragma unroll
        for (int step = 1; step < 8; step *= 2) high |= __shfl_xor_sync(FULL_WARP, high, step);
        if (!writes) return;
        if (number == 0) {
            fields.put_half(0, block, d);
            fields.field[1][block * 2] = static_cast<unsigned char>(high);
            fields.field[1][block * 2 + 1] = static_cast<unsigned char>(high >> 8);
        }
        if (number % 2 == 0) fields.field[2][block * 4 + number / 2] = static_cast<unsigned char>(low | low_1 << 4);
        fields.put_words(3, block * 128 + number * 16, word);
    }
};

// ---- blocks of 32 with importance: Q4_0, Q5_0, Q4_1 and Q5_1 -----------------------------------------------------

// BITS bits a code, a scale and, where it has one, a minimum. Codes stay as they are found.
template <int BITS, bool MINIMUM>
struct LegacyLane : Lane<32, 32, true> {
    float code[32], d, m;

    __device__ __forceinline__ void weigh(const float (&v)[32], float mean) { weigh_by(v, mean); }

    __device__ __forceinline__ void search(const NothingShared&) {
        const auto weight = [&](int i) { return w[i]; };
        if constexpr (MINIMUM) {
            constexpr int LARGEST = (1 << BITS) - 1;
            const Range found = find_range<LARGEST, 36, true>(x, weight, -0.9f, 0.05f);
            Range::codes_of<LARGEST>(x, found.step, found.from, code);
            d = found.scale, m = found.low;
        } else {
            constexpr int LARGEST = 1 << (BITS - 1);
            const Scale found = find_scale<LARGEST>(x, weight);
#pragma unroll
            for (int i = 0; i < 32; ++i)
                code[i] = __fadd_rn(found.template code<LARGEST>(x[i]), static_cast<float>(LARGEST));
            d = found.scale;
        }
    }

    __device__ __forceinline__ void agree(const NothingShared&) {}

    // fields: d, and m behind it; the fifth bits; the others
    __device__ __forceinline__ void store(const Fields& fields, long long block, bool writes) const {
        if (!writes) return;
        unsigned word[8], low[4], fifth[1] = {0};
        to_bytes(code, 0, word);
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = (word[i] & 0x0f0f0f0fu) | (word[i + 4] & 0x0f0f0f0fu) << 4;
#pragma unroll
        for (int i = 0; i < 32; ++i) fifth[0] |= (word[i / 4] >> (i % 4 * 8 + 4) & 1u) << i;
        fields.put_half(0, block * (1 + MINIMUM), d);
        if constexpr (MINIMUM) fields.put_half(0, block * 2 + 1, m);
        if constexpr (BITS == 5) fields.put_words(1, block * 4, fifth);
        fields.put_words(BITS - 3, block * 16, low);
    }
};

using Q2_KEncoder = Q2_KLane<false>;
using Q3_KEncoder = Q3_KLane<false>;
using Q4_KEncoder = Q4_KLane<false>;
using Q5_KEncoder = Q5_KLane<false>;
using Q6_KEncoder = Q6_KLane<false>;
using IQ4_NLEncoder = IQ4_NLLane<false>;
using IQ4_XSEncoder = IQ4_XSLane<false>;

using Q2_KWeighed = Q2_KLane<true>;
using Q3_KWeighed = Q3_KLane<true>;
using Q4_KWeighed = Q4_KLane<true>;
using Q5_KWeighed = Q5_KLane<true>;
using Q6_KWeighed = Q6_KLane<true>;
using IQ4_NLWeighed = IQ4_NLLane<true>;
using IQ4_XSWeighed = IQ4_XSLane<true>;
using Q4_0Weighed = LegacyLane<4, false>;
using Q4_1Weighed = LegacyLane<4, true>;
using Q5_0Weighed = LegacyLane<5, false>;
using Q5_1Weighed = LegacyLane<5, true>;
