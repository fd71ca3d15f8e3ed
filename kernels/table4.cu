// Quantization and dequantization of the blockwise tables nf4, fp4, table4 and dynamic8
// (kbitcupy/formats/codebook/table4.py).
//
// Blocks are 16 to 4096 elements. A lane encodes 32 elements, half a block to two blocks; of larger blocks neighbouring
// lanes, and from 1024 elements on neighbouring warps, share the absmax:
//
//     quantize     x --16 B a lane--> tile --one row a lane--> absmax --shuffles, shared memory--> absmax of the block
//                  --bucket of the quotient--> threshold and level --> codes, 16 or 32 B a lane
//     dequantize   4 or 16 B of codes a lane --table of values, one copy a lane, times the scale--> 16 B a lane --> y
//
// bitsandbytes' kernels for NF4 in blocks of 64 reach .06 of the copy bandwidth of an H200 when they quantize and .55
// when they dequantize; these reach .84 to .99 and .90 to .96, as a bucket holds at most one threshold (one comparison
// an element) and no two lanes of a warp read one bank.
#include "table4.cuh"

constexpr int QUANTIZE_WARPS = THREADS / WARP;
// Thread blocks on a multiprocessor at least: 64 registers for each thread, which some architectures cannot do with.
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 1200
constexpr int QUANTIZE_BLOCKS = 4;
#else
constexpr int QUANTIZE_BLOCKS = 2;
#endif

