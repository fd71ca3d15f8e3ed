// Whatever a decoder F gives (formats/planes.cuh): all of an array, some of its rows, and its product with a few
// tokens. The host names the header of F in KBIT_FORMAT_HEADER.
//
// A thread decodes eight neighbours at a time, or several octets that share bytes. Threads of a warp have neighbouring
// octets, so their loads and stores make whole lines, or whole pieces of lines. Where the arrays begin at multiples of
// 16 bytes and no octet is cut, which is nearly always, nothing branches, and the loads of two octets are under way
// together.
#include "common/types.cuh"
#include "formats/reader.cuh"
#include KBIT_FORMAT_HEADER

// Of the host (kbitcupy/formats/decoders.py), ahead of this source: THREADS of a block; UNITS, the octets that a thread
// has under way, and UNITS_TOGETHER, those of formats that decode some together; TOKENS that share the decoding of a
// row.
static_assert(MAX_PLANES == PLANES && MAX_NUMBERS == NUMBERS, "the host packs other planes");

// ---- what the kernels share ------------------------------------------------------------------------------------

// Elements of 16 bytes.
template <typename T>
__device__ __forceinline__ uint4 packed(const float* v) {
    constexpr int PER_WORD = Word<T>::COUNT;
    return make_uint4(
        Word<T>::pack(v), Word<T>::pack(v + PER_WORD), Word<T>::pack(v + 2 * PER_WORD),
        Word<T>::pack(v + 3 * PER_WORD));
}

// Eight elements, in stores of 16 bytes.
template <typename T>
__device__ __forceinline__ void store_whole(T* y, const float (&v)[8]) {
    constexpr int EACH = 4 * Word<T>::COUNT;
#pragma unroll
    for (int i = 0; i < 8 / EACH; ++i) __stcs(reinterpret_cast<uint4*>(y) + i, packed<T>(v + i * EACH));
}

// The same of all lanes of a warp, whose octets are neighbours. Where they take two stores, two lanes exchange halves,
// so that each store of the two is one piece of 32 bytes, which memory writes at once.
template <typename T>
__device__ __forceinline__ void store_neighbours(T* y, const float (&v)[8]) {
    if constexpr (Word<T>::COUNT == 2) {
        store_whole(y, v);
    } else {
        const bool odd = threadIdx.x % 2;
        float first[4], second[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(FULL_WARP, odd ? v[i] : v[4 + i], 1);
            first[i] = odd ? other : v[i], second[i] = odd ? v[4 + i] : other;
        }
        uint4* target = reinterpret_cast<uint4*>(odd ? y - 4 : y);
        __stcs(target, packed<T>(first));
        __stcs(target + 2, packed<T>(second));
    }
}

// Elements `from` to `to` - 1 of eight to y[from] ... y[to - 1].
template <typename T>
__device__ __forceinline__ void store_part(T* y, int from, int to, const float (&v)[8]) {
    constexpr int PER_WORD = Word<T>::COUNT;
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (e >= from && e < to) y[e] = Word<T>::element(Word<T>::pack(v + e / PER_WORD * PER_WORD), e % PER_WORD);
}

__device__ __forceinline__ int at_most_8(long long count) { return static_cast<int>(count < 8 ? count : 8); }

// ---- all elements ----------------------------------------------------------------------------------------------

// How a thread takes octets: COUNT of them together, APART from each other, OCTETS in all. Elements of four bytes are
// written faster when the octets of a warp are neighbours than decoded faster when they share bytes.
template <typename T, typename F>
struct Share {
    static constexpr int COUNT = Word<T>::COUNT == 1 ? 1 : Together<F>::COUNT;
    static constexpr int APART = COUNT == 1 ? 1 : Together<F>::APART;
    static constexpr int OCTETS = COUNT == 1 ? UNITS : UNITS_TOGETHER;
    // Thread blocks of a multiprocessor that the compiler keeps registers for; 0: its choice. For octets that are
    // decoded together it would rather save some and have one load wait for another, on the architecture where that was
    // looked at: 40 registers, which are those of six blocks, hold all loads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    static constexpr int BLOCKS = COUNT == 1 ? 0 : 6;
#else
    static constexpr int BLOCKS = 0;
#endif
};

