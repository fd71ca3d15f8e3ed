// Kernels that find the ranges of affine integers: scales and zero points from what the blocks hold.
//
// The range of a block is kept as two magnitudes, max(x, 0) and max(-x, 0), whose bits have the order of the numbers:
// zero bytes are the range of nothing, atomicMax joins ranges, and the range holds 0 as it must.
#include "affine.cuh"

// a / b correctly rounded, by few instructions where b and the quotient are ordinary.
__device__ __forceinline__ float divide(float a, float b) {
    const float q = short_division(a, b, short_reciprocal(b));
    return is_ordinary(b) && is_ordinary(q) ? q : divide_ieee(a, b);
}
__device__ __forceinline__ double divide(double a, double b) { return divide_ieee(a, b); }

template <typename C>
struct Range {
    using Bits = typename Compute<C>::Bits;
    Bits high, low;

    // Of ends that keep it (see Ends).
    __device__ __forceinline__ bool has_nan() const { return max(high, low) > largest_finite(C(0)) + 1; }
    __device__ __forceinline__ void join(const Range& other) {
        high = max(high, other.high), low = max(low, other.low);
    }
    // Scale and zero point by the contract; infinities count as the largest finite number.
    __device__ __forceinline__ void parameters(const Geometry& g, C& scale, int& zero) const {
        const C up = from_bits(min(high, largest_finite(C(0)))), down = from_bits(min(low, largest_finite(C(0))));
        scale = C(1), zero = g.symmetric ? g.zero : g.qmin;
        if ((high | low) == 0) return;
        if (g.symmetric) {
            scale = divide(larger(up, down), C(g.divisor));
            return;
        }
        const C width = narrow(fmin(widen(up) + widen(down), from_bits(largest_finite(0.0))) / g.divisor, C(0));
        scale = smaller(width, from_bits(largest_finite(C(0))));
        const C s = usable(scale), steps = magnitude_bits(s) == 0 ? C(0) : C(rint(divide(down, s)));
        zero = g.qmin + int(smaller(steps, C(g.qmax - g.qmin)));
    }
};

// The range of elements that are added in pieces of a unit: a register of two 16-bit elements, or one element.
// STRICT: a NaN stays, beyond all numbers; else it is ignored.
template <typename T, bool STRICT>
struct Ends {
    using C = typename Compute<T>::Type;
    static constexpr int PIECE = 1;  // elements of a piece
    C high = C(0), low = C(0);       // the largest x and -x

    __device__ __forceinline__ static C larger_one(C a, C b) {
        const C found = larger(a, b);
        return STRICT && a != a ? a : STRICT && b != b ? b : found;
    }
    // BOTH: as the range wants it; else high becomes the largest magnitude.
    template <bool BOTH, int SIZE>
    __device__ __forceinline__ void add(const Unit<T, SIZE>& unit, int piece) {
        constexpr auto SIGN = typename Compute<C>::Bits(1) << (sizeof(C) * 8 - 1);
        const C v = unit.get(piece);
        if constexpr (!BOTH) high = larger_one(high, from_bits(magnitude_bits(v)));
        else high = larger_one(high, v), low = larger_one(low, from_bits(all_bits(v) ^ SIGN));
    }
    __device__ __forceinline__ Range<C> of(int) const { return {magnitude_bits(high), magnitude_bits(low)}; }
};

template <typename T, bool STRICT>
struct PairEnds {
    static constexpr int PIECE = 2;
    unsigned high = 0, low = 0;

