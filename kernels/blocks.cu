// Whatever a decoder F gives (formats/planes.cuh): all of an array, some of its rows, and its product with a few
// tokens. The host names the header of F in KBIT_FORMAT_HEADER.
//
// A thread decodes eight neighbours at a time. Threads of a warp have neighbouring octets, so their loads and stores
// make whole lines.
#include "common/types.cuh"
#include KBIT_FORMAT_HEADER

constexpr int THREADS = 256, WARPS = THREADS / WARP;

// ---- what the kernels share ------------------------------------------------------------------------------------

// The planes of the first member, with the table in shared memory. Every thread of the block calls it.
template <typename F>
__device__ __forceinline__ Planes planes_of(const Argument<F>& argument) {
    Planes planes = argument.planes;
    if constexpr (F::TABLE > 0) {
        __shared__ float table[F::TABLE];
        for (int i = threadIdx.x; i < F::TABLE; i += THREADS)
            table[i] = i < argument.value_count ? argument.values[i] : argument.table[i];
        __syncthreads();
        planes.table = table;
    }
    return planes;
}

// Elements `from` to `to` - 1 of eight to y[from] ... y[to - 1].
template <typename T>
__device__ __forceinline__ void store8(T* y, int from, int to, const float (&v)[8]) {
    constexpr int PER_WORD = Word<T>::COUNT, WORDS = 8 / PER_WORD;
    unsigned word[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = Word<T>::pack(v + i * PER_WORD);
    if (from == 0 && to == 8 && is_aligned(y)) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4)
            __stcs(reinterpret_cast<uint4*>(y) + i / 4, make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]));
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (e >= from && e < to) y[e] = Word<T>::element(word[e / PER_WORD], e % PER_WORD);
    }
}

__device__ __forceinline__ int at_most_8(long long count) { return static_cast<int>(count < 8 ? count : 8); }

// ---- all elements ----------------------------------------------------------------------------------------------

// Octets of a thread whose loads are under way at a time.
constexpr int UNITS = 2;

// y        T[members * size]
// members  1, or how many arrays lie behind each other; each begins with an octet of its own
template <typename T, typename F>
__global__ void __launch_bounds__(THREADS)
    dequantize_blocks(T* y, long long members, const __grid_constant__ Argument<F> argument) {
    const Planes first = planes_of(argument);
    const long long each = (first.size + 7) / 8, octets = each * members;
    for (long long start = (long long)blockIdx.x * (THREADS * UNITS) + threadIdx.x; start < octets;
         start += (long long)gridDim.x * (THREADS * UNITS)) {
        float v[UNITS][8];
        long long member[UNITS], octet[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const long long i = start + u * THREADS;
            if (i >= octets) break;
            member[u] = members == 1 ? 0 : divide(i, each), octet[u] = i - member[u] * each;
            F::decode8(members == 1 ? first : of_member(first, argument, member[u]), octet[u], v[u]);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (start + u * THREADS >= octets) break;
            const long long element = octet[u] * 8;
            store8(y + member[u] * first.size + element, 0, at_most_8(first.size - element), v[u]);
        }
    }
}

// ---- rows by their numbers (an embedding lookup) ---------------------------------------------------------------

// A row is one or more runs of neighbours, each in one member; a member is one or more of these runs. `struct Rows`
// (kbitcupy/formats/decoders.py) says how many:
//     count       rows asked for
//     rows        of the array
//     length      elements of a run
//     runs        of a row
//     per_member  runs of a member
//     wide        whether row numbers have 64 bits

