// Kernels of the k-bit family: one lane encodes or decodes one block of 32, a warp works on a tile of 32 blocks.
#include "kbit.cuh"

// What a quantization pass does about scales.
enum Pass {
    FLAT,    // search with the float32 absmax, as bitsandbytes does; no tensor scale; padded buffers
    FIXED,   // search with the decoded scale, tensor scale 1 (written)
    NOTE,    // ... and the largest finite absmax is noted in tensor_scale, its sign bit set
    REPEAT,  // turn that note into the tensor scale; encode again where it is not 1
};

// Threads of a block, by the bytes of an element: a warp's tile takes 1024 of them in shared memory.
template <typename T>
struct Threads {
    static constexpr int COUNT = sizeof(T) == 4 ? 128 : 256;
};

// x             T[n]
// packed        uint32[blocks * K], and K zero words more in the FLAT pass
// absmax        Code[blocks], and one zero more in the FLAT pass
// tensor_scale  float32[1]; not used in the FLAT pass
// values        float32[2^K] on the device, or null: then codebook.value
// values_out    float32[2^K], receives the values, or null
template <typename T, int K, int FORMAT, bool SORTED>
__global__ void __launch_bounds__(Threads<T>::COUNT) quantize_kbit(
    const T* x, long long n, unsigned* packed, typename Absmax<FORMAT>::Code* absmax, unsigned* tensor_scale,
    const float* values, float* values_out, int pass, Codebook<K> codebook) {
    using A = Absmax<FORMAT>;
    constexpr int BITS = Field<K>::BITS;
    constexpr int PER_WORD = Word<T>::COUNT;
    extern __shared__ uint4 dynamic[];  // tiles of the warps, then the bucket table
    __shared__ float shared_values[1 << K];

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long blocks = (n + ROW - 1) / ROW, tiles = (blocks + WARP - 1) / WARP;
    const long long stride = (long long)gridDim.x * (Threads<T>::COUNT / WARP);

    float scale = 1.0f;
    if (pass == REPEAT) {
        // Whoever comes late may read the finished scale instead of the note: the sign bit tells them apart.
        unsigned note = *static_cast<volatile unsigned*>(tensor_scale);
        scale = note >> 31 ? tensor_scale_of<FORMAT>(__uint_as_float(note & 0x7fffffffu)) : __uint_as_float(note);
        if (note >> 31 && threadIdx.x == 0) atomicExch(tensor_scale, __float_as_uint(scale));
        if (scale == 1.0f) return;
    }
    const float inverse_scale = __int_as_float((254 << 23) - __float_as_int(scale));  // of a power of two

    char* table = reinterpret_cast<char*>(dynamic + Threads<T>::COUNT * Tile<T>::CHUNKS);
    BucketSearch nearest_sorted{};
    FullSearch<K> nearest_any{};
    if (SORTED) {
        build_buckets<K>(codebook, shared_values, reinterpret_cast<Bucket*>(table));
        nearest_sorted = make_bucket_search(codebook, table, lane);
    } else {
        for (int i = threadIdx.x; i < (1 << K); i += blockDim.x)
            shared_values[i] = flush(values ? values[i] : codebook.value[i]);
        __syncthreads();
        nearest_any = {shared_values, infinity(), -infinity(), pass != FLAT};
        for (int i = 0; i < (1 << K); ++i) {
            nearest_any.lowest = fminf(nearest_any.lowest, shared_values[i]);
            nearest_any.highest = fmaxf(nearest_any.highest, shared_values[i]);
        }
    }
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; values_out && i < (1 << K); i += blockDim.x)
            values_out[i] = flush(values ? values[i] : codebook.value[i]);
        if (pass == FLAT && threadIdx.x <= K) {
            if (threadIdx.x < K) packed[blocks * K + threadIdx.x] = 0;
            else absmax[blocks] = typename A::Code(0.0f);
        }
        if (pass == FIXED && threadIdx.x == 0) *tensor_scale = __float_as_uint(1.0f);
    }

    const Tile<T> tile{dynamic + warp * WARP * Tile<T>::CHUNKS};
    const bool aligned = is_aligned(x);
    float largest = 0.0f;
    for (long long t = (long long)blockIdx.x * (Threads<T>::COUNT / WARP) + warp; t < tiles; t += stride) {
        const long long block = t * WARP + lane;
        tile.load(x, t * TILE, n, aligned, lane);
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
        const float d = pass == FLAT ? fmaxf(a, 1e-8f) : __fmul_rn(A::decode(code), scale);

        unsigned plane[BITS] = {};
        // Outside this range the short division below is not exact; inf / inf must be NaN, inf / finite infinite.
        bool ordinary = a < infinity() && (d == 0.0f || (d >= 0x1p-60f && d <= 0x1p100f));
        if (SORTED) {
            const float reciprocal = d == 0.0f ? 0.0f : __frcp_rn(d);
#pragma unroll
            for (int e = 0; e < ROW; ++e) {
                float v = Word<T>::get(row[e / PER_WORD], e % PER_WORD);
                unsigned index = nearest_sorted(divide_by_reciprocal(v, d, reciprocal));
                plane[e % BITS] += index << (e / BITS * BITS);
            }
            transpose_fields<BITS>(plane);
        }
        if (!SORTED || !ordinary) {
            for (int e = 0; e < ROW; ++e) {
                float v = flush(to_float(*tile.element(lane, e)));
                float y = d == 0.0f ? v * 0.0f : flush(divide_ieee(v, d));
                unsigned index = SORTED ? nearest_sorted(y) : nearest_any(y);
#pragma unroll
                for (int p = 0; p < K; ++p) plane[p] = (plane[p] & ~(1u << e)) | ((index >> p & 1u) << e);
            }
        }
        __syncwarp();  // every row has been read: the tile's memory now stages the words
        unsigned words[K];
#pragma unroll
        for (int p = 0; p < K; ++p) words[p] = plane[p];
        store_words<K>(packed, t * WARP, blocks, reinterpret_cast<unsigned*>(tile.chunks), lane, words);
        if (block < blocks) absmax[block] = code;
        __syncwarp();
    }

    if (pass == NOTE) {
        unsigned note = warp_max(__float_as_uint(largest)) | 0x80000000u;
        if (lane == 0) atomicMax(tensor_scale, note);
    }
}

