// Decoders for one token (members: decoder.cuh), whose mma has seven columns more: parts of k that have scales of their
// own have columns of their own. In column g is x of part g, and zero for all others, so that sums stay apart without a
// scale in between: those of a block of 256 elements are scaled once, and lane t has two of them of each of its rows.
//
// Codes that are worked out are halves as they are, multiples of 2^-24, of upper nibbles 16 times that: tensor cores
// multiply subnormal numbers, too.
//
// A decoder has, beside what it has from that for more tokens,
//
//     Own                       the words of x that a lane has of a block: of part g, and what belongs to lane t
//     load_own                  reads them
//     arrange_own               brings them to their places in two k-tiles, and finds sums of x
//     multiply_block            acc += W x of a block of 16 rows, in four sums, since an mma waits for the one that it
//                               adds to; all of acc of a row is to be added up in the end
//
// and for a token that is quantized (IntegerColumns)
//
//     place(lane, i)            where in a block the lane's first or second four neighbours begin, as Own has them
//     TOGETHER                  whether these have one scale
//     part_scales               of the lane's parts, from those of its own elements
#pragma once
#include "linear/block_activations.cuh"
#include "linear/gguf_tables.cuh"
#include "linear/kquants.cuh"

// A decoder for one token, parts of which have columns of their own (columns.cuh); or one that the kernel quantizes by
// "q8_1" as it reads it, so that sums of parts are exact, and are multiplied by the scales of their elements.
template <typename Base>
struct Columns;
template <typename Base>
struct IntegerColumns;
// ... of which a lane has two of each block.
struct NoPartScales {
    __device__ __forceinline__ float of(float sum, int) const { return sum; }
};
struct PartScales {
    float scale[2];
    __device__ __forceinline__ float of(float sum, int i) const { return ieee::multiply(sum, scale[i]); }
};
template <typename Decoder>
struct ByColumns {
    static constexpr bool VALUE = false, QUANTIZED = false;
    using Scales = NoPartScales;
    using Own = unsigned[4];
};
template <typename Base>
struct ByColumns<Columns<Base>> {
    static constexpr bool VALUE = true, QUANTIZED = false;
    using Scales = NoPartScales;
    using Own = typename Columns<Base>::Own;
};
template <typename Base>
struct ByColumns<IntegerColumns<Base>> {
    static constexpr bool VALUE = true, QUANTIZED = true;
    using Scales = PartScales;
    using Own = typename IntegerColumns<Base>::Own;
};

// Put x of part g in column g: `mine` has COUNT words of each, which begin at `first` of the PARTS of a k-tile.
template <int PARTS, int WORDS, int ALL>
__device__ __forceinline__ void put_apart(const unsigned (&mine)[WORDS], unsigned first, unsigned (&x)[ALL]) {
    const unsigned g = opaque(threadIdx.x % WARP) / 4;
#pragma unroll
    for (int i = 0; i < PARTS * WORDS; ++i) x[i] = g == first + i / WORDS ? mine[i % WORDS] : 0u;
}
// The sum of a lane's words of x.
template <typename T, int WORDS>
__device__ __forceinline__ float sum_of_words(const unsigned (&w)[WORDS]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) sum += Word<T>::get(w[i], 0) + Word<T>::get(w[i], 1);
    return sum;
}

// Parts are the eight sub-blocks.
template <typename T>
struct Columns<Q4K<T>> : Q4K<T> {
    using Base = Q4K<T>;
    using Base::FIELDS, Base::X_WORDS;
    using Own = unsigned[4];

    __device__ __forceinline__ static int token(int g) { return g; }

    struct Constants {
        unsigned own;               // the selector of the lane's two bytes of a word, and of those of the next word
        unsigned right, six, four;  // of the first or the second half of a block: where bits lie
        unsigned tops;              // upper bytes of 2^69, 2^73 and 2^49, and zero
    };
    static __device__ __forceinline__ Constants constants(const Values&) {
        const unsigned t = threadIdx.x % 4;
        const bool second = t >= 2;
        return {
            opaque(t % 2 ? 0x7632u : 0x5410u), opaque(second ? 2u : 0u), opaque(second ? 0x30303030u : 0x3f3f3f3fu),
            opaque(second ? 0x0f0f0f0fu : 0u), opaque(0x58640062u)};
    }

