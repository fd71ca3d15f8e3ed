// Quantization and dequantization of the k-bit formats kbit1 to kbit8 (kbitcupy/formats/codebook/kbit.py).
//
// One lane encodes or decodes one block of 32, a warp works on a tile of 32 blocks:
//
//     quantize     x --16 B a lane--> tile --one row a lane--> absmax, search: an index an element
//                  --transposition--> bit planes --16 B a lane--> packed, absmax
//     dequantize   packed, absmax --16 B a lane--> stage --one block a lane--> bit planes --transposition--> indices
//                  --groups of eight through shared memory--> table of values, one copy a lane --16 B a lane--> y
//
// What limited each version, as a fraction of the copy bandwidth of an H200, float16, K = 4:
//   - a ballot for each bit of an index: .10 quantized, .32 dequantized;
//   - a table of buckets and transposition in registers: .66 and .92. Quantization took 25.6 instructions an element
//     and 83 % of the issue slots, the integer pipe was at 67 % and DRAM at 50 %: instructions are what it is bound by.
//     Dequantization of K = 5 took 16.4 and 73 % of the integer pipe at .80, its fifth plane bit by bit;
//   - this one divides nothing where thresholds for the product x * r exist (see direct_thresholds in tables.py), and
//     keeps what is under way at a time close together in memory: .84 to .99 and .90 to .96.
#include "kbit.cuh"

// Of the host (kbitcupy/formats/codebook/cuda.py), ahead of this source: threads of a block, STAGES, VALUES_LOG2 and
// DEQUANTIZE_SHARED of dequantize_kbit, and what a pass of quantization does about the tensor scale. Where that is not
// known, there are two passes: FIND_SCALE, which encodes with a tensor scale of 1, and RESCALE, which has nothing to do
// unless that was wrong.
//     FLAT         search with the float32 absmax, as bitsandbytes does; no tensor scale; padded buffers
//     UNIT_SCALE   search with the decoded scale, tensor scale 1 (written)
//     FIND_SCALE   ... and leave the largest finite absmax in tensor_scale, with its sign bit set
//     RESCALE      turn that into the tensor scale; encode again where it is not 1
template <typename T>
constexpr int QUANTIZE_THREADS = sizeof(T) == 4 ? FLOAT_THREADS : HALF_THREADS;
template <int K>
constexpr int DEQUANTIZE_THREADS = K <= FEW_BITS ? FEW_BITS_THREADS : MANY_BITS_THREADS;

// Ordered codebooks of one or two bits need none: the sign of (threshold - y) for each threshold is nearly the plane.
template <int K, int SEARCH>
constexpr bool USES_TABLE = SEARCH != ORDERED || K > 2;

// The index of every element of a row, as bit planes.
//
// DIRECT: the thresholds are those for the product x * r (see direct_thresholds in tables.py), so nothing is divided.
// Otherwise y is the correctly rounded quotient. With ORDERED the bucket gives the level below its threshold, the sign
// of (threshold - y) is the one to add: 32 signs are gathered in a word and added to the planes as binary digits.
// Returns the elements (bit e) that the table leaves open, which is possible with ANY; their index is 0.
template <typename T, int K, int SEARCH>
__device__ __forceinline__ unsigned search_row(
    const unsigned (&row)[Tile<T>::WORDS], float d, const Codebook<K>& codebook, const BucketSearch& search,
    const char* table, unsigned (&plane)[Field<K>::BITS]) {
    constexpr int BITS = Field<K>::BITS, PER_WORD = Word<T>::COUNT;
    constexpr bool DIRECT = SEARCH == ORDERED && sizeof(T) == 2;
    const float r = d == 0.0f ? 0.0f : __frcp_rn(d);
    const float factor = DIRECT ? __fmul_rn(r, search.slope) : search.slope;
    constexpr int SIGNS = USES_TABLE<K, SEARCH> ? 1 : (1 << K) - 1;
    unsigned above[SIGNS] = {};  // bit e: y of element e lies above the threshold
    unsigned open = 0;
#pragma unroll
    for (int p = 0; p < BITS; ++p) plane[p] = 0;
#pragma unroll
    for (int e = ROW - 1; e >= 0; --e) {
        const float x = Word<T>::get(row[e / PER_WORD], e % PER_WORD);
        const float y = DIRECT ? x : divide_by_reciprocal(x, d, r);
        auto distance_to = [&](float threshold) {
            return DIRECT ? __fmaf_rn(-x, r, threshold) : __fsub_rn(threshold, y);
        };
        if constexpr (!USES_TABLE<K, SEARCH>) {
#pragma unroll
            for (int i = 0; i < SIGNS; ++i)
                above[i] = __funnelshift_l(__float_as_uint(distance_to(codebook.threshold[i])), above[i], 1);
        } else {
            const Bucket bucket = *reinterpret_cast<const Bucket*>(table + search(y, factor));
            const float distance = distance_to(bucket.threshold);
            if (SEARCH == ORDERED) {
                above[0] = __funnelshift_l(__float_as_uint(distance), above[0], 1);
                plane[e % BITS] += bucket.index << (e / BITS * BITS);
            } else {
                unsigned index = distance < 0.0f ? bucket.index >> 16 : bucket.index & 0xffffu;
                if (y != y) index = 0;
                plane[e % BITS] += index << (e / BITS * BITS);
                if (SEARCH == ANY) open = __funnelshift_l(bucket.index, open, 1);
            }
        }
    }
    if constexpr (!USES_TABLE<K, SEARCH>) {
        plane[K - 1] = above[SIGNS / 2];
        if constexpr (K == 2) plane[0] = (above[0] & ~above[1]) | above[2];
    } else {
        transpose_fields<BITS>(plane);
        if (SEARCH == ORDERED) {
#pragma unroll
            for (int p = 0; p < K; ++p) {
                const unsigned carry = plane[p] & above[0];
                plane[p] ^= above[0];
                above[0] = carry;
            }
        }
    }
    return open;
}

