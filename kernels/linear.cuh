// Weights as operands of the tensor cores.
//
// The product of few tokens and a weight W [N, K] runs as mma m16n8k16: 16 rows of W are the rows of A, 8 tokens the
// columns of B. Lane (g, t), g = lane / 4 and t = lane % 4, holds of A the rows g and g + 8, of B the token g, of the
// result the rows g and g + 8 of the tokens 2t and 2t + 1:
//
//     A   a0 = row g, k lo    a1 = row g + 8, k lo    a2 = row g, k hi    a3 = row g + 8, k hi      two numbers each
//     B   b0 = k lo, token g  b1 = k hi, token g
//
// Which four k of a step a lane holds is free as long as A and B agree. So an item of work is 16 rows x 128 k, and a
// lane owns 32 k of each of its two rows: it reads them as they are stored, decodes them where they are, and takes x
// in the order in which they come out. No weight crosses lanes.
//
// Scales go through shared memory, a turn of a few items ahead: as they are stored, or as float32.
//
// A decoder is a struct with
//     Type                            of x
//     PAIRS                           pairs of tiles that may share the x of an item, 1 or 2
//     EARLY                           whether there are registers for the x of the next item
//     SCALE_BYTES                     of the scales of a row and an item
//     build(...)                      fill the table of values
//     load(words, source)             what a lane reads of a row and an item
//     load_x, arrange                 the 16 words of x, in the order of multiply
//     unpack(words, fields)           the first step of decoding, which frees the words
//     multiply(fields, ...)           acc += two tiles of 16 rows x 8 tokens
#pragma once
#include "kbit.cuh"

constexpr int ITEM_K = 128;    // k of an item
constexpr int ITEM_ROWS = 16;  // rows of an item
constexpr int TOKENS = 8;

// ---- arithmetic on pairs -----------------------------------------------------------------------------------------

template <typename T>
struct Pair;

template <>
struct Pair<__half> {
    __device__ __forceinline__ static unsigned pack(float low, float high) {
        const __half2 both = __floats2half2_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned multiply(unsigned a, unsigned b) {
        const __half2 both = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
        return *reinterpret_cast<const unsigned*>(&both);
    }
    // An E4M4 code is the upper byte of half of 2^-4 of its value, subnormals included.
    static constexpr float E4M4_FACTOR = 16.0f;
    __device__ __forceinline__ static unsigned e4m4(unsigned code) { return code * 0x00400040u; }
};

template <>
struct Pair<__nv_bfloat16> {
    __device__ __forceinline__ static unsigned pack(float low, float high) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned multiply(unsigned a, unsigned b) {
        const __nv_bfloat162 both =
            __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
        return *reinterpret_cast<const unsigned*>(&both);
    }
    // ... and as bits 3 to 10 of a bfloat16, 2^-116 of its value, subnormals included.
    static constexpr float E4M4_FACTOR = 8.307674973655724e34f;  // 2^116
    __device__ __forceinline__ static unsigned e4m4(unsigned code) { return code * 0x00080008u; }
};

// acc += A * B, 16 x 8 x 16, in fp32.
template <typename T>
__device__ __forceinline__ void mma(
    float (&acc)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SameType<T, __half>::VALUE)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// ---- what all decoders share ---------------------------------------------------------------------------------------

// The values of a codebook and those of 8-bit scales, passed by value: no upload, nothing to keep alive.
struct Values {
    float value[32];
    float map[256];
    float factor;  // of the values, which then lose less when they are rounded to x's type
};

// Read 16, 8, 4 or 2 bytes unless they are not there: then the registers stay as they are. Weights are read once, so
// they need not stay in the L1 cache, whose room is for x.
__device__ __forceinline__ void read_weights(unsigned (&w)[4], const char* p, bool there) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
                 : "l"(p), "r"(unsigned(there)));
}
__device__ __forceinline__ void read_weights(unsigned& w0, unsigned& w1, const char* p, bool there) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];}"
                 : "+r"(w0), "+r"(w1)
                 : "l"(p), "r"(unsigned(there)));
}
__device__ __forceinline__ void read_weights(unsigned& w, const char* p, bool there) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u32 %0, [%1];}"
                 : "+r"(w)
                 : "l"(p), "r"(unsigned(there)));
}
__device__ __forceinline__ void read_weights(unsigned short& w, const char* p, bool there) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u16 %0, [%1];}"
                 : "+h"(w)
                 : "l"(p), "r"(unsigned(there)));
}