    __device__ __forceinline__ static unsigned larger_pair(unsigned a, unsigned b) {
        const auto pair =
            STRICT ? __hmax2_nan(Word<T>::as(a), Word<T>::as(b)) : __hmax2(Word<T>::as(a), Word<T>::as(b));
        return *reinterpret_cast<const unsigned*>(&pair);
    }
    // The larger magnitudes, with any signs.
    __device__ __forceinline__ static unsigned larger_magnitudes(unsigned a, unsigned b) {
#if __CUDA_ARCH__ >= 860
        unsigned r;
        if constexpr (SameType<T, __half>::VALUE && STRICT)
            asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        else if constexpr (SameType<T, __half>::VALUE)
            asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        else if constexpr (STRICT) asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        else asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
#else
        return larger_pair(a, b & 0x7fff7fffu);
#endif
    }
    template <bool BOTH, int SIZE>
    __device__ __forceinline__ void add(const Unit<T, SIZE>& unit, int piece) {
        const unsigned pair = unit.word[piece];
        if constexpr (!BOTH) high = larger_magnitudes(high, pair);
        else high = larger_pair(high, pair), low = larger_pair(low, pair ^ 0x80008000u);
    }
    __device__ __forceinline__ Range<float> of(int j) const {
        return {magnitude_bits(Word<T>::get(high, j)), magnitude_bits(Word<T>::get(low, j))};
    }
};
template <bool STRICT>
struct Ends<__half, STRICT> : PairEnds<__half, STRICT> {};
template <bool STRICT>
struct Ends<__nv_bfloat16, STRICT> : PairEnds<__nv_bfloat16, STRICT> {};

// The ranges of the columns of units that lie below each other.
template <bool BOTH, typename T, int PIECES, int COUNT>
__device__ __forceinline__ void add_columns(Ends<T, false> (&ends)[PIECES], const Unit<T> (&unit)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) ends[piece].template add<BOTH>(unit[i], piece);
    }
}

// The range of units.
template <typename T, bool STRICT>
struct Gather {
    using C = typename Compute<T>::Type;
    Ends<T, STRICT> ends;
    template <int SIZE>
    __device__ __forceinline__ void add(const Unit<T, SIZE>& unit, bool both) {
        constexpr int PIECES = SIZE / Ends<T, STRICT>::PIECE;
        if (both) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) ends.template add<true>(unit, i);
        } else {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) ends.template add<false>(unit, i);
        }
    }
    __device__ __forceinline__ Range<C> range() const {
        Range<C> range = ends.of(0);
        if constexpr (Ends<T, STRICT>::PIECE == 2) range.join(ends.of(1));
        return range;
    }
};

template <typename T>
__device__ __forceinline__ Range<typename Compute<T>::Type> range_of(T x) {
    using C = typename Compute<T>::Type;
    const C v = to_float(x);
    return {magnitude_bits(larger(v, C(0))), magnitude_bits(smaller(v, C(0)))};
}

// The largest number of the warp, in every lane.
__device__ __forceinline__ unsigned warp_largest(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, x);
#else
    return warp_max(x);
