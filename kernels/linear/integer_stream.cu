// Products of up to 16 int8 tokens with integer codes, which are read in place, once, and multiplied by integer tensor
// cores. The contract is that of kbitcupy/products/integers.py; the host is kbitcupy/products/integer_stream.py.
//
//     codes   --boxes of 16 rows x 128 bytes, TMA or cp.async--> a ring of each warp --and, shift--> a of mma
//     tokens  --in the order of fragments (linear/integer_activations.cuh)--> registers ----------------> b of mma
//     numbers --quantized by each block (linear/integer_tokens.cuh), shared memory--> the same, of very few tokens
//     scales  --a tile ahead in registers--> shared memory, float32
//     sums    --ring of tiles in shared memory--> one warp adds up those of all --> y
//
// A team of warps has a tile of 16 rows at a time, and each warp of it a share of K, whose tokens stay in its registers
// while it goes through one tile after the other; of a longer K there are phases, and what a tile has so far is kept.
// A slot of the ring is asked for again as soon as it has been read. No warp waits for another but where a tile's sums
// are added up, some tiles later.
//
// The first slots are asked for while tokens are still being quantized: by another launch all of them, but of q4_k; by
// the block itself one of each warp, and the others when its numbers have arrived. With more than 64 KB under way on a
// multiprocessor, or with lines brought to the L2 cache beforehand, everything comes later, tokens first of all: that,
// tokens in shared memory, and warps of a block that wait for all of them, were 8 us of the first version,
// 28672 x 8192 on an H200.
//
// Sums of a unit, elements that share all scales, are exact: codes of 4 bits stand in the upper half of a byte, where
// they count 16 times what they are; an mma begins with the bits of a float whose last bit counts 1, or 1/16, and the
// sum is read as a float less that number. Unsigned ones whose units are their own may stand in the lower half as well.
// A zero point is taken off there, times the sum of the tokens' codes. Where all of a row is one unit, sums stay
// integers to the end. What a table has for codes is two bytes each, which two mma add up (Pairs).
#include "common/copy.cuh"
#include "common/ieee.cuh"
#include "common/sync.cuh"
#include "linear/integer_tokens.cuh"
#include "linear/ternary_mma.cuh"

// Of the host, ahead of this source: struct IntegerWeight and struct Cut; numbers of `added`, of dtypes, of codes
// (NEIGHBOURS4, HALVES4, PAIRS4, BYTES8, and of what has blocks of 256 as Blocks: MINIMA4 as HALVES4; TABLE4 as
// NEIGHBOURS4 and TABLE_HALVES4 as HALVES4, into a table), of units (SHARES, LONG_UNIT) and of a bias; STREAM_THREADS,
// the most of a block; of eight tokens SHARE_OF_EIGHT, of sixteen SHARE_OF_SIXTEEN, k of a warp; FEW_REGISTERS for a
// block that quantizes tokens (linear/integer_tokens.cu); SPLIT, thread blocks of a cluster that have the same rows and
// other parts of K (linear/integer_stream_split.cu). SUMS_RING tiles have room for their sums, which are added up
// SUMS_LATER tiles later. MINIMA_OF_BLOCK words for the minima of 256 k of q4_k, those of a unit MINIMA_STEP words
// behind those of the one before: so lanes meet in no bank.
constexpr int ROWS_OF_TILE = 16, ROW_BYTES = 128, SLOT_BYTES = ROWS_OF_TILE * ROW_BYTES, MMA_K = 32;

// Whether codes are copied by TMA; not where ptxas gives such kernels a stack.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool BULK = true;
#else
constexpr bool BULK = false;
#endif

#ifndef CLUSTER_BOUNDS
#define CLUSTER_BOUNDS
#endif

// a / b, given 2^32 / b + 1: exact for a < 2^32 / b.
__device__ __forceinline__ int divided(int a, unsigned reciprocal, int b) {
    return b == 1 ? a : static_cast<int>(__umulhi(static_cast<unsigned>(a), reciprocal));
}

// d = a * b + c for a of 16 x 32 bytes, unsigned or SIGNED, and b of 32 x 8 signed ones.
template <bool SIGNED>
__device__ __forceinline__ void mma_from(
    int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int c0, int c1, int c2, int c3) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
#endif
}

// Bytes of a and b by the four lowest nibbles of `selector`: three bits are the number of a byte, and with the fourth
// one there are eight times the highest bit of that.
__device__ __forceinline__ unsigned permuted(unsigned a, unsigned b, unsigned selector) {
    unsigned v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}

// Four times eight rows of 16 bytes, of which lane i has the address of row i % 8 of the (i / 8)th eight: a lane gets
// of each eight its word t of row g.
__device__ __forceinline__ void load_rows(unsigned (&v)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
}

// c += a * b for a of 16 x 8 and b of 8 x 8 floats, of which the upper 11 bits count.
__device__ __forceinline__ void mma_short(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// ---- weights -----------------------------------------------------------------------------------------------------

// Loads that the compiler neither drops nor moves: it would put ld.global.nc off until the kernel ahead has ended.
__device__ __forceinline__ unsigned load_word(unsigned long long address) {
    unsigned v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}
__device__ __forceinline__ unsigned load_entry(unsigned long long plane, int bytes, long long i) {
    unsigned v;
    if (bytes == 4) return load_word(plane + 4 * i);
    if (bytes == 2) asm volatile("ld.global.u16 %0, [%1];" : "=r"(v) : "l"(plane + 2 * i) : "memory");
    else asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(plane + i) : "memory");
    return v;
}

// An entry of BYTES where `wanted`; else 0.
template <int BYTES>
__device__ __forceinline__ unsigned load_if(unsigned long long address, bool wanted) {
    unsigned v = 0;
    if constexpr (BYTES == 4)
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }"
                     : "+r"(v)
                     : "l"(address), "r"(unsigned(wanted))
                     : "memory");
    else if constexpr (BYTES == 2)
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
                     : "+r"(v)
                     : "l"(address), "r"(unsigned(wanted))
                     : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u8 %0, [%1]; }"
                     : "+r"(v)
                     : "l"(address), "r"(unsigned(wanted))
                     : "memory");
    return v;
}

// Pieces of 16 bytes, or one of 8.
template <int N>
__device__ __forceinline__ void load_words(unsigned (&v)[N], unsigned long long address) {
    static_assert(N % 4 == 0 || N == 2, "times 16 bytes, or 8");
    if constexpr (N > 4) {
#pragma unroll
        for (int i = 0; i < N; i += 4) load_words(reinterpret_cast<unsigned (&)[4]>(v[i]), address + 4 * i);
    } else if constexpr (N == 4)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[N - 1])
                     : "l"(address)
                     : "memory");
    else asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(address) : "memory");
}

