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

constexpr int WARP = 32;
constexpr int ROW = 32;                  // elements that a lane owns
constexpr int TILE = WARP * ROW;         // elements of a warp's tile
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;  // 2^-126

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// ---- element types ---------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Elements per 32-bit register, their conversion, and the larger magnitude of two registers (NaN loses).
template <typename T>
struct Word;

template <>
struct Word<float> {
    static constexpr int COUNT = 1;
    __device__ __forceinline__ static float get(unsigned word, int) { return __uint_as_float(word); }
    __device__ __forceinline__ static unsigned pack(const float* v) { return __float_as_uint(v[0]); }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        return __float_as_uint(fmaxf(__uint_as_float(a), fabsf(__uint_as_float(b))));
    }
    __device__ __forceinline__ static float largest(unsigned word) { return __uint_as_float(word); }
};

template <>
struct Word<__half> {
    static constexpr int COUNT = 2;
    __device__ __forceinline__ static __half2 as(unsigned word) { return *reinterpret_cast<__half2*>(&word); }
    __device__ __forceinline__ static float get(unsigned word, int i) {
        return i == 0 ? __low2float(as(word)) : __high2float(as(word));
    }
    __device__ __forceinline__ static unsigned pack(const float* v) {
        __half2 both = __floats2half2_rn(v[0], v[1]);
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        __half2 both = __hmax2(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static float largest(unsigned word) { return fmaxf(get(word, 0), get(word, 1)); }
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
    __device__ __forceinline__ static unsigned pack(const float* v) {
        __nv_bfloat162 both = __floats2bfloat162_rn(v[0], v[1]);
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        __nv_bfloat162 both = __hmax2(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static float largest(unsigned word) { return fmaxf(get(word, 0), get(word, 1)); }
};

// ---- arithmetic ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float flush(float x) { return fabsf(x) < SMALLEST_NORMAL ? 0.0f : x; }

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
    static constexpr int PER_WORD = 32 / BITS;
};

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
            word[row] = (a & low) | ((b << step) & ~low);
            word[row + step] = ((a >> step) & low) | (b & ~low);
        }
    }
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

    // Fill from x[start ..], zeros beyond n.
    __device__ __forceinline__ void load(const T* x, long long start, long long n, bool aligned, int lane) const {
        if (aligned && start + TILE <= n) {
            const uint4* source = reinterpret_cast<const uint4*>(x + start) + lane;
            uint4 value[CHUNKS];
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) value[i] = __ldcs(source + i * WARP);
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                int chunk = i * WARP + lane;
                chunks[place(chunk / CHUNKS, chunk % CHUNKS)] = value[i];
            }
        } else {
            for (int i = 0; i < ROW; ++i) {
                int e = i * WARP + lane;
                *element(e / ROW, e % ROW) = start + e < n ? x[start + e] : T(0.0f);
            }
        }
    }

    // Write to y[start ..], nothing beyond n.
    __device__ __forceinline__ void store(T* y, long long start, long long n, bool aligned, int lane) const {
        if (aligned && start + TILE <= n) {
            uint4* target = reinterpret_cast<uint4*>(y + start) + lane;
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                int chunk = i * WARP + lane;
                __stcs(target + i * WARP, chunks[place(chunk / CHUNKS, chunk % CHUNKS)]);
            }
        } else {
            for (int i = 0; i < ROW; ++i) {
                int e = i * WARP + lane;
                if (start + e < n) y[start + e] = *element(e / ROW, e % ROW);
            }
        }
    }

    // The words of one row, in order.
    __device__ __forceinline__ void read_row(int row, unsigned (&word)[WORDS]) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            uint4 v = chunks[place(row, c)];
            word[4 * c] = v.x, word[4 * c + 1] = v.y, word[4 * c + 2] = v.z, word[4 * c + 3] = v.w;
        }
    }
    __device__ __forceinline__ void write_chunk(int row, int chunk, const unsigned* word) const {
        chunks[place(row, chunk)] = make_uint4(word[0], word[1], word[2], word[3]);
    }
};

__device__ __forceinline__ bool is_aligned(const void* pointer) {
    return (reinterpret_cast<unsigned long long>(pointer) & 15) == 0;
}

// K words a lane, lane after lane, between global memory (coalesced) and registers; `stage` is K * 32 words of shared
// memory that the warp owns. Blocks from `blocks` on are read as zero and not written.
template <int K>
__device__ __forceinline__ void load_words(
    const unsigned* packed, long long first_block, long long blocks, unsigned* stage, int lane, unsigned (&word)[K]) {
    const unsigned* source = packed + first_block * K;
    long long limit = (blocks - first_block) * K;
#pragma unroll
    for (int i = 0; i < K; ++i) {
        int at = i * WARP + lane;
        stage[at] = at < limit ? __ldcs(source + at) : 0u;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < K; ++i) word[i] = stage[lane * K + i];
}

template <int K>
__device__ __forceinline__ void store_words(
    unsigned* packed, long long first_block, long long blocks, unsigned* stage, int lane, const unsigned (&word)[K]) {
#pragma unroll
    for (int i = 0; i < K; ++i) stage[lane * K + i] = word[i];
    __syncwarp();
    unsigned* target = packed + first_block * K;
    long long limit = (blocks - first_block) * K;
#pragma unroll
    for (int i = 0; i < K; ++i) {
        int at = i * WARP + lane;
        if (at < limit) __stcs(target + at, stage[at]);
    }
}