// Multiply a row and its divisor by a power of two that brings them to where search_row is exact: a matter of a few
// blocks, if any. A divisor of float16 numbers needs it never.
template <typename T, int K, int SEARCH>
__device__ __forceinline__ void renormalise(unsigned (&row)[Tile<T>::WORDS], bool infinite, float& d, float slope) {
    // Outside this range the short division (or where nothing is divided, the reciprocal or its product with the slope)
    // would lose bits: move the block by a power of two.
    constexpr bool DIRECT = SEARCH == ORDERED && sizeof(T) == 2;
    const float low = DIRECT ? 0x1p-125f : 0x1p-60f, high = DIRECT ? 0x1p126f * slope : 0x1p100f;
    if (SameType<T, __half>::VALUE) return;
    if (d != 0.0f && d < infinity() && ((infinite && sizeof(T) == 4) || d < low || d > high)) {
        const int exponent = int(__float_as_uint(d) >> 23) - 127;
        const float factor = __int_as_float((127 - min(exponent, 126)) << 23);
        d = __fmul_rn(d, factor);
#pragma unroll
        for (int i = 0; i < Tile<T>::WORDS; ++i) row[i] = Word<T>::scale(row[i], factor);
        if (sizeof(T) == 4) {
            // What lies beyond every threshold, infinities too, only has to stay beyond.
            const float beyond = 4.0f / slope;
#pragma unroll
            for (int i = 0; i < Tile<T>::WORDS; ++i) {
                const float x = __uint_as_float(row[i]);
                row[i] = __float_as_uint(x > beyond ? beyond : x < -beyond ? -beyond : x);
            }
        }
    } else if (sizeof(T) == 4 && d == infinity()) {
        d = 1.0f;  // x / inf is 0, inf / inf is NaN
#pragma unroll
        for (int i = 0; i < Tile<T>::WORDS; ++i) row[i] = __float_as_uint(__fmul_rn(__uint_as_float(row[i]), 0.0f));
    }
}

// The same for any codebook, any divisor and only the elements `which`, one after the other: `index_of` takes the IEEE
// quotient.
template <typename T, int K, typename Index>
__device__ __forceinline__ void search_elements(
    const Tile<T>& tile, int lane, float d, unsigned which, Index index_of, unsigned (&plane)[Field<K>::BITS]) {
#pragma unroll 1
    for (; which != 0; which &= which - 1) {
        const int e = __ffs(which) - 1;
        const float x = flush(to_float(*tile.element(lane, e)));
        const unsigned index = index_of(d == 0.0f ? x * 0.0f : flush(divide_ieee(x, d)));
#pragma unroll
        for (int p = 0; p < K; ++p) plane[p] = (plane[p] & ~(1u << e)) | ((index >> p & 1u) << e);
    }
}

