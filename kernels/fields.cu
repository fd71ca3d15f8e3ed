// Blocks of bytes to planes of their fields, and back. Nothing is computed: what counts is that global memory is read
// and written in whole vectors, while a field begins at any byte of a block and a block at any byte of memory.
//
//     blocks   |d|  qs  |d|  qs  |d|  qs  |...        planes   |d|d|d|...   |  qs  |  qs  |  qs  |...
//
// A thread block moves a tile of blocks through shared memory, in which the blocks lie as in global memory, as far
// behind a multiple of 16 bytes as there. Planes are read and written in whole vectors of 16 bytes, each by one thread:
// of a field of whole vectors one is a run of bytes of one block, else it is of several blocks, a word, a half word or
// a byte at a time. What counts is how many bytes are under way: all loads of a tile are, before anything is done with
// one. (To go through tiles in one thread block is slower, even with the next tile's loads under way.)
//
// Then integer instructions count: at the speed of a copy an H200 has time for some 120 of them while it moves 16 bytes
// for each lane of a warp. So the host computes what all lanes need, and words are selected where lanes would go
// different ways. Tiles are small: a grid of large ones begins and ends more slowly. Loads are plain ones: with __ldcs
// all of it takes a twentieth longer.
#include "common/types.cuh"

// Of the host (kbitcupy/formats/fields.py), ahead of this source: THREADS, TILE_BYTES, MAX_FIELDS and struct
// BlockFields. A tile is whole vectors of every plane, and all tiles begin at the same byte of a vector.
constexpr int VECTOR = sizeof(uint4);
// Vectors that a thread has under way.
constexpr int HELD = TILE_BYTES / VECTOR / THREADS;
static_assert(HELD * VECTOR * THREADS == TILE_BYTES, "whole vectors of all threads");
// Thread blocks that a multiprocessor holds at least. From sm_100 on the compiler keeps more in registers.
#if __CUDA_ARCH__ >= 1000
constexpr int RESIDENT = BLOCKS / 2;
#else
constexpr int RESIDENT = BLOCKS;
#endif

// A tile, the bytes ahead of it, and those behind it that cut() reads and leaves.
struct Staged {
    uint4 vector[TILE_BYTES / VECTOR + 2];

    __device__ __forceinline__ unsigned char* bytes() { return reinterpret_cast<unsigned char*>(vector); }
};

// ---- vectors at any byte of shared memory ------------------------------------------------------------------------

// The word that begins `bytes` behind `low`; `high` is the word behind that.
__device__ __forceinline__ unsigned shifted(unsigned low, unsigned high, unsigned bytes) {
    return __byte_perm(low, high, 0x3210u + 0x1111u * bytes);
}

// 16 bytes from byte `at` on, a multiple of a unit of which `bits` has the lowest bit. Three loads of 8 bytes take more
// of shared memory's time than two of 16, of which there is enough, and half the selects.
__device__ __forceinline__ uint4 cut(const Staged& staged, unsigned at, unsigned bits) {
    if (bits % VECTOR == 0) return staged.vector[at / VECTOR];
    const uint2* pairs = reinterpret_cast<const uint2*>(staged.vector) + at / 8;
    const uint2 a = pairs[0], b = pairs[1], c = pairs[2];
    unsigned w[6] = {a.x, a.y, b.x, b.y, c.x, c.y};
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = at & 4 ? w[i + 1] : w[i];
    const unsigned bytes = at % 4;
    return make_uint4(
        shifted(w[0], w[1], bytes), shifted(w[1], w[2], bytes), shifted(w[2], w[3], bytes), shifted(w[3], w[4], bytes));
}

// 16 bytes to byte `at` on, a multiple of a unit of which `bits` has the lowest bit. Other threads write what lies
// beside them, in the same words too: of the first word, and of the one behind the last, only what is ours is written,
// in units, so that no lane goes another way than the others. Together the two have four bytes of ours.
__device__ __forceinline__ void put(Staged& staged, unsigned at, unsigned bits, uint4 v) {
    if (bits % VECTOR == 0) {
        staged.vector[at / VECTOR] = v;
        return;
    }
    const unsigned ahead = at % 4;  // bytes of the first word that are not ours
    unsigned char* to = staged.bytes() + (at - ahead);
    unsigned* words = reinterpret_cast<unsigned*>(to);
    words[1] = shifted(v.x, v.y, 4 - ahead);
    words[2] = shifted(v.y, v.z, 4 - ahead);
    words[3] = shifted(v.z, v.w, 4 - ahead);
    if (bits % 4 == 0) {
        words[0] = v.x;
        return;
    }
    const unsigned edges = shifted(v.w, v.x, 4 - ahead);
    if (bits % 2 == 0) {
        *reinterpret_cast<unsigned short*>(to + (ahead == 0 ? 0 : VECTOR)) = static_cast<unsigned short>(edges);
        *reinterpret_cast<unsigned short*>(to + 2) = static_cast<unsigned short>(edges >> 16);
    } else {
#pragma unroll
        for (unsigned b = 0; b < 4; ++b) to[b + (b < ahead ? VECTOR : 0)] = static_cast<unsigned char>(edges >> b * 8);
    }
}