    __device__ __forceinline__ static void load_own(Own& own, const T* block, int lane, bool there) {
        load_global_if(own, reinterpret_cast<const uint4*>(block) + lane, there);
    }
    __device__ __forceinline__ static void arrange_own(
        const Own& w, unsigned (&first)[X_WORDS], unsigned (&second)[X_WORDS]) {
        float sum = sum_of_words<T>(w);
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        const unsigned t = opaque(threadIdx.x % 4);
        first[16] = __float_as_uint(__shfl_sync(FULL_WARP, sum, 8 * t));
        second[16] = __float_as_uint(__shfl_sync(FULL_WARP, sum, 8 * t + 4));
        const unsigned mine[4] = {
            __byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x5410),
            __byte_perm(w[2], w[3], 0x7632)};
        put_apart<4>(mine, 0, first), put_apart<4>(mine, 4, second);
    }

    // A byte as a float from TOP on, less that, of which it is a 2^23rd.
    template <unsigned SELECTOR>
    static __device__ __forceinline__ float number(unsigned bytes, unsigned tops, float top) {
        return __uint_as_float(__byte_perm(bytes, tops, SELECTOR)) - top;
    }
    __device__ __forceinline__ static void multiply_block(
        const unsigned (&f)[2][2][FIELDS], const unsigned (&first)[X_WORDS], const unsigned (&second)[X_WORDS],
        const Constants& with, unsigned record, unsigned eight, const NoPartScales&, float (&acc)[4]) {
        float part[4][4] = {};
#pragma unroll
        for (int step = 0; step < 16; ++step) {
            const int item = step / 8, j = step / 2 % 4, w = step % 2;
            unsigned a[2][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i / 2][i % 2] = nibbles(f[item][i / 2][j / 2 * 2 + w], j % 2, i % 2);
            const unsigned (&x)[X_WORDS] = item ? second : first;
            mma<T>(part[step % 4], a[0][0], a[1][0], a[0][1], a[1][1], x[4 * j + 2 * w], x[4 * j + 2 * w + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) part[0][i] += part[2][i], part[1][i] += part[3][i];
        constexpr float LOW = 9.444732965739290427392e21f, HIGH = LOW / 16, MINIMUM = LOW / 16777216;  // 2^73, ...
        const float sums[2] = {__uint_as_float(first[16]), __uint_as_float(second[16])};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 stored = shared_at<uint4>(record + i * eight);
            // sc of the lane's two sub-blocks, then mn.
            const unsigned bytes = (__byte_perm(stored.y, stored.z, with.own) >> with.right & with.six) |
                                   (__byte_perm(stored.w, stored.w >> 4, with.own) & with.four);
            const float high = (part[0][2 * i + 1] + part[1][2 * i + 1]) * number<0x4551>(bytes, with.tops, HIGH);
            const float product = fmaf(part[0][2 * i] + part[1][2 * i], number<0x6550>(bytes, with.tops, LOW), high);
            const float minimum = sums[1] * number<0x7553>(bytes, with.tops, MINIMUM);
            const float less = fmaf(sums[0], number<0x7552>(bytes, with.tops, MINIMUM), minimum);
            acc[2 * i] = fmaf(product, Word<__half>::get(stored.x, 0), acc[2 * i]);
            acc[2 * i] = fmaf(less, -Word<__half>::get(stored.x, 1), acc[2 * i]);
        }
    }
};

// Tables: parts are the eight blocks of 32 of two k-tiles.
template <typename Base>
struct TableColumns : Base {
    using T = typename Base::Type;
    using Base::X_WORDS;
    using Own = unsigned[4];
    static constexpr bool SPLIT_CODES = Base::k_of(0, 0, 1) == 16, TOGETHER = true;