// Of scales in shared memory, rows r and r + 8 stand side by side.
__device__ __forceinline__ int place_of(int row) { return row % 8 * 2 + row / 8; }

// The entries of units from `unit` on, of which `there` are; `group` units share one.
template <int BYTES, int N>
__device__ __forceinline__ void load_entries(
    unsigned (&v)[N], unsigned long long plane, int unit, int there, const Cut& cut) {
    if (cut.group == 1) {
        const unsigned long long first = plane + static_cast<long long>(unit) * BYTES;
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = load_if<BYTES>(first + i * BYTES, i < there);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            v[i] = load_if<BYTES>(
                plane + static_cast<long long>(divided(unit + i, cut.per_group, cut.group)) * BYTES, i < there);
    }
}

__device__ __forceinline__ float float_of(unsigned bits, int dtype) {
    if (dtype == FLOAT32_BIAS) return __uint_as_float(bits);
    const unsigned short half = static_cast<unsigned short>(bits);
    return dtype == FLOAT16_BIAS ? to_float(*reinterpret_cast<const __half*>(&half)) : __uint_as_float(bits << 16);
}

__device__ __forceinline__ int integer_of(unsigned bits, int dtype) {
    return dtype == INT8_ENTRIES ? static_cast<signed char>(bits) : static_cast<int>(bits);
}

// k of a warp, and the most threads of a block. Sixteen tokens take as many registers as a thread may have: fewer warps
// with more k each then do less beside the products. Where scales are INNER ones of a table the products wait for more,
// and more warps wait at once; so with powers of two. Where SPLIT blocks share out K the same warps have less of it.
__device__ __forceinline__ constexpr int share_of(int codes, int unit, int added, int eights) {
    if (SPLIT > 1) return SHARE_OF_EIGHT;
    if (unit == SHARES) return SHARES / eights;
    return eights <= 1 || added == INNER || codes == TABLE4 ? SHARE_OF_EIGHT : SHARE_OF_SIXTEEN;
}
__device__ __forceinline__ constexpr int most_threads(int codes, int unit, int added, int eights) {
    return SPLIT > 1 || share_of(codes, unit, added, eights) > 512 ? STREAM_THREADS / 2 : STREAM_THREADS;
}

// What codes are places in, where there is such a table: for each value two bytes, which are added up (pairs_of in
// kbitcupy/products/integer_stream.py). Of each half of them a word is KEPT in a register, beside a constant one, where
// one is left: by way of a shuffle, since the compiler would bring a constant there anew for each use. What all lanes
// have from the same one it brings anew, too, from a uniform register, if other registers are few; the word for lower
// codes of APART tables is that of the even lane of each pair, which is not known to be uniform.
template <int CODES, bool KEPT, bool APART>
struct Pairs {
    static constexpr bool FP4 = CODES == TABLE4;
    unsigned lower = first_word<APART>(FP4 ? FP4_PAIRS[0] : IQ4_PAIRS[0]);
    unsigned upper = first_word<false>(FP4 ? FP4_PAIRS[2] : IQ4_PAIRS[2]);

    // Of four codes, the lowest nibbles of a word, the bytes of either half.
    __device__ __forceinline__ unsigned lower_of(unsigned codes) const {
        return permuted(lower, FP4 ? FP4_PAIRS[1] : IQ4_PAIRS[1], codes);
    }
    __device__ __forceinline__ unsigned upper_of(unsigned turned_codes) const {
        return permuted(upper, FP4 ? FP4_PAIRS[3] : IQ4_PAIRS[3], turned_codes);
    }
    // Codes whose highest bits are turned over. The compiler would do it for each half of a word.
    __device__ __forceinline__ static unsigned turned(unsigned codes) {
        unsigned v;
        asm("xor.b32 %0, %1, 0x88888888;" : "=r"(v) : "r"(codes));
        return v;
    }

  private:
    template <bool OF_PAIR>
    __device__ __forceinline__ static unsigned first_word(unsigned v) {
        constexpr unsigned LANES = OF_PAIR ? 2 : WARP;  // the first of them has it
        const unsigned lane = threadIdx.x % WARP;
        if constexpr (KEPT) return __shfl_sync(FULL_WARP, lane % LANES == 0 ? v : threadIdx.x, lane / LANES * LANES);
        else return v;
    }
};

// Where codes of a slot of the ring lie, and how they become fragments.
//     SHARE     k of a warp
//     WIDE, PAIR, or a word: what a lane reads at a time of a row
//     STEPS     mma of a slot
//     TABLE     whether codes are places in a table; of each there are PARTS bytes, which are added up
//     MINIMA    whether units have minima, which are multiplied by sums of tokens for 256 k at once
//     BLOCKS    whether scales are those of blocks of 256, see BlockScales
template <int CODES, int UNIT, int ADDED, int EIGHTS, bool ALONE>
struct Slot {
    static constexpr bool BYTES = CODES == BYTES8, INNER = CODES == PAIRS4, MINIMA = INNER || CODES == MINIMA4;
    static constexpr bool TABLE = CODES == TABLE4 || CODES == TABLE_HALVES4, BLOCKS = TABLE || CODES == MINIMA4;
    // Whether scales are halves, or halves times six bits: neither is large, and none has more than 17 bits.
    static constexpr bool HALF_SCALES = INNER || CODES == MINIMA4 || CODES == TABLE_HALVES4;
    // Whether scales are taken as powers of two; and whether each stands beside what it makes of FIRST: what that saves
    // is worth its room where sixteen tokens have a scale together.
    static constexpr bool POWERS = CODES == TABLE4 && !ALONE, PAIRED = POWERS && EIGHTS == 2;
    static constexpr int PARTS = TABLE ? 2 : 1;
    static constexpr bool WIDE = UNIT != 32 && (BYTES || (CODES == NEIGHBOURS4 && UNIT != 64));
    static constexpr bool PAIR = !WIDE && (BYTES || CODES == PAIRS4);
    static constexpr int DEPTH = ROW_BYTES * (BYTES ? 1 : 2), STEPS = DEPTH / MMA_K;
    static constexpr int SHARE = share_of(CODES, UNIT, ADDED, EIGHTS), SLOTS = SHARE / DEPTH;
    // What a sum begins with: of codes that count 16 times what they are the last bit of this float counts 1/16.
    static constexpr int TIMES = BYTES || TABLE ? 1 : 16, FIRST_BITS = TIMES == 1 ? 0x4b400000 : 0x49400000;
    static constexpr float FIRST = TIMES == 1 ? 12582912.0f : 786432.0f;

    // Which row the lanes g have, and the one 8 below it, so that those which read together meet in no bank.
    __device__ __forceinline__ static int row(int g) {
        if (WIDE) return (g & 1) << 2 | g >> 1;
        return PAIR ? (g & 3) << 1 | g >> 2 : g;
    }