// ---- codes of 4 bits in another order ----------------------------------------------------------------------------

// The two codes in the middle of every four change places: halves of two bytes become bytes of two halves, and back.
__device__ __forceinline__ unsigned exchanged(unsigned w) {
    const unsigned different = (w ^ w >> 4) & 0x00f000f0u;
    return w ^ different * 0x11u;
}

// 16 bytes of codes with half a run between the two of a byte, as bytes of neighbours. A run has 32 or 16 codes.
__device__ __forceinline__ uint4 to_neighbours(uint4 v, int run) {
    const unsigned w[4] = {exchanged(v.x), exchanged(v.y), exchanged(v.z), exchanged(v.w)};
    const unsigned low[2] = {__byte_perm(w[0], w[1], 0x6420), __byte_perm(w[2], w[3], 0x6420)};
    const unsigned high[2] = {__byte_perm(w[0], w[1], 0x7531), __byte_perm(w[2], w[3], 0x7531)};
    return run == 32 ? make_uint4(low[0], low[1], high[0], high[1]) : make_uint4(low[0], high[0], low[1], high[1]);
}

__device__ __forceinline__ uint4 to_split(uint4 v, int run) {
    const unsigned low[2] = {v.x, run == 32 ? v.y : v.z}, high[2] = {run == 32 ? v.z : v.y, v.w};
    return make_uint4(
        exchanged(__byte_perm(low[0], high[0], 0x5140)), exchanged(__byte_perm(low[0], high[0], 0x7362)),
        exchanged(__byte_perm(low[1], high[1], 0x5140)), exchanged(__byte_perm(low[1], high[1], 0x7362)));
}

// ---- tiles of blocks ---------------------------------------------------------------------------------------------

// Where a tile lies in global memory, counted from the vector that it begins in: so do its bytes in shared memory.
struct Span {
    uint4* vectors;
    unsigned ahead;        // bytes of that vector that are not ours
    unsigned end;          // the byte behind the tile
    unsigned first, last;  // vectors that are all ours: from `first` on, up to the one before `last`
};

__device__ __forceinline__ Span span_of(unsigned char* raw, unsigned bytes) {
    Span span;
    span.ahead = static_cast<unsigned>(reinterpret_cast<unsigned long long>(raw) % VECTOR);
    span.vectors = reinterpret_cast<uint4*>(raw - span.ahead);
    span.end = span.ahead + bytes;
    span.first = span.ahead == 0 ? 0 : 1;
    span.last = max(span.end / VECTOR, span.first);
    return span;
}

// Copy the bytes ahead of the whole vectors and behind them, one by each of the first threads.
__device__ __forceinline__ void copy_edges(uint4* to, const uint4* from, const Span& span) {
    const unsigned t = threadIdx.x;
    if (t >= 2 * VECTOR) return;
    const unsigned at = t < VECTOR ? span.ahead + t : span.last * VECTOR + t - VECTOR;
    if (at < (t < VECTOR ? min(span.first * VECTOR, span.end) : span.end))
        reinterpret_cast<unsigned char*>(to)[at] = reinterpret_cast<const unsigned char*>(from)[at];
}

__device__ __forceinline__ void load(Staged& staged, const Span& span) {
    uint4 v[HELD];
    const unsigned begin = span.first + threadIdx.x;
    const uint4* from = span.vectors + begin;
    uint4* to = staged.vector + begin;
#pragma unroll
    for (unsigned i = 0; i < HELD; ++i)
        if (begin + i * THREADS < span.last) v[i] = from[i * THREADS];
    copy_edges(staged.vector, span.vectors, span);
#pragma unroll
    for (unsigned i = 0; i < HELD; ++i)
        if (begin + i * THREADS < span.last) to[i * THREADS] = v[i];
}