// x             T[n]
// packed        uint32[blocks * K], and K zero words more in the FLAT pass
// absmax        Code[blocks], and one zero more in the FLAT pass
// tensor_scale  float32[1]; not used in the FLAT pass
// values        float32[2^K] on the device, only for ANY, or null: then codebook.value
// values_out    float32[2^K], receives the values, or null
template <typename T, int K, int FORMAT, int SEARCH>
__global__ void __launch_bounds__(QUANTIZE_THREADS<T>, sizeof(T) == 4 ? 5 : 0) quantize_kbit(
    const T* x, long long n, unsigned* packed, typename Absmax<FORMAT>::Code* absmax, unsigned* tensor_scale,
    const float* values, float* values_out, int pass, const __grid_constant__ Codebook<K> codebook) {
    using A = Absmax<FORMAT>;
    constexpr int THREADS = QUANTIZE_THREADS<T>, WARPS = THREADS / WARP;
    constexpr int TILE_CHUNKS = WARP * Tile<T>::CHUNKS;
    // Two tiles for each warp, then the bucket table. Copies to anything but whole 128-byte lines are slower.
    extern __shared__ __align__(128) uint4 dynamic[];
    __shared__ float thresholds[1 << K];
    __shared__ Codebook<K> analysed;  // only for ANY

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long blocks = (n + ROW - 1) / ROW;
    const BlockRun<long long> run((blocks + WARP - 1) / WARP);
    long long t = run.first + warp;

    float scale = 1.0f;
    if (pass == RESCALE) {
        // The first block to come here replaces the largest absmax by the scale, so a later one may read either: the
        // sign bit tells them apart.
        const unsigned found = *static_cast<volatile unsigned*>(tensor_scale);
        scale = found >> 31 ? tensor_scale_of<FORMAT>(__uint_as_float(found & 0x7fffffffu)) : __uint_as_float(found);
        if (found >> 31 && threadIdx.x == 0) atomicExch(tensor_scale, __float_as_uint(scale));
        if (scale == 1.0f) return;
    }
    const float inverse_scale = __int_as_float((254 << 23) - __float_as_int(scale));  // of a power of two

    // The first tile is on its way while the table is built.
    const bool aligned = is_aligned(x);
    Tile<T> tile{dynamic + warp * 2 * TILE_CHUNKS}, next{tile.chunks + TILE_CHUNKS};
    if (t < run.end) tile.load(x, t * TILE, n, aligned, lane);
    commit_copies();

    char* table = reinterpret_cast<char*>(dynamic + WARPS * 2 * TILE_CHUNKS);
    bool has_thresholds = true, has_table = true;
    if constexpr (SEARCH == ANY) {
        has_thresholds = analyse<K>(values ? values : codebook.value, analysed, reinterpret_cast<float*>(table));
        has_table = analysed.buckets > 0;
    }
    const Codebook<K>& known = SEARCH == ANY ? analysed : codebook;
    const BucketSearch search(known, lane);
#pragma unroll 1
    for (int i = threadIdx.x; i < (1 << K); i += THREADS) thresholds[i] = known.threshold[i];
    __syncthreads();
    if (USES_TABLE<K, SEARCH> && has_table)
        build_buckets<K, SEARCH>(known, thresholds, reinterpret_cast<Bucket*>(table));
    FullSearch<K> nearest{analysed.value, 0.0f, 0.0f, pass != FLAT};
    if (!has_thresholds) nearest.find_extremes();
    auto index_of = [&](float y) { return has_thresholds ? bisect<K, SEARCH>(known, thresholds, y) : nearest(y); };
    if (blockIdx.x == 0) {
#pragma unroll 1
        for (int i = threadIdx.x; values_out && i < (1 << K); i += THREADS)
            values_out[i] = flush(values ? values[i] : codebook.value[i]);
        if (pass == FLAT && threadIdx.x < K) packed[blocks * K + threadIdx.x] = 0;
        if (pass == FLAT && threadIdx.x == K) absmax[blocks] = typename A::Code(0.0f);
        if (pass == UNIT_SCALE && threadIdx.x == 0) *tensor_scale = __float_as_uint(1.0f);
    }

    float largest = 0.0f;
    for (; t < run.end; t += WARPS) {
        if (t + WARPS < run.end) next.load(x, (t + WARPS) * TILE, n, aligned, lane);
        commit_copies();
        wait_copies<1>();
        __syncwarp();
        unsigned row[Tile<T>::WORDS];
        tile.read_row(lane, row);

        unsigned magnitude = 0;
#pragma unroll
        for (int i = 0; i < Tile<T>::WORDS; ++i) magnitude = Word<T>::larger_magnitude(magnitude, row[i]);
        const float a = flush(Word<T>::largest(magnitude));
        if (a < infinity()) largest = fmaxf(largest, a);
        const typename A::Code code = A::encode(__fmul_rn(a, inverse_scale));
        // The divisor of the search; 0 divides to 0.
        float d = pass == FLAT ? fmaxf(a, 1e-8f) : __fmul_rn(A::decode(code), scale);

        unsigned plane[Field<K>::BITS] = {};
        unsigned open = ~0u;  // elements that are still to be searched
        if (has_table) {
            float divisor = d;
            renormalise<T, K, SEARCH>(row, !(a < infinity()), divisor, search.slope);
            open = search_row<T, K, SEARCH>(row, divisor, known, search, table, plane);
        }
        if constexpr (SEARCH != ORDERED) {
            // An infinity breaks the short division (inf - inf), but not the product. (float32 has been renormalised.)
            if (sizeof(T) == 2 && !(a < infinity())) open = ~0u;
            search_elements<T, K>(tile, lane, d, open, index_of, plane);
        }
        __syncwarp();  // every row has been read: the tile's memory now stages the words
        unsigned words[K];
#pragma unroll
        for (int p = 0; p < K; ++p) words[p] = plane[p];
        WordTile<K>::store(packed, t * WARP, blocks, tile.chunks, lane, words);
        if (t * WARP + lane < blocks) absmax[t * WARP + lane] = code;
        __syncwarp();
        uint4* freed = tile.chunks;
        tile.chunks = next.chunks, next.chunks = freed;
    }

    if (pass == FIND_SCALE) {
        const unsigned found = warp_max(__float_as_uint(largest)) | 0x80000000u;
        // Atomics of all warps on one address would queue, so most must not get there. What is in memory is read only
        // now: earlier every block would wait for it.
        if (lane == 0 && found > *static_cast<volatile unsigned*>(tensor_scale)) atomicMax(tensor_scale, found);
    }
}

