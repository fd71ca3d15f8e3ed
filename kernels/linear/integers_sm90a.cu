// Products of int8 tokens and weights of integer codes of 8, 4 or 2 bits on Hopper (sm_90a): codes become bytes in
// registers, which are operand A of wgmma, 64 rows of the weight; operand B is the tokens, straight from shared memory.
//
//     TMA --full[stage]--> codes to registers, bytes, wgmma: 64 rows x TOKENS x 32 k --empty[stage]--> TMA
//
// One warp fills the ring of stages, 128 k each: tokens in the 128-byte swizzle, and the codes of a tile of rows as
// they are stored. Warpgroups have 64 rows each; where K_GROUPS share them, each takes every K_GROUPS-th stage. A
// cluster of SHARE blocks has neighbouring tiles of rows and the same tokens, of which each block fetches a part for
// all.
//
// Sums are exact in int32 as far as scales are shared: along a row (UNIT = 0), or along UNIT k or a multiple of 128.
// Those of a unit are scaled and added in float32, in the order of k; parts of K_GROUPS then in their order. EACH: so
// are those of EACH_K k, of which each token has a scale. The contract is that of kbitcupy/products/integers.py and
// kbitcupy/products/ternary.py. Tiles of 256 tokens whose sums are in float32 are multiplied as integer_chunks.cuh
// says. Where the last tiles of 256 tokens would leave many blocks without work, all multiply them together, parts of k
// that are added as integer_parts.cuh says; or two blocks share each, half of the tokens each.
#include "linear/int8.cuh"
#include "linear/integer_beside.cuh"
#include "linear/integer_chunks.cuh"
#include "linear/integer_pairs.cuh"
#include "linear/integer_parts.cuh"
#include "linear/integer_results.cuh"

// Of the host (kbitcupy/products/integer_tile.py), ahead of this source: STAGE_K of a stage, EACH_K that share a scale
// of a token where it has several; TABLE_UNITS of a row whose scales are copied together, to one of TABLES; and how
// numbers beside codes are stored, scales FLOAT32_SCALES, FLOAT16_SCALES, BFLOAT16_SCALES, or ANY_FLOAT16_SCALES, which
// count even where they are not positive; zero points NO_POINTS, INT32_POINTS, INT8_POINTS, UINT8_POINTS.
constexpr int COPIERS = WARPGROUP - WARP;  // threads that copy scales and zero points

// ---- the parts of a thread block -----------------------------------------------------------------------------------

template <
    typename Decoder_, int TOKENS_, int ROW_GROUPS_, int K_GROUPS_, int SHARE_, int STAGES_, int BOXES_, int UNIT_,
    bool EACH_>