    // The lanes that have row r, or the one 8 above it.
    __device__ __forceinline__ static int lanes(int r) {
        return PAIR ? r % 8 >> 1 | (r & 1) << 2 : WIDE ? (r & 3) << 1 | r % 8 >> 2 : r % 8;
    }

    // Where in a slot a lane's part of a load of all lanes together begins (load_rows).
    __device__ __forceinline__ static unsigned part(int lane) {
        return lane % 16 * ROW_BYTES + (lane / 16 ^ lane % 8) * 16;
    }

    // A lane's words of its two rows, `slot` being the address of all of them. TOGETHER: whether all lanes read at once
    // what no lane has in larger pieces.
    template <bool TOGETHER>
    __device__ __forceinline__ static void read(unsigned (&word)[2][8], unsigned slot, unsigned part, int row, int t) {
        if constexpr (TOGETHER && !WIDE && !PAIR) {
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                unsigned v[4];
                load_rows(v, slot + part ^ j * 16);
                word[0][j] = v[0], word[1][j] = v[1], word[0][j + 1] = v[2], word[1][j + 1] = v[3];
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const unsigned from = slot + row * ROW_BYTES + h * (SLOT_BYTES / 2);
                if constexpr (WIDE) {
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        to_words(word[h] + 4 * j, shared_at<uint4>(from + ((4 * j + t) ^ row) * 16));
                } else if constexpr (PAIR) {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        to_words(word[h] + 2 * j, shared_at<uint2>(from + ((2 * j + t / 2) ^ row) * 16 + t % 2 * 8));
                } else {
#pragma unroll
                    for (int j = 0; j < 8; ++j) word[h][j] = shared_at<unsigned>(from + (j ^ row) * 16 + t * 4);
                }
            }
        }
    }

    // A word of each load: ptxas issues them in any order, so that none is known to arrive last.
    template <bool TOGETHER>
    __device__ __forceinline__ static unsigned bits_read(const unsigned (&word)[2][8]) {
        constexpr bool BOTH_ROWS = TOGETHER && !WIDE && !PAIR;
        constexpr int AT_ONCE = WIDE ? 4 : PAIR || BOTH_ROWS ? 2 : 1;
        unsigned bits = 0;
#pragma unroll
        for (int j = 0; j < 8; j += AT_ONCE) bits |= word[0][j] | (BOTH_ROWS ? 0u : word[1][j]);
        return bits;
    }

    // Whether codes of unit u stand in the lower half of a byte, and count 1, so that scales are TIMES what they are:
    // unsigned ones, with their own units.
    __device__ __forceinline__ static constexpr bool low(int u) { return INNER && u % 2 == 0; }

    // The a of mma number s.
    template <typename Pairs>
    __device__ __forceinline__ static void fragment(
        unsigned (&parts)[PARTS][4], const unsigned (&word)[2][8], int s, unsigned flip, const Pairs& pairs) {
        constexpr unsigned HIGH = 0xf0f0f0f0u, LOW = 0x0f0f0f0fu;
        unsigned (&a)[4] = parts[0];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if constexpr (TABLE) {
                look_up(parts, word[h][s], h, pairs);
            } else if constexpr (BYTES) {
                a[h] = word[h][2 * s] ^ flip, a[h + 2] = word[h][2 * s + 1] ^ flip;
            } else if constexpr (CODES == PAIRS4) {
                const unsigned u = word[h][s / 2 * 2], v = word[h][s / 2 * 2 + 1];
                a[h] = u & (s % 2 ? HIGH : LOW), a[h + 2] = v & (s % 2 ? HIGH : LOW);
            } else {
                a[h] = (word[h][s] << 4 & HIGH) ^ flip, a[h + 2] = (word[h][s] & HIGH) ^ flip;
            }
        }
    }

  private:
    // What the table has for eight codes of a row, in the order of their nibbles.
    template <typename Pairs>
    __device__ __forceinline__ static void look_up(
        unsigned (&parts)[PARTS][4], unsigned codes, int h, const Pairs& pairs) {
        const unsigned turned = pairs.turned(codes);
        parts[0][h] = pairs.lower_of(codes), parts[0][h + 2] = pairs.lower_of(codes >> 16);
        parts[1][h] = pairs.upper_of(turned), parts[1][h + 2] = pairs.upper_of(turned >> 16);
    }
};

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

// What a warp reads of a weight, in the order in which it does: boxes of codes, as far ahead as its ring reaches.
template <typename Of>
struct Feed {
    const IntegerWeight& w;
    const TensorMap& map;
    const Cut& cut;
    int rows, row_bytes, lane;  // of all members; of a row
    unsigned ring, full;        // addresses of slots, and of their barriers
    int first, step, count;     // rows of the team: of its first tile, from tile to tile, tiles
    int row, column, tile, left, box;
    int slot = 0;  // of the ring, to be read next, and the parity of its barrier
    unsigned parity = 0;

    // Ask for the first box, and later on for what else the ring has room for.
    __device__ __forceinline__ void begin(int phases) {
        row = first, tile = 0, box = 0, left = phases * count * Of::SLOTS;
        fetch(0, 0);
    }
    __device__ __forceinline__ void fill() {
#pragma unroll 1
        for (int i = 1; i < cut.ring; ++i) fetch(i, 0);
    }
    // Ask for the next box; `zero` may depend on what was read.
    __device__ __forceinline__ void fetch(int to, unsigned zero) {
        if (left == 0) return;
        --left;
        if constexpr (BULK) {
            if (elect_lane()) {
                barrier_expect(full + 8 * to, SLOT_BYTES | zero);
                copy_box(ring + to * SLOT_BYTES, &map, column, row, full + 8 * to);
            }
        } else {
            copy_rows(ring + to * SLOT_BYTES + zero, to);
        }
        column += ROW_BYTES;
        if (++box != Of::SLOTS) return;
        box = 0, row += step, column -= Of::SLOTS * ROW_BYTES;
        if (++tile == count) tile = 0, row = first, column += SPLIT * cut.warps * (Of::SLOTS * ROW_BYTES);
    }
    // What is in the next slot, which is asked for again at once; `zero` is 0, see zero_after.
    template <bool TOGETHER>
    __device__ __forceinline__ void take(unsigned (&word)[2][8], unsigned part, int own_row, int t, unsigned zero) {
        barrier_wait(full + 8 * slot, parity);
        Of::template read<TOGETHER>(word, ring + slot * SLOT_BYTES, part, own_row, t);
        __syncwarp();
        fetch(slot, zero_after(Of::template bits_read<TOGETHER>(word), zero));
        if (++slot == cut.ring) slot = 0, parity ^= 1;
    }