// How many tiles ahead of its own a block prefetches to the L2 cache: about as many as are under way at a time. Beside
// all the writing a read from DRAM takes as long as everything else that a block does.
constexpr int PREFETCH_TILES = 2048;

// The compressed tiles of a warp: the one it works on, and those on their way from memory.
template <int K, int FORMAT>
struct Pipeline {
    using Code = typename Absmax<FORMAT>::Code;
    static constexpr int DEPTH = STAGES;
    static constexpr int CODE_CHUNKS = WARP * sizeof(Code) / 16;
    static constexpr int STAGE = WordTile<K>::CHUNKS + CODE_CHUNKS;  // chunks

    const unsigned* packed;
    const Code* absmax;
    long long blocks, end;  // tiles from `end` on are others'
    uint4* stages;          // DEPTH * STAGE chunks of shared memory that the warp owns
    int lane;
    bool aligned;

    __device__ __forceinline__ bool whole(long long tile) const { return aligned && (tile + 1) * WARP <= blocks; }

    // Every call closes one group of copies, also where there is nothing to copy.
    __device__ __forceinline__ void start(long long tile, int slot) const {
        if (tile < end && whole(tile)) {
            uint4* stage = stages + slot * STAGE;
            WordTile<K>::load_async(packed, tile * WARP, lane, stage);
            if (lane < CODE_CHUNKS)
                copy_async<16>(
                    shared_address(stage + WordTile<K>::CHUNKS + lane),
                    reinterpret_cast<const uint4*>(absmax + tile * WARP) + lane);
        }
        commit_copies();
    }

    // Ask for a tile that another thread block will read later, so that it finds it in the L2 cache.
    __device__ __forceinline__ void prefetch(long long tile) const {
        if ((tile + 1) * WARP <= blocks) {
            if (lane < K) prefetch_l2(packed + tile * WARP * K + lane * WARP);
            if (lane == K) prefetch_l2(absmax + tile * WARP);
        }
    }

    // The words and the scale of this lane's block; DEPTH - 1 later groups may be on their way.
    __device__ __forceinline__ Code finish(long long tile, int slot, unsigned (&word)[K]) const {
        wait_copies<DEPTH - 1>();
        __syncwarp();
        if (whole(tile)) {
            const uint4* stage = stages + slot * STAGE;
            WordTile<K>::read(stage, lane, word);
            return reinterpret_cast<const Code*>(stage + WordTile<K>::CHUNKS)[lane];
        }
        WordTile<K>::load(packed, tile * WARP, blocks, lane, word);
        return tile * WARP + lane < blocks ? absmax[tile * WARP + lane] : Code(0.0f);
    }
};