struct Tiling {
    using Decoder = Decoder_;
    static constexpr int TOKENS = TOKENS_, ROW_GROUPS = ROW_GROUPS_, K_GROUPS = K_GROUPS_, SHARE = SHARE_;
    static constexpr int STAGES = STAGES_, BOXES = BOXES_, UNIT = UNIT_;
    static constexpr bool EACH = EACH_;
    static constexpr int WARPGROUPS = ROW_GROUPS * K_GROUPS, WARPS = 4 * WARPGROUPS;
    static constexpr int TILES = TOKENS == 64 && WARPGROUPS == 2 ? 2 : 1;  // of 64 rows, of a warpgroup
    static constexpr int ROWS = 64 * TILES * ROW_GROUPS;
    static constexpr int THREADS = (WARPGROUPS + 1) * WARPGROUP;
    // Registers of a thread that multiplies, to which those go that the threads of the last warpgroup do not need.
    static_assert(WARPGROUPS == 2 || WARPGROUPS == 4, "how registers are shared out");
    static constexpr int MORE = WARPGROUPS == 2 ? 232 : UNIT == 0 && TOKENS == 64 ? 104 : 112;
    static constexpr int LESS = WARPGROUPS == 2 ? 40 : UNIT == 0 && TOKENS == 64 ? 64 : 32;
    static constexpr int PART = TOKENS / SHARE;                     // tokens that a block of a cluster fetches
    static constexpr int SUMS = TOKENS / 2;                         // of a thread and a tile
    static constexpr int SCALES = UNIT == 0 ? 1 : STAGE_K / UNIT;   // of a row of the weight in a stage
    static constexpr int UNITS = EACH ? STAGE_K / EACH_K : SCALES;  // sums of a stage that are scaled
    static constexpr bool FLOATS = EACH || UNIT != 0;               // whether sums are added in float32
    // Whether sums in float32 leave registers for those in int32 of CHUNK tokens only, at a time.
    static constexpr bool IN_CHUNKS = TOKENS == 256 && UNIT != 0 && !EACH;
    static constexpr int CHUNK = 64;
    // Whether the two warpgroups multiply in turns: that takes two registers, which bytes do not leave.
    static constexpr bool IN_TURNS = IN_CHUNKS && UNIT == STAGE_K && Decoder::BITS == 4;
    // Whether numbers beside codes that are words have copiers of their own, which take fewer of the slots in which
    // instructions are issued.
    static constexpr bool WORDS = TILES > 1 || IN_TURNS;
    // Whether a stage is decoded while the one before is multiplied, for which there must be registers.
    static constexpr bool AHEAD = WARPGROUPS == 2 || UNIT == 0;
    // Buffers of a warpgroup for results of 16 bits, as many as there is memory for: 0 where each warp stores its own.
    static constexpr int BUFFERS = TOKENS < 256 ? 0 : UNIT == 0 ? 2 : 4;
    // Whether scales of tokens, and sums of their codes, are copied while a tile is multiplied.
    static constexpr bool EARLY = TOKENS == 256 && !EACH;
    // Whether thread blocks may multiply tiles together: of smaller units that would take registers.
    static constexpr bool TOGETHER = TOKENS == 256 && (UNIT == 0 || UNIT == STAGE_K);
    // Scales of each token in STAGE_K.
    static constexpr int NUMBERS = EACH ? STAGE_K / EACH_K : 0;
    // A stage: BOXES of tokens, codes, numbers of the first part of tokens and then of others.
    static constexpr int X_BYTES = TOKENS * STAGE_K, ROW_BYTES = BOXES * Decoder::ROW_BYTES;
    static constexpr int CODES_AT = BOXES * X_BYTES, NUMBERS_AT = CODES_AT + ROWS * ROW_BYTES;
    static constexpr int COPIED = NUMBERS_AT + BOXES * TOKENS * NUMBERS * 4;
    static constexpr int STAGE = (COPIED + 1023) / 1024 * 1024;
    // Behind the stages, tables of a scale and a zero point for every unit and row; banks differ by unit.
    static constexpr int TABLE_PITCH = 8 * (ROWS + 4), TABLE = UNIT == 0 ? 0 : TABLE_UNITS * TABLE_PITCH;
    static_assert(STAGES % K_GROUPS == 0 && STAGES >= 2 * K_GROUPS, "each warpgroup has its stages, and holds one");
    static_assert(
        K_GROUPS == 1 || (K_GROUPS - 1) * ROW_GROUPS * SUMS * WARPGROUP * 4 <= STAGES * STAGE,
        "sums are exchanged where the ring was");
};

// The sizes that the host reckons with.
template <int THREADS, int ROWS, int STAGE_BYTES, int TABLE_BYTES>
struct Layout {
    template <typename S>
    static constexpr bool IS_OF =
        S::THREADS == THREADS && S::ROWS == ROWS && S::STAGE == STAGE_BYTES && TABLES * S::TABLE == TABLE_BYTES;
};

// The ring of stages.
template <typename S>
using Tables = Ring<TABLES, S::TABLE, 2>;
template <typename S>
struct Stages : Ring<S::STAGES, S::STAGE, 2> {
    __device__ __forceinline__ unsigned full(unsigned s) const { return this->barrier(FULL, s); }
    __device__ __forceinline__ unsigned empty(unsigned s) const { return this->barrier(EMPTY, s); }
};

// Fills the ring with the stages of a tile.
template <typename S>
struct Fetcher {
    static constexpr int PART = S::PART, ALL = (1 << S::SHARE) - 1;
    const TensorMap *x_map, *w_map, *e_map;
    unsigned rank;

