// Decoders of codebooks for the products of few tokens: bit planes of blocks of 32 (Kbit) and tables of 16 values
// (Table4). What their members mean stands in decoder.cuh.
#pragma once
#include "linear/decoder.cuh"

// ---- k-bit ---------------------------------------------------------------------------------------------------------

// TWO_PARTS: each value is kept as two numbers of T, the rounded one and what that leaves, so that a weight is rounded
// once, as decoded weights are. Scales are kept so, too, where T does not hold them. Many values are so close together
// that they need it; and what rounding does to few values, which times scales of 5 bits are few numbers, does not
// average out over a row.
template <typename T, int K, int FORMAT, bool TWO_PARTS = (K > 5)>
struct Kbit {
    using Type = T;
    using Code = typename Absmax<FORMAT>::Code;
    static constexpr int VALUES = 1 << K, ENTRIES = K >= 5 ? VALUES : 256;
    static constexpr bool GAPS = !TWO_PARTS && (K == 3 || K == 4);
    static constexpr int SCALE_BYTES = ITEM_K / ROW * sizeof(Code), WORDS = K;
    // Of 4 values an entry is for four codes, but in two parts, which have as many words, for two, as of 8 and 16.
    static constexpr int FIELDS = Field<(TWO_PARTS && K == 2 ? 4 : K)>::BITS;
    static constexpr int ITEM_BYTES = ITEM_K * K / 8, LANE_BYTES = ROW * K / 8;
    static constexpr bool SPREAD_SCALES = false, PAIRED = false;
    // What the sums of multiply lack: a scale of up to 65504 must leave room for the values.
    static constexpr float EPILOGUE_SCALE = FORMAT == FLOAT16 ? 4.0f : 1.0f;
    static constexpr int SCALE_STEP = sizeof(Code), X_WORDS = 16, MOST_TOGETHER = 2;
    static constexpr int SWIZZLE_PERIOD = 1;
    static constexpr bool ONE_READ = K == 4;
    // Words are read one or two at a time, and each word of `unpack` has bits of all.
    static constexpr bool MIXED = K > 4 && K < 8;
    static constexpr bool EXACT_SCALE = FORMAT == E4M4 || (FORMAT == FLOAT16 && SameType<T, __half>::VALUE);

    __device__ __forceinline__ static int row(int g) { return g; }
    __device__ __forceinline__ static int token(int g) { return g; }

    // The block of 32 that a lane owns in a row of an k-tile; `row` is the address of that in the shared window, of
    // this lane's part where MINE, and `swizzle` what its places are exclusive-ored with.
    template <bool MINE>
    __device__ __forceinline__ static void read(unsigned (&word)[WORDS], unsigned row, int swizzle, int t) {
        const unsigned source = MINE ? row : row + ((t * LANE_BYTES) ^ swizzle);
        if constexpr (K == 4) {
            const uint4 v = shared_at<uint4>(source);
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        } else if constexpr (K == 2) {
            const uint2 v = shared_at<uint2>(source);
            word[0] = v.x, word[1] = v.y;
        } else if constexpr (K == 6) {
#pragma unroll
            for (int p = 0; p < K; p += 2) to_words(word + p, shared_at<uint2>(source + 4 * p));
        } else {
#pragma unroll
            for (int p = 0; p < K; ++p) word[p] = shared_at<unsigned>(source + 4 * p);
        }
    }

    // The same of k-tile `j` of two whose rows, of 128 bytes, are permuted; `from` is where this lane begins in the
    // first, less `behind`.
    __device__ __forceinline__ static void read_swizzled(unsigned (&word)[WORDS], unsigned from, int j, int behind) {
        static_assert(K == 4 || K == 8, "rows of 64 bytes, or 128");
#pragma unroll
        for (int p = 0; p < K; p += 4) to_words(word + p, shared_at<uint4>((from ^ (j * ITEM_BYTES + 4 * p)) + behind));
    }

    // The x that a lane needs for an k-tile, of which `left` elements are there; `x` is that of the lane's token.
    __device__ __forceinline__ static void load_x_global(
        unsigned (&word)[16], const T* x, bool there, int left, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            load_global_if(word + 4 * i, reinterpret_cast<const uint4*>(x + t * ROW) + i, there && t * ROW < left);
    }

    // The same from shared memory, `address(i)` being that of element i.
    template <typename Address>
    __device__ __forceinline__ static void load_x_shared(unsigned (&word)[16], const Address& address, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to_words(word + 4 * i, shared_at<uint4>(address(t * ROW + 8 * i)));
    }