    __device__ __forceinline__ static int token(int g) { return g; }

    __device__ __forceinline__ static void load_own(Own& own, const T* block, int lane, bool there) {
        if constexpr (SPLIT_CODES) {
            const uint2* from = reinterpret_cast<const uint2*>(block) + (lane / 4 * 8 + lane % 4);
            load_global_if(own, from, there), load_global_if(own + 2, from + 4, there);
        } else {
            load_global_if(own, reinterpret_cast<const uint4*>(block) + lane, there);
        }
    }
    __device__ __forceinline__ static void arrange_own(
        const Own& w, unsigned (&first)[X_WORDS], unsigned (&second)[X_WORDS]) {
        unsigned mine[4] = {w[0], w[1], w[2], w[3]};
        if constexpr (SPLIT_CODES) {
            mine[0] = __byte_perm(w[0], w[2], 0x5410), mine[1] = __byte_perm(w[0], w[2], 0x7632);
            mine[2] = __byte_perm(w[1], w[3], 0x5410), mine[3] = __byte_perm(w[1], w[3], 0x7632);
        }
        put_apart<4>(mine, 0, first), put_apart<4>(mine, 4, second);
    }
    __device__ __forceinline__ static int place(int lane, int i) {
        return SPLIT_CODES ? lane / 4 * 32 + lane % 4 * 4 + i * 16 : lane * 8 + i * 4;
    }
    __device__ __forceinline__ static PartScales part_scales(const float (&own)[1], int t) {
        return {{__shfl_sync(FULL_WARP, own[0], 8 * t), __shfl_sync(FULL_WARP, own[0], 8 * t + 4)}};
    }
    // part += codes * x, without scales.
    __device__ __forceinline__ static void look_up(
        const unsigned (&f)[2][2][Base::FIELDS], const unsigned (&first)[X_WORDS], const unsigned (&second)[X_WORDS],
        unsigned lane, float (&part)[4][4]) {
#pragma unroll
        for (int step = 0; step < 16; ++step) {
            const int item = step / 8, j = step / 2 % 4, h = step % 2;
            unsigned a[2][2];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                a[i / 2][i % 2] = table_entry(entry_offset(f[item][i / 2][j], 2 * h + i % 2, lane));
            const unsigned (&x)[X_WORDS] = item ? second : first;
            mma<T>(part[step % 4], a[0][0], a[1][0], a[0][1], a[1][1], x[4 * j + 2 * h], x[4 * j + 2 * h + 1]);
        }
    }
};
template <typename Base>
struct Columns : TableColumns<Base> {
    using T = typename Base::Type;
    using Base::FIELDS, Base::X_WORDS, Base::SCALE_BYTES;

    // The lane's two scales of a row.
    static __device__ __forceinline__ void scales_of(unsigned at, unsigned t, float (&scale)[2]) {
        if constexpr (SCALE_BYTES == 8) {
            const unsigned two = shared_at<unsigned>(at + t * 4);
            scale[0] = Word<__half>::get(two, 0), scale[1] = Word<__half>::get(two, 1);
        } else {
            const unsigned two[1] = {shared_at<unsigned short>(at + t * 2)};
            scale[0] = Base::scale_of(two, 0), scale[1] = Base::scale_of(two, 1);
        }
    }
    template <typename OfToken>
    __device__ __forceinline__ static void multiply_block(
        const unsigned (&f)[2][2][FIELDS], const unsigned (&first)[X_WORDS], const unsigned (&second)[X_WORDS],
        unsigned lane, unsigned scales, unsigned eight, const OfToken& of_token, float (&acc)[4]) {
        float part[4][4] = {}, scale[2][2];
        const unsigned t = opaque(threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) scales_of(scales + i * eight, t, scale[i]);
        TableColumns<Base>::look_up(f, first, second, lane, part);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            acc[i] = fmaf(
                of_token.of((part[0][i] + part[1][i]) + (part[2][i] + part[3][i]), i % 2), scale[i / 2][i % 2], acc[i]);
    }
};

