// Device code that every family uses: element conversion, division, bit-matrix transposition, warp tiles.
//
// A warp works on a tile of 32 rows x 32 elements: memory is read and written in whole lines by the warp, and between
// the two each lane owns one row (one block of 32 elements), so no arithmetic crosses lanes:
//
//     global memory  --16 B a lane, consecutive-->  shared tile  --one row a lane-->  registers
//
// NumPy computes the same numbers, so nothing here may be contracted or reordered: the host passes --fmad=false, and
// every fused multiply-add is written out. CuPy forces -ftz=true: magnitudes under 2^-126 are zero.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/scalar.cuh"

constexpr int WARP = 32;
constexpr int ROW = 32;           // elements that a lane owns
constexpr int TILE = WARP * ROW;  // elements of a warp's tile
constexpr unsigned FULL_WARP = 0xffffffffu;

// ---- element types ---------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename A, typename B>
struct SameType {
    static constexpr bool VALUE = false;
};
template <typename A>
struct SameType<A, A> {
    static constexpr bool VALUE = true;
};

// Elements per 32-bit register, their conversion, and the larger magnitude of two registers: NaN loses in
// larger_magnitude and wins in largest_or_nan, whose first operand has no signs.
template <typename T>
struct Word;

template <>
struct Word<float> {
    static constexpr int COUNT = 1;
    __device__ __forceinline__ static float get(unsigned word, int) { return __uint_as_float(word); }
    __device__ __forceinline__ static float element(unsigned word, int) { return __uint_as_float(word); }
    __device__ __forceinline__ static unsigned pack(const float* v) { return __float_as_uint(v[0]); }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        return __float_as_uint(fmaxf(__uint_as_float(a), fabsf(__uint_as_float(b))));
    }
    __device__ __forceinline__ static unsigned largest_or_nan(unsigned a, unsigned b) {
        return max(a, b & 0x7fffffffu);
    }
    __device__ __forceinline__ static bool is_finite(unsigned word) { return (word & 0x7fffffffu) < 0x7f800000u; }
    __device__ __forceinline__ static float largest(unsigned word) { return __uint_as_float(word); }
    __device__ __forceinline__ static unsigned scale(unsigned word, float factor) {
        return __float_as_uint(__fmul_rn(__uint_as_float(word), factor));
    }
};

