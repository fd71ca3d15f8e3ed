// What products of ternary codes need of the hardware. tests/host has a stand-in, with which their kernels run on the
// host.
#pragma once
#include "common/mma.cuh"

// sum += a * b for a of 16 x 32 unsigned, or SIGNED, bytes and b of 32 x 8 signed ones, laid out as in mma_s8.
template <bool SIGNED>
__device__ __forceinline__ void mma_bytes(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Two numbers that the kernel before this one has written.
__device__ __forceinline__ int2 load_written(const int2* p) {
    int2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}

// mma_bytes for 16 x 16 floats of 16 bits in float32, laid out as in mma.
template <typename T>
__device__ __forceinline__ void mma_floats(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma<T>(sum, a[0], a[1], a[2], a[3], b0, b1);
}

// The number whose last bit is 1, twice, and for how many fields its fraction has room.
template <typename T>
constexpr unsigned LARGE = 0x64006400u;  // 1024
template <>
constexpr unsigned LARGE<__nv_bfloat16> = 0x43004300u;  // 128
template <typename T>
constexpr int PLACES = 4;
template <>
constexpr int PLACES<__nv_bfloat16> = 3;

// Two numbers less (that one and 4^place).
template <typename T>
__device__ __forceinline__ unsigned less_large(unsigned both, int place) {
    const unsigned large = LARGE<T> + (0x00010001u << 2 * place);
    const auto difference = __hsub2(Word<T>::as(both), Word<T>::as(large));
    return Word<T>::bits(difference);
}

// The shared memory that the launch asks for.
__device__ __forceinline__ unsigned char* dynamic_memory() {
    extern __shared__ uint4 dynamic[];
    return reinterpret_cast<unsigned char*>(dynamic);
}

// Two words to shared memory, by their address in the window.
__device__ __forceinline__ void store_shared(unsigned address, unsigned low, unsigned high) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}

// How codes pass through the L2 cache: they leave it first, as they are read once.
__device__ __forceinline__ unsigned long long passing() {
    unsigned long long policy = 0;
#if __CUDA_ARCH__ >= 800
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// Copy 16 bytes of codes, or as many zeros where `bytes` is 0.
__device__ __forceinline__ void copy_codes(
    unsigned address, const unsigned char* codes, int bytes, unsigned long long policy) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(address), "l"(codes),
                 "r"(bytes), "l"(policy)
                 : "memory");
#endif
}

// 8 bytes of weights that are read once, and a scale of them. Not by ld.global.nc: those loads the compiler would put
// off until the kernel ahead has ended.
__device__ __forceinline__ uint2 load_codes8(const unsigned char* codes) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(codes) : "memory");
    return v;
}

// One, two or four scales.
__device__ __forceinline__ void load_scales(float (&v)[1], const float* scale) {
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v[0]) : "l"(scale) : "memory");
}
__device__ __forceinline__ void load_scales(float (&v)[2], const float* scale) {
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "l"(scale) : "memory");
}
__device__ __forceinline__ void load_scales(float (&v)[4], const float* scale) {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "l"(scale)
                 : "memory");
}
__device__ __forceinline__ float load_scale(const float* scale) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(scale) : "memory");
    return v;
}

__device__ __forceinline__ void from_float(float& y, float x) { y = x; }
__device__ __forceinline__ void from_float(__half& y, float x) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(__nv_bfloat16& y, float x) { y = __float2bfloat16_rn(x); }