#endif
}
__device__ __forceinline__ unsigned long long warp_largest(unsigned long long x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

// Join the ranges of `lanes` neighbouring lanes, a power of two up to 32.
template <typename C>
__device__ __forceinline__ void join_lanes(Range<C>& range, int lanes, bool both) {
    if (lanes == WARP) {
        range.high = warp_largest(range.high);
        if (both) range.low = warp_largest(range.low);
        return;
    }
    for (int step = lanes / 2; step > 0; step /= 2) {
        range.high = max(range.high, __shfl_xor_sync(FULL_WARP, range.high, step));
        if (both) range.low = max(range.low, __shfl_xor_sync(FULL_WARP, range.low, step));
    }
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
__global__ void __launch_bounds__(
    AFFINE_THREADS, sizeof(T) == 8      ? 2
                    : LAYOUT == COLUMNS ? 3
                                        : 4)
    find_range_affine(
        const T* x, typename Compute<T>::Bits* high, typename Compute<T>::Bits* low,
        const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    const bool aligned = is_aligned(x);
    if constexpr (LAYOUT == RUNS) {
        constexpr int DEPTH = sizeof(T) == 2 ? 4 : sizeof(T) == 4 ? 2 : 1;
        constexpr long long TILE_SIZE = (long long)AFFINE_THREADS * UNIT * DEPTH;
        const Run tiles((g.n + TILE_SIZE - 1) / TILE_SIZE);
        long long mine = -1;  // the block whose range is being gathered
        Gather<T, false> gather;
        auto flush = [&] {
            Range<C> range = gather.range();
            if (__all_sync(FULL_WARP, mine == __shfl_sync(FULL_WARP, mine, 0))) {
                join_lanes(range, WARP, low);
                if (threadIdx.x % WARP != 0) return;
            }
            if (mine >= 0) join_block<C>(high, low, mine, range);
        };
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            Unit<T> unit[DEPTH];
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                const long long i = tile * TILE_SIZE + (u * AFFINE_THREADS + threadIdx.x) * UNIT;
                if (i + UNIT <= g.n) load_unit(unit[u], x + i, aligned);
            }
            const RunsTile place(g, tile * TILE_SIZE);
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                const long long i = tile * TILE_SIZE + (u * AFFINE_THREADS + threadIdx.x) * UNIT;
                unsigned rest = 0;
                long long index =
                    g.wide ? -1 : place.first + place.locate(g, (u * AFFINE_THREADS + threadIdx.x) * UNIT, rest);
                const bool whole = i + UNIT <= g.n && rest >= UNIT;
                if (!whole) index = mine;
                if (__any_sync(FULL_WARP, index != mine)) {
                    flush();
                    mine = index, gather = {};
                }
                if (whole) {
                    gather.add(unit[u], low);
                } else {
#pragma unroll 1
                    for (long long e = i; e < min(i + UNIT, g.n); ++e)
                        join_block<C>(high, low, g.index(e), range_of(x[e]));
                }
            }
        }
        flush();
    } else {
        constexpr int ROWS = 64, BATCH = sizeof(T) == 2 ? 8 : sizeof(T) == 4 ? 4 : 2;
        constexpr long long WIDTH = AFFINE_THREADS * UNIT;
        constexpr int PITCH = AFFINE_THREADS + 4;  // eight times four banks apart
        using Bits = typename Compute<T>::Bits;
        __shared__ Bits highs[UNIT * PITCH], lows[UNIT * PITCH];
        const long long across = (g.columns + WIDTH - 1) / WIDTH;
        const Run tiles((g.rows + ROWS - 1) / ROWS * across);
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            const long long left = tile % across * WIDTH, column = left + threadIdx.x * UNIT;
            using Pieces = Ends<T, false>;
            Pieces ends[UNIT / Pieces::PIECE];
            for (int r = 0; r < ROWS && column < g.columns; r += BATCH) {
                const long long i = (tile / across * ROWS + r) * g.columns + column;
                if (i + (BATCH - 1) * g.columns + UNIT <= g.n) {
                    Unit<T> unit[BATCH];
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) load_unit(unit[b], x + i + b * g.columns, aligned);
                    if (low) add_columns<true>(ends, unit);
                    else add_columns<false>(ends, unit);
                } else {
#pragma unroll 1
                    for (int b = 0; b < BATCH; ++b) {
#pragma unroll 1
                        for (long long e = i + b * g.columns; e < min(i + b * g.columns + UNIT, g.n); ++e)
                            join_block<C>(high, low, g.index(e), range_of(x[e]));
                    }
                }
            }
            // Neighbouring lanes join the ranges of neighbouring columns, which touches the fewest sectors.
            __syncthreads();
#pragma unroll
            for (int j = 0; j < UNIT; ++j) {
                const Range<C> range = ends[j / Pieces::PIECE].of(j % Pieces::PIECE);
                highs[j * PITCH + threadIdx.x] = range.high, lows[j * PITCH + threadIdx.x] = range.low;
            }
            __syncthreads();
            unsigned index[UNIT];
            Bits seen_high[UNIT], seen_low[UNIT];  // one look, so that there is one wait
#pragma unroll
            for (int k = 0; k < UNIT; ++k) {
                const long long c = min(left + k * AFFINE_THREADS + threadIdx.x, g.columns - 1);
                index[k] = static_cast<unsigned>(c % g.row) / static_cast<unsigned>(g.run);
                seen_high[k] = __ldcg(high + index[k]), seen_low[k] = low ? __ldcg(low + index[k]) : 0;
            }
