// Kernels that find the ranges of affine integers: scales and zero points from what the blocks hold.
//
// The range of a block is kept as two magnitudes, max(x, 0) and max(-x, 0), whose bits have the order of the numbers:
// zero bytes are the range of nothing, atomicMax joins ranges, and the range holds 0 as it must.
#include "affine.cuh"

template <typename C>
struct Range {
    using Bits = typename Compute<C>::Bits;
    Bits high, low;

    __device__ __forceinline__ void join(const Range& other) {
        high = max(high, other.high), low = max(low, other.low);
    }
    // Scale and zero point by the contract; infinities count as the largest finite number.
    __device__ __forceinline__ void parameters(const Geometry& g, C& scale, int& zero) const {
        const C up = from_bits(min(high, largest_finite(C(0)))), down = from_bits(min(low, largest_finite(C(0))));
        scale = C(1), zero = g.symmetric ? g.zero : g.qmin;
        if ((high | low) == 0) return;
        if (g.symmetric) {
            scale = divide_ieee(larger(up, down), C(g.divisor));
            return;
        }
        const C width = narrow(fmin(widen(up) + widen(down), from_bits(largest_finite(0.0))) / g.divisor, C(0));
        scale = smaller(width, from_bits(largest_finite(C(0))));
        zero = min(g.qmax, g.qmin + int(clamped(steps_of(down, usable(scale)), C(0), C(g.qmax - g.qmin))));
    }
};

// The range of some elements, gathered in packed registers.
template <typename T>
struct Gather {
    using C = typename Compute<T>::Type;
    C high = C(0), low = C(0);
    __device__ __forceinline__ void add(const Unit<T>& unit) {
#pragma unroll
        for (int j = 0; j < UNIT; ++j) high = larger(high, unit.get(j)), low = smaller(low, unit.get(j));
    }
    __device__ __forceinline__ Range<C> range() const { return {magnitude_bits(high), magnitude_bits(low)}; }
};

template <typename T>
struct GatherPairs {
    using Pair = decltype(Word<T>::as(0u));
    Pair high = Word<T>::as(0u), low = Word<T>::as(0u);
    __device__ __forceinline__ void add(const Unit<T>& unit) {
#pragma unroll
        for (int i = 0; i < UNIT / 2; ++i) {
            high = __hmax2(high, Word<T>::as(unit.word[i]));
            low = __hmin2(low, Word<T>::as(unit.word[i]));
        }
    }
    __device__ __forceinline__ Range<float> range() const {
        const unsigned h = *reinterpret_cast<const unsigned*>(&high), l = *reinterpret_cast<const unsigned*>(&low);
        return {
            max(magnitude_bits(Word<T>::get(h, 0)), magnitude_bits(Word<T>::get(h, 1))),
            max(magnitude_bits(Word<T>::get(l, 0)), magnitude_bits(Word<T>::get(l, 1)))};
    }
};
template <>
struct Gather<__half> : GatherPairs<__half> {};
template <>
struct Gather<__nv_bfloat16> : GatherPairs<__nv_bfloat16> {};

template <typename T>
__device__ __forceinline__ Range<typename Compute<T>::Type> range_of(T x) {
    using C = typename Compute<T>::Type;
    const C v = to_float(x);
    return {magnitude_bits(larger(v, C(0))), magnitude_bits(smaller(v, C(0)))};
}

// Join the ranges of `lanes` neighbouring lanes, a power of two up to 32.
template <typename C>
__device__ __forceinline__ void join_lanes(Range<C>& range, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2)
        range.join({__shfl_xor_sync(FULL_WARP, range.high, step), __shfl_xor_sync(FULL_WARP, range.low, step)});
}

template <typename T>
__device__ __forceinline__ void load_unit(Unit<T>& unit, const T* x, bool aligned) {
    if (aligned) unit.template load<true>(x);
    else unit.template load<false>(x);
}

// ---- ranges in memory --------------------------------------------------------------------------------------------