    __device__ __forceinline__ void weights(const Stages<S>& ring, unsigned s, int stage, int row) const {
        barrier_expect(ring.full(s), S::COPIED);
        copy_box(ring.data(s) + S::CODES_AT, w_map, stage * S::ROW_BYTES, row, ring.full(s));
    }
    // first: of the block. Then the weights of all stages do not wait for the tokens to be quantized.
    __device__ __forceinline__ void tile(
        Stages<S>& ring, int token, int row, int first_stage, int stages, bool first) const {
        const int ahead = first ? min(stages, first_stage + S::STAGES) : first_stage;
        for (int stage = first_stage; stage < ahead; ++stage) weights(ring, stage - first_stage, stage, row);
        if (first) wait_for_previous();
        for (int stage = first_stage; stage < stages; ++stage) {
            const unsigned s = ring.stage;
            if (stage >= ahead) {
                barrier_wait(ring.empty(s), ring.phase ^ 1);
                weights(ring, s, stage, row);
            }
            const unsigned data = ring.data(s), numbers = data + S::NUMBERS_AT;
            // A stage is empty when it is so in all blocks: their warps arrive at this barrier, too.
#pragma unroll
            for (int box = 0; box < S::BOXES; ++box) {
                const unsigned to = data + box * S::X_BYTES;
                const int k = (stage * S::BOXES + box) * STAGE_K;
                if constexpr (S::SHARE == 1) copy_box(to, x_map, k, token, ring.full(s));
                else copy_box_multicast(to + rank * PART * STAGE_K, x_map, k, token + rank * PART, ring.full(s), ALL);
            }
            if constexpr (S::NUMBERS > 0) {
                constexpr int MANY = S::BOXES * S::NUMBERS;
                if constexpr (S::SHARE == 1) copy_box(numbers, e_map, token * 4, stage * MANY, ring.full(s));
                else
                    copy_box_multicast(
                        numbers + rank * PART * MANY * 4, e_map, (token + rank * PART) * 4, stage * MANY, ring.full(s),
                        ALL);
            }
            ring.step(1);
        }
    }
};

// ---- numbers beside codes ------------------------------------------------------------------------------------------

// Copies scales and zero points of the rows of a tile to tables, two words for each, and makes of them what is
// multiplied and taken off: the warps beside the one that copies tokens and codes. Lanes beside each other have those
// of a row.
template <typename S>
struct Neighbours {
    static constexpr int STEP = COPIERS / TABLE_UNITS;  // rows at a time
    const Beside& beside;
    int thread;

    // ... of a tile, `units` for each row from `first_unit` on, a multiple of TABLE_UNITS; nothing for rows that there
    // are not. A table is copied while the one before it is made ready. WORDS: scales are float32, and zero points
    // int32, for which fewer instructions do.
    template <bool WORDS = false>
    __device__ __forceinline__ void tile(Tables<S>& tables, int row, int last_row, int first_unit, int units) const {
        const int u = thread % TABLE_UNITS, own = thread / TABLE_UNITS, rows = min(S::ROWS, last_row - row + 1);
        const unsigned step = STEP * beside.per_row, begin = static_cast<unsigned>(row + own) * beside.per_row;
        const unsigned to = u * S::TABLE_PITCH + own * 8;
        Tables<S> copied = tables;
        unsigned at = begin;
        for (int first = first_unit; first < units + TABLE_UNITS; first += TABLE_UNITS) {
            const unsigned before = at;
            if (first < units) {
                barrier_wait(copied.barrier(EMPTY, copied.stage), copied.phase ^ 1);
                at = begin + min(static_cast<unsigned>(first + u), beside.per_row - 1);
                unsigned number = at, place = copied.data() + to;
                if constexpr (WORDS) {
                    const auto* const scale = static_cast<const unsigned*>(beside.scale);
                    const auto* const zero = static_cast<const unsigned*>(beside.zero);
#pragma unroll 4
                    for (int r = own; r < rows; r += STEP, number += step, place += STEP * 8)
                        copy_word_of_line(place, scale + number), copy_word_of_line(place + 4, zero + number);
                } else {
#pragma unroll 2
                    for (int r = own; r < rows; r += STEP, number += step, place += STEP * 8)
                        beside.copy(place, number);
                }
                copied.step(1);
            }
            commit_copies();
            if (first == first_unit) continue;
            wait_copies<1>();
            unsigned number = before, place = tables.data() + to;
            if constexpr (WORDS) {
#pragma unroll 4
                for (int r = own; r < rows; r += STEP, place += STEP * 8) {
                    const uint2 v = shared_at<uint2>(place);
                    store_shared(place, usable(__uint_as_float(v.x)), beside.points_of_word(v.y));
                }
            } else {
#pragma unroll 2
                for (int r = own; r < rows; r += STEP, number += step, place += STEP * 8) {
                    const uint2 v = shared_at<uint2>(place);
                    store_shared(place, beside.scale_of(v.x, number), beside.points_of(v.y, number));
                }
            }
            barrier_arrive(tables.barrier(FULL, tables.stage));
            tables.step(1);
        }
    }
};

// ---- sums ----------------------------------------------------------------------------------------------------------

