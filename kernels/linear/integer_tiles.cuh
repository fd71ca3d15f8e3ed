// What products of integer codes on Hopper are made of: wgmma of bytes with operand A from registers, codes of a few
// bits that become bytes there, and matrices of eight rows between shared memory and registers.
#pragma once
#include "common/mma.cuh"

// ---- matrices in shared memory -------------------------------------------------------------------------------------

// Four matrices of 8 rows x 16 bytes; lane l gives the address of row l % 8 of matrix l / 8, and gets word l % 4 of the
// rows l / 4.
__device__ __forceinline__ void load_matrices(unsigned* r, unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Four matrices of 8 x 8 numbers of 16 bits, each transposed: lane l has two neighbours of row l / 4, from column 2 (l
// % 4) on, and gives the address of column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(unsigned address, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// A number and a word beside it.
__device__ __forceinline__ void store_shared(unsigned address, float v, unsigned word) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(__float_as_uint(v)), "r"(word) : "memory");
}

// What the kernel before this one has written.
__device__ __forceinline__ int load_written(const int* p) {
    int v;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Starts to copy a word, which brings the 128 bytes around it to the L2 cache: those beside it come next.
__device__ __forceinline__ void copy_word_of_line(unsigned address, const void* global) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------

#define OPERANDS16(s, i) OPERANDS8(s, i), OPERANDS8(s, i + 8)
#define OPERANDS32(s, i) OPERANDS16(s, i), OPERANDS16(s, i + 16)
#define OPERANDS_OF_64(s, i) OPERANDS32(s, i), OPERANDS32(s, i + 32)
#define LIST128                                                                                                \
    LIST64                                                                                                     \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83"     \
    ", %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103" \
    ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120"   \
    ", %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_BYTES(tokens, list, a0, a1, a2, a3, b_, keep_, ...)                                                     \
    asm volatile("{ .reg .pred keep; setp.ne.b32 keep, " keep_                                                        \
                 ", 0;"                                                                                               \
                 " wgmma.mma_async.sync.aligned.m64n" tokens "k32.s32.s8.s8 {" list "}, {" a0 ", " a1 ", " a2 ", " a3 \
                 "}, " b_ ", keep; }"                                                                                 \
                 : __VA_ARGS__                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep))

// sum (+)= a * b for 64 rows x 2 N tokens x 32 k; the old sum counts only where `keep` is not 0. Lane (g, t) of a warp
// has four k from 4 t on of rows g and g + 8, then those from 16 + 4 t on; sums of tokens 8 j + 2 t and the next, of
// those two rows.
template <int N>
__device__ __forceinline__ void wgmma_bytes(int (&sum)[N], const unsigned (&a)[4], unsigned long long b, int keep) {
    if constexpr (N == 16) WGMMA_BYTES("32", LIST16, "%16", "%17", "%18", "%19", "%20", "%21", OPERANDS16(sum, 0));
    else if constexpr (N == 32) WGMMA_BYTES("64", LIST32, "%32", "%33", "%34", "%35", "%36", "%37", OPERANDS32(sum, 0));
    else if constexpr (N == 64)
        WGMMA_BYTES("128", LIST64, "%64", "%65", "%66", "%67", "%68", "%69", OPERANDS_OF_64(sum, 0));
    else
        WGMMA_BYTES(
            "256", LIST128, "%128", "%129", "%130", "%131", "%132", "%133", OPERANDS_OF_64(sum, 0),
            OPERANDS_OF_64(sum, 64));
}

// Sums that wgmma writes, which it does behind the compiler's back.
template <int N>
__device__ __forceinline__ void fence_sums(int (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(sum[i])::"memory");
}

// ---- codes ---------------------------------------------------------------------------------------------------------

// How codes become the bytes that are multiplied, STAGE_K = 128 of each row at a time, in ROW_BYTES, of which one or
// more lie beside each other, in the swizzle of all of them.
//     RAW                     words that a lane has of a stage, of rows g and g + 8
//     fetch(raw, address)     those words
//     Zero                    what is subtracted: flip(whether codes are in two's complement), take(row, four times the
//                             zero point from the lowest code on, in a word)
//     begun(raw, s, zero, a)  what becomes operand A of 32 k, number s of four, by
//     finished(a, zero)       of a word
//     SHIFT                   bits by which bytes are too large. Where there are such, sums lack added(zero, row) times
//                             those of the tokens

// Where the first matrix of a lane begins in 16 rows of ROW_BYTES, in the swizzle of that width; the next one two
// pieces of 16 bytes on, and what stands beside them, by exclusive or.
template <int ROW_BYTES>
__device__ __forceinline__ unsigned row_offset(unsigned lane) {
    static_assert(ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128, "swizzles of other widths");
    const unsigned row = lane % 16, chunk = lane / 16;
    return row * ROW_BYTES + ((chunk ^ (row * ROW_BYTES / 128 & (ROW_BYTES / 16 - 1))) << 4);
}

// Codes in the low bits of bytes are raised by 128, which keeps bytes apart when numbers up to 127 are taken off; an
// exclusive or takes the 128 off again.
constexpr unsigned RAISED = 0x80808080u;

// The bits of a mask, others flipped.
template <unsigned MASK>
__device__ __forceinline__ unsigned cut_bytes(unsigned word, unsigned flipped) {
    unsigned r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(word), "n"(MASK), "r"(flipped));
    return r;
}