// Join `range` to those of block `index`. Most ranges change nothing, which a look at the memory finds out for less.
template <typename C>
__device__ __forceinline__ void join_block(
    typename Compute<C>::Bits* high, typename Compute<C>::Bits* low, long long index, Range<C> range) {
    using Bits = typename Compute<C>::Bits;
    if (!low) range.high = max(range.high, range.low);
    if (range.high > *static_cast<volatile Bits*>(high + index)) atomicMax(high + index, range.high);
    if (low && range.low > *static_cast<volatile Bits*>(low + index)) atomicMax(low + index, range.low);
}

// x          T[n]
// high, low  Bits[count], zero at first; they receive the ranges. low null: high is the larger one of both
template <typename T, int LAYOUT>
__global__ void __launch_bounds__(AFFINE_THREADS, 2) find_range_affine(
    const T* x, typename Compute<T>::Bits* high, typename Compute<T>::Bits* low, const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    const bool aligned = is_aligned(x);
    if constexpr (LAYOUT == RUNS) {
        constexpr int DEPTH = sizeof(T) == 2 ? 4 : sizeof(T) == 4 ? 2 : 1;
        constexpr long long TILE_SIZE = (long long)AFFINE_THREADS * UNIT * DEPTH;
        const Run tiles((g.n + TILE_SIZE - 1) / TILE_SIZE);
        long long mine = -1;  // the block whose range is being gathered
        Gather<T> gather;
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            const RunsTile place(g, tile * TILE_SIZE);
            Unit<T> unit[DEPTH];
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                const long long i = tile * TILE_SIZE + (u * AFFINE_THREADS + threadIdx.x) * UNIT;
                if (i + UNIT <= g.n) load_unit(unit[u], x + i, aligned);
            }
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                const long long i = tile * TILE_SIZE + (u * AFFINE_THREADS + threadIdx.x) * UNIT;
                if (i >= g.n) continue;
                unsigned rest = 0;
                const long long index =
                    g.wide ? -1 : place.first + place.locate(g, (u * AFFINE_THREADS + threadIdx.x) * UNIT, rest);
                if (i + UNIT <= g.n && rest >= UNIT) {
                    if (index != mine) {
                        if (mine >= 0) join_block<C>(high, low, mine, gather.range());
                        mine = index, gather = Gather<T>();
                    }
                    gather.add(unit[u]);
                } else {
#pragma unroll 1
                    for (long long e = i; e < min(i + UNIT, g.n); ++e)
                        join_block<C>(high, low, g.index(e), range_of(x[e]));
                }
            }
        }
        Range<C> range = gather.range();
        if (__all_sync(FULL_WARP, mine == __shfl_sync(FULL_WARP, mine, 0))) {
            join_lanes(range, WARP);
            if (threadIdx.x % WARP != 0) return;
        }
        if (mine >= 0) join_block<C>(high, low, mine, range);
    } else {
        constexpr int ROWS = 64;
        constexpr long long WIDTH = AFFINE_THREADS * UNIT;
        const long long across = (g.columns + WIDTH - 1) / WIDTH;
        const Run tiles((g.rows + ROWS - 1) / ROWS * across);
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            const long long column = tile % across * WIDTH + threadIdx.x * UNIT;
            if (column >= g.columns) continue;
            Range<C> range[UNIT] = {};
#pragma unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const long long i = (tile / across * ROWS + r) * g.columns + column;
                if (i + UNIT <= g.n) {
                    Unit<T> unit;
                    load_unit(unit, x + i, aligned);
#pragma unroll
                    for (int j = 0; j < UNIT; ++j) {
                        const C v = unit.get(j);
                        range[j].join({magnitude_bits(larger(v, C(0))), magnitude_bits(smaller(v, C(0)))});
                    }
                } else {
                    for (long long e = i; e < g.n; ++e) join_block<C>(high, low, g.index(e), range_of(x[e]));
                }
            }
#pragma unroll
            for (int j = 0; j < UNIT; ++j) join_block<C>(high, low, g.index(column + j), range[j]);
        }
    }
}