// y        T[members * size], gridDim.y thread blocks for each span of a member, or fewer that go through them
// members  1, or how many arrays lie behind each other; each begins with an octet of its own
template <typename T, typename F>
__global__ void __launch_bounds__(THREADS, (Share<T, F>::BLOCKS))
    dequantize_blocks(T* y, long long members, const __grid_constant__ Argument<F> argument) {
    const Planes first = planes_of<THREADS>(argument);
    // Each block has a run of neighbouring spans: what is under way at a time lies close together in memory.
    constexpr int TOGETHER = Share<T, F>::COUNT, APART = Share<T, F>::APART, OCTETS = Share<T, F>::OCTETS;
    constexpr int SPAN = THREADS * OCTETS, EACH = OCTETS / TOGETHER;
    static_assert(EACH * TOGETHER == OCTETS && THREADS % APART == 0, "threads share out a span");
    const int lead = threadIdx.x / APART * (APART * TOGETHER) + threadIdx.x % APART;
    const long long size = first.size, octets = (size + 7) / 8, spans = (octets + SPAN - 1) / SPAN;
    const long long run = gridDim.x >= spans ? 1 : divide(spans + gridDim.x - 1, gridDim.x);
    for (long long member = blockIdx.y; member < members; member += gridDim.y) {
        const Planes planes = members == 1 ? first : of_member(first, argument, member);
        const Planes whole = as_whole(planes);
        T* target = y + member * size;
        const bool plain = are_aligned(planes) && is_aligned(target) && (TOGETHER == 1 || Asked<F>::together(planes));
        const long long uncut = plain ? size / 8 : 0;
        for (long long i = 0, span = blockIdx.x * run * SPAN; i < run && span < octets; ++i, span += SPAN) {
            if (span + SPAN <= uncut) {
                const long long octet = span + lead;
                float v[EACH][TOGETHER][8];
#pragma unroll
                for (int u = 0; u < EACH; ++u) decode_some<F>(whole, octet + u * (THREADS * TOGETHER), v[u]);
#pragma unroll
                for (int u = 0; u < EACH; ++u)
#pragma unroll
                    for (int j = 0; j < TOGETHER; ++j)
                        store_neighbours(target + (octet + u * (THREADS * TOGETHER) + j * APART) * 8, v[u][j]);
                continue;
            }
#pragma unroll 1
            for (int u = 0; u < OCTETS; ++u) {
                const long long at = span + threadIdx.x + u * THREADS;
                if (at >= octets) break;
                float v[8];
                F::decode8(planes, at, v);
                store_part(target + at * 8, 0, at_most_8(size - at * 8), v);
            }
        }
    }
}

// ---- rows by their numbers (an embedding lookup) ---------------------------------------------------------------

// A row is a run of neighbours, or in a stack one or more runs, each of them a whole member. `struct Rows`
// (kbitcupy/formats/decoders.py):
//     count       rows asked for
//     rows        of the array
//     length      elements of a run
//     runs        of a row
//     stacked     whether runs are members
//     wide        whether row numbers have 64 bits

// y    T[count, runs * length]
// ids  int32 or int64 [count]; they wrap, as CuPy's indices do
template <typename T, typename F>
__global__ void __launch_bounds__(THREADS) take_blocks(
    T* y, const void* ids, const __grid_constant__ Rows rows, const __grid_constant__ Argument<F> argument) {
    const Planes first = planes_of<THREADS>(argument);
    // Where rows do not end with an octet, a run may touch one more.
    const bool cut = rows.length % 8 != 0;
    const long long each = rows.length / 8 + 2 * cut, all = rows.count * rows.runs * each;
    const bool whole = !cut && !rows.stacked && are_aligned(first) && is_aligned(y);
    const long long step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < all; i += step) {
        const long long to = divide(i, each), slot = rows.runs == 1 ? to : divide(to, rows.runs);
        long long row = rows.wide ? static_cast<const long long*>(ids)[slot] : static_cast<const int*>(ids)[slot];
        if (row < 0 || row >= rows.rows) row %= rows.rows, row += row < 0 ? rows.rows : 0;
        const long long run = row * rows.runs + to - slot * rows.runs;
        float v[8];
        if (whole) {
            F::decode8(as_whole(first), run * each + i - to * each, v);
            store_whole(y + i * 8, v);
            continue;
        }
        const long long begin = rows.stacked ? 0 : run * rows.length;
        const long long octet = begin / 8 + i - to * each, element = octet * 8 - begin;
        if (element >= rows.length) continue;
        F::decode8(of_member(first, argument, rows.stacked ? run : 0), octet, v);
        const int from = element < 0 ? static_cast<int>(-element) : 0;
        store_part(y + to * rows.length + element, from, at_most_8(rows.length - element), v);
    }
}

// ---- a product -------------------------------------------------------------------------------------------------

// Eight neighbours of a row of x that begin at a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void load_whole(const T* x, float (&v)[8]) {
    constexpr int PER_WORD = Word<T>::COUNT, EACH = 4 * PER_WORD;