// 16 or 8 bytes of x, which other warps read as well.
__device__ __forceinline__ void read_x(unsigned* w, const uint4* p, bool there) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
                 : "l"(p), "r"(unsigned(there)));
}
__device__ __forceinline__ void read_x(unsigned* w, const uint2* p, bool there) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.v2.u32 {%0,%1}, [%2];}"
                 : "+r"(w[0]), "+r"(w[1])
                 : "l"(p), "r"(unsigned(there)));
}

// 4 bytes from global to shared memory, as copy_async moves 16.
__device__ __forceinline__ void copy_word_async(unsigned* shared, const unsigned* global) {
#if __CUDA_ARCH__ >= 800
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
#else
    *shared = __ldg(global);
#endif
}

// 2^-e with e the exponent of the largest magnitude among `count` values: the table then fits the range of half
// precision whatever the codebook.
__device__ __forceinline__ float power_below(const float* values, int count) {
    float largest = 0.0f;
    for (int i = 0; i < count; ++i) largest = fmaxf(largest, fabsf(values[i]));
    const int exponent = int(__float_as_uint(largest) >> 23);
    return exponent == 0 || exponent > 252 ? 1.0f : __int_as_float((254 - exponent) << 23);
}

// ---- shared memory
// ---------------------------------------------------------------------------------------------------

// The table of values stands at a fixed address of the shared window, so that a byte permutation forms the address of
// an entry and no addition is left: entries are 256 bytes apart, byte 1 of the offset is the index, byte 0 the lane,
// which has a copy of its own (no bank conflicts). Entries of 4 bytes leave a gap of 128 bytes behind each.
constexpr unsigned TABLE_AT = 2048;
constexpr int ENTRY_STRIDE = 256;

__device__ __forceinline__ unsigned entry_offset(unsigned indices, int byte, unsigned lane_offset) {
    return __byte_perm(indices, lane_offset, 0x5504 | byte << 4);
}

// Entry of the table, BEHIND bytes on.
template <int BEHIND = 0>
__device__ __forceinline__ unsigned entry(unsigned offset) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(v) : "r"(offset), "n"(TABLE_AT + BEHIND));
    return v;
}
__device__ __forceinline__ uint2 entry_pair(unsigned offset) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2+%3];" : "=r"(v.x), "=r"(v.y) : "r"(offset), "n"(TABLE_AT));
    return v;
}

// A number in shared memory, by its address in the window.
template <typename A>
__device__ __forceinline__ A shared_at(unsigned address) {
    if constexpr (sizeof(A) == 1) {
        unsigned v;
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
        return A(v);
    } else if constexpr (sizeof(A) == 2) {
        unsigned short v;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
        return *reinterpret_cast<A*>(&v);
    } else {
        unsigned v;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
        return *reinterpret_cast<A*>(&v);
    }
}

// Write one half, `part`, of entry `index`: WARP copies of the words.
template <int WORDS>
__device__ __forceinline__ void fill_entry(char* table, int index, int part, const unsigned (&word)[WORDS]) {
    // The chunks of neighbouring entries are written in different order: no bank conflicts.
    uint4* at = reinterpret_cast<uint4*>(table + index * ENTRY_STRIDE);
    constexpr int CHUNKS = WORDS * WARP / 4 / 2;
    const uint4 v = make_uint4(word[0], word[WORDS - 1], word[0], word[WORDS - 1]);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) at[part * CHUNKS + ((i + index) & (CHUNKS - 1))] = v;
}