template <>
struct Word<__half> {
    static constexpr int COUNT = 2;
    __device__ __forceinline__ static __half2 as(unsigned word) { return *reinterpret_cast<__half2*>(&word); }
    __device__ __forceinline__ static float get(unsigned word, int i) {
        return i == 0 ? __low2float(as(word)) : __high2float(as(word));
    }
    __device__ __forceinline__ static __half element(unsigned word, int i) {
        return i == 0 ? __low2half(as(word)) : __high2half(as(word));
    }
    __device__ __forceinline__ static unsigned pack(const float* v) {
        __half2 both = __floats2half2_rn(v[0], v[1]);
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        __half2 both = __hmax2(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned largest_or_nan(unsigned a, unsigned b) {
        __half2 both = __hmax2_nan(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static bool is_finite(unsigned word) {
        return (word & 0x7fffu) < 0x7c00u && (word >> 16 & 0x7fffu) < 0x7c00u;
    }
    __device__ __forceinline__ static float largest(unsigned word) { return fmaxf(get(word, 0), get(word, 1)); }
    __device__ __forceinline__ static unsigned scale(unsigned word, float factor) {
        const float v[2] = {__fmul_rn(get(word, 0), factor), __fmul_rn(get(word, 1), factor)};
        return pack(v);
    }
};

template <>
struct Word<__nv_bfloat16> {
    static constexpr int COUNT = 2;
    __device__ __forceinline__ static __nv_bfloat162 as(unsigned word) {
        return *reinterpret_cast<__nv_bfloat162*>(&word);
    }
    __device__ __forceinline__ static float get(unsigned word, int i) {
        return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
    }
    __device__ __forceinline__ static __nv_bfloat16 element(unsigned word, int i) {
        return i == 0 ? __low2bfloat16(as(word)) : __high2bfloat16(as(word));
    }
    __device__ __forceinline__ static unsigned pack(const float* v) {
        __nv_bfloat162 both = __floats2bfloat162_rn(v[0], v[1]);
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        __nv_bfloat162 both = __hmax2(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned largest_or_nan(unsigned a, unsigned b) {
        __nv_bfloat162 both = __hmax2_nan(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static bool is_finite(unsigned word) {
        return (word & 0x7fffu) < 0x7f80u && (word >> 16 & 0x7fffu) < 0x7f80u;
    }
    __device__ __forceinline__ static float largest(unsigned word) { return fmaxf(get(word, 0), get(word, 1)); }
    __device__ __forceinline__ static unsigned scale(unsigned word, float factor) {
        const float v[2] = {__fmul_rn(get(word, 0), factor), __fmul_rn(get(word, 1), factor)};
        return pack(v);
    }
};

// ---- arithmetic ------------------------------------------------------------------------------------------------

// IEEE division, subnormals included: -ftz=true turns every other spelling of it into the flushing one.
__device__ __forceinline__ float divide_ieee(float x, float y) {
    float q;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
    return q;
}

// a * b + c clamped to [0, 1], NaN to 0, in one instruction.
__device__ __forceinline__ float fma_saturate(float a, float b, float c) {
    float r;
    asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// The correctly rounded x / divisor from the correctly rounded reciprocal (Markstein): exact while neither the
// residual nor the quotient leaves the normal range, which the caller sees to.
__device__ __forceinline__ float divide_by_reciprocal(float x, float divisor, float reciprocal) {
    float q = __fmul_rn(x, reciprocal);
    return __fmaf_rn(__fmaf_rn(-q, divisor, x), reciprocal, q);
}

// This thread's warp; the compiler learns that it is the same for all lanes, and keeps what follows from it once.
__device__ __forceinline__ int warp_number() { return __shfl_sync(FULL_WARP, int(threadIdx.x / WARP), 0); }

// The largest of the warp's 32 numbers, in every lane.
__device__ __forceinline__ unsigned warp_max(unsigned x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

// ---- bit planes ------------------------------------------------------------------------------------------------

// Fields of 1, 2, 4 or 8 bits hold an index of K bits.
template <int K>
struct Field {
    static constexpr int BITS = K == 1 ? 1 : K == 2 ? 2 : K <= 4 ? 4 : 8;
};

// Bits of a where the mask is set, of b elsewhere: one instruction, which the compiler does not find by itself.
__device__ __forceinline__ unsigned select_bits(unsigned mask, unsigned a, unsigned b) {
    unsigned r;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
    return r;
}

// Exchange rows and columns of the BITS x BITS bit matrices that stand side by side in BITS words. On one side of the
// exchange word p is bit plane p (bit e belongs to element e); on the other, field n of word w is the whole index of
// element n * BITS + w. The exchange is its own inverse.
template <int BITS>
__device__ __forceinline__ void transpose_fields(unsigned (&word)[BITS]) {
#pragma unroll
    for (int step = 1; step < BITS; step *= 2) {
        // Mask of the bits whose column number lacks `step`: 0x55555555, 0x33333333, 0x0f0f0f0f.
        const unsigned low = step == 1 ? 0x55555555u : step == 2 ? 0x33333333u : 0x0f0f0f0fu;
#pragma unroll
        for (int row = 0; row < BITS; ++row) {
            if (row & step) continue;
            unsigned a = word[row], b = word[row + step];
            word[row] = select_bits(low, a, b << step);
            word[row + step] = select_bits(low, a >> step, b);
        }
    }
}

// ---- copies ----------------------------------------------------------------------------------------------------

// The address of shared memory in its window.
__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// A number, or two or four words, in shared memory, by its address in the window.
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
    } else if constexpr (sizeof(A) == 4) {
        unsigned v;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
        return *reinterpret_cast<A*>(&v);
    } else if constexpr (sizeof(A) == 8) {
        A v;
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
        return v;
    } else {
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(address));
        return *reinterpret_cast<A*>(&v);
    }
}

// Start to copy BYTES, 4, 8 or 16, from global memory to an address of the shared window, without a stop in registers
// where the architecture can (sm_80 on).
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned address, const void* global) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(global), "n"(BYTES) : "memory");
#else
    static_assert(BYTES % 4 == 0, "words");
    void* shared = __cvta_shared_to_generic(address);
    if constexpr (BYTES == 16) *static_cast<uint4*>(shared) = __ldcs(static_cast<const uint4*>(global));
    else if constexpr (BYTES == 8) *static_cast<uint2*>(shared) = __ldg(static_cast<const uint2*>(global));
    else *static_cast<unsigned*>(shared) = __ldg(static_cast<const unsigned*>(global));
#endif
}

// The same from sm_80 on, if they are there: a predicate costs less than a branch in a loop.
template <int BYTES>
__device__ __forceinline__ void copy_async_if(unsigned address, const void* global, bool there) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile(
            "{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(address),
            "l"(global), "r"(unsigned(there))
            : "memory");
    else
        asm volatile(
            "{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], %3;}" ::"r"(address),
            "l"(global), "r"(unsigned(there)), "n"(BYTES)
            : "memory");
#endif
}

// ... and the first `bytes` of them, with zeros behind.
template <int BYTES>
__device__ __forceinline__ void copy_async_or_zero(unsigned address, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(address), "l"(global), "r"(bytes), "n"(BYTES)
                     : "memory");
#endif
}

// Close the group of the copies started since the last call.
__device__ __forceinline__ void close_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Bring the 128-byte line of an address to the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Wait for this lane's copies, except those of the last PENDING groups.
template <int PENDING>
__device__ __forceinline__ void copies_arrived() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- warp tiles ------------------------------------------------------------------------------------------------

// A tile in shared memory: 32 rows of 32 elements, in 16-byte chunks. Chunk c of row r stands at column c ^ swizzle(r):
// the eight lanes that a shared-memory phase serves then touch all 32 banks, by rows and by columns.
template <typename T>
struct Tile {
    static constexpr int PER_CHUNK = 16 / sizeof(T);
    static constexpr int CHUNKS = ROW / PER_CHUNK;  // per row: 4 (2-byte types) or 8
    static constexpr int WORDS = ROW * sizeof(T) / 4;
    uint4* chunks;

    __device__ __forceinline__ static int place(int row, int chunk) {
        return row * CHUNKS + (chunk ^ ((row * CHUNKS / 8) & (CHUNKS - 1)));
    }
    __device__ __forceinline__ T* element(int row, int column) const {
        return reinterpret_cast<T*>(chunks + place(row, column / PER_CHUNK)) + column % PER_CHUNK;
    }

    // Start to fill from a whole aligned tile, of which `source` is the lane's first chunk; complete after
    // copies_arrived() and a barrier of the warp.
    __device__ __forceinline__ void load_whole(const uint4* source, int lane) const {
        const int first = place(lane / CHUNKS, lane % CHUNKS);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)  // place(chunk / CHUNKS, chunk % CHUNKS) of chunk i * WARP + lane
            copy_async<16>(shared_address(chunks + i * WARP + (first ^ (4 * i & (CHUNKS - 1)))), source + i * WARP);
    }

    // Fill from x[start ..], zeros beyond n, an element at a time.
    __device__ __forceinline__ void load_part(const T* x, long long start, long long n, int lane) const {
        for (int i = 0; i < ROW; ++i) {
            int e = i * WARP + lane;
            *element(e / ROW, e % ROW) = start + e < n ? x[start + e] : T(0.0f);
        }
    }

    // Either of them.
    __device__ __forceinline__ void load(const T* x, long long start, long long n, bool aligned, int lane) const {
        if (aligned && start + TILE <= n) load_whole(reinterpret_cast<const uint4*>(x + start) + lane, lane);
        else load_part(x, start, n, lane);
    }

    // The words of one row, in order.
    __device__ __forceinline__ void read_row(int row, unsigned (&word)[WORDS]) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            uint4 v = chunks[place(row, c)];
            word[4 * c] = v.x, word[4 * c + 1] = v.y, word[4 * c + 2] = v.z, word[4 * c + 3] = v.w;
        }
    }
};