  private:
    // By all lanes, in the swizzle of TMA, and zeros for what is not there.
    __device__ __forceinline__ void copy_rows(unsigned target, int to) const {
#if __CUDA_ARCH__ >= 800
#pragma unroll 1
        for (int i = lane; i < ROWS_OF_TILE * 8; i += WARP) {
            const int down = i / 8, at = column + i % 8 * 16;
            const bool there = at < row_bytes;
            const long long from = static_cast<long long>(min(row + down, rows - 1)) * row_bytes + (there ? at : 0);
            copy_async_or_zero<16>(
                target + down * ROW_BYTES + (i % 8 ^ down % 8) * 16, reinterpret_cast<const char*>(w.codes) + from,
                there ? 16 : 0);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full + 8 * to) : "memory");
#endif
    }
};

// ---- tokens ------------------------------------------------------------------------------------------------------

// The tokens of a product.
struct Tokens {
    const unsigned char* a;    // fragments of all
    const float* token_scale;  // [tokens]; or [1]; or of units of Q8_BLOCK, [units, padded]
    const int* sums;           // of codes: [units, padded], or of tokens
    int padded, first, count;  // of all; those of this product
};

// A word, or four, of them: in shared memory, where the block has quantized them itself, or in global memory.
__device__ __forceinline__ unsigned load_anywhere(const void* p) {
    unsigned v;
    asm volatile("ld.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ unsigned load_anywhere_if(const void* p, bool wanted) {
    unsigned v = 0;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.u32 %0, [%1]; }"
                 : "+r"(v)
                 : "l"(p), "r"(unsigned(wanted))
                 : "memory");
    return v;
}
__device__ __forceinline__ void load_four_anywhere(unsigned (&v)[4], const void* p) {
    asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(p)
                 : "memory");
}

// What is known of a unit of a token: with Q8 its scale; and what the zero point or offset of a row is multiplied by.
template <int ADDED_, bool Q8>
struct Record {
    static constexpr int WORDS = Q8 + (ADDED_ != NOTHING);

    __device__ __forceinline__ static void store(unsigned* to, float scale, int sum) {
        if constexpr (Q8) to[0] = __float_as_uint(scale);
        if constexpr (ADDED_ == ZERO_POINTS) to[WORDS - 1] = sum;
        if constexpr (ADDED_ == OFFSETS)
            to[WORDS - 1] = __float_as_uint(Q8 ? ieee::multiply(__int2float_rn(sum), scale) : __int2float_rn(sum));
    }

    float scale[2];
    unsigned other[2];  // of two neighbouring tokens

    __device__ __forceinline__ explicit Record(const unsigned* from) {
        if constexpr (WORDS == 2) {
            const uint4 four = *reinterpret_cast<const uint4*>(from);
            scale[0] = __uint_as_float(four.x), other[0] = four.y;
            scale[1] = __uint_as_float(four.z), other[1] = four.w;
        } else if constexpr (WORDS == 1) {
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            scale[0] = __uint_as_float(other[0] = two.x), scale[1] = __uint_as_float(other[1] = two.y);
        }
    }
};

__device__ __forceinline__ float fma_ieee(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// Of a share that begins at `k`: the b of its mma. Where there is no token, that of another stands: its sums are of no
// one. No register is cleared that could still be the address of a load: that would wait for it. `wait` is called as
// soon as it is known where they lie.
template <typename Of, int EIGHTS, typename W>
__device__ __forceinline__ void load_tokens(
    unsigned (&x)[EIGHTS][Of::SHARE / FRAGMENT_K][4], const Tokens& tokens, int k, int depth, int lane, const W& wait) {
    constexpr int ALL = Of::SHARE / FRAGMENT_K;
    const int first = k / FRAGMENT_K, there = (depth + 127) / 128 * (128 / FRAGMENT_K) - first;  // of whole 128 k
    const long long step = static_cast<long long>(tokens.padded) * MEMBER_BYTES;
    const unsigned char* from[EIGHTS];
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
        from[e] = tokens.a + first * step + lane % 4 * 16 +
                  (tokens.first + min(8 * e + lane / 4, tokens.count - 1)) * MEMBER_BYTES;
    if constexpr (W::WAITS) from[0] = opaque(from[0]);
    wait();
    if (there >= ALL) {
#pragma unroll
        for (int i = 0; i < ALL; ++i)
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) load_four_anywhere(x[e][i], from[e] + i * step);
    } else {
#pragma unroll
        for (int i = 0; i < ALL; ++i)
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
                if (i < there) load_four_anywhere(x[e][i], from[e] + i * step);
                else x[e][i][0] = x[e][i][1] = x[e][i][2] = x[e][i][3] = 0;
    }
}

// The b of one token, which all lanes have, spread: eight mma after each other have one unit each, of the column with
// that number; others are 0 there. So the eight units come in one sum.
template <int N>
__device__ __forceinline__ void spread_units(unsigned (&x)[N][4], int g) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int w = 0; w < 4; ++w) x[i][w] = g == (2 * i + w / 2) % 8 ? x[i][w] : 0;
}

// What the block scales of q4_k have beside: minima are multiplied by sums of tokens on tensor cores, each sum in two
// parts of 11 bits, the upper one first. Those of 256 k and eight tokens are a piece of 16 bytes for each lane, of two
// units, its b of two mma.
__device__ __forceinline__ int place_of_sum(int unit, int token, int eights) {
    return ((unit / 8 * eights + token / 8) * WARP + token % 8 * 4 + unit % 4) * 4 + unit % 8 / 4 * 2;
}

// ... and the records of its units, and behind them those pieces: asked for all at once, since each answer takes as
// long as all of them. A lane has a token and a unit of eight at a time, so that pieces meet in no bank; of fewer units
// it has one at a time.
template <typename Of, int UNIT, int ADDED_, bool Q8, int EIGHTS>
struct Records {
    using Entry = Record<ADDED_, Q8>;
    static constexpr bool ANY = UNIT != 0 && (Entry::WORDS != 0 || Of::MINIMA),
                          SUMMED = ADDED_ != NOTHING || Of::MINIMA;
    static constexpr int TOKENS = 8 * EIGHTS, UNITS = UNIT ? Of::SHARE / (UNIT ? UNIT : 1) : 1, ALL = UNITS * TOKENS;
    static constexpr int ABREAST = UNITS % 8 == 0 ? 8 : UNITS, EACH = WARP / ABREAST;  // units; tokens of a turn
    static constexpr int COUNT = ANY ? (ALL + WARP - 1) / WARP : 1;
    int sum[SUMMED ? COUNT : 1];
    unsigned scale[Q8 ? COUNT : 1];

    // Which unit and token turn j of a lane is for.
    __device__ __forceinline__ static int unit_of(int j, int lane) {
        return j * EACH / TOKENS * ABREAST + lane % ABREAST;
    }
    __device__ __forceinline__ static int token_of(int j, int lane) { return j * EACH % TOKENS + lane / ABREAST; }