// Load tile after tile of the thread block's run, which its warps take in turn, and hand each row with its scale to
// `encode(row, scale, tile)`. Short runs keep what is under way close together in memory. Every run is whole rounds, so
// that the warps which share a block work on it together. `tiles` is one tile for each warp: once the rows are in
// registers, the next one is on its way to the same place.
template <typename T, typename Encode>
__device__ __forceinline__ void for_each_row(
    const T* x, long long n, int block_log2, uint4* tiles, const Encode& encode) {
    __shared__ float absmax_of_warps[2 * QUANTIZE_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const bool aligned = is_aligned(x);
    const long long rounds = (n + TILE * QUANTIZE_WARPS - 1) / (TILE * QUANTIZE_WARPS);
    const long long each = (rounds + gridDim.x - 1) / gridDim.x, whole = aligned ? n / TILE : 0;
    const Tile<T> tile{tiles + warp * WARP * Tile<T>::CHUNKS};
    // Tiles beyond the array are zeros: their warps still take part in the barriers of scale_row.
    long long t = blockIdx.x * each * QUANTIZE_WARPS + warp;
    int left = int(min(each, rounds - blockIdx.x * each));
    if (left <= 0) return;
    tile.load(x, t * TILE, n, aligned, lane);
    commit_copies();
    const uint4* source = reinterpret_cast<const uint4*>(x + t * TILE) + lane;
    for (; left > 0; --left, t += QUANTIZE_WARPS) {
        wait_copies<0>();
        __syncwarp();
        unsigned row[Tile<T>::WORDS];
        tile.read_row(lane, row);
        __syncwarp();
        source += QUANTIZE_WARPS * WARP * Tile<T>::CHUNKS;
        if (left > 1) {
            if (t + QUANTIZE_WARPS < whole) tile.load_whole(source, lane);
            else tile.load_part(x, (t + QUANTIZE_WARPS) * TILE, n, lane);
        }
        commit_copies();
        const RowScale scale = scale_row<T>(row, block_log2, absmax_of_warps + (left & 1) * QUANTIZE_WARPS, lane, warp);
        encode(row, scale, t);
    }
}

// x            T[n]
// packed       uint8[(n + 1) / 2]
// absmax       float32[blocks]
// values_out   float32[16], or null
template <typename T, int SEARCH>
__global__ void __launch_bounds__(THREADS, QUANTIZE_BLOCKS) quantize_table4(
    const T* x, long long n, unsigned char* packed, float* absmax, float* values_out, long long block_log2,
    const __grid_constant__ Table4 table) {
    extern __shared__ uint4 dynamic[];  // a tile for each warp
    __shared__ __align__(16) char search[TABLE4_BYTES];
    const int lane = threadIdx.x % WARP;
    const long long blocks = (n + (1 << block_log2) - 1) >> block_log2, whole = is_aligned(packed) ? n / TILE : 0;
    build_table4<SEARCH>(table, search);
    if (values_out && blockIdx.x == 0 && threadIdx.x < 16) values_out[threadIdx.x] = table.value[threadIdx.x];
    __syncthreads();
    const unsigned lane_offset = lane % COPIES * sizeof(Bucket);
    for_each_row<T>(
        x, n, int(block_log2), dynamic, [&](unsigned (&row)[Tile<T>::WORDS], const RowScale& scale, long long t) {
            store_absmax(absmax, t * WARP + lane, blocks, int(block_log2), scale);
            const uint4 codes = encode4<T, SEARCH>(row, scale, search, lane_offset);
            if (t < whole) {
                __stcs(reinterpret_cast<uint4*>(packed) + t * WARP + lane, codes);
            } else {
                const long long start = t * TILE + lane * ROW;
                const unsigned word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
                for (int i = 0; i < ROW / 2; ++i)
                    if (start + 2 * i < n) packed[start / 2 + i] = word[i / 4] >> i % 4 * 8;
            }
        });
}

// x            T[n]
// codes        uint8[n]
// absmax       float32[blocks]
template <typename T>
__global__ void __launch_bounds__(THREADS, QUANTIZE_BLOCKS) quantize_dynamic8(
    const T* x, long long n, unsigned char* codes, float* absmax, long long block_log2,
    const __grid_constant__ Dynamic table) {
    extern __shared__ uint4 dynamic[];  // a tile for each warp
    __shared__ __align__(16) DynamicSearch search;
    const int lane = threadIdx.x % WARP;
    const long long blocks = (n + (1 << block_log2) - 1) >> block_log2, whole = is_aligned(codes) ? n / TILE : 0;
    build_dynamic(table, search);
    // A bucket's number is added to the bits of 2^23: here they are taken off.
    const unsigned copy = shared_address(&search.entry[0][lane % DYNAMIC_COPIES]) - 0x4b000000u * (DYNAMIC_COPIES * 4);
    __syncthreads();
    for_each_row<T>(
        x, n, int(block_log2), dynamic, [&](unsigned (&row)[Tile<T>::WORDS], const RowScale& scale, long long t) {
            store_absmax(absmax, t * WARP + lane, blocks, int(block_log2), scale);
            unsigned word[8];
            encode8<T>(row, scale, copy, word);
            // Neighbours exchange halves, so that each store of the two is one piece of 32 bytes.
            const bool odd = lane & 1;
            unsigned out[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned other = __shfl_xor_sync(FULL_WARP, odd ? word[i] : word[4 + i], 1);
                out[0][i] = odd ? other : word[i];
                out[1][i] = odd ? word[4 + i] : other;
            }
            if (t < whole) {
                uint4* target = reinterpret_cast<uint4*>(codes + t * TILE) + lane / 2 * 4 + odd;
                __stcs(target, make_uint4(out[0][0], out[0][1], out[0][2], out[0][3]));
                __stcs(target + 2, make_uint4(out[1][0], out[1][1], out[1][2], out[1][3]));
            } else {
                const long long start = t * TILE + lane * ROW;
#pragma unroll
                for (int i = 0; i < ROW; ++i)
                    if (start + i < n) codes[start + i] = word[i / 4] >> i % 4 * 8;
            }
        });
}

// ---- decoding --------------------------------------------------------------------------------------------------

// Groups of eight 4-bit codes that a thread has under way: more where it has a second table to make, and the writes do
// not take longest.
template <typename T, bool NESTED>
constexpr int UNITS4 = NESTED && sizeof(T) == 2 ? NESTED_HALF_OCTETS : OCTETS;
// How many elements ahead a warp prefetches to the L2 cache, for other thread blocks: about what is under way at a
// time. Beside all the writing, reads from DRAM take long.
constexpr long long PREFETCH_ELEMENTS = 1 << 21;

// Sixteen elements of output registers to memory: 16 bytes at once where `whole`, else one by one up to n.
template <typename T>
__device__ __forceinline__ void store_chunk(
    T* y, long long first, long long n, bool whole, const float (&v)[Tile<T>::PER_CHUNK]) {
    constexpr int PER_WORD = Word<T>::COUNT;
    unsigned out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = Word<T>::pack(v + i * PER_WORD);
    if (whole) {
        __stcs(reinterpret_cast<uint4*>(y + first), make_uint4(out[0], out[1], out[2], out[3]));
    } else {
#pragma unroll
        for (int e = 0; e < Tile<T>::PER_CHUNK; ++e)
            if (first + e < n) y[first + e] = Word<T>::element(out[e / PER_WORD], e % PER_WORD);
    }
}

template <bool NESTED>
struct ValuesOf {
    using Type = Values4;
};
template <>
struct ValuesOf<true> {
    using Type = Values4Nested;
};

template <bool NESTED>
struct ScaleOf {
    using Type = float;
};
template <>
struct ScaleOf<true> {
    using Type = unsigned char;
};

// packed           uint8[(n + 1) / 2]
// absmax           float32[blocks], or uint8[blocks] with NESTED
// nested_absmax    float32[(blocks + 255) / 256], or null
// nested_offset    float32[1], or null
// values           float32[16] on the device, or null: then table.value
// y                T[n]
template <typename T, bool NESTED>
__global__ void __launch_bounds__(THREADS) dequantize_table4(
    const unsigned char* packed, const void* absmax, const float* nested_absmax, const float* nested_offset,
    const float* values, T* y, long long n, long long block_log2,
    const __grid_constant__ typename ValuesOf<NESTED>::Type table) {
    // An entry of the table is one float for each lane, and 256 bytes: a byte permutation forms the address.
    __shared__ float lut[16][2 * WARP];
    __shared__ float map[NESTED ? 256 : 1];
    constexpr int PER_CHUNK = Tile<T>::PER_CHUNK, WARP_ELEMENTS = WARP * 8, UNITS = UNITS4<T, NESTED>;
    const int lane = threadIdx.x % WARP;
    // A warp has UNITS neighbouring spans of 256 elements: 128 packed bytes each.
    const long long first = ((long long)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) * UNITS;
    const bool aligned = (reinterpret_cast<unsigned long long>(packed) & 3) == 0 && is_aligned(y);
    unsigned words[UNITS];
    const long long ahead = (first + lane) * WARP_ELEMENTS + PREFETCH_ELEMENTS;
    if (lane < UNITS && ahead < n) prefetch_l2(packed + ahead / 2);
    typename ScaleOf<NESTED>::Type stored[UNITS];
    float nested = 0.0f, mean = 0.0f;
    if (NESTED && first * WARP_ELEMENTS < n) {  // a nested block is 256 * 16 elements or more, and a warp is in one
        nested = nested_absmax[first * WARP_ELEMENTS >> (block_log2 + NESTED_LOG2)];
        mean = *nested_offset;
    }
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const long long start = (first + u) * WARP_ELEMENTS + lane * 8;
        words[u] = 0;
        stored[u] = 0;
        if (start < n) stored[u] = static_cast<const typename ScaleOf<NESTED>::Type*>(absmax)[start >> block_log2];
        if (aligned && start + 8 <= n) {
            words[u] = __ldcs(reinterpret_cast<const unsigned*>(packed + start / 2));
        } else {
            for (int i = 0; i < 4; ++i)
                if (start + 2 * i < n) words[u] |= unsigned(packed[start / 2 + i]) << 8 * i;
        }
    }
    for (int i = threadIdx.x; i < 16 * WARP; i += THREADS)
        lut[i / WARP][i % WARP] = values ? values[i / WARP] : table.value[i / WARP];
    if constexpr (NESTED)
        for (int i = threadIdx.x; i < 256; i += THREADS) map[i] = table.map[i];
    __syncthreads();
    const unsigned lane_offset = lane * 4;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const long long span = (first + u) * WARP_ELEMENTS;
        if (span >= n) return;
        const bool whole = aligned && span + WARP_ELEMENTS <= n;
        float own = stored[u];
        if constexpr (NESTED) own = __fadd_rn(__fmul_rn(map[stored[u]], nested), mean);
#pragma unroll
        for (int c = 0; c < 8 / PER_CHUNK; ++c) {
            const long long start = span + c * WARP * PER_CHUNK + lane * PER_CHUNK;
            unsigned word = words[u];
            float scale = own;
            if (PER_CHUNK == 4) {  // half a word each, from the lane that has it
                word = __shfl_sync(FULL_WARP, word, c * (WARP / 2) + lane / 2) >> (lane % 2 * 16);
                scale = __shfl_sync(FULL_WARP, scale, c * (WARP / 2) + lane / 2);
            }
            const unsigned high = word >> 4 & 0x0f0f0f0fu, low = word & 0x0f0f0f0fu;
            float v[PER_CHUNK];
#pragma unroll
            for (int e = 0; e < PER_CHUNK; ++e) {
                const unsigned offset = __byte_perm(e % 2 ? low : high, lane_offset, 0x5504 | e / 2 << 4);
                v[e] = __fmul_rn(*reinterpret_cast<const float*>(reinterpret_cast<const char*>(lut) + offset), scale);
            }
            store_chunk<T>(y, start, n, whole, v);
        }
    }
}