__device__ __forceinline__ void store(Staged& staged, const Span& span) {
    const unsigned begin = span.first + threadIdx.x;
    const uint4* from = staged.vector + begin;
    uint4* to = span.vectors + begin;
#pragma unroll
    for (unsigned i = 0; i < HELD; ++i)
        if (begin + i * THREADS < span.last) __stcs(to + i * THREADS, from[i * THREADS]);
    copy_edges(span.vectors, staged.vector, span);
}

// ---- vectors of planes -------------------------------------------------------------------------------------------

// 16 bytes of a plane, and where they lie in a tile.
struct Piece {
    int field;       // which
    unsigned size;   // bytes that a block has of the field
    unsigned byte;   // of the tile's part of the plane, at which the vector begins
    unsigned block;  // in which the vector begins
    unsigned at;     // byte of shared memory
    unsigned bits;   // its lowest bit: bytes that lie side by side in every block, at a multiple of themselves
};

// Vector i of a tile that begins at byte `ahead` of shared memory.
__device__ __forceinline__ Piece piece_of(const BlockFields& fields, int i, unsigned ahead) {
    Piece piece;
    piece.field = 0;
#pragma unroll
    for (int f = 1; f < MAX_FIELDS; ++f) piece.field += i >= fields.start[f];
    piece.size = fields.size[piece.field];
    piece.byte = static_cast<unsigned>(i - fields.start[piece.field]) * VECTOR;
    // The quotient of a number under 2^14 and the size.
    const unsigned long long product = 1ull * piece.byte * fields.reciprocal[piece.field];
    piece.block = static_cast<unsigned>(product >> 24);
    piece.at = ahead + fields.offset[piece.field] + piece.byte + piece.block * (fields.block - piece.size);
    piece.bits = fields.bits[piece.field] | ahead;
    return piece;
}

// How many bytes of vector i are there in a tile of so many blocks: 16 but for the end of a plane, none behind it.
__device__ __forceinline__ int bytes_of(const BlockFields& fields, const Piece& piece, int i, int blocks) {
    return i < fields.vectors ? max(min(static_cast<int>(blocks * piece.size - piece.byte), VECTOR), 0) : 0;
}

