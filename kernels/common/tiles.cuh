// Blocks of 32 elements: bit planes, and a warp's tile of 32 blocks.
//
// A warp works on a tile of 32 rows x 32 elements: memory is read and written in whole lines by the warp, and between
// the two each lane owns one row (one block of 32 elements), so no arithmetic crosses lanes:
//
//     global memory  --16 B a lane, consecutive-->  shared tile  --one row a lane-->  registers
#pragma once
#include "common/copy.cuh"

constexpr int ROW = 32;           // elements that a lane owns
constexpr int TILE = WARP * ROW;  // elements of a warp's tile

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

// ---- runs of tiles -------------------------------------------------------------------------------------------------

// The tiles of a thread block: a run of neighbours, which its warps take in turn. The grid decides how long a run is.
// Short runs are fast: blocks start in order, so all that is under way at a time lies close together in memory. Warps
// that stride over the whole array drift apart, and DRAM pages are opened more than once.
// Count: unsigned where there are few tiles, whose division is then spared in a grid that has a block for each.
template <typename Count>
struct BlockRun {
    Count first, end;

    __device__ __forceinline__ explicit BlockRun(long long all) {
        const Count tiles = static_cast<Count>(all);
        const bool one_each = sizeof(Count) == 4 && tiles <= gridDim.x;
        const Count run = one_each ? 1 : (tiles + gridDim.x - 1) / gridDim.x;
        first = blockIdx.x * run, end = min(tiles, (blockIdx.x + 1) * run);
    }
};

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
    // wait_copies() and a barrier of the warp.
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