// codes    uint8[n]
// absmax   float32[blocks]
// y        T[n]
template <typename T>
__global__ void __launch_bounds__(DYNAMIC_THREADS, sizeof(T) == 2 ? 2 : 1) dequantize_dynamic8(
    const unsigned char* codes, const float* absmax, T* y, long long n, long long block_log2,
    const __grid_constant__ Values8 table) {
    __shared__ __align__(16) float lut[256][WARP];
    constexpr int PER_CHUNK = Tile<T>::PER_CHUNK, WORDS = PER_CHUNK / 4, SPAN = WARP * PER_CHUNK;
    constexpr int UNITS = 4 / WORDS;                                     // chunks that a thread has under way
    constexpr int THREAD_BLOCK = DYNAMIC_THREADS / WARP * UNITS * SPAN;  // elements of one round
    static_assert(THREAD_BLOCK == DYNAMIC_THREADS * DYNAMIC_ELEMENTS, "the host reckons with other rounds");
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const bool aligned = (reinterpret_cast<unsigned long long>(codes) & (PER_CHUNK - 1)) == 0 && is_aligned(y);
    for (int i = threadIdx.x; i < 256 * WARP / 4; i += DYNAMIC_THREADS) {
        const float value = table.value[i / (WARP / 4)];
        reinterpret_cast<float4*>(lut)[i] = make_float4(value, value, value, value);
    }
    __syncthreads();
    const char* table_lane = reinterpret_cast<const char*>(lut) + lane * 4;
    const long long rounds = (n + THREAD_BLOCK - 1) / THREAD_BLOCK, each = (rounds + gridDim.x - 1) / gridDim.x;
    const long long end = min(n, (blockIdx.x + 1) * each * THREAD_BLOCK);
    for (long long first = blockIdx.x * each * THREAD_BLOCK + warp * UNITS * SPAN; first < end; first += THREAD_BLOCK) {
        const long long ahead = first + lane * 128 + PREFETCH_ELEMENTS;
        if (lane < UNITS * SPAN / 128 && ahead < n) prefetch_l2(codes + ahead);
        unsigned words[UNITS][WORDS];
        float scale[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const long long start = first + u * SPAN + lane * PER_CHUNK;
            scale[u] = start < n ? absmax[start >> block_log2] : 0.0f;
            if (aligned && start + PER_CHUNK <= n) {
                if constexpr (WORDS == 2) {
                    const uint2 both = __ldcs(reinterpret_cast<const uint2*>(codes + start));
                    words[u][0] = both.x, words[u][1] = both.y;
                } else {
                    words[u][0] = __ldcs(reinterpret_cast<const unsigned*>(codes + start));
                }
            } else {
#pragma unroll
                for (int i = 0; i < WORDS; ++i) words[u][i] = 0;
#pragma unroll
                for (int i = 0; i < PER_CHUNK; ++i)
                    if (start + i < n) words[u][i / 4] |= unsigned(codes[start + i]) << i % 4 * 8;
            }
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const long long start = first + u * SPAN + lane * PER_CHUNK;
            float v[PER_CHUNK];
#pragma unroll
            for (int e = 0; e < PER_CHUNK; ++e) {
                const unsigned code = words[u][e / 4] >> e % 4 * 8 & 0xffu;
                v[e] = __fmul_rn(*reinterpret_cast<const float*>(table_lane + code * (WARP * 4)), scale[u]);
            }
            store_chunk<T>(y, start, n, aligned && start + PER_CHUNK <= n, v);
        }
    }
}