    // Of a share that begins at `k`; `wait` as that of load_tokens.
    template <typename W>
    __device__ __forceinline__ void load(const Tokens& tokens, int k, int depth, int lane, const W& wait) {
        if constexpr (ANY) {
            const int first = k / UNIT, units = (depth + UNIT - 1) / UNIT - first;
            long long begin =
                static_cast<long long>(first + lane % ABREAST) * tokens.padded + tokens.first + lane / ABREAST;
            const long long step = static_cast<long long>(ABREAST) * tokens.padded;
            const int* of_sums = tokens.sums;
            if constexpr (W::WAITS) {
                static_assert(!Q8, "where scales lie is not found out ahead");
                if constexpr (SUMMED) of_sums = opaque(of_sums + begin);
                begin = 0;
            }
            wait();
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                const bool there = unit_of(j, lane) < units && token_of(j, lane) < min(tokens.count, TOKENS);
                const long long at = begin + j * EACH / TOKENS * step + j * EACH % TOKENS;
                if constexpr (SUMMED) sum[j] = static_cast<int>(load_anywhere_if(of_sums + at, there));
                if constexpr (Q8) scale[j] = load_anywhere_if(tokens.token_scale + at, there);
            }
        } else {
            wait();
        }
    }

    // A turn all of whose tokens are not there is left out: what stands in their place is multiplied for no one.
    __device__ __forceinline__ void store(unsigned* records, int count, int lane) const {
        if constexpr (ANY) {
            __syncwarp();  // all lanes have read those of the phase before
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                const int unit = unit_of(j, lane), token = token_of(j, lane);
                if (j * EACH % TOKENS >= count || (ALL < WARP && token >= TOKENS)) continue;
                const float of_unit = Q8 ? usable(__uint_as_float(scale[Q8 ? j : 0])) : 0.0f;
                const int of_codes = SUMMED ? sum[SUMMED ? j : 0] : 0;
                Entry::store(records + (unit * TOKENS + token) * Entry::WORDS, of_unit, of_codes);
                if constexpr (Of::MINIMA) {
                    const float codes = __int2float_rn(of_codes), whole = Q8 ? ieee::multiply(codes, of_unit) : codes;
                    const unsigned high = __float_as_uint(whole) & 0xffffe000u;
                    const float low = ieee::finite(ieee::subtract(whole, __uint_as_float(high)));
                    *reinterpret_cast<uint2*>(records + ALL * Entry::WORDS + place_of_sum(unit, token, EIGHTS)) =
                        make_uint2(high, __float_as_uint(low));
                }
            }
            __syncwarp();
        }
    }
};

// What is known of tokens 2t and 2t + 1 of each eight as a whole: their scales, and the sums of their codes. RAW scales
// are as they come, since what makes them usable waits for them.
template <int UNIT, bool Q8, bool RAW, int EIGHTS>
__device__ __forceinline__ void load_whole(
    float2 (&scale)[EIGHTS], int2 (&sum)[EIGHTS], const Tokens& tokens, int scale_step, int t) {
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; ++i) {
        const int of = i / 2 * 8 + 2 * t + i % 2, m = tokens.first + of;
        float& s = i % 2 ? scale[i / 2].y : scale[i / 2].x;
        int& c = i % 2 ? sum[i / 2].y : sum[i / 2].x;
        s = 0.0f, c = 0;
        if constexpr (RAW) {
            const bool there = of < tokens.count;
            if (!Q8) s = __uint_as_float(load_anywhere_if(tokens.token_scale + m * scale_step, there));
            if (UNIT == 0) c = load_anywhere_if(tokens.sums + m, there);
            continue;
        }
        if (of >= tokens.count) continue;
        if (!Q8) s = usable(__uint_as_float(load_anywhere(tokens.token_scale + m * scale_step)));
        if (UNIT == 0) c = load_anywhere(tokens.sums + m);
    }
}

// ---- sums --------------------------------------------------------------------------------------------------------

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

// ---- the kernel --------------------------------------------------------------------------------------------------

// The shared memory of a block, and the barriers in it, by their addresses: of the slots of a warp, and of the sums of
// a team, where they are written and where they have been read.
template <typename Of, typename Scale, int RECORD_BYTES, int EIGHTS>
struct Memory {
    static constexpr int SUMS = EIGHTS * WARP;  // of a warp and tile, in pieces of 16 bytes
    static constexpr int RING = SUMS_RING, LATER = SUMS_LATER;
    unsigned char* start;
    const Cut& cut;
    int warp, team, member;

    __device__ __forceinline__ unsigned ring() const { return shared_address(start) + warp * cut.ring * SLOT_BYTES; }
    __device__ __forceinline__ float* scales() const {
        return reinterpret_cast<float*>(start + cut.scales_at + warp * Scale::BYTES);
    }
    __device__ __forceinline__ unsigned* records() const {
        return reinterpret_cast<unsigned*>(start + cut.records_at + warp * RECORD_BYTES);
    }
    __device__ __forceinline__ float4* sums(int slot, int of) const {
        return reinterpret_cast<float4*>(start + cut.sums_at) + ((team * RING + slot) * cut.warps + of) * SUMS;
    }
    __device__ __forceinline__ float4* kept(int tile) const {
        return reinterpret_cast<float4*>(start + cut.kept_at) + (team * cut.kept + tile) * SUMS;
    }
    __device__ __forceinline__ unsigned full() const {
        return shared_address(start + cut.barriers_at) + warp * cut.ring * 8;
    }
    __device__ __forceinline__ unsigned written(int slot) const {
        return shared_address(start + cut.barriers_at) +
               (cut.warps * cut.teams * cut.ring + (team * RING + slot) * 2) * 8;
    }
    __device__ __forceinline__ unsigned read(int slot) const { return written(slot) + 8; }

    __device__ __forceinline__ void begin(int lane) const {
        if (lane == 0) {
            for (int i = 0; i < cut.ring; ++i) barrier_init(full() + 8 * i, BULK ? 1 : WARP);
            if (member == 0)
                for (int i = 0; i < RING; ++i) barrier_init(written(i), cut.warps * WARP), barrier_init(read(i), WARP);
            if constexpr (BULK) fence_barrier_init();
        }
        __syncwarp();
    }
};

__device__ __forceinline__ int rank_in_cluster() {
#if __CUDA_ARCH__ >= 900
    if constexpr (SPLIT > 1) return block_in_cluster();
#endif
    return 0;
}