// What a warpgroup multiplies of a tile, one stage or more: `sum` where rows have one scale, else `total`. Its codes
// are `codes` behind the beginning of a stage, and what stands beside those of row g `numbers` behind that of a table;
// `factor` has the scales of rows g and g + 8, and `zero` their zero points, where all of a row have the same.
template <typename S>
__device__ __forceinline__ void multiply_stages(
    Stages<S>& ring, Tables<S>& tables, unsigned codes, unsigned numbers, int first_stage, int stages, int units,
    int k_group, int group_stages, typename S::Decoder::Zero& zero, float (&factor)[2], int (&sum)[S::SUMS],
    float (&total)[S::SUMS]) {
    using Decoder = typename S::Decoder;
    const int lane = threadIdx.x % WARP;
    RowScales<S, Tables<S>> scales{tables, numbers};
    // The sums of a unit, which have come, count; of EACH by the scales of tokens, too, number u of a stage.
    auto convert = [&](const float (&by)[2], unsigned tile, int u) {
        constexpr int MANY = S::BOXES * S::NUMBERS;
#pragma unroll
        for (int j = 0; j < S::SUMS; j += 4) {
            float e[2] = {1.0f, 1.0f};
            if constexpr (S::EACH) {
                const int token = j / 4 * 8;
                const uint2 v = shared_at<uint2>(
                    tile + S::NUMBERS_AT +
                    (token / S::PART * MANY * S::PART + u * S::PART + token % S::PART + lane % 4 * 2) * 4);
                e[0] = __uint_as_float(v.x), e[1] = __uint_as_float(v.y);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float exact = __int2float_rn(sum[j + i]);
                total[j + i] = fma_ieee(S::EACH ? multiply_ieee(exact, e[i % 2]) : exact, by[i / 2], total[j + i]);
            }
        }
    };
    if constexpr (S::UNITS == 1) {
        unsigned last = 0, group = 0;
        int inside = k_group * S::BOXES;  // of the group ahead of what comes
        bool begins = true;
        auto reach = [&] {
            while (inside >= group_stages) inside -= group_stages, ++group, begins = true;
        };
        if constexpr (S::FLOATS) reach();
        for (int stage = first_stage + k_group; stage < stages; stage += S::K_GROUPS) {
            barrier_wait(ring.full(ring.stage), ring.phase);
            const unsigned tile = ring.data(ring.stage);
#pragma unroll
            for (int box = 0; box < S::BOXES; ++box) {
                unsigned a[4][4];
                auto begin = [&] {
                    unsigned raw[Decoder::RAW];
                    Decoder::fetch(raw, tile + codes ^ box * Decoder::ROW_BYTES);
#pragma unroll
                    for (int s = 0; s < 4; ++s) Decoder::begun(raw, s, zero, a[s]);
                    fence_operands(a);
                };
                float by[2];
                if constexpr (S::FLOATS)
                    if (begins) scales.take(group, by, zero);
                if constexpr (S::AHEAD) begin();
                wgmma_wait<0>();
                if constexpr (S::AHEAD) fence_operands(a);
                if constexpr (S::FLOATS) fence_sums(sum);
                const bool later = stage > first_stage + k_group;
                if constexpr (S::FLOATS)
                    if (begins && (later || box > 0)) convert(factor, 0, 0);
                if (box == 0 && later) release<S>(ring, last);  // what was read of it has come
                if constexpr (!S::AHEAD) begin();
                finish<Decoder>(a, zero);
                const unsigned long long x = wgmma_descriptor(tile + box * S::X_BYTES);
                fence_operands(a);
                wgmma_begin();
#pragma unroll
                for (int s = 0; s < 4; ++s)  // descriptors count in units of 16 bytes
                    wgmma_bytes(sum, a[s], x + 2 * s, s > 0 || (S::FLOATS ? !begins : box > 0 || later));
                wgmma_commit();
                if constexpr (S::FLOATS) {
                    if (begins) factor[0] = by[0], factor[1] = by[1];
                    begins = false, inside += box == S::BOXES - 1 ? (S::K_GROUPS - 1) * S::BOXES + 1 : 1;
                    reach();
                }
            }
            last = ring.stage;
            ring.step(S::K_GROUPS);
        }
        wgmma_wait<0>();
        fence_sums(sum);
        if constexpr (S::FLOATS) convert(factor, 0, 0);
        release<S>(ring, last);
    } else {
        for (int stage = k_group; stage < stages; stage += S::K_GROUPS) {
            barrier_wait(ring.full(ring.stage), ring.phase);
            const unsigned tile = ring.data(ring.stage);
            constexpr int STEPS = 4 / S::UNITS, EVERY = S::UNITS / S::SCALES;  // sums that have the same scales of rows
#pragma unroll 1
            for (int box = 0; box < S::BOXES; ++box) {
                const int number = stage * S::BOXES + box;
                const unsigned long long x = wgmma_descriptor(tile + box * S::X_BYTES);
                unsigned raw[Decoder::RAW];
                Decoder::fetch(raw, tile + codes ^ box * Decoder::ROW_BYTES);
#pragma unroll
                for (int u = 0; u < S::UNITS; ++u) {
                    unsigned a[STEPS][4];
                    if constexpr (S::UNIT != 0)
                        if (u % EVERY == 0)
                            scales.take(
                                S::UNIT == STAGE_K ? number / group_stages : number * S::SCALES + u / EVERY, factor,
                                zero);
#pragma unroll
                    for (int s = 0; s < STEPS; ++s) Decoder::begun(raw, u * STEPS + s, zero, a[s]);
                    finish<Decoder>(a, zero);
                    fence_operands(a);
                    wgmma_begin();
#pragma unroll
                    for (int s = 0; s < STEPS; ++s) wgmma_bytes(sum, a[s], x + 2 * (u * STEPS + s), s > 0);
                    wgmma_commit();
                    wgmma_wait<0>();
                    fence_sums(sum);
                    convert(factor, tile, box * S::NUMBERS + u);
                }
            }
            release<S>(ring, ring.stage);
            ring.step(S::K_GROUPS);
        }
    }
    if constexpr (S::UNIT != 0) scales.finish(units);
}