// scale       C[count], may be the memory of `high`
// zero_point  int32[count], or null
template <typename C>
__global__ void finish_range_affine(
    const typename Compute<C>::Bits* high, const typename Compute<C>::Bits* low, C* scale, int* zero_point,
    const __grid_constant__ Geometry g) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < g.count; i += step) {
        const Range<C> range{high[i], low ? low[i] : 0};
        C s;
        int zero;
        range.parameters(g, s, zero);
        scale[i] = s;
        if (zero_point) zero_point[i] = zero;
    }
}

// ---- ranges on chip ------------------------------------------------------------------------------------------------

constexpr int SLOTS = 4;  // units of a thread

// Threads of a thread block, as registers allow.
template <typename T, int EACH>
constexpr int DYNAMIC_THREADS = EACH > 1         ? AFFINE_THREADS
                                : sizeof(T) == 2 ? 1024
                                : sizeof(T) == 4 ? 512
                                                 : 256;

// A team of threads reads a block once: it stays in registers from the search of its range to its codes. Blocks begin
// at multiples of eight elements and are made of whole units.
//
// x           T[n]
// codes       as quantize_affine
// scale       C[count]
// zero_point  int32[count], or null
// team        threads of a team, a power of two: up to 32, or all of the thread block
// EACH        blocks that a team has in its registers: SLOTS of one unit a thread, or 1 of SLOTS units a thread
template <typename T, int BITS, int EACH>
__global__ void __launch_bounds__(DYNAMIC_THREADS<T, EACH>, 1) quantize_dynamic_affine(
    const T* x, unsigned char* codes, typename Compute<T>::Type* scale, int* zero_point, int team,
    const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    static_assert(EACH == 1 || EACH == SLOTS, "a slot is a block, or all are one");
    __shared__ Range<C> of_warps[32];
    const bool aligned = is_aligned(x) && is_aligned(codes);
    const int lane = threadIdx.x & (team - 1), teams = blockDim.x / team;
    const Run tiles((g.count + teams * EACH - 1) / (teams * EACH));
    for (long long tile = tiles.first; tile < tiles.end; ++tile) {
        const long long first = tile * teams * EACH + threadIdx.x / team;
        long long begin[EACH];
        int length[EACH];
        Unit<T> unit[SLOTS];
#pragma unroll
        for (int b = 0; b < EACH; ++b) {
            const long long block = first + b * teams, row = g.per_row == 1 ? block : block / g.per_row;
            const long long column = (block - row * g.per_row) * g.run;
            begin[b] = row * g.row + column;
            length[b] = block < g.count ? static_cast<int>(min(g.run, g.row - column)) : 0;
        }
#pragma unroll
        for (int v = 0; v < SLOTS; ++v) {
            const int b = EACH == 1 ? 0 : v, e = (EACH == 1 ? v * team + lane : lane) * UNIT;
            if (e < length[b]) load_unit(unit[v], x + begin[b] + e, aligned);
        }
        Range<C> range[EACH];
#pragma unroll
        for (int b = 0; b < EACH; ++b) {
            Gather<T> gather;
#pragma unroll
            for (int v = 0; v < SLOTS; ++v) {
                const int e = (EACH == 1 ? v * team + lane : lane) * UNIT;
                if ((EACH == 1 || v == b) && e < length[b]) gather.add(unit[v]);
            }
            range[b] = gather.range();
            join_lanes(range[b], min(team, WARP));
        }
        if (EACH == 1 && team > WARP) {
            if (tile > tiles.first) __syncthreads();
            if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = range[0];
            __syncthreads();
            range[0] = of_warps[threadIdx.x % (team / WARP)];
            join_lanes(range[0], team / WARP);
        }
#pragma unroll
        for (int b = 0; b < EACH; ++b) {
            if (length[b] == 0) continue;
            C s;
            int zero;
            range[b].parameters(g, s, zero);
            if (lane == 0) {
                scale[first + b * teams] = s;
                if (zero_point) zero_point[first + b * teams] = zero;
            }
            Scales<C, 1> scales;
            s = usable(s);
            scales.template set<true>(0, s, zero);
            const Quantize<T, BITS> op{x, codes, {nullptr, nullptr, s, zero}, g, aligned};
            unsigned left = 0;
#pragma unroll
            for (int v = 0; v < SLOTS; ++v) {
                const int e = (EACH == 1 ? v * team + lane : lane) * UNIT;
                if ((EACH == 1 || v == b) && e < length[b] &&
                    !(aligned && op.template quick<true>(begin[b] + e, unit[v], scales)))
                    left |= 1u << v;
            }
            for (; left; left &= left - 1)
                op.careful(begin[b] + ((EACH == 1 ? (__ffs(left) - 1) * team : 0) + lane) * UNIT, UNIT);
        }
    }
}