// iq4_xs: a lane has whole blocks of 32, whose codes are one read: of two k-tiles blocks t and 4 + t. x of a block is
// with the one lane of eight that has both its codes and its column.
template <typename T>
struct Columns<InnerPairTable<T>> : TableColumns<InnerPairTable<T>> {
    using Base = InnerPairTable<T>;
    using Base::FIELDS, Base::WORDS, Base::X_WORDS, Base::ITEM_BYTES;
    using Own = unsigned[X_WORDS];
    static constexpr int LANE_BYTES = 16;
    static constexpr bool ONE_READ = true;

    template <bool MINE>
    __device__ __forceinline__ static void read(unsigned (&word)[WORDS], unsigned row, int swizzle, int t) {
        to_words(word, shared_at<uint4>(MINE ? row : row + (t * LANE_BYTES ^ swizzle)));
    }
    __device__ __forceinline__ static void read_swizzled(unsigned (&word)[WORDS], unsigned from, int j, int behind) {
        to_words(word, shared_at<uint4>((from ^ j * ITEM_BYTES) + behind));
    }

    __device__ __forceinline__ static void load_own(Own& own, const T* block, int lane, bool there) {
        const bool mine = there && lane / 4 % 4 == lane % 4;
#pragma unroll
        for (int i = 0; i < X_WORDS / 4; ++i)
            load_global_if(own + 4 * i, reinterpret_cast<const uint4*>(block + lane / 4 * 32) + i, mine);
    }
    __device__ __forceinline__ static void arrange_own(
        const Own& w, unsigned (&first)[X_WORDS], unsigned (&second)[X_WORDS]) {
        const bool late = opaque(threadIdx.x % WARP) >= WARP / 2;
#pragma unroll
        for (int i = 0; i < X_WORDS; ++i) {
            const unsigned pair = __byte_perm(w[i / 2], w[i / 2 + X_WORDS / 2], i % 2 ? 0x7632 : 0x5410);
            first[i] = late ? 0u : pair, second[i] = late ? pair : 0u;
        }
    }

    // Blocks come with codes of their scales, InnerScales::hand_out.
    __device__ __forceinline__ static void multiply_block(
        const unsigned (&f)[2][2][FIELDS], const unsigned (&first)[X_WORDS], const unsigned (&second)[X_WORDS],
        unsigned lane, unsigned scales, unsigned eight, const NoPartScales&, float (&acc)[4]) {
        float part[4][4] = {};
        TableColumns<Base>::look_up(f, first, second, lane, part);
        const unsigned t = opaque(threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 block = shared_at<uint4>(scales + i / 2 * eight);
            const unsigned codes = i % 2 ? block.y : block.x;
            const float scale = InnerCodes::scale(codes, t, __uint_as_float(block.z), __uint_as_float(block.w));
            acc[i] = fmaf((part[0][i] + part[1][i]) + (part[2][i] + part[3][i]), scale, acc[i]);
        }
    }
};

// nvfp4: parts are the eight blocks of 16 of a k-tile. Two of them are 32 elements of a row, of which two lanes each
// have one.
template <typename T>
struct Columns<SharedTable16<T>> : TableColumns<SharedTable16<T>> {
    using Base = SharedTable16<T>;
    using Base::FIELDS, Base::X_WORDS;
    using Own = unsigned[4];

