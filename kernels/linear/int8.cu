// W8A8 products: tokens are quantized by quantize_tokens, if they are not yet, then one of three kernels multiplies.
//
//     stream_w8a8   up to 16 tokens: reads the weights once, straight into registers
//     tile_w8a8     any number of tokens, on any GPU: tiles in shared memory, mma.sync
//     wgmma_w8a8    the same on sm_90a: tiles by TMA, wgmma (int8_sm90a.cu)
#include "linear/int8.cuh"

// ---- tokens ----------------------------------------------------------------------------------------------------

// Of the host (kbitcupy/products/int8.py), ahead of this source: TOKEN_THREADS, the most of a block that quantizes, and
// numbers of the kernels below.
constexpr int OCTET = 8;  // elements that a thread reads at a time
constexpr unsigned LARGEST_FINITE = 0x7f7fffffu;
constexpr unsigned LARGEST_SCALE = 0x7c010203u;  // of which 127 are finite

#if __CUDA_ARCH__ >= 800
// The larger of two magnitudes in each half of a register, NaN where one of them is.
template <typename T>
__device__ __forceinline__ unsigned larger_or_nan(unsigned a, unsigned b) {
    if constexpr (SameType<T, __half>::VALUE) {
        const __half2 most = __hmax2_nan(Word<T>::as(a), Word<T>::as(b));
        return *reinterpret_cast<const unsigned*>(&most);
    } else {
        const __nv_bfloat162 most = __hmax2_nan(Word<T>::as(a), Word<T>::as(b));
        return *reinterpret_cast<const unsigned*>(&most);
    }
}
#else
template <typename T>
__device__ unsigned larger_or_nan(unsigned, unsigned);
#endif

// Eight elements of a row: as they are, or as float32 where they are divided or gathered one by one.
template <typename T, bool VECTOR, bool SMOOTH>
struct Octet {
    static constexpr bool RAW = VECTOR && !SMOOTH;
    static constexpr int LOADED = OCTET * sizeof(T) / 4;  // words in memory
    static constexpr int WORDS = RAW ? LOADED : OCTET;
#if __CUDA_ARCH__ >= 800
    static constexpr bool PACKED = RAW && Word<T>::COUNT == 2;
#else
    static constexpr bool PACKED = false;  // no maximum that keeps NaN
#endif
    static constexpr int HELD = WORDS == 4 ? 7 : VECTOR ? 4 : 2;  // octets of a thread that stay in registers
    unsigned word[WORDS];

    // Element e of octet `number` of this thread: neighbours with VECTOR, else as far apart as the block is wide.
    __device__ __forceinline__ static int place(int number, int e) {
        const int thread = threadIdx.x, threads = blockDim.x;
        return VECTOR ? (number * threads + thread) * OCTET + e : (number * OCTET + e) * threads + thread;
    }
    // What lies beyond the row is 0.
    __device__ __forceinline__ void load(const T* row, const float* smooth, int depth, int number) {
        const int first = place(number, 0);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word[i] = 0;
        if (first >= depth) return;
        if constexpr (VECTOR) {
            unsigned loaded[LOADED];
#pragma unroll
            for (int i = 0; i < LOADED; i += 4) {
                const uint4 c = *reinterpret_cast<const uint4*>(row + first + i * (4 / sizeof(T)));
                loaded[i] = c.x, loaded[i + 1] = c.y, loaded[i + 2] = c.z, loaded[i + 3] = c.w;
            }
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                if constexpr (RAW) word[i] = loaded[i];
                else
                    word[i] = __float_as_uint(divide_ieee(
                        Word<T>::get(loaded[i / Word<T>::COUNT], i % Word<T>::COUNT), __ldg(smooth + first + i)));
            }
        } else {
#pragma unroll
            for (int e = 0; e < OCTET; ++e) {
                const int k = place(number, e);
                if (k >= depth) break;
                const float x = to_float(row[k]);
                word[e] = __float_as_uint(SMOOTH ? divide_ieee(x, smooth[k]) : x);
            }
        }
    }
    __device__ __forceinline__ float get(int e) const {
        if constexpr (RAW) return Word<T>::get(word[e / Word<T>::COUNT], e % Word<T>::COUNT);
        else return __uint_as_float(word[e]);
    }
    // The bits of the largest magnitude; of a NaN where there is one, as those are the largest.
    __device__ __forceinline__ unsigned largest() const {
        if constexpr (PACKED) {
            unsigned most = 0;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) most = larger_or_nan<T>(most, word[i] & 0x7fff7fffu);
            return max(__float_as_uint(Word<T>::get(most, 0)), __float_as_uint(Word<T>::get(most, 1)));
        } else {
            unsigned most = 0;
#pragma unroll
            for (int e = 0; e < OCTET; ++e) most = max(most, __float_as_uint(get(e)) & 0x7fffffffu);
            return most;
        }
    }
    // The same with NaN as 0.
    __device__ __forceinline__ unsigned largest_number() const {
        unsigned most = 0;
#pragma unroll
        for (int e = 0; e < OCTET; ++e) most = max(most, __float_as_uint(number(get(e))) & 0x7fffffffu);
        return most;
    }
    // x, or 0 where that is NaN.
    __device__ __forceinline__ static float number(float x) {
        return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u ? 0.0f : x;
    }
    // Write what `byte` makes of each element.
    template <typename Byte>
    __device__ __forceinline__ void write(signed char* target, int depth, int number, const Byte& byte) const {
        if (place(number, 0) >= depth) return;
        if constexpr (VECTOR) {
            unsigned packed[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                packed[i] = __byte_perm(
                    __byte_perm(byte(get(4 * i)), byte(get(4 * i + 1)), 0x0040),
                    __byte_perm(byte(get(4 * i + 2)), byte(get(4 * i + 3)), 0x0040), 0x5410);
            *reinterpret_cast<uint2*>(target + place(number, 0)) = make_uint2(packed[0], packed[1]);
        } else {
#pragma unroll
            for (int e = 0; e < OCTET; ++e) {
                const int k = place(number, e);
                if (k < depth) target[k] = static_cast<signed char>(byte(get(e)));
            }
        }
    }
};

