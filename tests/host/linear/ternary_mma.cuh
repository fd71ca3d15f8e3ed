// Stands in for kernels/linear/ternary_mma.cuh where a kernel runs on the host: mma as its definition says.
#pragma once
#include "common/copy.cuh"
#include "common/sync.cuh"

// What the lanes of a warp give to an mma.
struct Operands {
    unsigned a[32][4], b[32][2];
};
inline Operands operands[32];

template <bool SIGNED>
void mma_bytes(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Operands& all = operands[threadIdx.x / 32];
    const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    std::memcpy(all.a[lane], a, sizeof(a));
    all.b[lane][0] = b0, all.b[lane][1] = b1;
    this_warp->wait();
    for (unsigned e = 0; e < 4; ++e)
        for (unsigned k = 0; k < 32; ++k) {
            // Register k / 16 of b, and of a with rows g + 8 behind each; its lane t and byte.
            const unsigned of = k % 16 / 4, shift = k % 4 * 8, row = e / 2;
            const unsigned x = all.a[g * 4 + of][k / 16 * 2 + row] >> shift & 0xff;
            const unsigned y = all.b[(2 * t + e % 2) * 4 + of][k / 16] >> shift & 0xff;
            sum[e] += (SIGNED ? static_cast<signed char>(x) : static_cast<int>(x)) * static_cast<signed char>(y);
        }
    this_warp->wait();
}

// Floats of 16 bits are the GPU's business: what mentions them only has to compile.
template <typename T>
constexpr unsigned LARGE = 0;
template <typename T>
constexpr int PLACES = 4;
template <typename T>
unsigned less_large(unsigned both, int) {
    return both;
}
template <typename T>
void mma_floats(float (&)[4], const unsigned (&)[4], unsigned, unsigned) {}

inline int passing() { return 0; }
inline void copy_codes(const void* shared, const unsigned char* codes, int bytes, int) {
    copy_async_or_zero<16>(shared, codes, bytes);
}
inline unsigned char* dynamic_memory() {
    alignas(16) static unsigned char memory[1 << 20];
    return memory;
}
inline uint2 load_codes8(const unsigned char* p) { return *reinterpret_cast<const uint2*>(p); }
template <int N>
void load_scales(float (&v)[N], const float* p) {
    std::memcpy(v, p, sizeof(v));
}
struct int2 {
    int x, y;
};
inline uint4 load_written(const uint4* p) { return *p; }
inline int2 load_written(const int2* p) { return *p; }
inline float load_scale(const float* p) { return *p; }
inline void from_float(float& y, float x) { y = x; }