// ---- k-bit ---------------------------------------------------------------------------------------------------------

template <typename T, int K, int FORMAT>
struct Kbit {
    using Type = T;
    using Code = typename Absmax<FORMAT>::Code;
    static constexpr int PAIRS = K == 5 || FORMAT == FLOAT32 ? 1 : 2;
    static constexpr bool EARLY = true;
    static constexpr int VALUES = 1 << K, ENTRIES = K == 5 ? 32 : 256;
    static constexpr bool GAPS = K == 3 || K == 4;
    static constexpr int SCALE_BYTES = ITEM_K / ROW * sizeof(Code), WORDS = K;
    static constexpr int FIELDS = Field<K>::BITS;
    static constexpr int ITEM_BYTES = ITEM_K * K / 8, LANE_BYTES = ROW * K / 8;

    // What a lane reads of one row and one item, of which `left` elements are there: its block of 32.
    __device__ __forceinline__ static void load(unsigned (&word)[WORDS], const char* source, int left, int t) {
        const bool there = t * ROW < left;
        if constexpr (K == 4) {
            read_weights(word, source, there);
        } else if constexpr (K == 2) {
            read_weights(word[0], word[1], source, there);
        } else {
#pragma unroll
            for (int p = 0; p < K; ++p) read_weights(word[p], source + 4 * p, there);
        }
    }

    // The x that a lane needs for an item, of which `left` elements are there; `x` is that of the lane's token.
    __device__ __forceinline__ static void load_x(unsigned (&word)[16], const T* x, bool there, int left, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            read_x(word + 4 * i, reinterpret_cast<const uint4*>(x + t * ROW) + i, there && t * ROW < left);
    }

    // For each 8 consecutive elements, which stand in 4 words, the 4 pairs of the table.
    __device__ __forceinline__ static void arrange(unsigned (&x)[16]) {
        if constexpr (K == 5) return;
        constexpr int FAR = K == 2 ? 1 : 2;  // distance of the two words that a pair comes from
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            const unsigned a = x[j], b = x[j + FAR], c = x[j + 3 - FAR], d = x[j + 3];
            x[j] = __byte_perm(a, b, 0x5410), x[j + 3 - FAR] = __byte_perm(a, b, 0x7632);
            x[j + FAR] = __byte_perm(c, d, 0x5410), x[j + 3] = __byte_perm(c, d, 0x7632);
        }
    }

    // value[i] is multiplied by `factor` first.
    __device__ static void build(char* table, const float* value, float factor, int thread, int threads) {
        if constexpr (FORMAT == E4M4) factor *= Pair<T>::E4M4_FACTOR;
        for (int i = thread; i < 2 * ENTRIES; i += threads) {
            const int index = i / 2, part = i % 2;
            if constexpr (K == 5) {
                // The value in the low half of a word, and 128 bytes on in the high half.
                const float v = value[index] * factor;
                const unsigned word[1] = {part ? Pair<T>::pack(0.0f, v) : Pair<T>::pack(v, 0.0f)};
                fill_entry<1>(table + part * 128, index, 0, word);
                fill_entry<1>(table + part * 128, index, 1, word);
            } else if constexpr (K == 2) {
                const unsigned word[2] = {
                    Pair<T>::pack(value[index & 3] * factor, value[index >> 2 & 3] * factor),
                    Pair<T>::pack(value[index >> 4 & 3] * factor, value[index >> 6] * factor)};
                fill_entry<2>(table, index, part, word);
            } else {
                const unsigned word[1] = {
                    Pair<T>::pack(value[index & (VALUES - 1)] * factor, value[index >> 4 & (VALUES - 1)] * factor)};
                fill_entry<1>(table, index, part, word);
            }
        }
    }

    __device__ __forceinline__ static unsigned lane_offset(int lane) { return lane * (K == 2 ? 8 : 4); }

    // The planes of two tiles, transposed: field n of word w is an index. Then `word` is free for what comes next.
    __device__ __forceinline__ static void unpack(const unsigned (&word)[2][2][WORDS], unsigned (&f)[2][2][FIELDS]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int p = 0; p < FIELDS; ++p) f[i / 2][i % 2][p] = p < K ? word[i / 2][i % 2][p] : 0u;
            transpose_fields<FIELDS>(f[i / 2][i % 2]);
        }
    }

    // Two tiles of 16 rows, whose chains of instructions fill each other's gaps. `scales` is the address of the scales
    // of row g of the first; those of row g + 8 and of the second tile follow `eight` and 2 * eight bytes on.
    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales,
        unsigned eight, int t, float (&acc)[2][EIGHTS][4]) {
        unsigned scale[2][2];
        float after[2][2], part[2][EIGHTS][4] = {};
        float (&sum)[2][EIGHTS][4] = FORMAT == FLOAT32 ? part : acc;
#pragma unroll
        for (int d = 0; d < 2; ++d)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Code code = shared_at<Code>(scales + (2 * d + i) * eight + t * sizeof(Code));
                if constexpr (FORMAT == E4M4) {
                    scale[d][i] = Pair<T>::e4m4(code);
                } else if constexpr (FORMAT == FLOAT16) {
                    scale[d][i] = Pair<T>::pack(__half2float(code), __half2float(code));
                } else {
                    // The scales of the four blocks of a row, relative to the largest: half precision lacks the range.
                    unsigned largest = __float_as_uint(code) & 0x7f800000u;
                    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                    largest = min(max(largest, 1u << 23), 252u << 23);
                    after[d][i] = __uint_as_float(largest);
                    const float s = code * __uint_as_float((254u << 23) - largest);
                    scale[d][i] = Pair<T>::pack(s, s);
                }
            }
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            unsigned a[2][2][2];
#pragma unroll
            for (int d = 0; d < 2; ++d)