__device__ __forceinline__ bool is_aligned(const void* pointer) {
    return (reinterpret_cast<unsigned long long>(pointer) & 15) == 0;
}

// K words for each block, block after block. A full tile of an aligned plane moves in 16-byte chunks through `stage`,
// CHUNKS of shared memory that the warp owns; any other one word by word. Blocks from `blocks` on are read as zero and
// not written.
template <int K>
struct WordTile {
    static constexpr int PER_LANE = (K + 3) / 4;  // chunks that a lane moves
    static constexpr int CHUNKS = WARP * K / 4;

    __device__ __forceinline__ static bool whole(const unsigned* packed, long long first, long long blocks) {
        return is_aligned(packed) && first + WARP <= blocks;
    }

    __device__ __forceinline__ static void load_async(const unsigned* packed, long long first, int lane, uint4* stage) {
        const uint4* source = reinterpret_cast<const uint4*>(packed + first * K);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (i * WARP + lane < CHUNKS)
                copy_async<16>(shared_address(stage + i * WARP + lane), source + i * WARP + lane);
    }

    __device__ __forceinline__ static void read(const uint4* stage, int lane, unsigned (&word)[K]) {
        if constexpr (K % 4 == 0) {
#pragma unroll
            for (int i = 0; i < K / 4; ++i) {
                const uint4 v = stage[lane * (K / 4) + i];
                word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < K; ++i) word[i] = reinterpret_cast<const unsigned*>(stage)[lane * K + i];
        }
    }

    __device__ __forceinline__ static void load(
        const unsigned* packed, long long first, long long blocks, int lane, unsigned (&word)[K]) {
        const long long block = first + lane;
#pragma unroll
        for (int i = 0; i < K; ++i) word[i] = block < blocks ? packed[block * K + i] : 0u;
    }

    __device__ __forceinline__ static void store(
        unsigned* packed, long long first, long long blocks, uint4* stage, int lane, const unsigned (&word)[K]) {
        if (whole(packed, first, blocks)) {
            uint4* target = reinterpret_cast<uint4*>(packed + first * K);
            if constexpr (K == 4) {
                __stcs(target + lane, make_uint4(word[0], word[1], word[2], word[3]));
                return;
            }
            if constexpr (K == 8) {
                stage[lane * 2] = make_uint4(word[0], word[1], word[2], word[3]);
                stage[lane * 2 + 1] = make_uint4(word[4], word[5], word[6], word[7]);
            } else {
#pragma unroll
                for (int i = 0; i < K; ++i) reinterpret_cast<unsigned*>(stage)[lane * K + i] = word[i];
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                if (i * WARP + lane < CHUNKS) __stcs(target + i * WARP + lane, stage[i * WARP + lane]);
        } else {
            const long long block = first + lane;
#pragma unroll
            for (int i = 0; i < K; ++i)
                if (block < blocks) packed[block * K + i] = word[i];
        }
    }
};

// ---- launches that overlap -------------------------------------------------------------------------------------

// Let a kernel that waits for this one start already.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait for what the kernel before this one writes, where the launch does not do so.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