// packed        uint32[blocks * K]
// absmax        Code[blocks]
// tensor_scale  float32[1], or null: 1
// values        float32[2^K] on the device, or null: then codebook.value
// y             T[n]
template <typename T, int K, int FORMAT>
__global__ void __launch_bounds__(Threads<T>::COUNT) dequantize_kbit(
    const unsigned* packed, const typename Absmax<FORMAT>::Code* absmax, const float* tensor_scale,
    const float* values, T* y, long long n, Codebook<K> codebook) {
    constexpr int BITS = Field<K>::BITS, PER_WORD = Word<T>::COUNT;
    // An entry of the table is one float for each lane (no bank conflicts) while that is at most 16 KiB. 256 bytes
    // an entry let a byte permutation form the address: byte 1 is the index, byte 0 the lane.
    constexpr int STRIDE_LOG2 = K <= 6 ? 8 : 14 - K;
    constexpr int COPIES = STRIDE_LOG2 == 8 ? WARP : (1 << STRIDE_LOG2) / 4;
    extern __shared__ uint4 dynamic[];  // tiles of the warps, then the table
    char* table = reinterpret_cast<char*>(dynamic + Threads<T>::COUNT * Tile<T>::CHUNKS);
    for (int i = threadIdx.x; i < (COPIES << K); i += blockDim.x) {
        int index = i / COPIES, copy = i % COPIES;
        *reinterpret_cast<float*>(table + (index << STRIDE_LOG2) + copy * 4) =
            flush(values ? values[index] : codebook.value[index]);
    }
    __syncthreads();

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned lane_offset = (lane % COPIES) * 4;
    const float scale = tensor_scale ? *tensor_scale : 1.0f;
    const long long blocks = (n + ROW - 1) / ROW, tiles = (blocks + WARP - 1) / WARP;
    const long long stride = (long long)gridDim.x * (Threads<T>::COUNT / WARP);
    const Tile<T> tile{dynamic + warp * WARP * Tile<T>::CHUNKS};
    const bool aligned = is_aligned(y);
    for (long long t = (long long)blockIdx.x * (Threads<T>::COUNT / WARP) + warp; t < tiles; t += stride) {
        const long long block = t * WARP + lane;
        unsigned words[K];
        load_words<K>(packed, t * WARP, blocks, reinterpret_cast<unsigned*>(tile.chunks), lane, words);
        const float a = block < blocks ? __fmul_rn(Absmax<FORMAT>::decode(absmax[block]), scale) : 0.0f;
        unsigned field[BITS] = {};
#pragma unroll
        for (int p = 0; p < K; ++p) field[p] = words[p];
        transpose_fields<BITS>(field);

        __syncwarp();  // every lane has its words: the tile's memory now takes the output
#pragma unroll
        for (int c = 0; c < Tile<T>::CHUNKS; ++c) {
            unsigned out[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float v[PER_WORD];
#pragma unroll
                for (int h = 0; h < PER_WORD; ++h) {
                    constexpr unsigned FIELD_MASK = (1u << BITS) - 1;
                    const int e = (c * 4 + i) * PER_WORD + h;
                    const int bit = e / BITS * BITS, byte = bit / 8;
                    // Indices to whole bytes, four at a time (the compiler shares this between elements).
                    unsigned bytes = field[e % BITS] >> bit % 8 & FIELD_MASK * 0x01010101u;
                    unsigned offset = STRIDE_LOG2 == 8
                        ? __byte_perm(bytes, lane_offset, 0x5504 | byte << 4)
                        : (bytes >> 8 * byte & 0xffu) << STRIDE_LOG2 | lane_offset;
                    v[h] = __fmul_rn(*reinterpret_cast<const float*>(table + offset), a);
                }
                out[i] = Word<T>::pack(v);
            }
            tile.write_chunk(lane, c, out);
        }
        __syncwarp();
        tile.store(y, t * TILE, n, aligned, lane);
        __syncwarp();
    }
}