// The indices of a tile, in shared memory in groups of eight consecutive elements: BITS bytes a group. Byte w of a
// group holds its elements w, w + BITS, ..., BITS bits each; rows are written, and any lane reads any group.
template <int BITS>
struct Groups {
    static constexpr int CHUNKS = WARP * BITS / 4;
    char* memory;

    // Field n of word w is element n * BITS + w of the row: its byte g belongs to group g.
    __device__ __forceinline__ void put(int row, const unsigned (&field)[BITS]) const {
        if constexpr (BITS == 1) {
            reinterpret_cast<unsigned*>(memory)[row] = field[0];
        } else if constexpr (BITS == 2) {
            reinterpret_cast<uint2*>(memory)[row] =
                make_uint2(__byte_perm(field[0], field[1], 0x5140), __byte_perm(field[0], field[1], 0x7362));
        } else {
            constexpr int HALVES = BITS / 4;
            unsigned out[4][HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const unsigned* f = field + 4 * h;
                const unsigned low01 = __byte_perm(f[0], f[1], 0x5140), high01 = __byte_perm(f[0], f[1], 0x7362);
                const unsigned low23 = __byte_perm(f[2], f[3], 0x5140), high23 = __byte_perm(f[2], f[3], 0x7362);
                out[0][h] = __byte_perm(low01, low23, 0x5410), out[1][h] = __byte_perm(low01, low23, 0x7632);
                out[2][h] = __byte_perm(high01, high23, 0x5410), out[3][h] = __byte_perm(high01, high23, 0x7632);
            }
            uint4* target = reinterpret_cast<uint4*>(memory) + row * HALVES;
            if constexpr (HALVES == 1) {
                target[0] = make_uint4(out[0][0], out[1][0], out[2][0], out[3][0]);
            } else {
                target[0] = make_uint4(out[0][0], out[0][1], out[1][0], out[1][1]);
                target[1] = make_uint4(out[2][0], out[2][1], out[3][0], out[3][1]);
            }
        }
    }

    // Group number `chunk`, or with COUNT = 4 one half of group number chunk / 2, moved to where the first half is.
    template <int COUNT>
    __device__ __forceinline__ void get(int chunk, unsigned (&indices)[2]) const {
        const int group = COUNT == 8 ? chunk : chunk / 2;
        const int shift = COUNT == 8 ? 0 : chunk % 2 * 4;
        indices[1] = 0;
        if constexpr (BITS == 1) indices[0] = reinterpret_cast<const unsigned char*>(memory)[group] >> shift;
        if constexpr (BITS == 2) indices[0] = reinterpret_cast<const unsigned short*>(memory)[group] >> shift;
        if constexpr (BITS == 4) indices[0] = reinterpret_cast<const unsigned*>(memory)[group] >> shift;
        if constexpr (BITS == 8 && COUNT == 4) indices[0] = reinterpret_cast<const unsigned*>(memory)[chunk];
        if constexpr (BITS == 8 && COUNT == 8) {
            const uint2 both = reinterpret_cast<const uint2*>(memory)[group];
            indices[0] = both.x, indices[1] = both.y;
        }
    }
};

