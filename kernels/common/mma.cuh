// Tensor cores: mma.sync, ldmatrix and wgmma.
#pragma once
#include "common/copy.cuh"
#include "common/sync.cuh"

// ---- mma.sync ------------------------------------------------------------------------------------------------------

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

// sum += a * b for a of 16 x 32, b of 32 x 8, four neighbouring k a register:
// a[0] row g, k 4t ..; a[1] row g + 8; a[2], a[3] the same at k 16 + 4t; b0, b1 column g at k 4t and 16 + 4t.
__device__ __forceinline__ void mma_s8(int* sum, const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#pragma unroll
    for (int i = 0; i < 4; ++i)  // Turing has a quarter of it
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(sum[i % 2 * 2]), "+r"(sum[i % 2 * 2 + 1])
            : "r"(a[i]), "r"(i < 2 ? b0 : b1));
#endif
}

// Four 8 x 16 byte matrices from shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
    const unsigned address = shared_address(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------

// The descriptor of an operand of wgmma: rows of 128 bytes in the 128-byte swizzle, of which eight, 1024 bytes, are a
// unit. Descriptors count in units of 16 bytes.
__device__ __forceinline__ unsigned long long wgmma_descriptor_of(unsigned low) {
    return (unsigned long long)(64u | 1u << 30) << 32 | low;
}
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned address) {
    return wgmma_descriptor_of((address & 0x3ffffu) >> 4 | 1u << 16);
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers that wgmma reads or writes, which it does behind the compiler's back: until here nothing else may have
// them.
template <int N>
__device__ __forceinline__ void fence_operands(float (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}
template <int N, int M>
__device__ __forceinline__ void fence_operands(unsigned (&a)[N][M]) {
#pragma unroll
    for (int i = 0; i < N * M; ++i) asm volatile("" : "+r"(a[i / M][i % M])::"memory");
}

// Behind it wgmma and TMA, the async proxy, see what this thread wrote to shared memory, once a barrier has told of it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define SUMS8(s, i)                                                                                             \
    "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), "+f"(s[i + 5]), "+f"(s[i + 6]), \
        "+f"(s[i + 7])
#define SUMS16(s, i) SUMS8(s, i), SUMS8(s, i + 8)
#define SUMS32(s, i) SUMS16(s, i), SUMS16(s, i + 16)
#define SUMS64(s, i) SUMS32(s, i), SUMS32(s, i + 32)
#define SUMS4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define LIST4 "%0, %1, %2, %3"
#define LIST8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIST16 LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST32 LIST16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST64                                                                                        \
    LIST32                                                                                            \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50" \
    ", %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA(tokens, type, list, inputs, ...)                                                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" tokens "k16.f32." type "." type " {" list "}, " inputs \
                 ", 1, 1, 1, 0;"                                                                            \
                 : __VA_ARGS__                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA_OF(tokens, list, inputs, ...)                                                        \
    do {                                                                                           \
        if constexpr (SameType<T, __half>::VALUE) WGMMA(tokens, "f16", list, inputs, __VA_ARGS__); \
        else WGMMA(tokens, "bf16", list, inputs, __VA_ARGS__);                                     \
    } while (false)

// sum += a * b for 64 rows x 2 N tokens x 16 k.
template <typename T, int N>
__device__ __forceinline__ void wgmma(float (&sum)[N], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (N == 4) WGMMA_OF("8", LIST4, "{%4, %5, %6, %7}, %8", SUMS4(sum, 0));
    else if constexpr (N == 8) WGMMA_OF("16", LIST8, "{%8, %9, %10, %11}, %12", SUMS8(sum, 0));
    else if constexpr (N == 16) WGMMA_OF("32", LIST16, "{%16, %17, %18, %19}, %20", SUMS16(sum, 0));
    else if constexpr (N == 32) WGMMA_OF("64", LIST32, "{%32, %33, %34, %35}, %36", SUMS32(sum, 0));
    else WGMMA_OF("128", LIST64, "{%64, %65, %66, %67}, %68", SUMS64(sum, 0));
}

#define OPERANDS8(s, i)                                                                                         \
    "+r"(s[i]), "+r"(s[i + 1]), "+r"(s[i + 2]), "+r"(s[i + 3]), "+r"(s[i + 4]), "+r"(s[i + 5]), "+r"(s[i + 6]), \
        "+r"(s[i + 7])
#define OPERANDS64(s)                                                                                         \
    OPERANDS8(s, 0), OPERANDS8(s, 8), OPERANDS8(s, 16), OPERANDS8(s, 24), OPERANDS8(s, 32), OPERANDS8(s, 40), \
        OPERANDS8(s, 48), OPERANDS8(s, 56)

// sum (+)= a * b for 64 tokens x 128 channels x 32 k; the old sum counts only where `keep` is not 0.
__device__ __forceinline__ void wgmma_s8(int (&sum)[64], unsigned long long a, unsigned long long b, int keep) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %66, 0;"
        " wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8"
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"
        " %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44,"
        " %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
        " %64, %65, keep; }"
        : OPERANDS64(sum)
        : "l"(a), "l"(b), "r"(keep));
}

__device__ __forceinline__ void fence_operands(int (&sum)[64]) { asm volatile("" : OPERANDS64(sum)::"memory"); }