#pragma unroll
            for (int k = 0; k < UNIT; ++k) {
                const int c = k * AFFINE_THREADS + threadIdx.x, place = c % UNIT * PITCH + c / UNIT;
                if (left + c >= g.columns) break;
                if (highs[place] > seen_high[k]) atomicMax(high + index[k], highs[place]);
                if (low && lows[place] > seen_low[k]) atomicMax(low + index[k], lows[place]);
            }
        }
    }
}

// The range of an array that is one block; arguments as above.
template <typename T>
__global__ void __launch_bounds__(AFFINE_THREADS, 4) find_whole_affine(
    const T* x, typename Compute<T>::Bits* high, typename Compute<T>::Bits* low, const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    constexpr int DEPTH = 128 / (UNIT * sizeof(T));  // 128 bytes of a thread are under way
    constexpr long long TILE_SIZE = (long long)AFFINE_THREADS * UNIT * DEPTH;
    const Run tiles(g.n / TILE_SIZE);
    Gather<T, false> gather;
    if (is_aligned(x)) {
        for (long long tile = tiles.first; tile < tiles.end; ++tile) {
            Unit<T> unit[DEPTH];
#pragma unroll
            for (int u = 0; u < DEPTH; ++u)
                unit[u].template load<true>(x + tile * TILE_SIZE + (u * AFFINE_THREADS + threadIdx.x) * UNIT);
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) gather.add(unit[u], low);
        }
    }
    Range<C> range = gather.range();
    // What is left: the end of the array, or all of it.
    const long long step = (long long)gridDim.x * AFFINE_THREADS;
    for (long long i = (is_aligned(x) ? g.n / TILE_SIZE * TILE_SIZE : 0) + blockIdx.x * AFFINE_THREADS + threadIdx.x;
         i < g.n; i += step)
        range.join(range_of(x[i]));
    __shared__ Range<C> of_warps[AFFINE_THREADS / WARP];
    join_lanes(range, WARP, true);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = range;
    __syncthreads();
    if (threadIdx.x < AFFINE_THREADS / WARP) {
        range = of_warps[threadIdx.x];
        join_block<C>(high, low, 0, range);
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
//
// x is read once where a block stays in registers from the search of its range to its codes. Three kernels share the
// lengths of blocks: 32 elements a lane (up to 1024 elements, a power of two), a team of lanes (up to 1024, any
// multiple of eight), a thread block (beyond). What fits none of them is read twice: find_range_affine, then
// quantize_affine.

// What quantizes the units of a block by the block's own range.
template <typename T, int BITS>
struct Own {
    using C = typename Compute<T>::Type;
    const T* x;
    unsigned char* codes;
    const Geometry& g;
    C s, r;
    int zero;
    bool quick;  // all units of the block are

    __device__ __forceinline__ Own(const T* x, unsigned char* codes, const Geometry& g, const Range<C>& range)
        : x(x), codes(codes), g(g) {
        range.parameters(g, s, zero);
        quick = is_ordinary(s);
        if constexpr (sizeof(C) == 4) r = short_reciprocal(s);
    }

    // Numbers of a block of an ordinary scale. Neither do quotients overflow, nor do they leave a range with as many
    // steps below the zero point as above it.
    template <int SIZE>
    __device__ __forceinline__ Codes<BITS, SIZE> level(const Unit<T, SIZE>& unit) const {
        const int offset = BITS == 4 && g.qmin < 0 ? 8 : 0;  // as in Quantize
        unsigned q[SIZE];
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (int j = 0; j < SIZE; ++j)
                q[j] = int(clamped(steps_of(unit.get(j), s), C(g.qmin - zero), C(g.qmax - zero))) + zero + offset;
        } else if (g.symmetric && g.zero % 2 == 0 && g.zero - g.divisor >= g.qmin) {
            const float rounder = beside_rounder(g.zero + offset);  // even, so ties go where they go without it
#pragma unroll
            for (int j = 0; j < SIZE; ++j)
                q[j] = __float_as_uint(__fadd_rn(short_division(unit.get(j), s, r), rounder));
        } else {
            const Rounding rounding(offset, g.qmin + offset, g.qmax + offset);
#pragma unroll
            for (int j = 0; j < SIZE; ++j)
                q[j] = __float_as_uint(rounding.clamped(rounding(short_division(unit.get(j), s, r), float(zero))));
        }
        Codes<BITS, SIZE> packed;
        packed.pack_bytes(q);
        if (BITS == 4 && offset) {
#pragma unroll
            for (int w = 0; w < packed.WORDS; ++w) packed.word[w] ^= 0x88888888u;
        }
        return packed;
    }

    __device__ __forceinline__ void note(long long block, C* scale, int* zero_point) const {
        scale[block] = s;
        if (zero_point) zero_point[block] = zero;
    }

    __device__ __forceinline__ void store(const Unit<T>& unit, long long i) const {
        level(unit).template store<true>(codes + i * BITS / 8);
    }

    __device__ __forceinline__ void careful(long long i, int count) const {
        Steady<C> at{usable(s), C(zero)};
        Quantize<T, BITS>{{{}, g, false}, x, codes}.one_by_one(i, count, at);
    }
};