    // For each 8 consecutive elements, which stand in 4 words, the 4 pairs of the table.
    __device__ __forceinline__ static void arrange_x(unsigned (&x)[16]) {
        if constexpr (K >= 5) return;
        constexpr int FAR = FIELDS == 2 ? 1 : 2;  // distance of the two words that a pair comes from
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            const unsigned a = x[j], b = x[j + FAR], c = x[j + 3 - FAR], d = x[j + 3];
            x[j] = __byte_perm(a, b, 0x5410), x[j + 3 - FAR] = __byte_perm(a, b, 0x7632);
            x[j + FAR] = __byte_perm(c, d, 0x5410), x[j + 3] = __byte_perm(c, d, 0x7632);
        }
    }

    // Fill the table with values in two parts: those of a plane, or of the parameter, which are prescaled. Returns the
    // prescale.
    __device__ static float fill_in_two(
        unsigned table, const float* values, const Values& codebook, unsigned thread, unsigned threads) {
        float power = codebook.power;
        if (values) {
            wait_for_previous();
            float largest = 0.0f;
            for (int i = threadIdx.x % WARP; i < VALUES; i += WARP) largest = fmaxf(largest, fabsf(values[i]));
            power = power_below(__uint_as_float(warp_max(__float_as_uint(largest))));
        }
        const float factor = (FORMAT == E4M4 ? E4m4Pair<T>::FACTOR : 1.0f) / EPILOGUE_SCALE;
        auto value = [&](unsigned code) {
            return in_two((values ? values[code] * power : codebook.map[code]) * factor);
        };
        for (unsigned i = thread; i < 2 * ENTRIES; i += threads) {
            const unsigned index = i / 2;
            if constexpr (K >= 5) {
                const unsigned word[1] = {value(index)};
                fill_entry<1>(table, index, i % 2, word);
            } else {
                const unsigned first = value(index % VALUES), second = value(index / 16 % VALUES);
                const unsigned word[2] = {__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632)};
                fill_entry<2>(table, index, i % 2, word);
            }
        }
        return power;
    }

    // A number as the sum of two of T, the rounded one in the lower half of a word.
    static __device__ __forceinline__ unsigned in_two(float v) {
        return Word<T>::pack(v, v - Word<T>::get(Word<T>::pack(v, 0.0f), 0));
    }

    // Each lane brings a value: lane i that of index i % VALUES. All lanes of a warp are here.
    template <bool ONE>
    __device__ static void fill(unsigned table, float mine, unsigned thread, unsigned threads) {
        if constexpr (FORMAT == E4M4 && !ONE) mine *= E4m4Pair<T>::FACTOR;
        if constexpr (!ONE) mine /= EPILOGUE_SCALE;
        const unsigned rounded = between<T>(mine);
        auto value = [&](int index) { return __shfl_sync(FULL_WARP, rounded, index & (VALUES - 1)); };
        for (unsigned i = thread; i < 2 * ENTRIES; i += threads) {
            const int index = i / 2, part = i % 2;
            if constexpr (K >= 5) {
                fill_rounded_halves(table, index, part, value(index));
            } else if constexpr (K == 2) {
                const unsigned v[4] = {value(index), value(index >> 2), value(index >> 4), value(index >> 6)};
                fill_entry<2>(table, index, part, rounded_fours(v));
            } else {
                const unsigned low = value(index), high = value(index >> 4);
                const uint4 four = rounded_pairs(low, high, bits_of_code(index), bits_of_code(index >> 4));
                fill_entry<1>(table, index, part, four);
            }
        }
    }

    __device__ __forceinline__ static unsigned lane_offset(int lane) {
        return lane * (K < 5 && (K == 2 || TWO_PARTS) ? 8 : 4);
    }

    // The planes of a tile, transposed: field n of word w is an index.
    __device__ __forceinline__ static void unpack(const unsigned (&word)[2][WORDS], unsigned (&f)[2][FIELDS]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int p = 0; p < FIELDS; ++p) f[i][p] = p < K ? word[i][p] : 0u;
            transpose_fields<FIELDS>(f[i]);
        }
    }

    // A tile of 16 rows. `scales` is the address of the scale of row g; those of row g + 8 follow `eight` bytes on.
    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        const NoTokenScales&, float (&acc)[EIGHTS][4]) {
        unsigned scale[2], rest[2];
        float after[2], part[EIGHTS][4] = {};
        float (&sum)[EIGHTS][4] = FORMAT == FLOAT32 ? part : acc;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Code code = shared_at<Code>(scales + i * eight);
            if constexpr (FORMAT == E4M4) {
                scale[i] = E4m4Pair<T>::of(code);
            } else if constexpr (FORMAT == FLOAT16) {
                split_scale(__half2float(code), scale[i], rest[i]);
            } else {
                // The scales of the four blocks of a row, relative to the largest: half precision lacks the range.
                unsigned largest = __float_as_uint(code) & 0x7f800000u;
                largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                largest = min(max(largest, 1u << 23), 252u << 23);
                after[i] = __uint_as_float(largest);
                split_scale(code * __uint_as_float((254u << 23) - largest), scale[i], rest[i]);
            }
        }
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            unsigned a[2][2];
            if constexpr (TWO_PARTS) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[i / 2][i % 2] = rounded_once(f[i / 2], s * 2 + i % 2, lane, scale[i / 2], rest[i / 2]);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) weights(f[i], s, lane, a[i]);
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) a[i][h] = Word<T>::multiply(a[i][h], scale[i]);
            }
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
                mma<T>(sum[e], a[0][0], a[1][0], a[0][1], a[1][1], x[e][2 * s], x[e][2 * s + 1]);
        }
        if constexpr (FORMAT == FLOAT32) {
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[e][i] = fmaf(part[e][i], after[i / 2], acc[e][i]);
        }
    }

    // A scale twice in a word, and what it leaves where weights are rounded once.
    static __device__ __forceinline__ void split_scale(float s, unsigned& scale, unsigned& rest) {
        scale = Word<T>::pack(s, s);
        if constexpr (TWO_PARTS && !EXACT_SCALE) {
            const float left = s - Word<T>::get(scale, 0);
            rest = Word<T>::pack(left, left);
        }
    }

    // Pair h of a row's sixteen, scaled: the products of what was left first, so that one rounding is all that counts.
    static __device__ __forceinline__ unsigned rounded_once(
        const unsigned (&f)[FIELDS], int h, unsigned lane, unsigned scale, unsigned rest) {
        uint2 v;  // the values, and what they leave
        if constexpr (K >= 5) {
            const unsigned first = table_entry(entry_offset(f[h % 4 * 2], h / 4, lane));
            const unsigned second = table_entry(entry_offset(f[h % 4 * 2 + 1], h / 4, lane));
            v = make_uint2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
        } else {
            v = table_entry_pair(entry_offset(f[h % 4], h / 4, lane));
        }
        unsigned small = Word<T>::multiply(v.y, scale);
        if constexpr (!EXACT_SCALE) small = fma_pairs<T>(v.x, rest, small);
        return fma_pairs<T>(v.x, scale, small);
    }

    // The four unscaled values of step s of a row, from its transposed planes.
    __device__ __forceinline__ static void weights(
        const unsigned (&f)[FIELDS], int s, unsigned lane, unsigned (&pair)[2]) {
        if constexpr (K == 2) {
            const uint2 v = table_entry_pair(entry_offset(f[s % 2], s / 2, lane));
            pair[0] = v.x, pair[1] = v.y;
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if constexpr (K >= 5) {
                    const int w = s % 2 * 4 + 2 * h;
                    pair[h] = table_entry(entry_offset(f[w], s / 2, lane)) |
                              table_entry<128>(entry_offset(f[w + 1], s / 2, lane));
                } else {
                    pair[h] = table_entry(entry_offset(f[s % 2 * 2 + h], s / 2, lane));
                }
            }
        }
    }
};