// The first `count` bytes of a vector from shared memory, of a field that is not whole vectors: A is an unsigned
// integer of a unit, and `gap` how far apart the fields of two blocks are.
template <typename A>
__device__ __forceinline__ uint4 gather(Staged& staged, const Piece& piece, int gap, int count) {
    unsigned w[4] = {0, 0, 0, 0};
    unsigned from = piece.byte - piece.block * piece.size;
    unsigned at = piece.at;
#pragma unroll
    for (int b = 0; b < VECTOR; b += sizeof(A)) {
        if (b < count) {
            const unsigned unit = *reinterpret_cast<const A*>(staged.bytes() + at);
            w[b / 4] |= unit << b % 4 * 8;
        }
        at += sizeof(A), from += sizeof(A);
        if (from == piece.size) from = 0, at += gap;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// The inverse.
template <typename A>
__device__ __forceinline__ void scatter(Staged& staged, const Piece& piece, int gap, int count, uint4 v) {
    const unsigned w[4] = {v.x, v.y, v.z, v.w};
    unsigned from = piece.byte - piece.block * piece.size;
    unsigned at = piece.at;
#pragma unroll
    for (int b = 0; b < VECTOR; b += sizeof(A)) {
        if (b < count) *reinterpret_cast<A*>(staged.bytes() + at) = static_cast<A>(w[b / 4] >> b % 4 * 8);
        at += sizeof(A), from += sizeof(A);
        if (from == piece.size) from = 0, at += gap;
    }
}

// A vector of a plane from shared memory.
__device__ __forceinline__ uint4 take(Staged& staged, const BlockFields& fields, const Piece& piece, int count) {
    if (piece.size % VECTOR == 0) {
        const uint4 v = cut(staged, piece.at, piece.bits);
        const int split = fields.split[piece.field];
        return split ? to_neighbours(v, split) : v;
    }
    const int gap = fields.block - piece.size;
    return piece.bits % 4 == 0   ? gather<unsigned>(staged, piece, gap, count)
           : piece.bits % 2 == 0 ? gather<unsigned short>(staged, piece, gap, count)
                                 : gather<unsigned char>(staged, piece, gap, count);
}

// The inverse.
__device__ __forceinline__ void give(
    Staged& staged, const BlockFields& fields, const Piece& piece, int count, uint4 v) {
    if (piece.size % VECTOR == 0) {
        const int split = fields.split[piece.field];
        put(staged, piece.at, piece.bits, split ? to_split(v, split) : v);
        return;
    }
    const int gap = fields.block - piece.size;
    if (piece.bits % 4 == 0) scatter<unsigned>(staged, piece, gap, count, v);
    else if (piece.bits % 2 == 0) scatter<unsigned short>(staged, piece, gap, count, v);
    else scatter<unsigned char>(staged, piece, gap, count, v);
}

// The first `count` of 16 bytes at any address, the others are 0. Few are not whole and aligned: they take little code.
__device__ __forceinline__ uint4 load_vector(const unsigned char* from, int count) {
    if (is_aligned(from) && count == VECTOR) return *reinterpret_cast<const uint4*>(from);
    uint4 v = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int b = 0; b < VECTOR; ++b) {
        const unsigned byte = b < count ? from[b] : 0u;
        v = make_uint4(shifted(v.x, v.y, 1), shifted(v.y, v.z, 1), shifted(v.z, v.w, 1), shifted(v.w, byte, 1));
    }
    return v;
}

__device__ __forceinline__ void store_vector(unsigned char* to, int count, uint4 v) {
    if (count == VECTOR) {
        __stcs(reinterpret_cast<uint4*>(to), v);
        return;
    }
#pragma unroll 1
    for (int b = 0; b < count; ++b) {
        to[b] = static_cast<unsigned char>(v.x);
        v = make_uint4(shifted(v.x, v.y, 1), shifted(v.y, v.z, 1), shifted(v.z, v.w, 1), v.w >> 8);
    }
}

// Where a vector of a tile lies in global memory.
__device__ __forceinline__ unsigned char* address_of(const BlockFields& fields, const Piece& piece) {
    return reinterpret_cast<unsigned char*>(fields.plane[piece.field]) +
           1ull * blockIdx.x * (fields.tile * piece.size) + piece.byte;
}

// The blocks of this thread block's tile, and where they lie.
__device__ __forceinline__ int blocks_of_tile(const BlockFields& fields, long long blocks) {
    const long long behind = blocks - 1ll * blockIdx.x * fields.tile;
    return static_cast<int>(behind < fields.tile ? behind : fields.tile);
}

__device__ __forceinline__ Span span_of_tile(const BlockFields& fields, unsigned char* raw, int blocks) {
    return span_of(raw + 1ull * blockIdx.x * static_cast<unsigned>(fields.tile * fields.block), blocks * fields.block);
}

// ---- kernels -----------------------------------------------------------------------------------------------------

// raw     uint8[blocks * fields.block], at any byte
// blocks  how many
// fields  the planes begin at multiples of 16 bytes
//
// A thread block for each tile.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    split_fields(unsigned char* raw, long long blocks, const __grid_constant__ BlockFields fields) {
    __shared__ Staged staged;
    const int there = blocks_of_tile(fields, blocks);
    const Span span = span_of_tile(fields, raw, there);
    load(staged, span);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < fields.vectors; i += THREADS) {
        const Piece piece = piece_of(fields, i, span.ahead);
        const int count = bytes_of(fields, piece, i, there);
        if (count > 0) store_vector(address_of(fields, piece), count, take(staged, fields, piece, count));
    }
}

// The same the other way; here planes may begin anywhere, too.
__global__ void __launch_bounds__(THREADS, RESIDENT)
    join_fields(unsigned char* raw, long long blocks, const __grid_constant__ BlockFields fields) {
    __shared__ Staged staged;
    const int there = blocks_of_tile(fields, blocks);
    const Span span = span_of_tile(fields, raw, there);
    uint4 v[HELD];
    Piece piece[HELD];
    int count[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int i = static_cast<int>(threadIdx.x) + k * THREADS;
        piece[k] = piece_of(fields, i, span.ahead);
        count[k] = bytes_of(fields, piece[k], i, there);
        if (count[k] > 0) v[k] = load_vector(address_of(fields, piece[k]), count[k]);
    }
#pragma unroll
    for (int k = 0; k < HELD; ++k)
        if (count[k] > 0) give(staged, fields, piece[k], count[k], v[k]);
    __syncthreads();
    store(staged, span);
}