constexpr int SLOTS = 4, TEAM_THREADS = 128;  // units of a thread; threads of a thread block

// The ranges of the blocks of a team.
template <bool STRICT, typename T, int EACH, typename C>
__device__ __forceinline__ void find_ranges(
    const Unit<T> (&unit)[SLOTS], Range<C> (&range)[EACH], int team, bool both) {
    Gather<T, STRICT> gather[EACH];
#pragma unroll
    for (int v = 0; v < SLOTS; ++v) gather[EACH == 1 ? 0 : v].add(unit[v], both);
#pragma unroll
    for (int b = 0; b < EACH; ++b) {
        range[b] = gather[b].range();
        join_lanes(range[b], team, both);
    }
}

// Blocks of up to 1024 elements, which begin at multiples of eight and are made of whole units. A team of threads reads
// a block once: it stays in registers from the search of its range to its codes.
//
// x           T[n], begins at a multiple of 16 bytes
// codes       as quantize_affine, begins at a multiple of 16 bytes
// scale       C[count]
// zero_point  int32[count], or null
// team        threads of a team: a power of two up to 32
// EACH        blocks that a team has in its registers: SLOTS of one unit a thread, or 1 of SLOTS units a thread
template <typename T, int BITS, int EACH>
__global__ void __launch_bounds__(
    TEAM_THREADS, sizeof(T) == 8 ? 2
                  : EACH > 1     ? 5
                                 : 8)
    quantize_dynamic_affine(
        const T* x, unsigned char* codes, typename Compute<T>::Type* scale, int* zero_point, int team,
        const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    static_assert(EACH == 1 || EACH == SLOTS, "a slot is a block, or all are one");
    const bool both = !g.symmetric;
    const int lane = threadIdx.x & (team - 1), teams = TEAM_THREADS / team;
    const long long first = (long long)blockIdx.x * (teams * EACH) + threadIdx.x / team;
    long long begin[EACH];
    int length[EACH];
    Unit<T> unit[SLOTS] = {};
#pragma unroll
    for (int b = 0; b < EACH; ++b) {
        const long long block = first + b * teams;
        begin[b] = block * g.run, length[b] = block < g.count ? int(g.run) : 0;
        if (g.per_row != 1) {  // the last block of a row may be short
            const long long row = block / g.per_row, column = (block - row * g.per_row) * g.run;
            begin[b] = row * g.row + column, length[b] = min((long long)length[b], g.row - column);
        }
    }
    // The element of a block that slot v begins with.
    auto element = [&](int v) { return (EACH == 1 ? v * team + lane : lane) * UNIT; };
#pragma unroll
    for (int v = 0; v < SLOTS; ++v) {
        const int b = EACH == 1 ? 0 : v;
        if (element(v) < length[b]) unit[v].template load<true>(x + begin[b] + element(v));
    }
    Range<C> range[EACH];
    find_ranges<true>(unit, range, team, both);
    bool nan = false;
#pragma unroll
    for (int b = 0; b < EACH; ++b) nan |= range[b].has_nan();
    nan = __any_sync(FULL_WARP, nan);
    if (nan) find_ranges<false>(unit, range, team, both);
#pragma unroll
    for (int b = 0; b < EACH; ++b) {
        if (length[b] == 0) continue;
        const Own<T, BITS> own(x, codes, g, range[b]);
        if (lane == 0) own.note(first + b * teams, scale, zero_point);
        if (own.quick && !nan) {
#pragma unroll
            for (int v = 0; v < SLOTS; ++v)
                if ((EACH == 1 || v == b) && element(v) < length[b]) own.store(unit[v], begin[b] + element(v));
        } else {
#pragma unroll 1
            for (int v = 0; v < SLOTS; ++v)
                if ((EACH == 1 || v == b) && element(v) < length[b]) own.careful(begin[b] + element(v), UNIT);
        }
    }
}