// Adds up what the blocks of a cluster have kept of the tiles of a team, in their order, and finishes every SPLIT-th
// tile.
template <int UNIT, int EIGHTS, typename M, typename F>
__device__ __forceinline__ void join_cluster(const M& memory, int rank, int count, int lane, const F& finish) {
#if __CUDA_ARCH__ >= 900
    cluster_sync();
    for (int i = memory.member; i < count * EIGHTS; i += memory.cut.warps) {
        const int tile = i / EIGHTS, e = i % EIGHTS;
        if (tile % SPLIT != rank) continue;
        const unsigned from = shared_address(memory.kept(tile) + e * WARP + lane);
        float4 total{};
#pragma unroll
        for (int part = 0; part < SPLIT; ++part) {
            const uint4 v = load_cluster<uint4>(cluster_address(from, part));
            const float4 sums =
                make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
            if (part == 0) total = sums;
            else join<UNIT>(total, sums);
        }
        finish(tile, e, total);
    }
    cluster_sync();  // others may still read sums here
#endif
}

// What is done between finding out where tokens lie and asking for them.
template <typename F>
struct Waiting : F {
    static constexpr bool WAITS = true;
    __device__ __forceinline__ explicit Waiting(const F& wait) : F(wait) {}
};

struct NoWait {
    static constexpr bool WAITS = false;
    __device__ __forceinline__ void operator()() const {}
};

// A tile of the team, the phase, and which of the warps adds up its sums: in all phases the same.
struct Turn {
    int tile, phase, warp;

    __device__ __forceinline__ void step(int tiles, int warps) {
        if (++warp == warps) warp = 0;
        if (++tile == tiles) tile = 0, warp = 0, ++phase;
    }
};

// The most registers. Where tokens have scales of 32, blocks of quantize_few_integers that wait for this product to end
// find room beside it; but sixteen tokens beside a table's INNER scales would be spilled for that.
__device__ __forceinline__ constexpr int most_registers(int codes, int unit, int added, bool q8, int eights) {
    const int threads = most_threads(codes, unit, added, eights);
    if (q8 && (added != INNER || eights <= 1)) return (65536 - FEW_REGISTERS) / threads;
    return threads > 256 ? 128 : 255;
}

#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 4)
#define STREAM_BOUNDS(codes, unit, added, q8, eights) __maxnreg__(most_registers(codes, unit, added, q8, eights))
#else
#define STREAM_BOUNDS(codes, unit, added, q8, eights) __launch_bounds__(most_threads(codes, unit, added, eights), 1)
#endif