// The sums of K_GROUPS warpgroups, added in their order by the first, through the ring, which is free.
template <typename S, typename A>
__device__ __forceinline__ void add_parts(A (&sum)[S::SUMS], unsigned ring, int row_group, int k_group) {
    static_assert(sizeof(A) == 4, "words");
    constexpr int PART = S::ROW_GROUPS * S::SUMS * WARPGROUP * 4;
    const unsigned own = ring + (row_group * S::SUMS * WARPGROUP + threadIdx.x % WARPGROUP * 4) * 4;
    asm volatile("bar.sync 15, %0;" ::"n"(S::WARPGROUPS * WARPGROUP) : "memory");  // nobody reads stages any more
    if (k_group > 0)
#pragma unroll
        for (int j = 0; j < S::SUMS; j += 4)
            store_shared(own + (k_group - 1) * PART + j * WARPGROUP * 4, reinterpret_cast<const A(&)[4]>(sum[j]));
    asm volatile("bar.sync 15, %0;" ::"n"(S::WARPGROUPS * WARPGROUP) : "memory");
    if (k_group == 0)
#pragma unroll 1
        for (int part = 0; part < S::K_GROUPS - 1; ++part)
#pragma unroll
            for (int j = 0; j < S::SUMS; j += 4) {
                const uint4 v = shared_at<uint4>(own + part * PART + j * WARPGROUP * 4);
                const unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[j + i] += reinterpret_cast<const A&>(word[i]);
            }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Decoder                  of the weights
// TOKENS                   of a thread block
// ROW_GROUPS, K_GROUPS     warpgroups of a thread block: those with other rows, 64 each, and those that share k
// SHARE                    thread blocks of a cluster, which share tokens
// STAGES                   of the ring
// BOXES                    of STAGE_K in a stage: so many neighbours of a row of codes are copied together
// UNIT                     k that share a scale: 0 for those of a row, 128 for a multiple of it, 64, 32
// EACH                     whether tokens have a scale for EACH_K k, not one
// Layout                   the sizes that the host reckons with
//
// With K_GROUPS > 1 the grid has a cluster for every tile, and K at least as many stages.
template <
    typename T, typename Decoder, int TOKENS, int ROW_GROUPS, int K_GROUPS, int SHARE, int STAGES, int BOXES, int UNIT,
    bool EACH, typename Layout>
__global__ void __cluster_dims__(SHARE)
    __launch_bounds__(Tiling<Decoder, TOKENS, ROW_GROUPS, K_GROUPS, SHARE, STAGES, BOXES, UNIT, EACH>::THREADS, 1)
        wgmma_integers(
            const __grid_constant__ TensorMap x_map,  // int8 [tokens, K], boxes of 128 bytes x TOKENS / SHARE
            const __grid_constant__ TensorMap
                w_map,  // codes [rows, bytes], boxes of BOXES * ROW_BYTES x the rows of a tile
            // EACH: float32 [ceil(K / EACH_K), tokens or more], scales of tokens
            const __grid_constant__ TensorMap e_map,
            // TOKENS = 256: y of 16 bits as bytes, boxes of 128 x the tokens of half of the buffers, where rows start
            // at multiples of 16
            const __grid_constant__ TensorMap y_map,
            T* __restrict__ y,                      // [tokens, rows]
            const int* __restrict__ token_sum,      // [tokens] of their codes, where Decoder wants them added, or null
            const float* __restrict__ token_scale,  // [tokens], or [1] where token_step is 0; not of EACH
            const void* __restrict__ scale,         // [rows, units], [rows] or [1], as scale_kind says
            const void* __restrict__ zero,          // zero points beside them, as zero_kind says; or null
            const void* __restrict__ bias,          // [rows] of the type that bias_kind names, or null
            long long tokens, long long rows, long long depth,
            long long per_row,      // scales of a row; 0 where all rows share one; below 2^31 in all
            unsigned* const parts,  // flags, and room for sums of a block each: integer_parts.cuh
            int part_stages,        // of a cluster, of tiles that are multiplied together; 0: there are none
            int group_stages,       // UNIT = 128: stages that share a scale
            int token_step, int scale_kind, int zero_kind, int bias_kind,
            int lowest,    // of the codes, as they are stored
            int middle) {  // what stands for 0 where there are no zero points
    using S = Tiling<Decoder, TOKENS, ROW_GROUPS, K_GROUPS, SHARE, STAGES, BOXES, UNIT, EACH>;
    static_assert(Layout::template IS_OF<S>, "the host reckons with other sizes");
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * STAGES + 2 * TABLES];
    __shared__ float factors[ROW_GROUPS][TOKENS];
    __shared__ int of_tokens[Decoder::SHIFT > 0 ? ROW_GROUPS : 1][Decoder::SHIFT > 0 ? TOKENS : 1];
    using Stored = Results<T, sizeof(T) == 2 ? S::BUFFERS : 0>;
    __shared__ alignas(Stored::ALIGNED) unsigned char turned[ROW_GROUPS][Stored::STAGED];
    // The swizzle counts in units of 1024 bytes from address 0.
    Stages<S> ring{{opaque((shared_address(memory) + 1023u) & ~1023u), opaque(shared_address(barriers))}};
    Tables<S> tables{ring.data(STAGES), ring.barriers + 8 * 2 * STAGES};
    const unsigned rank = SHARE == 1 ? 0 : block_in_cluster();
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), 4 * ROW_GROUPS * SHARE);
        }
        for (int i = 0; i < TABLES; ++i) {
            barrier_init(tables.barrier(FULL, i), COPIERS);
            barrier_init(tables.barrier(EMPTY, i), S::WARPGROUPS * WARPGROUP);
        }
        fence_barrier_init();
    }
    if constexpr (SHARE == 1) __syncthreads();
    else cluster_sync();

    constexpr int ROWS = S::ROWS;
    const TileOrder order{(tokens + TOKENS - 1) / TOKENS, (rows + ROWS * SHARE - 1) / (ROWS * SHARE)};
    const int last_row = static_cast<int>(rows) - 1;
    const int boxes = static_cast<int>((depth + STAGE_K - 1) / STAGE_K), stages = (boxes + BOXES - 1) / BOXES;
    const int units =
        UNIT == STAGE_K ? (stages * BOXES - 1) / group_stages + 1 : stages * BOXES * S::SCALES;  // of a row
    const int tiles = static_cast<int>(order.along_m * order.along_n), stride = gridDim.x / SHARE;
    const Beside beside{scale, zero, scale_kind, zero_kind, lowest, middle, static_cast<unsigned>(per_row)};
    // The last tiles, fewer than clusters, may be multiplied together: from number `whole` on each cluster has a part
    // at the beginning of one and another of the tile before it, or one of them, or none. Or those from number `halved`
    // on are halves, where there are blocks for them.
    const int rest = tiles % stride, whole = tiles - rest;
    // The number of this cluster, which no register keeps while a tile is multiplied.
    auto own = [] {
        if constexpr (!S::TOGETHER) return static_cast<int>(blockIdx.x / SHARE);
        unsigned block;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
        return static_cast<int>(block / SHARE);
    };
    const bool together = S::TOGETHER && part_stages > 0;
    const int halved = S::IN_CHUNKS && !together && 2 * rest <= stride ? whole : tiles;
    const int count = together ? whole + 2 * stride : 2 * tiles - halved;
    // Where a tile starts, and which stages of it there are to multiply, if any.
    auto tile_at = [&](int number, int& token, int& row, int& begin, int& end) {
        long long m, n;
        begin = 0, end = stages;
        if (together && number >= whole) {
            const int first = own() * part_stages, last = min(first + part_stages, rest * stages);
            const int tile = first / stages;
            begin = first - tile * stages, end = min(last - tile * stages, stages);
            if (number < whole + stride) begin = 0, end = last - (tile + 1) * stages, number = whole + tile + 1;
            else number = whole + tile;
        }
        if constexpr (S::IN_CHUNKS)
            if (number > halved) number = halved + (number - halved) / 2;
        order.at(number, m, n);
        token = static_cast<int>(m) * TOKENS;
        row = (static_cast<int>(n) * SHARE + static_cast<int>(rank)) * ROWS;
        return !S::TOGETHER || begin < end;
    };
    if (warpgroup == S::WARPGROUPS) {
        lower_registers<S::LESS>();
        int token, row, begin, end;
        if (threadIdx.x == S::WARPGROUPS * WARPGROUP) {
            const Fetcher<S> fetch{&x_map, &w_map, &e_map, rank};
            bool first = true;
            for (int number = own(); number < count; number += stride) {
                if (!tile_at(number, token, row, begin, end)) continue;
                fetch.tile(ring, token, row, begin, end, S::TOGETHER ? first : number == own());
                first = false;
            }
        }
        if constexpr (UNIT != 0) {
            const int thread = static_cast<int>(threadIdx.x) - S::WARPGROUPS * WARPGROUP - WARP;
            const Neighbours<S> neighbours{beside, thread};
            for (int number = own(); number < count && thread >= 0; number += stride) {
                if (!tile_at(number, token, row, begin, end)) continue;
                const int first = S::TOGETHER ? begin / group_stages / TABLE_UNITS * TABLE_UNITS : 0;
                const int last = S::TOGETHER ? (end - 1) / group_stages + 1 : units;
                if constexpr (S::WORDS) {
                    if (scale_kind == FLOAT32_SCALES && zero_kind == INT32_POINTS) {
                        neighbours.template tile<true>(tables, row, last_row, first, last);
                        continue;
                    }
                }
                neighbours.tile(tables, row, last_row, first, last);
            }
        }
        __syncwarp();
    } else {
        raise_registers<S::MORE>();
        // The shuffle tells the compiler that a warp has one number: what it counts stands in uniform registers then.
        const int row_group = warpgroup % ROW_GROUPS;
        const int k_group = K_GROUPS == 1 ? 0 : __shfl_sync(FULL_WARP, warpgroup, 0) / ROW_GROUPS;
        const int warp = threadIdx.x % WARPGROUP / WARP, g = lane / 4;
        const int of_tile = 64 * S::TILES * row_group + 16 * warp;  // the first row of this warp
        const unsigned codes = S::CODES_AT + of_tile * S::ROW_BYTES + row_offset<S::ROW_BYTES>(lane);
        const unsigned numbers = (of_tile + g) * 8;
        typename Decoder::Zero point;
        point.flip(lowest < 0);
        float* const token_factors = factors[row_group];
        const Stored results{
            {y, &y_map, tokens, rows, is_aligned(y) && rows * sizeof(T) % 16 == 0, shared_address(turned[row_group]),
             row_group}};
        ring.step(k_group);
        const int turn = S::IN_TURNS ? __shfl_sync(FULL_WARP, row_group, 0) : 0;
        if (S::IN_TURNS && turn == 1) give_turn(turn);
        const Parts<S::SUMS> others{parts, row_group};
        auto number_of = [&](int cluster) {
            return (cluster * SHARE + static_cast<int>(rank)) * ROW_GROUPS + row_group;
        };
        for (int number = own(); number < count; number += stride) {
            int token, row, begin, end;
            if (!tile_at(number, token, row, begin, end)) continue;
            row += of_tile;
            const int offset = S::IN_CHUNKS && !together && number > halved && (number - halved) % 2 ? TOKENS / 2 : 0;
            auto row_of = [&](int i) { return min(row + g + 8 * i, last_row); };
            float factor[2] = {};
            auto take = [&] {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const unsigned at = static_cast<unsigned>(row_of(i)) * beside.per_row;
                    factor[i] = beside.scale_at(at), point.take(i, beside.points_at(at));
                }
            };
            const int thread = threadIdx.x % WARPGROUP;
            if constexpr (S::EARLY) {
                wait_for_previous();
                for (int i = thread; i < TOKENS && end == stages; i += WARPGROUP) {
                    const bool there = token + offset + i < tokens, summed = there && token_sum != nullptr;
                    const long long m = there ? token + offset + i : 0;
                    const float* const factor = token_scale + m * token_step;
                    copy_async_or_zero<4>(shared_address(token_factors + i), factor, there ? 4 : 0);
                    if constexpr (Decoder::SHIFT > 0) {
                        const void* const of_token = summed ? static_cast<const void*>(token_sum + m) : factor;
                        copy_async_or_zero<4>(shared_address(of_tokens[row_group] + i), of_token, summed ? 4 : 0);
                    }
                }
                commit_copies();
            }
            if constexpr (UNIT == 0 && Decoder::SHIFT == 0) take();
            int sum[S::SUMS];
            float total[S::TILES * S::SUMS] = {};
            bool half = false;
            if constexpr (S::IN_CHUNKS) {
                half = (number >= halved && !together) || token + TOKENS / 2 >= tokens;
                const int group = S::TOGETHER ? begin / group_stages : 0;
                if (half)
                    multiply_chunks<S, false>(
                        ring, tables, codes, numbers, S::TOGETHER ? begin : 0, S::TOGETHER ? end : stages, group_stages,
                        group % TABLE_UNITS, (group + 1) * group_stages, point, turn, offset, total);
                else
                    multiply_chunks<S, true>(
                        ring, tables, codes, numbers, S::TOGETHER ? begin : 0, S::TOGETHER ? end : stages, group_stages,
                        group % TABLE_UNITS, (group + 1) * group_stages, point, turn, offset, total);
                token += offset;
            } else if constexpr (S::TILES > 1) {
                multiply_pairs<S>(ring, tables, codes, numbers, stages, units, point, total);
            } else {
                multiply_stages<S>(
                    ring, tables, codes, numbers, S::TOGETHER ? begin : 0, S::TOGETHER ? end : stages, units, k_group,
                    group_stages, point, factor, sum, total);
            }
            if constexpr (S::TOGETHER) {
                if (end < stages) {
                    if constexpr (S::FLOATS) others.leave(total, number_of(own()));
                    else others.leave(sum, number_of(own()));
                    continue;
                }
                for (int missing = begin, from = own() - 1; missing > 0; missing -= part_stages, --from) {
                    if constexpr (S::FLOATS) others.add(total, number_of(from));
                    else others.add(sum, number_of(from));
                }
            }
            if constexpr (K_GROUPS > 1) {
                if constexpr (S::FLOATS) add_parts<S>(total, ring.data0, row_group, k_group);
                else add_parts<S>(sum, ring.data0, row_group, k_group);
                if (k_group > 0) break;
            }
            if constexpr (Decoder::SHIFT > 0) take();  // here, where registers are free again
            const Rescaling rescaling{token_scale, nullptr, bias, bias_kind};
            if constexpr (S::EARLY) {
                wait_copies<0>();
                for (int i = thread; i < TOKENS; i += WARPGROUP) token_factors[i] = usable(token_factors[i]);
            } else {
                wait_for_previous();  // the scales of the tokens are there
                for (int i = thread; i < TOKENS && !EACH; i += WARPGROUP)
                    token_factors[i] =
                        token + i < tokens ? rescaling.of_token(static_cast<long long>(token + i) * token_step) : 0.0f;
                for (int i = thread; i < TOKENS && Decoder::SHIFT > 0; i += WARPGROUP)
                    of_tokens[row_group][i] =
                        token_sum != nullptr && token + i < tokens ? load_written(token_sum + token + i) : 0;
            }
#pragma unroll
            for (int r = 0; r < S::TILES; ++r) {
                if (r > 0) row += 64;
                const float added[2] = {rescaling.bias_of(row_of(0)), rescaling.bias_of(row_of(1))};
                if (r == 0) results.begin(), warpgroup_sync(row_group);
#pragma unroll
                for (int c = 0; c < TOKENS / CHUNK_TOKENS; ++c) {
                    if (c % Stored::MANY == 0)
                        if (token + c * CHUNK_TOKENS >= tokens || (half && c * CHUNK_TOKENS >= TOKENS / 2)) break;
                    float v[CHUNK_TOKENS / 2];
#pragma unroll
                    for (int j = 0; j < CHUNK_TOKENS / 2; ++j) {
                        const int of = c * (CHUNK_TOKENS / 2) + j, i = j / 2 % 2;
                        const int m = c * CHUNK_TOKENS + j / 4 * 8 + lane % 4 * 2 + j % 2;
                        const float e = EACH ? 1.0f : token_factors[m];
                        if constexpr (S::FLOATS) {
                            v[j] = add_ieee(
                                EACH ? total[r * S::SUMS + of] : multiply_ieee(total[r * S::SUMS + of], e), added[i]);
                        } else {
                            int exact = opaque(sum[of]);  // not converted earlier: registers would not do
                            if constexpr (Decoder::SHIFT > 0)
                                exact = (exact >> Decoder::SHIFT) + point.added(i) * of_tokens[row_group][m];
                            v[j] = Rescaling::apply(exact, e, factor[i], added[i]);
                        }
                    }
                    results.store(v, c, token + c * CHUNK_TOKENS, row, lane);
                }
            }
            warpgroup_sync(row_group);  // factors are read
            if constexpr (K_GROUPS > 1) break;
        }
        results.finish();
    }
    if constexpr (SHARE > 1) cluster_arrive_relaxed(), cluster_wait();  // others may still arrive at barriers here
}