// packed        uint32[blocks * K]
// absmax        Code[blocks]
// tensor_scale  float32[1], or null: 1
// values        float32[2^K] on the device, or null: then codebook.value
// y             T[n]
template <typename T, int K, int FORMAT>
__global__ void __launch_bounds__(DEQUANTIZE_THREADS<K>) dequantize_kbit(
    const unsigned* packed, const typename Absmax<FORMAT>::Code* absmax, const float* tensor_scale, const float* values,
    T* y, long long n, const __grid_constant__ Codebook<K> codebook) {
    constexpr int THREADS = DEQUANTIZE_THREADS<K>, WARPS = THREADS / WARP;
    constexpr int BITS = Field<K>::BITS, PER_WORD = Word<T>::COUNT, PER_CHUNK = Tile<T>::PER_CHUNK;
    // An entry of the table is one float for each lane (no bank conflicts) while that fits VALUES_LOG2. 256 bytes
    // an entry let a byte permutation form the address: byte 1 is the index, byte 0 the lane.
    constexpr int STRIDE_LOG2 = K + 8 <= VALUES_LOG2 ? 8 : VALUES_LOG2 - K;
    constexpr int COPIES = STRIDE_LOG2 == 8 ? WARP : (1 << STRIDE_LOG2) / 4;
    extern __shared__ uint4 dynamic[];  // for each warp the pipeline and its groups, then the table
    using Lines = Pipeline<K, FORMAT>;
    constexpr int WARP_CHUNKS = Lines::DEPTH * Lines::STAGE + Groups<BITS>::CHUNKS;
    static_assert(
        DEQUANTIZE_SHARED[FORMAT * 8 + K - 1] == WARPS * WARP_CHUNKS * 16 + (1 << K << STRIDE_LOG2),
        "the host reckons with other sizes");
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long blocks = (n + ROW - 1) / ROW;
    const BlockRun<long long> run((blocks + WARP - 1) / WARP);
    long long t = run.first + warp;

    uint4* mine = dynamic + warp * WARP_CHUNKS;
    const Lines pipeline{packed, absmax, blocks, run.end, mine, lane, is_aligned(packed) && is_aligned(absmax)};
    const Groups<BITS> groups{reinterpret_cast<char*>(mine + Lines::DEPTH * Lines::STAGE)};
    // The first tiles are on their way while the table is built.
#pragma unroll
    for (int i = 0; i < Lines::DEPTH - 1; ++i) pipeline.start(t + i * WARPS, i);
    for (long long i = t; i < run.end; i += WARPS) pipeline.prefetch(i + PREFETCH_TILES);
    char* table = reinterpret_cast<char*>(dynamic + WARPS * WARP_CHUNKS);
    for (int i = threadIdx.x; i < (COPIES << K); i += THREADS) {
        const int index = i / COPIES, copy = i % COPIES;
        *reinterpret_cast<float*>(table + (index << STRIDE_LOG2) + copy * 4) =
            flush(values ? values[index] : codebook.value[index]);
    }
    __syncthreads();

    const unsigned lane_offset = (lane % COPIES) * 4;
    const float scale = tensor_scale ? *tensor_scale : 1.0f;
    const bool aligned = is_aligned(y);
    int slot = 0;
    for (; t < run.end; t += WARPS) {
        const int last = slot == 0 ? Lines::DEPTH - 1 : slot - 1;
        pipeline.start(t + (Lines::DEPTH - 1) * WARPS, last);
        unsigned words[K];
        const float a = __fmul_rn(Absmax<FORMAT>::decode(pipeline.finish(t, slot, words)), scale);
        slot = slot == Lines::DEPTH - 1 ? 0 : slot + 1;
        unsigned field[BITS] = {};
#pragma unroll
        for (int p = 0; p < K; ++p) field[p] = words[p];
        transpose_fields<BITS>(field);
        groups.put(lane, field);
        __syncwarp();

        // From here a lane writes 16 bytes after 16 bytes next to its neighbours', of rows that others have unpacked.
        const bool whole = aligned && (t + 1) * TILE <= n;
#pragma unroll
        for (int c = 0; c < Tile<T>::CHUNKS; ++c) {
            const int chunk = c * WARP + lane;
            const float row_scale = __shfl_sync(FULL_WARP, a, chunk / Tile<T>::CHUNKS);
            unsigned indices[2];
            groups.template get<PER_CHUNK>(chunk, indices);
            unsigned out[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float v[PER_WORD];
#pragma unroll
                for (int h = 0; h < PER_WORD; ++h) {
                    const int e = i * PER_WORD + h, byte = e % BITS;
                    // Indices to whole bytes, up to four at a time (the compiler shares this between elements).
                    const unsigned bytes = indices[byte / 4] >> e / BITS * BITS & ((1u << BITS) - 1) * 0x01010101u;
                    const unsigned offset = STRIDE_LOG2 == 8
                                                ? __byte_perm(bytes, lane_offset, 0x5504 | byte % 4 << 4)
                                                : (bytes >> 8 * (byte % 4) & 0xffu) << STRIDE_LOG2 | lane_offset;
                    v[h] = __fmul_rn(*reinterpret_cast<const float*>(table + offset), row_scale);
                }
                out[i] = Word<T>::pack(v);
            }
            const long long first = t * TILE + chunk * PER_CHUNK;
            if (whole) {
                __stcs(reinterpret_cast<uint4*>(y + first), make_uint4(out[0], out[1], out[2], out[3]));
            } else {
#pragma unroll
                for (int e = 0; e < PER_CHUNK; ++e)
                    if (first + e < n) y[first + e] = Word<T>::element(out[e / PER_WORD], e % PER_WORD);
            }
        }
        __syncwarp();
    }
}
