// Fragments of linear_one: weights as operands of mma where there is one token.
//
// The eight columns of B are then free. Column 2t + h is for lane t: of each eight weights that it looks up of a row,
// four belong to h = 0 and four to h = 1, and A has the former where mma has row g and the latter where it has row g +
// 8:
//
//     A    a0 to a3 = the first to the fourth pair, of the same row of W and of lane t
//     B    b0 = x for the first (h = 0) or the second (h = 1) pair
//          b1 = x for the third (h = 0) or the fourth (h = 1) pair
//
// Of the result, lane t has D[g][2t] and D[g + 8][2t + 1], whose sum is that of the weights that it owns itself: the
// scale of a block is applied to sums, in fp32. The values of a table of pairs of pairs come as A wants them, and the
// two rows of a lane are two chains of mma.
//
// Weights come in boxes of 16 rows x BOX k-tiles; of each row of a box lane t owns a quarter, BOX blocks of 32.
#pragma once
#include "linear/pipeline.cuh"

// How a box stands in shared memory: rows of 128 bytes in the 128-byte swizzle of TMA, others as they are. What eight
// lanes read together, 16 bytes each, or 16 lanes 8 each, meets in no bank.
template <typename Decoder, int ITEMS>
struct TmaBox {
    // Items of a box; kbit4 and wider formats have no more room in 256 bytes, or no swizzle.
    static constexpr int COUNT = Decoder::ITEM_BYTES > 48 ? 2 : ITEMS, BOXES = ITEMS / COUNT;
    static constexpr int ROW = COUNT * Decoder::ITEM_BYTES, BYTES = ITEM_ROWS * ROW;
    static constexpr bool SWIZZLED = ROW == 128;
    static constexpr int OWN = ROW / 4, PIECE = OWN % 16 ? 8 : 16, WORDS = OWN / 4;

    // Where byte `at` of a row stands.
    __device__ __forceinline__ static int place(int row, int at) {
        return row * ROW + (SWIZZLED ? at ^ row % 8 * 16 : at);
    }

    // What lane t owns of a row, from place(row, t * OWN) on; `seen` gets bits of all of it.
    __device__ __forceinline__ static void read(unsigned (&word)[WORDS], unsigned from, unsigned& seen) {
#pragma unroll
        for (int i = 0; i < OWN / PIECE; ++i) {
            const unsigned source = SWIZZLED ? from ^ i * PIECE : from + i * PIECE;
            if constexpr (PIECE == 16) {
                const uint4 v = shared_at<uint4>(source);
                word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
                seen |= v.x;
            } else {
                const uint2 v = shared_at<uint2>(source);
                word[2 * i] = v.x, word[2 * i + 1] = v.y;
                seen |= v.x;
            }
        }
    }
};

// What the decoders differ in.
//     Scales<COUNT>      of a row of a box, of the blocks that a lane owns; read(row, t, seen) from those of the row
//     EPILOGUE_SCALE     what the epilogue must multiply sums by, beside 1 / power of the table
//     UPPER_FIRST        of a table of pairs: whether the first code of a pair is that of the upper four bits
//     load_x_global, arrange_x    the 16 words of x for a block, in the order of `multiply`
//     multiply           acc += a block of 16 rows, COUNT blocks one after the other; `part` is zero before the first
template <typename Decoder>
struct SingleToken;

// The table of pairs of 16 values that the host knows, made by 16 warps: `value` of the codebook has their words, which
// are `between` already. A warp makes 4 x 4 entries, for which it reads eight words: lanes that read parameters at
// different addresses are served one after the other.
template <typename Decoder>
__device__ __forceinline__ void fill_known_pairs(unsigned table, const Values& codebook, unsigned warp) {
    constexpr bool UPPER_FIRST = SingleToken<Decoder>::UPPER_FIRST;
    const unsigned lane = threadIdx.x % WARP;
    const unsigned upper = warp / 4 * 4 + lane / 8, lower = warp % 4 * 4 + lane / 2 % 4;
    const unsigned first = __float_as_uint(codebook.value[UPPER_FIRST ? upper : lower]);
    const unsigned second = __float_as_uint(codebook.value[UPPER_FIRST ? lower : upper]);
    const unsigned both = __byte_perm(first, second, 0x7632);
    uint4 four = make_uint4(both, both, both, both);
    if (__any_sync(FULL_WARP, (first | second) & 0xffffu)) {  // the type of x does not hold all of them
        const unsigned upper_bits = bits_of_code(upper), lower_bits = bits_of_code(lower);
        four =
            rounded_pairs(first, second, UPPER_FIRST ? upper_bits : lower_bits, UPPER_FIRST ? lower_bits : upper_bits);
    }
    fill_entry<1>(table, upper * 16 + lower, lane % 2, four);
}

// A number from global memory, where there is one. It may still be on its way.
__device__ __forceinline__ void read_number(float& number, const float* p) {
    asm volatile("{.reg .pred p; setp.ne.u64 p, %1, 0; @p ld.global.nc.f32 %0, [%1];}" : "+f"(number) : "l"(p));
}

// Where the x of a lane for a block stands in shared memory: two lines of 16 bytes; only eight lanes have any, the
// registers of others are zero.
template <typename Decoder>
struct XLine {
    static constexpr int STEP = Decoder::GAPS ? ENTRY_STRIDE : 128;
    unsigned at;
    bool mine;