#pragma unroll
                for (int i = 0; i < 2; ++i) weights(f[d][i], s, lane, a[d][i]);
#pragma unroll
            for (int d = 0; d < 2; ++d) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) a[d][i][h] = Pair<T>::multiply(a[d][i][h], scale[d][i]);
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e)
                    mma<T>(sum[d][e], a[d][0][0], a[d][1][0], a[d][0][1], a[d][1][1], x[e][2 * s], x[e][2 * s + 1]);
            }
        }
        if constexpr (FORMAT == FLOAT32) {
#pragma unroll
            for (int d = 0; d < 2; ++d)
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[d][e][i] = fmaf(part[d][e][i], after[d][i / 2], acc[d][e][i]);
        }
    }

  private:
    // The four unscaled values of step s of a row, from its transposed planes.
    __device__ __forceinline__ static void weights(
        const unsigned (&f)[FIELDS], int s, unsigned lane, unsigned (&pair)[2]) {
        if constexpr (K == 2) {
            const uint2 v = entry_pair(entry_offset(f[s % 2], s / 2, lane));
            pair[0] = v.x, pair[1] = v.y;
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if constexpr (K == 5) {
                    const int w = s % 2 * 4 + 2 * h;
                    pair[h] = entry(entry_offset(f[w], s / 2, lane)) | entry<128>(entry_offset(f[w + 1], s / 2, lane));
                } else {
                    pair[h] = entry(entry_offset(f[s % 2 * 2 + h], s / 2, lane));
                }
            }
        }
    }
};

// ---- tables of 16 values -------------------------------------------------------------------------------------------

template <int BYTES>
struct PieceOf {
    using Type = uint4;
};
template <>
struct PieceOf<8> {
    using Type = uint2;
};