// UNIT: SHARES where groups are whole shares, or several. TOKENS: in eights; 0 for one token.
template <int CODES, int UNIT, int ADDED_, bool Q8, bool SIGNED, int TOKENS>
__global__ void CLUSTER_BOUNDS STREAM_BOUNDS(CODES, UNIT, ADDED_, Q8, TOKENS) stream_integers(
    const __grid_constant__ IntegerWeight w,  // of [channels, depth]
    const __grid_constant__ Cut cut,
    const __grid_constant__ TensorMap map,  // of codes: boxes of 16 rows x 128 bytes, in their swizzle
    const void* numbers,  // tokens, [tokens, depth] of the type that x_kind names, which blocks quantize; or null
    const unsigned char* a, const float* token_scale, const int* sums,  // see Tokens
    const void* ids,   // of experts: each product has one, and a row of thread blocks; or null, as with Of::BLOCKS
    const void* bias,  // [channels] of the type that bias_kind names; 0 for none
    void* y,           // [tokens, channels] of the type that y_kind names
    int channels, int tokens, int padded, int depth, int experts,
    int slots,       // products of a token
    int scale_step,  // 0 where all tokens have one scale
    unsigned flip,   // what turns over the highest bit of codes, in all bytes
    int less,        // ... and what codes are lower by after that
    int bias_kind, int y_kind, int x_kind,
    int id_bytes) {  // of each of the ids, which are int32 or int64
#if __CUDA_ARCH__ >= 800
    constexpr bool ALONE = TOKENS == 0;
    constexpr int EIGHTS = ALONE ? 1 : TOKENS;
    constexpr int INSIDE = UNIT == SHARES ? 0 : UNIT;  // of a share
    using Of = Slot<CODES, UNIT, ADDED_, EIGHTS, ALONE>;
    using Scale = typename ScalesOf<Of, CODES, INSIDE, ADDED_>::Type;
    constexpr int BESIDE = Of::INNER || Of::BLOCKS ? NOTHING : ADDED_;  // what each unit has beside its scale
    using Entry = Record<BESIDE, Q8>;
    static_assert(!ALONE || (Q8 && Of::SHARE == WARP * SIXTEEN), "a turn of OwnShares is a share");
    constexpr int SUM_PIECES = INSIDE ? Of::SHARE / (INSIDE ? INSIDE : 1) * 8 * EIGHTS * Entry::WORDS : 0;  // at which
    constexpr int RECORD = (SUM_PIECES + (Of::MINIMA ? Of::SHARE / 256 * EIGHTS * WARP * 4 : 0)) * 4;
    const int lane = threadIdx.x % WARP, warp = warp_number(), g = lane / 4, t = lane % 4, own_row = Of::row(g);
    const int team = warp / cut.warps, member = warp % cut.warps;
    const int rank = rank_in_cluster(), share = rank * cut.warps + member;  // of the warp, among those of a phase
    const int teams = gridDim.x / SPLIT;                                    // with one number in their blocks
    const int tiles = (channels + ROWS_OF_TILE - 1) / ROWS_OF_TILE, step = teams * cut.teams;
    const int first = team * teams + blockIdx.x / SPLIT, count = first < tiles ? (tiles - first + step - 1) / step : 0;
    unsigned char* const start = dynamic_memory();
    using Parts = Memory<Of, Scale, RECORD, EIGHTS>;
    constexpr int RING = Parts::RING, LATER = Parts::LATER;
    const Parts memory{start + (-shared_address(start) & 1023u), cut, warp, team, member};
    memory.begin(lane);

    int above = 0;  // rows of the experts before
    if (!Of::BLOCKS && ids != nullptr) {
        wait_for_previous();
        const unsigned long long at = reinterpret_cast<unsigned long long>(ids) + 1ull * blockIdx.y * id_bytes;
        const int low = static_cast<int>(load_word(at)), high = id_bytes == 4 ? low >> 31 : load_word(at + 4);
        const long long expert = static_cast<long long>(high) << 32 | static_cast<unsigned>(low);
        if (expert < 0 || expert >= experts) return;
        above = static_cast<int>(expert) * channels;
    }
    Feed<Of> feed{w, map, cut, experts * channels, depth / (Of::BYTES ? 1 : 2), lane, memory.ring(), memory.full()};
    feed.first = above + first * ROWS_OF_TILE, feed.step = step * ROWS_OF_TILE, feed.count = count;
    feed.column = share * (Of::SLOTS * ROW_BYTES);
    feed.begin(cut.phases);
    Scale ahead;
    // With blocks numbers are worked out anew where they are used, if registers are few.
    constexpr bool ANEW = Of::BLOCKS && (EIGHTS == 2 || ALONE || Of::MINIMA || ADDED_ == INNER);
    const auto anew = [](int v) { return ANEW ? static_cast<int>(opaque(static_cast<unsigned>(v))) : v; };
    auto load_scales = [&](int tile, int phase) {
        const int mine = anew(lane), row = min((first + tile * step) * ROWS_OF_TILE + mine / 2, channels - 1);
        const int k = phase < cut.phases ? (phase * SPLIT * cut.warps + share) * Of::SHARE : depth;
        if constexpr (Scale::BYTES != 0) ahead.load(w, cut, above + row, min(k, depth), depth, mine % 2);
    };
    load_scales(0, 0);
    __syncthreads();                                    // all barriers are there
    if (!Of::INNER && numbers == nullptr) feed.fill();  // q4_k's many loads of scales would wait behind it
    // Tokens that the block quantizes itself. An odd number of them in a fragment, so that lanes meet in no bank.
    constexpr int SUMMED = UNIT == SHARES ? LONG_UNIT : UNIT;
    const auto quantized = [&] {
        const int reach = (depth + 127) / 128 * 128, units = Q8 ? (depth + Q8_BLOCK - 1) / Q8_BLOCK : 1;
        unsigned char* const codes = start + cut.tokens_at;
        float* const scales = reinterpret_cast<float*>(codes + reach * (tokens | 1));
        int* const behind = reinterpret_cast<int*>(scales + units * (tokens | 1));
        return Fragments<layout_of(CODES, UNIT), SUMMED, Q8>{
            codes, scales, behind, reinterpret_cast<unsigned*>(start + cut.sums_at), tokens | 1};
    };
    const auto first_token = [&] {
        return Of::BLOCKS || ids == nullptr ? 0 : static_cast<int>(opaque(blockIdx.y)) / slots;
    };
    // Found anew where tokens are read: it would take registers all the time.
    const auto given = [&] {
        const int every = opaque(padded);
        if constexpr (EIGHTS == 1)
            if (numbers != nullptr) {
                const auto own = quantized();
                return Tokens{own.codes, own.scales, own.sums, own.padded, 0, tokens};
            }
        return Tokens{a, token_scale, sums, every, first_token(), tokens};
    };
    const unsigned zero = unsigned(cut.whole) >> 1;  // see zero_after
    const auto begin_tokens = [&] {
        wait_for_previous();
        launch_dependents();
    };
    // Where another launch quantizes up to eight tokens by blocks it is waited for in the loop: to find out all that
    // does not depend on them would take .3 us behind it. More tokens leave no registers for that; nor do those with
    // one scale, beside whose products blocks that quantize rows find room, but for long units with zero points.
    // STAGED: there the first scales come to shared memory while it is waited for, and where tokens lie is known by
    // then. For short units that is no gain: products by q4_0 would take 3 % longer.
    constexpr bool STAGED = EIGHTS == 1 && INSIDE >= 128 && ADDED_ == ZERO_POINTS;
    constexpr bool LATE = EIGHTS == 1 && (Q8 || STAGED);
    // The scales at hand to shared memory, and those of the tile behind them asked for.
    const auto stage_scales = [&](const Turn& next, bool unusual) {
        if constexpr (Scale::BYTES != 0) {
            __syncwarp();  // all lanes have read those of the tile before
            const int mine = anew(lane);
            if constexpr (Of::POWERS && !Of::PAIRED) {
                if (unusual) ahead.store(w, memory.scales(), mine / 2, mine % 2, less);
                else ahead.store(w, memory.scales(), mine / 2, mine % 2, less, true);
            } else {
                ahead.store(w, memory.scales(), mine / 2, mine % 2, less);
            }
            __syncwarp();
            load_scales(next.tile, next.phase);
        }
    };
    if constexpr (!LATE) begin_tokens();
    if constexpr (EIGHTS == 1) {
        if (numbers != nullptr) {
            constexpr int HELD = Q8 ? 4 : 2;
            if constexpr (STAGED) begin_tokens();
            const auto shares = [&] {
                if constexpr (ALONE) return OwnShares{warp};
                else return Shares(tokens);
            }();  // before there is anything to wait for, with blocks
            if constexpr (Q8) begin_tokens();
            const long long first = static_cast<long long>(first_token()) * depth;
            int asked = 1;  // slots: the others do not delay numbers, and come while these are quantized
            const auto fill = [&](unsigned arrived) {
#pragma unroll 1
                for (; asked < cut.ring; ++asked) feed.fetch(asked, zero_after(arrived, zero));
            };
            if (x_kind == FLOAT16_BIAS)
                quantized().template quantize<HELD>(
                    static_cast<const __half*>(numbers) + first, shares, tokens, depth, fill);
            else if (x_kind == BFLOAT16_BIAS)
                quantized().template quantize<HELD>(
                    static_cast<const __nv_bfloat16*>(numbers) + first, shares, tokens, depth, fill);
            else
                quantized().template quantize<(HELD + 1) / 2>(
                    static_cast<const float*>(numbers) + first, shares, tokens, depth, fill);
            fill(0);
            // The turns of one token are the shares of the only team: a warp reads what it has quantized itself.
            if (ALONE && cut.teams == 1) __syncwarp();
            else __syncthreads();
        }
    }
    if (STAGED && numbers == nullptr) {
        Turn second{0, 0, 0};
        second.step(count, cut.warps);
        stage_scales(second, false);
    }
    float2 of_token[EIGHTS];
    int2 of_codes[EIGHTS];
    const Output output{
        bias,
        bias_kind,
        y_kind,
        channels,
        tokens,
        less,
        depth,
        above,
        static_cast<char*>(y) + static_cast<long long>(blockIdx.y) * channels * (y_kind == FLOAT32_BIAS ? 4 : 2)};
    const Pairs<CODES, Of::TABLE && (EIGHTS == 1 || (BULK && ADDED_ != INNER)), Of::PAIRED>
        pairs;  // sixteen tokens leave no register
    unsigned x[EIGHTS][Of::SHARE / FRAGMENT_K][4];
    // Of one token lanes have units 2t and 2t + 1 of eight, else tokens.
    const float* own_scales = memory.scales() + 2 * own_row * Scale::WORDS + (ALONE ? 2 * t * ROWS_OF_TILE : 0);
    // Registers that four words take side by side would spill beside those of sixteen tokens.
    constexpr bool TOGETHER = EIGHTS == 1 || (BULK && ADDED_ != INNER);
    const unsigned part = Of::part(lane);
    const unsigned* own_records = memory.records() + 2 * t * (ALONE ? 8 : 1) * Entry::WORDS;
    Turn now{0, 0, 0}, before{0, 0, 0};
    // EARLY: a tile's first slot is taken before its scales come to shared memory, which takes long with powers of two.
    constexpr bool EARLY = Of::POWERS && !Of::PAIRED;
    for (int pass = 0; pass < cut.phases * anew(count) + LATER; ++pass) {
        if (pass < cut.phases * anew(count)) {
            if (now.tile == 0) {
                if (LATE && !STAGED && pass == 0 && numbers == nullptr) begin_tokens();
                const int k = (now.phase * SPLIT * cut.warps + share) * Of::SHARE;
                const Tokens own = given();
                Records<Of, INSIDE, BESIDE, Q8, EIGHTS> records;
                // Records are few, and waited for first.
                if constexpr (STAGED) {
                    const auto wait = [&] {
                        if (pass == 0 && numbers == nullptr) begin_tokens();
                    };
                    const auto load_records = [&] { records.load(own, k, depth, lane, Waiting(wait)); };
                    load_tokens<Of, EIGHTS>(x, own, k, depth, lane, Waiting(load_records));
                    if (pass == 0) load_whole<UNIT, Q8, true>(of_token, of_codes, own, scale_step, t);
                    records.store(memory.records(), own.count, lane);
                } else if constexpr (Of::BLOCKS) {
                    records.load(own, k, anew(depth), anew(lane), NoWait{});
                    load_tokens<Of, EIGHTS>(x, own, k, anew(depth), anew(lane), NoWait{});
                    records.store(memory.records(), own.count, anew(lane));
                } else {
                    records.load(own, k, depth, lane, NoWait{});
                    load_tokens<Of, EIGHTS>(x, own, k, depth, lane, NoWait{});
                    if (Of::INNER && pass == 0 && numbers == nullptr) feed.fill();  // tokens do not wait behind it
                    records.store(memory.records(), own.count, lane);
                }
                if constexpr (ALONE) spread_units(x[0], g);
                if (!STAGED && pass == 0) load_whole<UNIT, Q8, false>(of_token, of_codes, own, scale_step, t);
            }
            now.step(count, cut.warps);
            unsigned early[2][8];
            if constexpr (EARLY) feed.template take<TOGETHER>(early, part, own_row, t, zero);
            bool unusual = false;  // whether FIRST times a power of this tile may not be finite, or one is subnormal
            if constexpr (Of::POWERS) {
                const unsigned zero_later = static_cast<unsigned>(feed.row) >> 31;  // after that slot was asked for
                unusual = __any_sync(FULL_WARP, ahead.unusual(zero_later));
            }
            if (!STAGED || pass != 0 || numbers != nullptr) stage_scales(now, unusual);
            Sums<Of, INSIDE, BESIDE, Q8, SIGNED, EIGHTS, ALONE> sum;
            sum.clear();
            if constexpr (Of::MINIMA)  // while codes are awaited
#pragma unroll
                for (int block = 0; block < Scale::BLOCKS; ++block)
                    sum.add_minima(
                        memory.scales() + Scale::MINIMA + block * MINIMA_OF_BLOCK + t * MINIMA_STEP + 2 * g,
                        memory.scales() + 2 * own_row + Scale::FACTORS + block * ROWS_OF_TILE,
                        memory.records() + SUM_PIECES + (block * EIGHTS * WARP + lane) * 4);
#pragma unroll
            for (int slot = 0; slot < Of::SLOTS; ++slot) {
                unsigned word[2][8];
                if (EARLY && slot == 0)
#pragma unroll
                    for (int i = 0; i < 16; ++i) word[i / 8][i % 8] = early[i / 8][i % 8];
                else feed.template take<TOGETHER>(word, part, own_row, t, zero);
                const auto multiply = [&](bool large) {
#pragma unroll
                    for (int i = 0; i < Of::STEPS; ++i) {
                        unsigned fragment[Of::PARTS][4];
                        Of::fragment(fragment, word, i, flip, pairs);
                        sum.add(slot * Of::STEPS + i, fragment, x, own_records, own_scales, large);
                    }
                };
                if constexpr (Of::POWERS) {
                    if (unusual) multiply(true);
                    else multiply(false);
                    continue;
                }
#pragma unroll
                for (int i = 0; i < Of::STEPS; ++i) {
                    unsigned fragment[Of::PARTS][4];
                    Of::fragment(fragment, word, i, flip, pairs);
                    if constexpr (ALONE) sum.add_unit(slot * Of::STEPS + i, fragment, x[0], own_records, own_scales);
                    else sum.add(slot * Of::STEPS + i, fragment, x, own_records, own_scales);
                }
            }
            const int slot = pass % RING;
            barrier_wait(memory.read(slot), (pass / RING & 1) ^ 1);
            sum.store(memory.sums(slot, member), lane);
            barrier_arrive(memory.written(slot));
        }
        if (pass < LATER) continue;
        if (before.warp == member) {
            const int slot = (pass - LATER) % RING, row = (first + before.tile * step) * ROWS_OF_TILE + own_row;
            barrier_wait(memory.written(slot), (pass - LATER) / RING & 1);
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
                float2 scale = of_token[e];
                if constexpr (STAGED) scale = make_float2(usable(scale.x), usable(scale.y));
                const float4* from = memory.sums(slot, 0) + e * WARP + lane;
                float4 total = *from;
                if constexpr (UNIT == SHARES)
                    total = output.of_groups(
                        w, cut, given(), from, EIGHTS * WARP, Of::SHARE, before.phase * cut.warps, scale, row,
                        8 * e + 2 * t);
                else
#pragma unroll 4
                    for (int i = 1; i < cut.warps; ++i) join<UNIT>(total, from[i * EIGHTS * WARP]);
                // Of a tile always the same warp: it has kept the sums itself.
                float4& kept = memory.kept(before.tile)[e * WARP + lane];
                if (before.phase != 0) join<UNIT>(total, kept);
                if (SPLIT > 1 || before.phase != cut.phases - 1) {
                    kept = total;
                    continue;
                }
                if constexpr (ALONE) total = sum_of_columns(total);
                output.template store<UNIT, Q8>(w, cut, total, scale, of_codes[e], row, 8 * e + 2 * t);
            }
            barrier_arrive(memory.read(slot));
        }
        before.step(count, cut.warps);
    }
    if constexpr (SPLIT > 1) {
        static_assert(Q8 && UNIT != SHARES, "tokens have no scale to be multiplied by in the end");
        const auto finish = [&](int tile, int e, const float4& total) {
            const int row = (first + tile * step) * ROWS_OF_TILE + own_row;
            output.template store<UNIT, Q8>(w, cut, total, of_token[0], of_codes[0], row, 8 * e + 2 * t);
        };
        join_cluster<UNIT, EIGHTS>(memory, rank, count, lane, finish);
    }
#endif
}