// Codes of 4 bits, two a byte: the k of the lower halves of 16 bytes, then those of the upper ones. So x either has
// the even k of every 32 ahead of the odd ones, or codes lie so.
struct Nibbles {
    static constexpr int BITS = 4, ROW_BYTES = 64, RAW = 8, SHIFT = 0;
    struct Zero {
        unsigned flipped;  // RAISED, and the highest bit of codes in two's complement
        unsigned points[2];

        __device__ __forceinline__ void flip(bool is_signed) {
            flipped = opaque(RAISED | (is_signed ? 0x08080808u : 0u));
        }
        __device__ __forceinline__ void take(int i, unsigned four) { points[i] = four; }
    };

    __device__ __forceinline__ static void fetch(unsigned (&raw)[RAW], unsigned address) {
        load_matrices(raw, address);
        load_matrices(raw + 4, address ^ 32);
    }
    __device__ __forceinline__ static void begun(
        const unsigned (&raw)[RAW], int s, const Zero& zero, unsigned (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[i] = cut_bytes<0x0f0f0f0fu>(raw[2 * s + i], zero.flipped) - zero.points[i];
            a[2 + i] = cut_bytes<0x0f0f0f0fu>(raw[2 * s + i] >> 4, zero.flipped) - zero.points[i];
        }
    }
    __device__ __forceinline__ static unsigned finished(unsigned a, const Zero&) { return a ^ RAISED; }
};

// The same where a row has one zero point, which is taken off sums: codes are multiplied where the upper half of a byte
// is, as numbers in two's complement, those that are none less 8.
struct RowNibbles {
    static constexpr int BITS = 4, ROW_BYTES = 64, RAW = 8, SHIFT = 4;
    struct Zero {
        unsigned flipped;
        int of_row[2];

        __device__ __forceinline__ void flip(bool is_signed) { flipped = opaque(is_signed ? 0u : RAISED); }
        __device__ __forceinline__ void take(int i, unsigned four) { of_row[i] = 8 - static_cast<int>(four & 0xff); }
        __device__ __forceinline__ int added(int i) const { return of_row[i]; }
    };

    __device__ __forceinline__ static void fetch(unsigned (&raw)[RAW], unsigned address) {
        Nibbles::fetch(raw, address);
    }
    __device__ __forceinline__ static void begun(const unsigned (&raw)[RAW], int s, const Zero&, unsigned (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) a[i] = raw[2 * s + i] << 4, a[2 + i] = raw[2 * s + i];
    }
    __device__ __forceinline__ static unsigned finished(unsigned a, const Zero& zero) {
        return cut_bytes<0xf0f0f0f0u>(a, zero.flipped);
    }
};

// Trits, four fields a byte, each of 32 neighbouring k. They are taken where the highest field is, as numbers in two's
// complement of which 0 stands for 1.
struct Trits {
    static constexpr int BITS = 2, ROW_BYTES = 32, RAW = 4, SHIFT = 6;
    struct Zero {
        __device__ __forceinline__ void flip(bool) {}
        __device__ __forceinline__ void take(int, unsigned) {}
        __device__ __forceinline__ int added(int) const { return 1; }
    };

    __device__ __forceinline__ static void fetch(unsigned (&raw)[RAW], unsigned address) {
        load_matrices(raw, address);
    }
    __device__ __forceinline__ static void begun(const unsigned (&raw)[RAW], int s, const Zero&, unsigned (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = raw[i] << (6 - 2 * s);
    }
    __device__ __forceinline__ static unsigned finished(unsigned a, const Zero&) {
        return cut_bytes<0xc0c0c0c0u>(a, RAISED);
    }
};

// Codes of 8 bits, less 128 where they are not in two's complement.
struct Bytes {
    static constexpr int BITS = 8, ROW_BYTES = 128, RAW = 16, SHIFT = 0;
    struct Zero {
        unsigned flipped;

        __device__ __forceinline__ void flip(bool is_signed) { flipped = opaque(is_signed ? 0u : RAISED); }
        __device__ __forceinline__ void take(int, unsigned) {}
    };

    __device__ __forceinline__ static void fetch(unsigned (&raw)[RAW], unsigned address) {
#pragma unroll
        for (int s = 0; s < 4; ++s) load_matrices(raw + 4 * s, address ^ 32 * s);
    }
    __device__ __forceinline__ static void begun(const unsigned (&raw)[RAW], int s, const Zero&, unsigned (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = raw[4 * s + i];
    }
    __device__ __forceinline__ static unsigned finished(unsigned a, const Zero& zero) { return a ^ zero.flipped; }
};