template <typename T, int K, int FORMAT, bool TWO_PARTS>
struct RoundsBothWays<Kbit<T, K, FORMAT, TWO_PARTS>> {
    static constexpr bool VALUE = !TWO_PARTS;
};

template <typename T, int K, int FORMAT, bool TWO_PARTS>
struct InTwoParts<Kbit<T, K, FORMAT, TWO_PARTS>> {
    static constexpr bool VALUE = TWO_PARTS;
};

// ---- tables of 16 values -------------------------------------------------------------------------------------------

// Four bits an element, the earlier of two in the upper half of a byte; one float32 scale a block, or an 8-bit code of
// it. SUB consecutive elements, 16, 32 or 64, belong to one block: the four lanes of a row share them, so that the sums
// of SUB / 16 steps can be scaled in fp32.
template <typename T, int SUB>
struct Table4 {
    using Type = T;
    static constexpr int VALUES = 16, ENTRIES = 256, SUBS = ITEM_K / SUB;
    static constexpr bool GAPS = true;
    static constexpr int SCALE_BYTES = SUBS * 4, WORDS = 4, FIELDS = 4;
    static constexpr int ITEM_BYTES = ITEM_K / 2, LANE_BYTES = SUB / 8;
    static constexpr bool SPREAD_SCALES = true, PAIRED = false;
    static constexpr float EPILOGUE_SCALE = 1.0f;
    static constexpr int SCALE_STEP = 0, X_WORDS = 16, MOST_TOGETHER = 2;
    static constexpr int SWIZZLE_PERIOD = 4;
    static constexpr bool ONE_READ = false, MIXED = false;