// ---- percentiles -----------------------------------------------------------------------------------------------

__device__ __forceinline__ bool has_sign(float x) { return __float_as_uint(x) >> 31; }
__device__ __forceinline__ bool has_sign(double x) { return __double_as_longlong(x) < 0; }

// A key has the order of the numbers, or of their magnitudes; NaN counts as 0.
template <typename C>
__device__ __forceinline__ typename Compute<C>::Bits key_of(C x, bool magnitude, bool negate) {
    using Bits = typename Compute<C>::Bits;
    constexpr Bits SIGN = Bits(1) << (sizeof(C) * 8 - 1);
    const Bits bits = x != x ? 0 : magnitude_bits(x);
    if (magnitude) return bits;
    return has_sign(x) != negate ? ~(bits | SIGN) : bits | SIGN;
}

// The number of rank `rank` (from 0) of a block, by its key, eight bits at a time. The whole thread block takes part.
template <typename T, typename Address>
__device__ typename Compute<T>::Bits select_rank(
    const T* x, Address address, long long size, unsigned long long rank, bool magnitude, bool negate,
    unsigned long long* counts) {
    using Bits = typename Compute<T>::Bits;
    Bits prefix = 0;
    for (int shift = sizeof(Bits) * 8 - 8; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        for (long long e = threadIdx.x; e < size; e += blockDim.x) {
            const Bits key = key_of<typename Compute<T>::Type>(to_float(x[address(e)]), magnitude, negate);
            if ((shift == sizeof(Bits) * 8 - 8 ? Bits(0) : key >> (shift + 8) % (sizeof(Bits) * 8)) == prefix)
                atomicAdd(counts + (key >> shift & 255), 1ull);
        }
        __syncthreads();
        int digit = 0;
        while (rank >= counts[digit]) rank -= counts[digit++];
        prefix = prefix << 8 | digit;
        __syncthreads();
    }
    return prefix;
}

// x           T[n]
// scale       C[count]
// zero_point  int32[count], or null
// fraction    percentile / 100
// period      distance of two runs of a block; 0 where a block is one run
template <typename T>
__global__ void percentile_affine(
    const T* x, typename Compute<T>::Type* scale, int* zero_point, double fraction, long long period,
    const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    using Bits = typename Compute<T>::Bits;
    constexpr Bits SIGN = Bits(1) << (sizeof(C) * 8 - 1);
    __shared__ unsigned long long counts[256];
    for (long long block = blockIdx.x; block < g.count; block += gridDim.x) {
        const long long r = period ? 0 : block / g.per_row, column = (block - r * g.per_row) * g.run;
        const long long begin = r * g.row + column, run = min(g.run, g.row - column);
        const long long size = period ? g.n / g.count : run;
        auto address = [&](long long e) { return period ? begin + e / run * period + e % run : begin + e; };
        const unsigned long long rank = max(static_cast<long long>(ceil(fraction * double(size))) - 1, 0ll);
        Range<C> range{};
        if (g.symmetric) {
            range.high = select_rank(x, address, size, rank, true, false, counts);
        } else {
            // The keys of positive numbers have the upper bit set.
            const Bits high = select_rank(x, address, size, rank, false, false, counts);
            const Bits low = select_rank(x, address, size, rank, false, true, counts);
            range.high = high & SIGN ? high ^ SIGN : 0, range.low = low & SIGN ? low ^ SIGN : 0;
        }
        if (threadIdx.x == 0) {
            C s;
            int zero;
            range.parameters(g, s, zero);
            scale[block] = s;
            if (zero_point) zero_point[block] = zero;
        }
    }
}