// y    T[count, runs * length]
// ids  int32 or int64 [count]; they wrap, as CuPy's indices do
template <typename T, typename F>
__global__ void __launch_bounds__(THREADS) take_blocks(
    T* y, const void* ids, const __grid_constant__ Rows rows, const __grid_constant__ Argument<F> argument) {
    const Planes first = planes_of(argument);
    // Where rows do not end with an octet, a run may touch one more.
    const long long each = rows.length % 8 ? rows.length / 8 + 2 : rows.length / 8;
    const long long all = rows.count * rows.runs * each, step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < all; i += step) {
        const long long to = divide(i, each), slot = rows.runs == 1 ? to : divide(to, rows.runs);
        long long row = rows.wide ? static_cast<const long long*>(ids)[slot] : static_cast<const int*>(ids)[slot];
        if (row < 0 || row >= rows.rows) row %= rows.rows, row += row < 0 ? rows.rows : 0;
        const long long run = row * rows.runs + to - slot * rows.runs;
        const long long member = run < rows.per_member ? 0 : divide(run, rows.per_member);
        const long long begin = (run - member * rows.per_member) * rows.length;
        const long long octet = begin / 8 + i - to * each, element = octet * 8 - begin;
        if (element >= rows.length) continue;
        float v[8];
        F::decode8(member == 0 ? first : of_member(first, argument, member), octet, v);
        const int from = element < 0 ? static_cast<int>(-element) : 0;
        store8(y + to * rows.length + element, from, at_most_8(rows.length - element), v);
    }
}

// ---- a product -------------------------------------------------------------------------------------------------

constexpr int TOKENS = 8;  // that share the decoding of a row

// Eight neighbours of a row of x, from column k on; 0 outside of the row.
template <typename T>
__device__ __forceinline__ void load_x(const T* x, long long k, long long columns, float (&v)[8]) {
    constexpr int PER_WORD = Word<T>::COUNT, WORDS = 8 / PER_WORD;
    const T* from = x + k;
    if (k >= 0 && k + 8 <= columns && is_aligned(from)) {
#pragma unroll
        for (int i = 0; i < WORDS / 4; ++i) {
            const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i);
            const unsigned word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4 * PER_WORD; ++e)
                v[i * 4 * PER_WORD + e] = Word<T>::get(word[e / PER_WORD], e % PER_WORD);
        }
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = k + e >= 0 && k + e < columns ? to_float(from[e]) : 0.0f;
    }
}

// y[m, n] = sum over k of x[m, k] * q[n, k], and bias[n]: a warp for a row of q and TOKENS rows of x. A lane adds up
// every 32nd octet with fused multiply-adds in the order of k, lanes are added as a tree, then the bias: float32
// throughout, rounded once to T. The same bits every time.
//
// x     T[tokens, columns]
// bias  T[rows], or null
// y     T[tokens, rows]
template <typename T, typename F>
__global__ void __launch_bounds__(THREADS) linear_blocks(
    const T* x, const T* bias, T* y, long long tokens, long long rows, long long columns,
    const __grid_constant__ Argument<F> argument) {
    const Planes planes = planes_of(argument);
    const int lane = threadIdx.x % WARP;
    const long long groups = (tokens + TOKENS - 1) / TOKENS, step = (long long)gridDim.x * WARPS;
    for (long long i = (long long)blockIdx.x * WARPS + warp_number(); i < groups * rows; i += step) {
        const long long group = groups == 1 ? 0 : divide(i, rows), n = i - group * rows, begin = n * columns;
        const T* x_group = x + group * TOKENS * columns;
        const int count = at_most_8(tokens - group * TOKENS);
        float sum[TOKENS] = {};
        for (long long octet = begin / 8 + lane; octet * 8 < begin + columns; octet += WARP) {
            const long long k = octet * 8 - begin;
            float v[8];
            F::decode8(planes, octet, v);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (k + e < 0 || k + e >= columns) v[e] = 0.0f;
#pragma unroll
            for (int m = 0; m < TOKENS; ++m) {
                if (m >= count) break;
                float token[8];
                load_x(x_group + m * columns, k, columns, token);
#pragma unroll
                for (int e = 0; e < 8; ++e) sum[m] = __fmaf_rn(token[e], v[e], sum[m]);
            }
        }
#pragma unroll
        for (int m = 0; m < TOKENS; ++m) {
#pragma unroll
            for (int other = WARP / 2; other > 0; other /= 2)
                sum[m] = __fadd_rn(sum[m], __shfl_xor_sync(FULL_WARP, sum[m], other));
        }
        const float added = bias ? to_float(bias[n]) : 0.0f;
#pragma unroll
        for (int m = 0; m < TOKENS; ++m) {
            if (lane != m || m >= count) continue;
            const float both[2] = {bias ? __fadd_rn(sum[m], added) : sum[m], 0.0f};
            y[(group * TOKENS + m) * rows + n] = Word<T>::element(Word<T>::pack(both), 0);
        }
    }
}