// Four bits an element, the earlier of two in the upper half of a byte; one float32 scale a block, or an 8-bit code of
// it. SUB consecutive elements, 16, 32 or 64, belong to one block: the four lanes of a row share them, so that the sums
// of SUB / 16 steps can be scaled in fp32.
template <typename T, int SUB>
struct Table4 {
    using Type = T;
    static constexpr int PAIRS = SUB == 64 ? 2 : 1;
    static constexpr bool EARLY = SUB != 64;
    static constexpr int VALUES = 16, ENTRIES = 256, SUBS = ITEM_K / SUB;
    static constexpr bool GAPS = true;
    static constexpr int SCALE_BYTES = SUBS * 4, WORDS = 4, FIELDS = 4;
    static constexpr int ITEM_BYTES = ITEM_K / 2, LANE_BYTES = SUB / 8;

    __device__ __forceinline__ static void load(unsigned (&word)[WORDS], const char* source, int left, int) {
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            const char* p = source + j * (SUB / 2);
            const bool there = j == 0 || j * SUB < left;
            if constexpr (SUB == 64) {
                read_weights(word[2 * j], word[2 * j + 1], p, there);
            } else if constexpr (SUB == 32) {
                read_weights(word[j], p, there);
            } else {
                unsigned short half = 0;
                read_weights(half, p, there);
                word[j / 2] = j % 2 ? word[j / 2] | unsigned(half) << 16 : half;
            }
        }
    }

    __device__ __forceinline__ static void load_x(unsigned (&word)[16], const T* x, bool there, int left, int t) {
        using Piece = typename PieceOf<(SUB > 16 ? 16 : 8)>::Type;
#pragma unroll
        for (int j = 0; j < SUBS; ++j)
#pragma unroll
            for (int c = 0; c < (SUB > 32 ? 2 : 1); ++c)
                read_x(
                    word + j * (SUB / 8) + 4 * c, reinterpret_cast<const Piece*>(x + j * SUB + t * (SUB / 4)) + c,
                    there && j * SUB < left);
    }

    __device__ __forceinline__ static void arrange(unsigned (&)[16]) {}

    __device__ static void build(char* table, const float* value, float factor, int thread, int threads) {
        for (int i = thread; i < 2 * ENTRIES; i += threads) {
            const int index = i / 2;
            const unsigned word[1] = {Pair<T>::pack(value[index >> 4] * factor, value[index & 15] * factor)};
            fill_entry<1>(table, index, i % 2, word);
        }
    }

    __device__ __forceinline__ static unsigned lane_offset(int lane) { return lane * 4; }

    // The codes of two tiles as they are. Then `word` is free for what comes next.
    __device__ __forceinline__ static void unpack(const unsigned (&word)[2][2][WORDS], unsigned (&f)[2][2][FIELDS]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) f[i / 8][i / 4 % 2][i % 4] = word[i / 8][i / 4 % 2][i % 4];
    }

    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales,
        unsigned eight, int, float (&acc)[2][EIGHTS][4]) {
#pragma unroll
        for (int j = 0; j < SUBS; ++j)
#pragma unroll
            for (int d = 0; d < 2; ++d) {
                float part[EIGHTS][4] = {};
#pragma unroll
                for (int s = j * (SUB / 16); s < (j + 1) * (SUB / 16); ++s) {
                    unsigned a[2][2];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        a[i / 2][i % 2] = entry(entry_offset(f[d][i / 2][s / 2], s % 2 * 2 + i % 2, lane));
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e)
                        mma<T>(part[e], a[0][0], a[1][0], a[0][1], a[1][1], x[e][2 * s], x[e][2 * s + 1]);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float scale = shared_at<float>(scales + (2 * d + i) * eight + 4 * j);
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e) {
                        acc[d][e][2 * i] = fmaf(part[e][2 * i], scale, acc[d][e][2 * i]);
                        acc[d][e][2 * i + 1] = fmaf(part[e][2 * i + 1], scale, acc[d][e][2 * i + 1]);
                    }
                }
            }
    }
};
