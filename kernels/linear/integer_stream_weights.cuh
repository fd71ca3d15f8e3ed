// Weights of integer_stream.cu: tiles of 16 rows, whose codes come in boxes to the ring of a warp, and from there to
// operand a of mma. Of the host, ahead of the source: what integer_stream.cu says.
#pragma once
#include "common/copy.cuh"
#include "common/ieee.cuh"
#include "common/sync.cuh"
#include "linear/integer_tokens.cuh"
#include "linear/ternary_mma.cuh"

constexpr int ROWS_OF_TILE = 16, ROW_BYTES = 128, SLOT_BYTES = ROWS_OF_TILE * ROW_BYTES, MMA_K = 32;

// Whether codes are copied by TMA; not where ptxas gives such kernels a stack.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool BULK = true;
#else
constexpr bool BULK = false;
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