// The largest number of the block, in every thread.
__device__ __forceinline__ unsigned block_max(unsigned x) {
    __shared__ unsigned of_warp[TOKEN_THREADS / WARP];
    x = warp_max(x);
    __syncthreads();  // an earlier maximum has been read
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_max(of_warp[threadIdx.x % (blockDim.x / WARP)]);
}

// rint(quotient), below 2^22 in magnitude, in the low bits.
__device__ __forceinline__ unsigned round_to_low_bits(float quotient) {
    return __float_as_uint(__fadd_rn(quotient, ROUNDER));
}

// Of numbers that are not larger than 127 scales, give or take a rounding, for a scale from 2^-60 to 2^60.
struct PlainQuantizer {
    float scale, reciprocal;

    __device__ __forceinline__ unsigned operator()(float x) const {
        return round_to_low_bits(divide_by_reciprocal(x, scale, reciprocal));
    }
};

// Of anything: NaN becomes 0, and what is too large `lowest` or 127.
struct AnyQuantizer {
    float scale, reciprocal, lowest;
    bool plain;  // whether the short division is exact

    __device__ __forceinline__ float quotient(float x) const {
        if (plain) {
            // A quotient beyond the range may overflow on the way; clamped first, it stays beyond.
            const float q = fminf(fmaxf(__fmul_rn(x, reciprocal), -200.0f), 200.0f);
            return __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
        }
        return is_zero(scale) ? 0.0f : divide_ieee(x, scale);
    }
    __device__ __forceinline__ unsigned operator()(float x) const {
        const bool is_nan = (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u;
        return is_nan ? 0u : round_to_low_bits(fminf(fmaxf(quotient(x), lowest), 127.0f));
    }
};

// Calls f with each octet of a row; those that are not held are read again.
template <typename T, typename Part, typename F>
__device__ __forceinline__ void each_octet(
    const Part (&held)[Part::HELD], const T* row, const float* smooth, int depth, int octets, const F& f) {
#pragma unroll
    for (int i = 0; i < Part::HELD; ++i)
        if (i < octets) f(held[i], i);
    for (int i = Part::HELD; i < octets; ++i) {
        Part part;
        part.load(row, smooth, depth, i);
        f(part, i);
    }
}

// A block quantizes one token and returns its scale: absmax / 127 (1 for zeros only), or the one that is given. Columns
// from K to pitch become 0. VECTOR: rows of x, and smooth, start at multiples of 16 bytes, and K is a multiple of 8.
template <typename T, bool VECTOR, bool SMOOTH>
__device__ __forceinline__ float quantize_token(
    const T* row, const float* smooth, const float* fixed, long long given, float lowest, signed char* target,
    int depth, int pitch) {
    using Part = Octet<T, VECTOR, SMOOTH>;
    const int run = OCTET * blockDim.x, octets = (depth + run - 1) / run;
    const bool dynamic = fixed == nullptr && given == 0;
    Part held[Part::HELD];
#pragma unroll
    for (int i = 0; i < Part::HELD; ++i)
        if (i < octets) held[i].load(row, smooth, depth, i);
    unsigned largest = 0;
    float scale = fixed == nullptr ? __int_as_float(static_cast<int>(given)) : usable(__ldg(fixed));
    if (dynamic) {
        each_octet(
            held, row, smooth, depth, octets, [&](const Part& part, int) { largest = max(largest, part.largest()); });
        largest = block_max(largest);
        if (largest > LARGEST_FINITE) {  // infinity counts as the largest finite number, NaN as 0
            unsigned most = 0;
            each_octet(held, row, smooth, depth, octets, [&](const Part& part, int) {
                most = max(most, part.largest_number());
            });
            scale = __uint_as_float(min(block_max(most), LARGEST_FINITE));
        } else {
            scale = __uint_as_float(largest);
        }
        scale = is_zero(scale) ? 1.0f : divide_ieee(scale, 127.0f);
        scale = __uint_as_float(min(__float_as_uint(scale), LARGEST_SCALE));
    }
    const bool plain = scale > 0x1p-60f && scale < 0x1p60f;
    const float reciprocal = plain ? __frcp_rn(scale) : 0.0f;
    if (dynamic && plain && largest <= LARGEST_FINITE) {
        const PlainQuantizer byte{scale, reciprocal};
        each_octet(
            held, row, smooth, depth, octets, [&](const Part& part, int i) { part.write(target, depth, i, byte); });
    } else {
        const AnyQuantizer byte{scale, reciprocal, lowest, plain};
        each_octet(
            held, row, smooth, depth, octets, [&](const Part& part, int i) { part.write(target, depth, i, byte); });
    }
    for (int k = depth + threadIdx.x; k < pitch; k += blockDim.x) target[k] = 0;
    return scale;
}

// Arguments as quantize_token.
template <typename T, bool VECTOR, bool SMOOTH>
__global__ void __launch_bounds__(TOKEN_THREADS, Octet<T, VECTOR, SMOOTH>::WORDS == 4 ? 2 : 1) quantize_tokens(
    const T* __restrict__ x,           // [M, K]
    const float* __restrict__ smooth,  // [K] divisors
    const float* __restrict__ fixed,   // [1] scale of all tokens, or null
    long long given,                   // ... or the bits of this one, where they are not 0
    signed char* __restrict__ a,       // [M, pitch]
    float* __restrict__ scales,        // [M]
    long long tokens, long long columns, long long pitch,
    float lowest) {  // code: -128 or -127
    wait_for_previous();
    launch_dependents();                          // not earlier: the next kernel reads weights at once
    const int depth = static_cast<int>(columns);  // at most 131071
    for (long long m = blockIdx.x; m < tokens; m += gridDim.x) {
        const float scale = quantize_token<T, VECTOR, SMOOTH>(
            x + m * columns, smooth, fixed, given, lowest, a + m * pitch, depth, static_cast<int>(pitch));
        if (threadIdx.x == 0) scales[m] = scale;
    }
}

// ---- up to 16 tokens -------------------------------------------------------------------------------------------

// STREAM_THREADS of a block and STREAM_ROWS, its channels; STREAM_K that a warp takes at a time; STREAM_DEPTH places in
// a lane's queue, of which more were not faster.
constexpr int STREAM_WARPS = STREAM_THREADS / WARP;
constexpr int STREAM_RUN = STREAM_WARPS * STREAM_K;                // k that a block takes at a time
constexpr int STREAM_PIECES = STREAM_ROWS * STREAM_K / WARP / 16;  // 16-byte pieces of an item

// The warps of a block share 16 channels: each takes every eighth run of 128 k, and the sums meet in shared memory.
//
// The weights are the rows of mma's a, the tokens the columns of b. Which k stand at which place of an mma does not
// matter as long as a and b agree, so lane (g, t) takes 16 neighbouring bytes of rows g and g + 8, at 16 t of each 64.
// It fetches them itself, through a queue of its own in shared memory that two items are under way to at any time, also
// across the end of a group of channels: no lane waits for another before the sums are complete.
template <typename T, int TOKENS, bool ALIGNED>
__global__ void __launch_bounds__(STREAM_THREADS, TOKENS == 8 ? 4 : 3) stream_w8a8(
    const signed char* __restrict__ a,  // [M, pitch]
    const signed char* __restrict__ w,  // [N, K]
    T* __restrict__ y,                  // [M, N]
    const float* __restrict__ token_scale, const float* __restrict__ channel_scale, const void* __restrict__ bias,
    long long bias_kind, long long tokens, long long channels, long long depth, long long pitch) {
    constexpr int GROUPS = TOKENS / 8;
    extern __shared__ uint4 memory[];
    __shared__ int partial[STREAM_WARPS][TOKENS][STREAM_ROWS + 1];
    const Rescaling rescaling{token_scale, channel_scale, bias, bias_kind};
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    uint4* queue = memory + threadIdx.x;  // piece p of place s at (s * STREAM_PIECES + p) * STREAM_THREADS
    const int runs = static_cast<int>((depth + STREAM_RUN - 1) / STREAM_RUN);
    const long long groups = (channels + STREAM_ROWS - 1) / STREAM_ROWS;

    long long fetched_group = blockIdx.x;
    int fetched_run = 0, fetched_place = 0;
    auto fetch = [&] {
        if (fetched_group < groups) {
#pragma unroll
            for (int p = 0; p < STREAM_PIECES; ++p) {
                // Channels beyond the last one are computed again and not written.
                const long long n = min(fetched_group * STREAM_ROWS + p / 2 * 8 + g, channels - 1);
                const long long k = fetched_run * STREAM_RUN + warp * STREAM_K + p % 2 * 64 + t * 16;
                uint4* target = queue + (fetched_place * STREAM_PIECES + p) * STREAM_THREADS;
                if (ALIGNED && k < depth) copy_async<16>(shared_address(target), w + n * depth + k);
                else *target = load_weights<ALIGNED>(w + n * depth, k, depth);
            }
            if (++fetched_run == runs) fetched_run = 0, fetched_group += gridDim.x;
            if (++fetched_place == STREAM_DEPTH) fetched_place = 0;
        }
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STREAM_DEPTH - 1; ++i) fetch();
    wait_for_previous();

    const signed char* token[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) token[i] = a + min(i * 8ll + g, tokens - 1) * pitch + warp * STREAM_K + t * 16;

    int place = 0;
    for (long long group = blockIdx.x; group < groups; group += gridDim.x) {
        int sum[GROUPS][4] = {};
        for (int run = 0; run < runs; ++run) {
            wait_copies<STREAM_DEPTH - 2>();
            fetch();
            uint4 v[STREAM_PIECES];
#pragma unroll
            for (int p = 0; p < STREAM_PIECES; ++p) v[p] = queue[(place * STREAM_PIECES + p) * STREAM_THREADS];
            if (++place == STREAM_DEPTH) place = 0;
            // The padding of the tokens reaches to the end of 128 k, not to the end of the run.
            if (run * STREAM_RUN + warp * STREAM_K >= depth) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 u = v[half], l = v[2 + half];
#pragma unroll
                for (int i = 0; i < GROUPS; ++i) {
                    const uint4 b =
                        load_written(reinterpret_cast<const uint4*>(token[i] + run * STREAM_RUN + half * 64));
                    mma_s8(sum[i], {u.x, l.x, u.y, l.y}, b.x, b.y);
                    mma_s8(sum[i], {u.z, l.z, u.w, l.w}, b.z, b.w);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) partial[warp][i * 8 + 2 * t + e % 2][g + e / 2 * 8] = sum[i][e];
        __syncthreads();
        const int m = threadIdx.x / STREAM_ROWS;
        const long long n = group * STREAM_ROWS + threadIdx.x % STREAM_ROWS;
        if (m < tokens && n < channels) {
            int total = 0;
#pragma unroll
            for (int part = 0; part < STREAM_WARPS; ++part) total += partial[part][m][threadIdx.x % STREAM_ROWS];
            from_float(
                y[m * channels + n],
                Rescaling::apply(total, rescaling.of_token(m), rescaling.of_channel(n), rescaling.bias_of(n)));
        }
        __syncthreads();
    }
}

// ---- tiles, mma.sync -------------------------------------------------------------------------------------------

// TILE_N channels of a tile, TILE_K of a stage; TILE_THREADS of a block for each of its tokens; TILE_STAGES take 64 KiB
// with 128 tokens, which the smallest architecture has.
constexpr int TILE_CHUNKS = TILE_K / 16;

// A warp computes 64 tokens x 32 channels. Row r of a stage holds its 16-byte chunk c at c ^ (r / 2 % 4): the eight
// rows that ldmatrix reads at a time then lie in different banks.
template <typename T, int TILE_M, bool ALIGNED>
__global__ void __launch_bounds__(TILE_M* TILE_THREADS) tile_w8a8(
    const signed char* __restrict__ a,  // [M, pitch]
    const signed char* __restrict__ w,  // [N, K]
    T* __restrict__ y,                  // [M, N]
    const float* __restrict__ token_scale, const float* __restrict__ channel_scale, const void* __restrict__ bias,
    long long bias_kind, long long tokens, long long channels, long long depth, long long pitch) {
    constexpr int THREADS = TILE_M * TILE_THREADS, STAGE = (TILE_M + TILE_N) * TILE_CHUNKS;
    extern __shared__ uint4 stages[];
    const Rescaling rescaling{token_scale, channel_scale, bias, bias_kind};
    const Output<T> output{y, tokens, channels, is_aligned(y) && channels * sizeof(T) % 16 == 0};
    const TileOrder order{(tokens + TILE_M - 1) / TILE_M, (channels + TILE_N - 1) / TILE_N};
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warp_m = warp / 4, warp_n = warp % 4;
    const int steps = static_cast<int>((depth + TILE_K - 1) / TILE_K);
    auto place = [](int row, int chunk) { return row * TILE_CHUNKS + (chunk ^ (row / 2 % 4)); };

    for (long long number = blockIdx.x; number < order.along_m * order.along_n; number += gridDim.x) {
        long long tile_m, tile_n;
        order.at(number, tile_m, tile_n);
        auto fill = [&](int step) {
            uint4* stage = stages + step % TILE_STAGES * STAGE;
#pragma unroll
            for (int i = 0; i < STAGE / THREADS; ++i) {
                const int c = i * THREADS + threadIdx.x, row = c / TILE_CHUNKS;
                const long long k = static_cast<long long>(step) * TILE_K + c % TILE_CHUNKS * 16;
                uint4* target = stage + place(row, c % TILE_CHUNKS);
                if (row < TILE_M) {
                    const long long m = min(tile_m * TILE_M + row, tokens - 1);
                    copy_async<16>(shared_address(target), a + m * pitch + k);
                } else {
                    const signed char* source = w + min(tile_n * TILE_N + row - TILE_M, channels - 1) * depth;
                    if (ALIGNED && k < depth) copy_async<16>(shared_address(target), source + k);
                    else *target = load_weights<ALIGNED>(source, k, depth);
                }
            }
        };
        int sum[4][4][4] = {};  // 16 tokens x 8 channels
        wait_for_previous();
#pragma unroll
        for (int i = 0; i < TILE_STAGES - 1; ++i) {
            if (i < steps) fill(i);
            commit_copies();
        }
        for (int step = 0; step < steps; ++step) {
            wait_copies<TILE_STAGES - 2>();
            __syncthreads();
            if (step + TILE_STAGES - 1 < steps) fill(step + TILE_STAGES - 1);
            commit_copies();
            const uint4* stage = stages + step % TILE_STAGES * STAGE;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned x[4][4], b[2][4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    load_matrices(x[i], stage + place(warp_m * 64 + i * 16 + lane % 16, half * 2 + lane / 16));
#pragma unroll
                for (int i = 0; i < 2; ++i)  // 16 channels: k low and high of the first eight, then of the others
                    load_matrices(
                        b[i],
                        stage +
                            place(TILE_M + warp_n * 32 + i * 16 + lane % 8 + lane / 16 * 8, half * 2 + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) mma_s8(sum[i][j], x[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
        wait_copies<0>();
        __syncthreads();
        // Scales and biases of the tile's channels, where the stages were.
        float* scale = reinterpret_cast<float*>(stages);
        for (int i = threadIdx.x; i < TILE_N; i += THREADS) {
            const long long n = tile_n * TILE_N + i;
            scale[i] = n < channels ? rescaling.of_channel(n) : 0.0f;
            scale[TILE_N + i] = n < channels ? rescaling.bias_of(n) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            output.store(
                &sum[i][0][0], tile_m * TILE_M + warp_m * 64 + i * 16, tile_n * TILE_N + warp_n * 32, rescaling,
                scale + warp_n * 32, scale + TILE_N + warp_n * 32, lane);
        __syncthreads();
    }
}