// Join the ranges of the threads of a thread block, at most 1024; of_warps is shared memory.
template <typename C>
__device__ __forceinline__ void join_threads(Range<C>& range, bool both, Range<C>* of_warps) {
    join_lanes(range, WARP, both);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = range;
    __syncthreads();
    range = of_warps[min(threadIdx.x % WARP, blockDim.x / WARP - 1)];
    join_lanes(range, WARP, both);
}

// The most threads of a thread block that holds a long block, as registers allow.
template <typename T, int SLOTS>
constexpr int ROW_THREADS = sizeof(T) == 8 ? 256
                            : SLOTS > 4    ? 512
                                           : 1024;

// The same with a block of `run` elements, all of them whole, for a thread block. It takes one after the other: while
// it works on one in its registers, the next is on its way to shared memory, where each warp has a place of its own.
//
// Arguments as quantize_dynamic_affine.
template <typename T, int BITS, int SLOTS>
__global__ void __launch_bounds__(ROW_THREADS<T, SLOTS>, 1) quantize_rows_affine(
    const T* x, unsigned char* codes, typename Compute<T>::Type* scale, int* zero_point,
    const __grid_constant__ Geometry g) {
    using C = typename Compute<T>::Type;
    constexpr int CHUNKS = UNIT * sizeof(T) / 16;
    extern __shared__ __align__(128) uint4 dynamic[];
    __shared__ Range<C> of_warps[3][32];
    const bool both = !g.symmetric;
    const int length = static_cast<int>(g.run);
    // A warp copies what its lanes are going to read, in order: a slot of all threads holds neighbours.
    const int lane = threadIdx.x % WARP, warp = threadIdx.x - lane;
    auto fetch = [&](long long block) {
        const uint4* source = reinterpret_cast<const uint4*>(x + block * length);
#pragma unroll 4  // where copies stop in registers these are few
        for (int v = 0; v < SLOTS; ++v) {
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                const int chunk = (v * blockDim.x + warp) * CHUNKS + i * WARP + lane;
                if (chunk * (UNIT / CHUNKS) < length) copy_async(dynamic + chunk, source + chunk);
            }
        }
    };
    const Run blocks(g.count);
    if (blocks.first < blocks.end) fetch(blocks.first);
    close_copies();
    for (long long block = blocks.first; block < blocks.end; ++block) {
        copies_arrived<0>();
        __syncwarp();
        Unit<T> unit[SLOTS] = {};
        Gather<T, true> gather;
#pragma unroll
        for (int v = 0; v < SLOTS; ++v) {
            const int first = v * blockDim.x + threadIdx.x;
            if (first * UNIT >= length) continue;
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                const uint4 chunk = dynamic[first * CHUNKS + i];
                unit[v].word[4 * i] = chunk.x, unit[v].word[4 * i + 1] = chunk.y;
                unit[v].word[4 * i + 2] = chunk.z, unit[v].word[4 * i + 3] = chunk.w;
            }
        }
        __syncwarp();
        if (block + 1 < blocks.end) fetch(block + 1);
        close_copies();
