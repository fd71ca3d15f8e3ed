// Results of integer codes on Hopper, 64 rows of the weight a warpgroup, which are neighbours of a row of y, 32 tokens
// at a time. wgmma leaves neighbouring rows in different lanes: where results have 16 bits, matrices are transposed on
// their way to shared memory.
#pragma once
#include "linear/int8.cuh"
#include "linear/integer_tiles.cuh"

// Of the host (kbitcupy/products/integer_tile.py), ahead of this source: CHUNK_TOKENS = 32, that are stored at a time.

// 16 bytes at once: of an assignment the compiler may make four.
__device__ __forceinline__ void store_global(void* target, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// The first of eight 16-bit results, those that there are.
template <typename T>
__device__ __forceinline__ void store_some(T* target, uint4 v, long long count) {
    const unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (e < count) target[e] = Word<T>::element(word[e / 2], e % 2);
}

// 16-bit results of a warp, 16 rows x CHUNK_TOKENS as sums of wgmma are laid out, in shared memory: place(m, half) of
// eight rows of token m.
template <typename T, typename Place>
__device__ __forceinline__ void turn_results(const float (&v)[CHUNK_TOKENS / 2], int lane, const Place& place) {
#pragma unroll
    for (int j = 0; j < CHUNK_TOKENS / 16; ++j) {
        unsigned word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = Word<T>::pack(v[8 * j + 2 * i], v[8 * j + 2 * i + 1]);
        store_transposed(place(16 * j + lane / 16 * 8 + lane % 8, lane / 8 % 2), word);
    }
}

// What Results are given.
template <typename T>
struct Target {
    static constexpr int BYTES = 128 * CHUNK_TOKENS;
    T* y;                    // [tokens, rows]
    const TensorMap* map;    // of its bytes, boxes of 128 x tokens in their swizzle, for lines of aligned rows
    long long tokens, rows;  // of all
    bool aligned;            // whether rows of y start at multiples of 16 bytes
    unsigned staged;         // shared memory of this warpgroup, STAGED bytes at a multiple of ALIGNED
    int warpgroup;
};

// Where a warpgroup writes 64 rows: with BUFFERS = 0 each warp 16 on its own. float32 results of eight rows are whole
// sectors as they are.
template <typename T, int BUFFERS>
struct Results;
template <typename T>
struct Results<T, 0> : Target<T> {
    using Target<T>::y, Target<T>::tokens, Target<T>::rows;
    static constexpr int STAGED = sizeof(T) == 2 ? Target<T>::BYTES : 16, ALIGNED = 16, MANY = 1;

    // Ahead of the first chunk of a tile, and of a barrier of the warpgroup; behind the last tile.
    __device__ __forceinline__ void begin() const {}
    __device__ __forceinline__ void finish() const {}
    // Chunk number c of a tile: tokens from `token` on, rows of this warp from `row` on; v as sums of wgmma are laid
    // out. MANY come together.
    __device__ __forceinline__ void store(
        const float (&v)[CHUNK_TOKENS / 2], int c, long long token, long long row, int lane) const {
        if constexpr (sizeof(T) == 2) {
            const unsigned own = this->staged + threadIdx.x % WARPGROUP / WARP * (Target<T>::BYTES / 4);
            auto place = [&](unsigned m, unsigned half) { return own + m * 32 + ((half ^ (m >> 2 & 1)) << 4); };
            __syncwarp();  // what was there has been read
            turn_results<T>(v, lane, place);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < CHUNK_TOKENS / 16; ++i) {
                const unsigned of = 16 * i + lane / 2, half = lane % 2;
                const uint4 eight = shared_at<uint4>(place(of, half));
                const long long m = token + of, n = row + 8 * half;
                if (m >= tokens || n >= rows) continue;
                if (this->aligned) store_global(y + m * rows + n, eight);
                else store_some(y + m * rows + n, eight, rows - n);
            }
        } else {
            const int g = lane / 4, t = lane % 4;
            T* const target = y + (token + 2 * t) * rows + row + g;
            const int first = static_cast<int>(min(tokens - token, static_cast<long long>(CHUNK_TOKENS))) - 2 * t;
#pragma unroll
            for (int j = 0; j < CHUNK_TOKENS / 2; ++j) {
                const int m = j / 4 * 8 + j % 2, n = j / 2 % 2 * 8;
                if (m < first && row + g + n < rows) target[m * rows + n] = v[j];
            }
        }
    }
};

// ---- lines ---------------------------------------------------------------------------------------------------------

// Starts to write a box from shared memory, whose threads' writes are seen.
__device__ __forceinline__ void store_box(const TensorMap& map, int x, int y, unsigned from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
                 "r"(y), "r"(from)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the boxes that this thread stores have been read in shared memory; until they are written.
__device__ __forceinline__ void wait_boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_boxes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// 16-bit results of a warpgroup, lines of 128 bytes of y, which TMA writes while the warps go on: BUFFERS / 2 chunks
// together, from one half of the buffers while the other is filled.
template <typename T, int BUFFERS>
struct Results : Target<T> {
    static_assert(sizeof(T) == 2 && BUFFERS % 2 == 0, "two halves");
    using Target<T>::y, Target<T>::tokens, Target<T>::rows;
    static constexpr int STAGED = BUFFERS * Target<T>::BYTES, ALIGNED = 1024, MANY = BUFFERS / 2;

    __device__ __forceinline__ static bool first() { return threadIdx.x % WARPGROUP == 0; }
    __device__ __forceinline__ void begin() const {
        if (first()) wait_boxes_read();
    }
    __device__ __forceinline__ void finish() const {
        if (first()) wait_boxes();
    }
    __device__ __forceinline__ void store(
        const float (&v)[CHUNK_TOKENS / 2], int c, int token, int row, int lane) const {
        const unsigned buffers = this->staged + c / MANY % 2 * MANY * Target<T>::BYTES;
        const unsigned warp = threadIdx.x % WARPGROUP / WARP, before = c % MANY * CHUNK_TOKENS;
        auto place = [&](unsigned m, unsigned eight) { return buffers + m * 128 + ((eight ^ (m & 7)) << 4); };
        turn_results<T>(v, lane, [&](unsigned m, unsigned half) { return place(before + m, 2 * warp + half); });
        if (c % MANY < MANY - 1) return;
        row -= 16 * warp, token -= before;
        if (this->aligned) {
            fence_async_proxy();
            if (first()) wait_boxes_read();  // then the buffers of the next chunks are free
            warpgroup_sync(this->warpgroup);
            if (first()) store_box(*this->map, row * static_cast<int>(sizeof(T)), token, buffers);
        } else {
            warpgroup_sync(this->warpgroup);
            const unsigned n = threadIdx.x % 64, of = threadIdx.x % WARPGROUP / 64;
            T* const target = y + token * rows + row + n;
#pragma unroll 1
            for (unsigned m = of; row + n < rows && m < MANY * CHUNK_TOKENS && token + m < tokens; m += WARPGROUP / 64)
                target[m * rows] = shared_at<T>(place(m, n / 8) + n % 8 * sizeof(T));
        }
    }
};