    // Before step s of four, the words for this one and the next.
    __device__ __forceinline__ void read(unsigned (&x)[8], int s) const {
        if (s % 2 == 0) load_shared_if(x + 2 * s, at + s / 2 * STEP, mine);
    }
};

template <typename T_, int K, int FORMAT>
struct SingleToken<Kbit<T_, K, FORMAT, false>> {
    using T = T_;
    using Decoder = Kbit<T, K, FORMAT>;
    static constexpr int WORDS = K;
    static constexpr float EPILOGUE_SCALE = FORMAT == E4M4 ? E4m4Pair<__half>::FACTOR : 1.0f;
    static constexpr bool UPPER_FIRST = false;

    template <int COUNT>
    struct Scales {
        float scale[COUNT];
        __device__ __forceinline__ void read(unsigned row, int t, unsigned& seen) {
            const unsigned from = row + t * COUNT * sizeof(typename Decoder::Code);
            if constexpr (FORMAT == FLOAT32) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
                    scale[i] = shared_at<float>(from + 4 * i), seen |= __float_as_uint(scale[i]);
            } else {
#pragma unroll
                for (int i = 0; i < COUNT; i += 2) {
                    unsigned two;  // as half precision
                    if constexpr (FORMAT == FLOAT16) two = shared_at<unsigned>(from + 2 * i);
                    else two = __byte_perm(shared_at<unsigned short>(from + i), 0u, 0x4140) << 6;
                    seen |= two;
                    scale[i] = __half2float(__ushort_as_half(two & 0xffffu));
                    scale[i + 1] = __half2float(__ushort_as_half(two >> 16));
                }
            }
        }
    };

    __device__ __forceinline__ static void load_x_global(unsigned (&word)[16], const T* x) {
        Decoder::load_x_global(word, x, true, ROW, 0);
    }
    __device__ __forceinline__ static void arrange_x(unsigned (&word)[16]) { Decoder::arrange_x(word); }

    template <int COUNT>
    __device__ __forceinline__ static void multiply(
        const unsigned (&word)[2][K * COUNT], int block, unsigned (&x)[8], XLine<Decoder> line, unsigned lane,
        const Scales<COUNT> (&scales)[2], float (&)[2][4], float (&acc)[2]) {
        unsigned own[2][K], field[2][Decoder::FIELDS];
#pragma unroll
        for (int i = 0; i < 2 * K; ++i) own[i / K][i % K] = word[i / K][block * K + i % K];
        Decoder::unpack(own, field);
        float part[2][4] = {};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            line.read(x, s);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (K == 5) {
                    // Of a pair the first and the second weight in turn: the tensor cores have time to add up zeros.
                    unsigned first[4], second[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        first[j] = table_entry(entry_offset(field[i][2 * j], s, lane));
                        second[j] = table_entry<128>(entry_offset(field[i][2 * j + 1], s, lane));
                    }
                    mma<T>(part[i], first[0], first[1], first[2], first[3], x[2 * s], x[2 * s + 1]);
                    mma<T>(part[i], second[0], second[1], second[2], second[3], x[2 * s], x[2 * s + 1]);
                } else {
                    unsigned low[2], high[2];
                    Decoder::weights(field[i], 2 * s, lane, low), Decoder::weights(field[i], 2 * s + 1, lane, high);
                    mma<T>(part[i], low[0], low[1], high[0], high[1], x[2 * s], x[2 * s + 1]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) acc[i] = fmaf(part[i][0] + part[i][3], scales[i].scale[block], acc[i]);
    }
};

template <typename T_, int SUB>
struct SingleToken<Table4<T_, SUB>> {
    using T = T_;
    using Decoder = Table4<T, SUB>;
    static constexpr int WORDS = 4;
    static constexpr float EPILOGUE_SCALE = 1.0f;
    static constexpr bool UPPER_FIRST = true;

    template <int COUNT>
    struct Scales {
        static constexpr int NUMBER = COUNT * ROW / SUB;
        float scale[NUMBER];
        __device__ __forceinline__ void read(unsigned row, int t, unsigned& seen) {
#pragma unroll
            for (int i = 0; i < NUMBER; ++i) {
                scale[i] = shared_at<float>(row + (t * NUMBER + i) * 4);
                seen |= __float_as_uint(scale[i]);
            }
        }
    };

    __device__ __forceinline__ static void load_x_global(unsigned (&word)[16], const T* x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) load_global_if(word + 4 * i, reinterpret_cast<const uint4*>(x) + i, true);
    }
    __device__ __forceinline__ static void arrange_x(unsigned (&)[16]) {}

    template <int COUNT>
    __device__ __forceinline__ static void multiply(
        const unsigned (&word)[2][4 * COUNT], int block, unsigned (&x)[8], XLine<Decoder> line, unsigned lane,
        const Scales<COUNT> (&scales)[2], float (&part)[2][4], float (&acc)[2]) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            line.read(x, s);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned a[4];
#pragma unroll
                for (int b = 0; b < 4; ++b) a[b] = table_entry(entry_offset(word[i][block * 4 + s], b, lane));
                mma<T>(part[i], a[0], a[1], a[2], a[3], x[2 * s], x[2 * s + 1]);
            }
            const int done = block * ROW + 8 * (s + 1);
            if (done % SUB == 0)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    acc[i] = fmaf(part[i][0] + part[i][3], scales[i].scale[done / SUB - 1], acc[i]);
#pragma unroll
                    for (int j = 0; j < 4; ++j) part[i][j] = 0.0f;
                }
        }
    }
};