#pragma unroll
    for (int i = 0; i < 8 / EACH; ++i) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(x) + i);
        const unsigned word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < EACH; ++e) v[i * EACH + e] = Word<T>::get(word[e / PER_WORD], e % PER_WORD);
    }
}

// One row of the array and up to TOKENS rows of x: what each lane has of their products. x[m, k] is x[m * columns + k].
template <typename T>
struct Products {
    const T* x;
    long long columns;
    int count;  // rows of x
    float sum[TOKENS];

    // NUMBER octets from column k on, each a warp's width further.
    template <typename F, int NUMBER>
    __device__ __forceinline__ void add_whole(const Planes& planes, long long octet, long long k) {
        float v[NUMBER][8];
#pragma unroll
        for (int i = 0; i < NUMBER; ++i) F::decode8(planes, octet + i * WARP, v[i]);
#pragma unroll
        for (int m = 0; m < TOKENS; ++m) {
            if (m >= count) break;
#pragma unroll
            for (int i = 0; i < NUMBER; ++i) {
                float token[8];
                load_whole(x + m * columns + k + i * (WARP * 8), token);
#pragma unroll
                for (int e = 0; e < 8; ++e) sum[m] = __fmaf_rn(token[e], v[i][e], sum[m]);
            }
        }
    }

    // One octet, of which columns `k` to `k` + 7 may lie outside of the row.
    template <typename F>
    __device__ __forceinline__ void add_part(const Planes& planes, long long octet, long long k) {
        float v[8];
        F::decode8(planes, octet, v);
#pragma unroll 1
        for (int m = 0; m < count; ++m) {
            float total = sum_of(m);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (k + e >= 0 && k + e < columns) total = __fmaf_rn(to_float(x[m * columns + k + e]), v[e], total);
            set_sum(m, total);
        }
    }

    // sum[m] where m is not known to the compiler: an index would move all of them to memory.
    __device__ __forceinline__ float sum_of(int m) const {
        float found = sum[0];
#pragma unroll
        for (int i = 1; i < TOKENS; ++i) found = i == m ? sum[i] : found;
        return found;
    }
    __device__ __forceinline__ void set_sum(int m, float total) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) sum[i] = i == m ? total : sum[i];
    }
};

// y[m, n] = sum over k of x[m, k] * q[n, k], and bias[n]: a warp for a row of q and TOKENS rows of x. A lane adds up
// every 32nd octet with fused multiply-adds in the order of k, lanes are added as a tree, then the bias: float32
// throughout, rounded once to T. The same bits every time.
//
// x     T[tokens, columns]
// bias  T[rows], or null
// y     T[tokens, rows]
template <typename T, typename F>
__global__ void __launch_bounds__(THREADS, 2) linear_blocks(
    const T* x, const T* bias, T* y, long long tokens, long long rows, long long columns,
    const __grid_constant__ Argument<F> argument) {
    const Planes planes = planes_of<THREADS>(argument);
    const Planes uncut = as_whole(planes);
    const bool whole = columns % 8 == 0 && are_aligned(planes) && is_aligned(x);
    const int lane = threadIdx.x % WARP;
    const long long groups = (tokens + TOKENS - 1) / TOKENS, step = (long long)gridDim.x * (THREADS / WARP);
    for (long long i = (long long)blockIdx.x * (THREADS / WARP) + warp_number(); i < groups * rows; i += step) {
        const long long group = groups == 1 ? 0 : divide(i, rows), n = i - group * rows, begin = n * columns;
        Products<T> products{x + group * TOKENS * columns, columns, at_most_8(tokens - group * TOKENS), {}};
        if (whole) {
            const long long octets = columns / 8, first = begin / 8;
            long long o = lane;
            for (; o + WARP < octets; o += 2 * WARP) products.template add_whole<F, 2>(uncut, first + o, o * 8);
            if (o < octets) products.template add_whole<F, 1>(uncut, first + o, o * 8);
        } else {
#pragma unroll 1
            for (long long o = begin / 8 + lane; o * 8 < begin + columns; o += WARP)
                products.template add_part<F>(planes, o, o * 8 - begin);
        }
        const float added = bias ? to_float(bias[n]) : 0.0f;
#pragma unroll
        for (int m = 0; m < TOKENS; ++m) {
            if (m >= products.count) break;
            float sum = products.sum[m];
#pragma unroll
            for (int other = WARP / 2; other > 0; other /= 2)
                sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, other));
            const float both[2] = {bias ? __fadd_rn(sum, added) : sum, 0.0f};
            if (lane == 0) y[(group * TOKENS + m) * rows + n] = Word<T>::element(Word<T>::pack(both), 0);
        }
    }
}