#pragma unroll
        for (int v = 0; v < SLOTS; ++v) gather.add(unit[v], both);
        Range<C> range = gather.range();
        join_threads(range, both, of_warps[block & 1]);
        const bool nan = range.has_nan();
        if (nan) {
            Gather<T, false> numbers;
#pragma unroll
            for (int v = 0; v < SLOTS; ++v) numbers.add(unit[v], both);
            range = numbers.range();
            join_threads(range, both, of_warps[2]);
        }
        const Own<T, BITS> own(x, codes, g, range);
        if (threadIdx.x == 0) own.note(block, scale, zero_point);
        if (own.quick && !nan) {
#pragma unroll
            for (int v = 0; v < SLOTS; ++v) {
                const int e = (v * blockDim.x + threadIdx.x) * UNIT;
                if (e < length) own.store(unit[v], block * length + e);
            }
        } else {
#pragma unroll 1
            for (int e = threadIdx.x * UNIT; e < length; e += blockDim.x * UNIT) own.careful(block * length + e, UNIT);
        }
    }
}

constexpr int LANE_THREADS = 256;

// Blocks of 32 * 2^j elements, up to 1024: a lane owns 32 elements, so 2^j lanes own a block. What they read passes
// through shared memory, one tile of the warp ahead.
//
// lanes  2^j; the rest as quantize_dynamic_affine
template <typename T, int BITS>
__global__ void __launch_bounds__(LANE_THREADS, sizeof(T) == 2 ? 4 : 3) quantize_lanes_affine(
    const T* x, unsigned char* codes, float* scale, int* zero_point, int lanes, const __grid_constant__ Geometry g) {
    constexpr int WARPS = LANE_THREADS / WARP, TILE_CHUNKS = WARP * Tile<T>::CHUNKS;
    extern __shared__ __align__(128) uint4 dynamic[];  // two tiles for each warp
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const bool both = !g.symmetric;
    const long long rows = g.n / ROW, all = (rows + WARP - 1) / WARP, run = (all + gridDim.x - 1) / gridDim.x;
    const long long end = min(all, (blockIdx.x + 1) * run);
    long long t = blockIdx.x * run + warp;
    Tile<T> tile{dynamic + warp * 2 * TILE_CHUNKS}, next{tile.chunks + TILE_CHUNKS};
    if (t < end) tile.load(x, t * TILE, g.n, true, lane);
    close_copies();
    for (; t < end; t += WARPS) {
        if (t + WARPS < end) next.load(x, (t + WARPS) * TILE, g.n, true, lane);
        close_copies();
        copies_arrived<1>();
        __syncwarp();
        Unit<T, ROW> unit;
        tile.read_row(lane, unit.word);
        Gather<T, true> gather;
        gather.add(unit, both);
        Range<float> range = gather.range();
        join_lanes(range, lanes, both);
        const bool nan = __any_sync(FULL_WARP, range.has_nan());
        if (nan) {
            Gather<T, false> numbers;
            numbers.add(unit, both);
            range = numbers.range();
            join_lanes(range, lanes, both);
        }
        const Own<T, BITS> own(x, codes, g, range);
        const long long row = t * WARP + lane;
        if (row < rows && lane % lanes == 0) own.note(row / lanes, scale, zero_point);
        if (__all_sync(FULL_WARP, own.quick && !nan)) {
            const Codes<BITS, ROW> packed = own.level(unit);
            __syncwarp();  // every row has been read: the tile's memory now stages the codes
            WordTile<BITS>::store(reinterpret_cast<unsigned*>(codes), t * WARP, rows, tile.chunks, lane, packed.word);
        } else if (row < rows) {
            own.careful(row * ROW, ROW);
        }
        __syncwarp();
        uint4* freed = tile.chunks;
        tile.chunks = next.chunks, next.chunks = freed;
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