    __device__ __forceinline__ static void arrange_own(
        const Own& w, unsigned (&first)[X_WORDS], unsigned (&second)[X_WORDS]) {
        const unsigned lane = opaque(threadIdx.x % WARP), block = lane / 8;
        const bool mine = lane / 4 % 2 == lane % 4 / 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned of_first = __shfl_sync(FULL_WARP, w[i], block * 4 + lane % 4);
            const unsigned of_second = __shfl_sync(FULL_WARP, w[i], 16 + block * 4 + lane % 4);
#pragma unroll
            for (unsigned j = 0; j < 4; ++j) {
                first[4 * j + i] = mine && block == j ? of_first : 0u;
                second[4 * j + i] = mine && block == j ? of_second : 0u;
            }
        }
    }
    // Of both k-tiles the scale of the 32 elements whose two parts the lane has.
    __device__ __forceinline__ static PartScales part_scales(const float (&own)[1], int t) {
        return {{__shfl_sync(FULL_WARP, own[0], 4 * t), __shfl_sync(FULL_WARP, own[0], 16 + 4 * t)}};
    }

    __device__ __forceinline__ static void multiply_block(
        const unsigned (&f)[2][2][FIELDS], const unsigned (&first)[X_WORDS], const unsigned (&second)[X_WORDS],
        unsigned lane, unsigned scales, unsigned eight, const PartScales& of_token, float (&acc)[4]) {
        const unsigned of_lane = scales + opaque(threadIdx.x % 4) * 2;
        float part[2][2][4] = {};
        unsigned scale[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            scale[i / 2][i % 2] =
                Base::two_of(shared_at<unsigned short>(of_lane + i / 2 * Base::SCALE_BYTES + i % 2 * eight));
#pragma unroll
        for (int step = 0; step < 16; ++step) {
            const int item = step / 8, j = step / 2 % 4, h = step % 2;
            const unsigned word[2] = {f[item][0][j], f[item][1][j]};
            unsigned a[2][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i / 2][i % 2] = table_entry(entry_offset(word[i / 2], 2 * h + i % 2, lane));
            const unsigned (&x)[X_WORDS] = item ? second : first;
            mma<T>(part[item][h], a[0][0], a[1][0], a[0][1], a[1][1], x[4 * j + 2 * h], x[4 * j + 2 * h + 1]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int item = i / 4, at = i % 4;
            const float sum = of_token.of(part[item][0][at] + part[item][1][at], item);
            acc[at] = fmaf(sum, Word<T>::get(scale[item][at / 2], at % 2), acc[at]);
        }
    }
};

// Parts are the lower and the upper nibbles of the four blocks of a k-tile, since a byte has elements i and i + 16.
template <typename T>
struct Columns<Q4_1<T>> : Q4_1<T> {
    using Base = Q4_1<T>;
    using Base::FIELDS, Base::X_WORDS, Base::UNIT;
    using Own = unsigned[4];  // two of each k-tile

    __device__ __forceinline__ static int token(int g) { return g; }

    __device__ __forceinline__ static void load_own(Own& own, const T* block, int lane, bool there) {
        const uint2* from = reinterpret_cast<const uint2*>(block) + lane;
        load_global_if(own, from, there), load_global_if(own + 2, from + WARP, there);
    }
    __device__ __forceinline__ static void arrange_own(
        const Own& w, unsigned (&first)[X_WORDS], unsigned (&second)[X_WORDS]) {
        arrange_item({w[0], w[1]}, first), arrange_item({w[2], w[3]}, second);
    }
    __device__ __forceinline__ static void arrange_item(const unsigned (&w)[2], unsigned (&x)[X_WORDS]) {
        float sum = sum_of_words<T>(w);
#pragma unroll
        for (int apart = 1; apart < 8; apart *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, apart);
        x[16] = __float_as_uint(__shfl_sync(FULL_WARP, sum, 8 * opaque(threadIdx.x % 4)) * UNIT);
        put_apart<8, 2>({__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632)}, 0, x);
    }

    // The lane's parts are both of one block, of either k-tile.
    static constexpr bool TOGETHER = false;
    __device__ __forceinline__ static int place(int lane, int i) { return lane * 4 + i * ITEM_K; }
    __device__ __forceinline__ static PartScales part_scales(const float (&own)[2], int t) {
        return {{__shfl_sync(FULL_WARP, own[0], 8 * t), __shfl_sync(FULL_WARP, own[1], 8 * t)}};
    }

    struct Constants {
        unsigned at;  // of the lane's d and m in a record
    };
    static __device__ __forceinline__ Constants constants(const Values&) { return {opaque(threadIdx.x % 4 * 4)}; }
    template <typename OfToken>
    __device__ __forceinline__ static void multiply_block(
        const unsigned (&f)[2][2][FIELDS], const unsigned (&first)[X_WORDS], const unsigned (&second)[X_WORDS],
        const Constants& with, unsigned record, unsigned eight, const OfToken& of_token, float (&acc)[4]) {
#pragma unroll
        for (int item = 0; item < 2; ++item) {
            const unsigned (&x)[X_WORDS] = item ? second : first;
            float part[4] = {};
#pragma unroll
            for (int s = 0; s < 8; ++s) {
                unsigned a[2][2];
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i / 2][i % 2] = nibbles(f[item][i / 2][s / 2], s % 2, i % 2);
                mma<T>(part, a[0][0], a[1][0], a[0][1], a[1][1], x[2 * s], x[2 * s + 1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned both = shared_at<unsigned>(record + item * Base::SCALE_BYTES + i * eight + with.at);
                const float product = fmaf(part[2 * i + 1], 0.0625f, part[2 * i]);
                float& to = acc[2 * i + item];
                to = fmaf(of_token.of(product, item), Word<__half>::get(both, 0), to);
                to = fmaf(of_token.of(__uint_as_float(x[16]), item), Word<__half>::get(both, 1), to);
            }
        }
    }
};

// The same of a token that is quantized by "q8_1": the lanes that have 32 elements of it find their scale, and x is
// their codes.
template <typename Base>
struct IntegerColumns : Columns<Base> {
    using Wide = Columns<Base>;
    using Own = unsigned[8];  // of types of two bytes half of it

    template <typename X>
    __device__ __forceinline__ static void load_own(Own& own, const X* block, int lane, bool there) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const X* from = block + Wide::place(lane, i);
            if constexpr (sizeof(X) == 4) load_global_if(own + 4 * i, reinterpret_cast<const uint4*>(from), there);
            else load_global_if(own + 4 * i, reinterpret_cast<const uint2*>(from), there);
        }
    }

    template <typename X>
    __device__ __forceinline__ static PartScales quantize(const Own& own, int lane, unsigned (&codes)[4]) {
        constexpr int BLOCKS = Wide::TOGETHER ? 1 : 2, FOURS = 2 / BLOCKS;  // of the lane; of a block
        float scale[BLOCKS];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            using OfBlock = Numbers<X, 4 * FOURS>;
            OfBlock numbers;
#pragma unroll
            for (int w = 0; w < OfBlock::WORDS; ++w)
                numbers.word[w] = own[(block * FOURS + w * FOURS / OfBlock::WORDS) * 4 + w % (OfBlock::WORDS / FOURS)];
            unsigned most = numbers.largest();
#pragma unroll
            for (int apart = 1; apart < 8 / FOURS; apart *= 2)
                most = max(most, __shfl_xor_sync(FULL_WARP, most, apart));
            const BlockRule rule(most);
            scale[block] = rule.scale;
            float v[4 * FOURS];
            unsigned word[FOURS];
            numbers.get(v), rule.codes(v, word);
#pragma unroll
            for (int e = 0; e < 4 * FOURS; e += 2)
                codes[(4 * FOURS * block + e) / 2] =
                    Word<__half>::pack(code(word[e / 4], e % 4), code(word[e / 4], e % 4 + 1));
        }
        return Wide::part_scales(scale, lane % 4);
    }

  private:
    __device__ __forceinline__ static float code(unsigned word, int i) {
        return static_cast<float>(static_cast<signed char>(word >> 8 * i));
    }
};

template <typename Base>
struct KnownValues<Columns<Base>> : KnownValues<Base> {};
template <typename Base>
struct KnownValues<IntegerColumns<Base>> : KnownValues<Base> {};