    // With reads of 8 bytes, half of the lanes meet in a bank if they have neighbouring rows.
    __device__ __forceinline__ static int row(int g) { return SUB == 64 ? (g & 1) | (g & 2) << 1 | (g & 4) >> 1 : g; }
    __device__ __forceinline__ static int token(int g) { return g; }

    template <bool>
    __device__ __forceinline__ static void read(unsigned (&word)[WORDS], unsigned row, int swizzle, int t) {
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            const unsigned source = row + ((j * (SUB / 2) + t * LANE_BYTES) ^ swizzle);
            if constexpr (SUB == 64) {
                const uint2 v = shared_at<uint2>(source);
                word[2 * j] = v.x, word[2 * j + 1] = v.y;
            } else if constexpr (SUB == 32) {
                word[j] = shared_at<unsigned>(source);
            } else {
                const unsigned half = shared_at<unsigned short>(source);
                word[j / 2] = j % 2 ? word[j / 2] | half << 16 : half;
            }
        }
    }

    __device__ __forceinline__ static void read_swizzled(unsigned (&word)[WORDS], unsigned from, int j, int behind) {
        static_assert(SUB == 64, "pieces of 8 bytes");
#pragma unroll
        for (int i = 0; i < SUBS; ++i) {
            const uint2 v = shared_at<uint2>((from ^ (j * ITEM_BYTES + i * (SUB / 2))) + behind);
            word[2 * i] = v.x, word[2 * i + 1] = v.y;
        }
    }

    __device__ __forceinline__ static void load_x_global(
        unsigned (&word)[16], const T* x, bool there, int left, int t) {
        using Piece = typename PieceOf<(SUB > 16 ? 16 : 8)>::Type;
#pragma unroll
        for (int j = 0; j < SUBS; ++j)
#pragma unroll
            for (int c = 0; c < (SUB > 32 ? 2 : 1); ++c)
                load_global_if(
                    word + j * (SUB / 8) + 4 * c, reinterpret_cast<const Piece*>(x + j * SUB + t * (SUB / 4)) + c,
                    there && j * SUB < left);
    }

    template <typename Address>
    __device__ __forceinline__ static void load_x_shared(unsigned (&word)[16], const Address& address, int t) {
        using Piece = typename PieceOf<(SUB > 16 ? 16 : 8)>::Type;
        constexpr int SIZE = sizeof(Piece) / 4;
#pragma unroll
        for (int i = 0; i < 16 / SIZE; ++i) {
            const int j = i * SIZE / (SUB / 8), c = i * SIZE % (SUB / 8);
            to_words(word + i * SIZE, shared_at<Piece>(address(j * SUB + t * (SUB / 4) + c * 2)));
        }
    }

    __device__ __forceinline__ static void arrange_x(unsigned (&)[16]) {}

    template <bool ONE>
    __device__ static void fill(unsigned table, float mine, unsigned thread, unsigned threads) {
        fill_pairs<T>(table, mine, thread, threads);
    }

    __device__ __forceinline__ static unsigned lane_offset(int lane) { return lane * 4; }

    // The codes as they are.
    __device__ __forceinline__ static void unpack(const unsigned (&word)[2][WORDS], unsigned (&f)[2][FIELDS]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i / 4][i % 4] = word[i / 4][i % 4];
    }

    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        const NoTokenScales&, float (&acc)[EIGHTS][4]) {
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            float part[EIGHTS][4] = {};
#pragma unroll
            for (int s = j * (SUB / 16); s < (j + 1) * (SUB / 16); ++s) {
                unsigned a[2][2];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[i / 2][i % 2] = table_entry(entry_offset(f[i / 2][s / 2], s % 2 * 2 + i % 2, lane));
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e)
                    mma<T>(part[e], a[0][0], a[1][0], a[0][1], a[1][1], x[e][2 * s], x[e][2 * s + 1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float scale = shared_at<float>(scales + i * eight + 4 * j);
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) {
                    acc[e][2 * i] = fmaf(part[e][2 * i], scale, acc[e][2 * i]);
                    acc[e][2 * i + 1] = fmaf(part[e][2 * i + 1], scale, acc[e][2 * i + 1]);
                }
            }
        }
    }
};

template <typename T, int SUB>
struct RoundsBothWays<Table4<T, SUB>> {
    static constexpr bool VALUE = true;
};
