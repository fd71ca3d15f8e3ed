// linear_tile: the Hopper GEMM y = x W^T with compressed weights for 3 to 128 tokens and for mixtures of experts
// (sm_90a; kbitcupy/products/hopper.py).
//
// One warp has TMA fill a ring of stages in shared memory, 128 k each: TOKENS rows of x, and
// the weights of a tile of rows as they are stored. Warpgroups of 64 rows decode the weights to registers, which are
// operand A of wgmma; operand B is x, straight from shared memory, so x costs the warps nothing:
//
//     TMA --full[stage]--> x in the lanes' order --ready[stage]--> wgmma, 64 rows x TOKENS x 16 k
//     --empty[stage]-->
//
// Which k of a stage a lane (g, t) of operand A holds is free as long as B agrees. It owns the granule t, 32 k with one
// scale, of the rows g and g + 8, so no weight crosses lanes; three more warps bring x into that order, in place, each
// another stage. Up to 8 tokens need neither: they go from shared memory to the lanes as operand B of mma.
//
// Where something is added to code times scale, it is added as a product, too: of what is added to a granule and the
// sum of x over it, one more step along k, for which those warps write means of x behind the weights. Where scale and
// offset are numbers of x's type it is added to each weight (FUSED).
//
// With 64 tokens all that is more than three warps can do while a stage is multiplied. There, arrange_tokens has
// brought x into order ahead, and made the means, for all thread blocks; and the four warps work out, for each row
// once, what lanes multiply codes by and add, its record in the stage (PREPARED). Of codes with a small scale and
// minimum in some tilings that is added to each weight, too, with no means (CENTRED): to code less the one whose weight
// is closest to zero, times scale, so that what is rounded is about as small as the weight.
//
// ROW_GROUPS x K_GROUPS warpgroups multiply: those of a K_GROUP each take every K_GROUPS-th stage, for 64 rows each.
// The thread blocks of a cluster share k as well. Each leaves its sums in its shared memory, and they add up in the
// order of the blocks, each for some of the tokens: one launch, and the same bits every time.
#include "linear/epilogue.cuh"
#include "linear/hopper_decoders.cuh"

// Of the host (kbitcupy/products/hopper.py), ahead of this source: GROUP_ROWS of a warpgroup; GRANULE_K, k that share a
// scale; MOST_STAGES, whose barriers must fit what RING_END leaves; RING_END and LARGE_RING_END in the shared window,
// whose first 1024 bytes are the system's: less what is declared by name, 195 KiB, which leave the scales more of the
// L1 cache, or 227 where the stages are large; DIRECT_BYTES of x in a stage of up to 8 tokens; MEANS_BYTES of a token;
// RECORD_BYTES of a row.
constexpr int STAGE_K = ITEM_K;  // k of a stage
constexpr int HALF_K = 64;       // k of a box of x: 128 bytes, one row of the swizzle; and of one group of wgmma

// The means of x in the granules of a token, of which a lane has eight elements each; of granule t two words of operand
// B, in two numbers each: k 2t and 2t + 1 are the mean and what its rounding leaves, times REST, k 8 + 2t the mean
// again. So an offset and what its rounding leaves make all products that count. REST keeps what is left of small means
// above what a half can hold; A has 1 / REST for it.
//
// In memory tokens of eight are 16 bytes apart, k from 8 on 128 bytes, the next eight tokens 256.
constexpr float REST = 2048.0f;
struct Means {
    unsigned granule, first, second;
};
template <typename T, int ORDER>
__device__ __forceinline__ Means means_of(const unsigned (&word)[4][4], unsigned c) {
    float sum[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        float of_two[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) of_two[i] = Word<T>::get(word[t][i], 0) + Word<T>::get(word[t][i], 1);
        sum[t] = (of_two[0] + of_two[1]) + (of_two[2] + of_two[3]);
    }
    float mine;
    unsigned t = c;
    if constexpr (ORDER == TWO_BLOCKS) {
        // Lanes c and c ^ 1 have the same block, 2 p + c / 2, in granules 2p and 2p + 1.
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            sum[p] = sum[2 * p] + sum[2 * p + 1];
            sum[p] += __shfl_xor_sync(FULL_WARP, sum[p], 8);
        }
        mine = c % 2 ? sum[1] : sum[0], t = c % 2 * 2 + c / 2;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 8);
            sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 16);
        }
        mine = c < 2 ? c == 0 ? sum[0] : sum[1] : c == 2 ? sum[2] : sum[3];
    }
    mine *= 1.0f / GRANULE_K;
    const unsigned twice = Word<T>::pack(mine, mine);
    const float mean = Word<T>::get(twice, 0);
    return {t, Word<T>::pack(mean, (mine - mean) * REST), Word<T>::pack(mean, 0.0f)};
}

// A stage of x, 8 PARTS tokens: the words (t, q), t of 4 granules, q of 16 pairs, to the order (q, t). Chunks of 16
// bytes lie in the 128-byte swizzle, those of the second half of a stage `half` bytes on.
template <typename Decoder, int PARTS>
__device__ __forceinline__ void reorder(unsigned x, unsigned half, unsigned means, int lane) {
    constexpr int ORDER = Decoder::ORDER;
    const unsigned row = lane % 8, c = lane / 8;
    unsigned word[PARTS][4][4];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (unsigned t = 0; t < 4; ++t)
            read_chunk<ORDER>(word[part][t], c, [&](unsigned chunk) {
                return x + part * 1024 + row * 128 + t / 2 * half + ((x_chunk<ORDER>(t % 2, chunk) ^ row) << 4);
            });
    __syncwarp();
    if constexpr (Decoder::OFFSETS) {  // braces: without them NVRTC 12.9 leaves out the loop behind, too
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Means of = means_of<typename Decoder::Type, ORDER>(word[part], c);
            asm volatile("st.shared.b32 [%0], %1; st.shared.b32 [%0+128], %2;" ::"r"(
                             means + part * 256 + row * 16 + of.granule * 4),
                         "r"(of.first), "r"(of.second)
                         : "memory");
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int t = 0; t < 4; ++t) arrange<ORDER>(word[part][t]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (unsigned i = 0; i < 4; ++i)
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                             x + part * 1024 + row * 128 + c / 2 * half + (((c % 2 * 4 + i) ^ row) << 4)),
                         "r"(word[part][0][i]), "r"(word[part][1][i]), "r"(word[part][2][i]), "r"(word[part][3][i])
                         : "memory");
}

// ---- the parts of a thread block ------------------------------------------------------------------------------------

template <typename Decoder_, int TOKENS_, int ROW_GROUPS_, int K_GROUPS_, int CLUSTER, bool GROUPED_>
struct Tiling {
    using Decoder = Decoder_;
    static constexpr int TOKENS = TOKENS_, ROW_GROUPS = ROW_GROUPS_, K_GROUPS = K_GROUPS_;
    static constexpr bool GROUPED = GROUPED_;
    static constexpr int WARPS = 4 * ROW_GROUPS * K_GROUPS, ROWS = GROUP_ROWS * ROW_GROUPS;  // warps that multiply
    static constexpr int ROW_BYTES = STAGE_K * Decoder::BITS / 8, W_BYTES = ROWS * ROW_BYTES;
    static constexpr bool DIRECT = TOKENS == 8 && !GROUPED;           // mma, not wgmma
    static constexpr bool HALVES = ROW_BYTES / 16 > Decoder::FIELDS;  // whether a half's codes fill the fields
    // What scales multiply: the weights; the sums of a stage, where there are few of them; those of a row.
    static constexpr bool OF_SUMS = Decoder::SHARES == OF_STAGES && !Decoder::OFFSETS && TOKENS <= 32 && !DIRECT,
                          OF_WEIGHTS = Decoder::SHARES != OF_ROWS && !OF_SUMS;
    static_assert(!Decoder::OFFSETS || (OF_WEIGHTS && !DIRECT), "offsets are relative to what scales are relative to");
    static_assert(!Decoder::FUSED || OF_WEIGHTS, "an offset is added to what a scale multiplies");
    static constexpr bool PREPARED = Decoder::OFFSETS && TOKENS >= 64 && !GROUPED;  // x, and the records of rows
    // Whether records say what is added to each weight, and whether else it takes a step along k; and the sets of
    // operands, of half a stage each: of two, products read one while the other is decoded. Both cost instructions
    // elsewhere. With 64 tokens they were measured to be faster where k is shared in a thread block and in a cluster,
    // two sets where a table or records are read; slower than the other way in one block alone, with four warpgroups of
    // other rows, and where codes without anything added are worked out.
    static constexpr bool PAIRED = TOKENS == 64 && K_GROUPS == 2 && CLUSTER == 2 && !GROUPED,
                          CENTRED = PREPARED && PAIRED && Decoder::CENTRED, STEP = Decoder::OFFSETS && !CENTRED,
                          FUSED = Decoder::FUSED || CENTRED;
    static constexpr int SETS = PAIRED && (Decoder::ENTRIES > 0 || CENTRED) ? 2 : 1;
    // Of x, its second half, and the weights in a stage. DIRECT: the lanes t and t + 2 must not meet in a bank.
    static constexpr int X_BYTES = TOKENS * STAGE_K * 2, HALF_AT = DIRECT ? 1024 + 256 : X_BYTES / 2;
    static constexpr int W_AT = DIRECT ? DIRECT_BYTES : X_BYTES;
    // Behind them, STEP: for each token the means of x in the granules, as operand B of a step along k.
    static constexpr int MEANS_AT = W_AT + W_BYTES, MEANS = STEP ? (TOKENS * MEANS_BYTES + 1023) / 1024 * 1024 : 0;
    // PREPARED: of each row, 16 bytes of scales and, behind those of all rows, 16 of what is added; see store_record.
    static constexpr int RECORDS_AT = MEANS_AT + MEANS, RECORDS = PREPARED ? ROWS * RECORD_BYTES : 0;
    static constexpr int STAGE = RECORDS_AT + RECORDS;
    static constexpr int PITCH = ROWS + 4, SUMS = TOKENS * PITCH;  // of the sums of a group along k
    // The swizzle counts in units of 1024 bytes from address 0. The sums stand where the ring was; behind it where the
    // ring goes on for the next tile.
    static constexpr int RING_AT = (int(TABLE_AT) + Decoder::ENTRIES * ENTRY_STRIDE + 1023) / 1024 * 1024;
    static constexpr int ROOM = (TOKENS < 64 && !GROUPED ? RING_END : LARGE_RING_END) - RING_AT -
                                (GROUPED ? K_GROUPS * SUMS * 4 : 0),
                         FITTING = ROOM / STAGE;
    static constexpr int STAGES = (FITTING < MOST_STAGES ? FITTING : MOST_STAGES) / K_GROUPS * K_GROUPS;
    static constexpr int SUMS_AT = RING_AT + (GROUPED ? STAGES * STAGE : 0);
    // A number that need not be computed again, where there is a register for it.
    __device__ __forceinline__ static unsigned keep(unsigned v) { return TOKENS < 64 || SETS > 1 ? opaque(v) : v; }
    static_assert(STAGES > K_GROUPS, "a stage is given back when the next one of its group is there");
};

// The sizes that the host reckons with when it finds out how much shared memory a kernel needs.
template <int RING_AT, int STAGE, int STAGES, int SUMS_BYTES>
struct TileLayout {
    template <typename S>
    static constexpr bool IS_OF =
        S::RING_AT == RING_AT && S::STAGE == STAGE && S::STAGES == STAGES && S::K_GROUPS * S::SUMS * 4 == SUMS_BYTES;
};

// The ring of stages. A stage is FULL when the copies have arrived, READY when x is in the order of the lanes or, where
// it came so, when records have been written, EMPTY when it has been multiplied.
enum Barrier { FULL, READY, EMPTY };
template <typename S>
struct Stages : Ring<S::STAGES, S::STAGE, 3> {
    __device__ __forceinline__ unsigned full() const { return this->barrier(FULL, this->stage); }
    __device__ __forceinline__ unsigned ready() const { return this->barrier(READY, this->stage); }
    __device__ __forceinline__ unsigned empty() const { return this->barrier(EMPTY, this->stage); }
};

// Rows of W, tokens of x and stages of k that a thread block multiplies.
struct Task {
    int row;  // of W, or of the expert
    Group group;
    int begin, end;
};

// What all threads know.
struct Job {
    const Group* groups;
    const int* order;
    int divisor;  // product p has row p / divisor of x
    int tokens, n, k;
    unsigned rank, blocks;  // of the cluster

    // Task number i of this thread block; without tokens behind the last one.
    template <typename S>
    __device__ __forceinline__ Task task(int i) const {
        const int items = (k + STAGE_K - 1) / STAGE_K, share = (items + blocks - 1) / blocks;
        Task found{0, {0, int(blockIdx.y) * S::TOKENS, 0, 0}, int(rank) * share, min(items, (int(rank) + 1) * share)};
        if constexpr (S::GROUPED) {
            const int tiles = (n + S::ROWS - 1) / S::ROWS, unit = blockIdx.x + i * gridDim.x;
            if (unit / tiles < tokens) found.group = groups[unit / tiles];  // `tokens` counts the groups
            found.row = unit % tiles * S::ROWS;
        } else {
            found.row = blockIdx.x / blocks * S::ROWS;
            found.group.count = min(S::TOKENS, tokens - found.group.first);
        }
        return found;
    }

    template <typename S>
    __device__ __forceinline__ long long product(const Task& task, int token) const {
        return S::GROUPED ? order[task.group.first + token] : task.group.first + token;
    }
};

// A barrier of the warps that multiply.
template <typename S>
__device__ __forceinline__ void warps_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(S::WARPS * WARP) : "memory");
}

// Bring the scales of a task to the L2 cache.
template <typename S>
__device__ __forceinline__ void prefetch_scales(
    const Task& task, const TileScales& scales, int n, int k, int thread, int threads) {
    using Decoder = typename S::Decoder;
    if (Decoder::SHARES == OF_ROWS) return;  // they are read once
    constexpr int size = Decoder::Raw::SCALE_BYTES, SECOND = Decoder::Raw::SECOND_BYTES;
    const int granules = row_granules<Decoder>(k, scales), shift = is_shared(Decoder::SHARES) ? scales.shift : 0;
    const int first = task.begin * (STAGE_K / GRANULE_K), last = min(task.end * (STAGE_K / GRANULE_K), granules);
    const int bytes = max(0, last - first) * size >> shift, lines = (bytes + 127) / 128;
    for (int i = thread; i < min(S::ROWS, n - task.row) * lines; i += threads) {
        const long long block = (task.row + i / lines) * (long long)granules + first >> shift;
        prefetch_l2(static_cast<const char*>(scales.absmax) + block * size + i % lines * 128);
        if constexpr (SECOND > 0)
#pragma unroll
            for (int part = 0; part < SECOND; part += size)
                prefetch_l2(
                    static_cast<const char*>(scales.second) + (block * size + i % lines * 128) * SECOND / size +
                    part / size * 128);
    }
}

// Fill the stages: one warp.
template <typename S>
__device__ __forceinline__ void copy_stages(
    Stages<S> ring, const Job& job, const TensorMap* x_map, const TensorMap* w_map, int lane) {
    const bool elected = elect_lane();
    for (int i = 0; S::GROUPED || i == 0; ++i) {
        const Task task = job.task<S>(i);
        if (task.group.count == 0) return;
        if (task.group.expert < 0) continue;
        const int x_row = S::GROUPED && lane < task.group.count ? int(job.product<S>(task, lane)) / job.divisor : 0;
        const int w_row = (S::GROUPED ? task.group.expert * job.n : 0) + task.row;
        for (int item = task.begin; item < task.end; ++item, ring.step(1)) {
            const unsigned x_column = item * STAGE_K * 2, target = ring.data();
            if (elected) {
                barrier_wait(ring.empty(), ring.phase ^ 1);
                barrier_expect(ring.full(), S::W_BYTES + (S::GROUPED ? task.group.count * STAGE_K * 2 : S::X_BYTES));
#pragma unroll
                for (int r = 0; r < S::ROW_GROUPS; ++r)
                    copy_box(
                        target + S::W_AT + r * (S::W_BYTES / S::ROW_GROUPS), w_map, item * S::ROW_BYTES, w_row + 64 * r,
                        ring.full());
                if (!S::GROUPED)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        copy_box(
                            target + h * S::HALF_AT, x_map, x_column + h * HALF_K * 2, task.group.first, ring.full());
            }
            __syncwarp();
            if (S::GROUPED && lane < task.group.count)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    copy_box(
                        target + h * (S::X_BYTES / 2) + lane * 128, x_map, x_column + h * HALF_K * 2, x_row,
                        ring.full());
        }
    }
}

// Bring x into the order of the lanes: three warps, a stage each in turn, as one takes longer than to multiply it.
template <typename S>
__device__ __forceinline__ void reorder_stages(Stages<S> ring, const Job& job, int warp, int lane) {
    int turn = 0;
    for (int i = 0; S::GROUPED || i == 0; ++i) {
        const Task task = job.task<S>(i);
        if (task.group.count == 0) return;
        if (task.group.expert < 0) continue;
#pragma unroll 1
        for (int item = task.begin; item < task.end; ++item, ring.step(1)) {
            const bool mine = turn == warp;
            turn = turn == 2 ? 0 : turn + 1;
            // Of all stages: a warp that skips one would lose count of the rounds.
            barrier_wait(ring.full(), ring.phase);
            if (!mine) continue;
            constexpr int PARTS = S::TOKENS == 16 || S::TOKENS == 32 ? 2 : 1;
#pragma unroll 1
            for (int token = 0; token < task.group.count; token += 8 * PARTS)
                reorder<typename S::Decoder, PARTS>(
                    ring.data() + token * 128, S::X_BYTES / 2, ring.data() + S::MEANS_AT + token * MEANS_BYTES, lane);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.ready());
        }
    }
}

// By how much exponents of scales may be above that of `top`: codes of 8 bits are larger.
template <typename Decoder>
__device__ constexpr unsigned scale_room() {
    return (Decoder::BITS == 8 ? 4u : 8u) << 23;
}

// The record of a row in a stage: scales of its four blocks of 32, in pairs of T; `top`, to whose power of two in half
// precision all numbers are relative; and what is added to each block, times the elements of a granule, in two T: what
// is rounded and what that leaves. CENTRED: pairs of scale and what is added to code less zero, times scale; two words
// of the zeros of two blocks, each beside `top`.
template <typename S, typename Decoder = typename S::Decoder>
__device__ __forceinline__ void store_record(
    const typename Decoder::RowScales& raw, unsigned& top, unsigned scales, unsigned offsets) {
    using W = Word<typename Decoder::Type>;
    float down = 1.0f;
    if constexpr (SameType<typename Decoder::Type, __half>::VALUE) {
        const unsigned exponent = min(__float_as_uint(raw.bound()) & 0x7f800000u, 252u << 23);
        if (exponent > top + scale_room<Decoder>()) top = exponent;
        down = __uint_as_float((254u << 23) - top);
    }
    if constexpr (S::CENTRED) {
        float s[4], added[4];
        unsigned zero[4];
        raw.centred(down, s, zero, added);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(scales), "r"(W::pack(s[0], added[0])),
                     "r"(W::pack(s[1], added[1])), "r"(W::pack(s[2], added[2])), "r"(W::pack(s[3], added[3]))
                     : "memory");
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %2};" ::"r"(offsets), "r"(Decoder::centres(zero[0], zero[1])),
                     "r"(top), "r"(Decoder::centres(zero[2], zero[3]))
                     : "memory");
        return;
    }
    float s[4], all[4];
    raw.numbers(down, s, all);
    unsigned of[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) of[j] = W::pack(all[j], all[j] - W::get(W::pack(all[j], all[j]), 0));
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %3};" ::"r"(scales), "r"(W::pack(s[0], s[1])),
                 "r"(W::pack(s[2], s[3])), "r"(top)
                 : "memory");
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(offsets), "r"(of[0]), "r"(of[1]), "r"(of[2]),
                 "r"(of[3])
                 : "memory");
}

// Start to copy bytes that lie together; they count at `barrier`. One lane of a warp.
__device__ __forceinline__ void copy_bulk(unsigned target, const void* from, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// Start to copy the weights of a stage, and announce its x and the means as well.
template <typename S>
__device__ __forceinline__ void copy_weights(
    const Stages<S>& ring, const Task& task, int item, const TensorMap* w_map) {
    barrier_expect(ring.full(), S::W_BYTES + S::X_BYTES + (S::STEP ? S::TOKENS * MEANS_BYTES : 0));
#pragma unroll
    for (int r = 0; r < S::ROW_GROUPS; ++r)
        copy_box(
            ring.data() + S::W_AT + r * (S::W_BYTES / S::ROW_GROUPS), w_map, item * S::ROW_BYTES, task.row + 64 * r,
            ring.full());
}

// ... and these.
template <typename S>
__device__ __forceinline__ void copy_tokens(
    const Stages<S>& ring, const Job& job, const Task& task, int item, const TensorMap* x_map, const float* means) {
    constexpr int BYTES = S::TOKENS * MEANS_BYTES;
#pragma unroll
    for (int h = 0; h < 2; ++h)
        copy_box(ring.data() + h * S::HALF_AT, x_map, (item * STAGE_K + h * HALF_K) * 2, task.group.first, ring.full());
    if constexpr (!S::STEP) return;
    const long long stage = blockIdx.y * ((job.k + STAGE_K - 1) / STAGE_K) + item;
    copy_bulk(ring.data() + S::MEANS_AT, reinterpret_cast<const char*>(means) + stage * BYTES, BYTES, ring.full());
}

// The x of the first stages, which the warps that fill them do not wait for. One lane of those that multiply, which
// have waited for what arrange_tokens has written.
template <typename S>
__device__ __forceinline__ void copy_first_tokens(
    Stages<S> ring, const Job& job, const TensorMap* x_map, const float* means) {
    const Task task = job.task<S>(0);
    if (task.group.count == 0) return;
    const int copied = min(task.end, task.begin + S::STAGES);
    for (int item = task.begin; item < copied; ++item, ring.step(1))
        copy_tokens<S>(ring, job, task, item, x_map, means);
}

// Fill the stages, and write the records of rows: four warps, the first of which starts the copies. A lane has a row of
// every fourth 32. The kernel ahead, arrange_tokens, let this one start when those before it had ended: until x is
// there, the ring fills with weights and records. Scales are asked for ahead of them: they would wait behind a whole
// ring of weights.
template <typename S>
__device__ __forceinline__ void prepare_stages(
    Stages<S> ring, const Job& job, const TensorMap* x_map, const TensorMap* w_map, const float* means,
    const TileScales& scales, int warp, int lane) {
    using Decoder = typename S::Decoder;
    using RowScales = typename Decoder::RowScales;
    constexpr int ROUNDS = S::ROWS / (4 * WARP), GRANULES = STAGE_K / GRANULE_K;
    static_assert(ROUNDS * 4 * WARP == S::ROWS, "the warps have as many rows each");
    const bool elected = elect_lane();
    const Task task = job.task<S>(0);
    if (task.group.count == 0) return;
    const int copied = min(task.end, task.begin + S::STAGES);
    const unsigned granules = row_granules<Decoder>(job.k, scales);
    RowScales raw[ROUNDS];  // of the next stage
    unsigned origin[ROUNDS], top[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int row = (warp + 4 * r) * WARP + lane;
        origin[r] = min(task.row + row, job.n - 1) * granules, top[r] = 1u << 23;
        raw[r].fetch(scales, origin[r], task.begin * GRANULES, granules, true);
    }
    if (warp == 0) {
        Stages<S> first = ring;
        if (elected)
            for (int item = task.begin; item < copied; ++item, first.step(1)) copy_weights<S>(first, task, item, w_map);
        __syncwarp();
    }
#pragma unroll 1
    for (int item = task.begin; item < task.end; ++item, ring.step(1)) {
        barrier_wait(ring.empty(), ring.phase ^ 1);
        if (warp == 0) {
            if (elected && item >= copied) {
                copy_weights<S>(ring, task, item, w_map);
                copy_tokens<S>(ring, job, task, item, x_map, means);
            }
            __syncwarp();
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const unsigned record = ring.data() + S::RECORDS_AT + ((warp + 4 * r) * WARP + lane) * 16;
            raw[r].take(item * GRANULES);
            store_record<S>(raw[r], top[r], record, record + S::ROWS * 16);
        }
        barrier_arrive(ring.ready());  // every lane: others read what it has written
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) raw[r].fetch(scales, origin[r], (item + 1) * GRANULES, granules, false);
    }
}

// What stands beside `own`: the scales of a second half that has others; where something is added to code times scale,
// that, as operand A of a step along k beside the means of x, or FUSED, twice in a word.
template <typename Decoder>
struct Offsets {
    static constexpr bool ADDED = Decoder::OFFSETS || Decoder::FUSED, ANY = ADDED || Decoder::SCALES > 1;
    float s[2], added[2];
    unsigned own[2], step[4], plus[2];

    __device__ __forceinline__ void fetch(const typename Decoder::Raw& raw, const TileScales& scales) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (ADDED) raw.offset(scales, i, s[i], added[i]);
            else s[i] = raw.second(i), added[i] = 0.0f;
        }
    }
    __device__ __forceinline__ void raise(unsigned (&largest)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned bits = max(__float_as_uint(s[i]) & 0x7f800000u, __float_as_uint(added[i]) & 0x7f800000u);
            largest[i] = max(largest[i], min(bits, 252u << 23));
        }
    }
    __device__ __forceinline__ void lower(const unsigned (&top)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float down = __uint_as_float((254u << 23) - top[i]);
            s[i] *= down, added[i] *= down;
        }
    }
    __device__ __forceinline__ void pack() {
        using W = Word<typename Decoder::Type>;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            plus[i] = W::pack(added[i], added[i]);
            const float all = added[i] * GRANULE_K;  // of means
            own[i] = W::pack(s[i], s[i]), step[i] = W::pack(all, all * (1.0f / REST));
            step[2 + i] = W::pack(all - W::get(step[i], 0), 0.0f);
        }
    }
};

// The descriptor of an operand B of 16 k as `store_means` has it, in no swizzle.
__device__ __forceinline__ unsigned long long means_descriptor(unsigned address) {
    return 16ull << 32 | 8u << 16 | (address & 0x3ffffu) >> 4;
}

// What multiplies the granules of a lane, in both halves of a word: their scales, as far as half precision reaches.
// There scales of other types are relative to a power of two for each row, `top`, which may have to grow.
template <typename Decoder, int N>
__device__ __forceinline__ void scale_words(
    const typename Decoder::Raw& raw, const TileScales& scales, unsigned (&top)[2], float (&sum)[N],
    float (&part)[2][4], unsigned (&own)[2], Offsets<Decoder>& offsets) {
    using T = typename Decoder::Type;
    if constexpr (Decoder::SCALE == E4M4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) own[i] = E4m4Pair<T>::of(raw.code[i]);
        return;
    } else if constexpr (as_halves<Decoder>()) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            own[i] = Decoder::Raw::twice(raw.code[i]), offsets.own[i] = Decoder::Raw::twice(raw.next[i]);
        return;
    }
    float s[2] = {raw.value(scales, 0), raw.value(scales, 1)};
    if constexpr (Offsets<Decoder>::ANY) offsets.fetch(raw, scales);
    if constexpr (SameType<T, __half>::VALUE) {
        constexpr unsigned ROOM = scale_room<Decoder>();
        unsigned largest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) largest[i] = min(__float_as_uint(s[i]) & 0x7f800000u, 252u << 23);
        if constexpr (Offsets<Decoder>::ANY) offsets.raise(largest);
        if (__any_sync(FULL_WARP, largest[0] > top[0] + ROOM || largest[1] > top[1] + ROOM)) {
            wgmma_wait<0>();
            fence_operands(sum);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                largest[i] = max(largest[i], __shfl_xor_sync(FULL_WARP, largest[i], 1));
                largest[i] = max(largest[i], __shfl_xor_sync(FULL_WARP, largest[i], 2));
                const unsigned one = 127u << 23, higher = max(largest[i], top[i]);
                const float down = top[i] + one > higher ? __uint_as_float(top[i] + one - higher) : 0.0f;
#pragma unroll
                for (int j = 0; j < N; j += 4) sum[j + 2 * i] *= down, sum[j + 2 * i + 1] *= down;
#pragma unroll
                for (int j = 0; j < 4; ++j) part[j / 2][2 * i + j % 2] *= down;
                top[i] = higher;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) s[i] *= __uint_as_float((254u << 23) - top[i]);
        if constexpr (Offsets<Decoder>::ANY) offsets.lower(top);
    }
    if constexpr (Offsets<Decoder>::ANY) offsets.pack();
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i] = Word<T>::pack(s[i], s[i]);
}

// What sums relative to the power of two `top` are multiplied by to be relative to a higher one.
__device__ __forceinline__ float lowered_by(unsigned top, unsigned higher) {
    const unsigned one = 127u << 23;
    return top + one > higher ? __uint_as_float(top + one - higher) : 0.0f;
}

// What a lane takes of the records of its rows: the scales of both halves of the stage in a word, which a byte
// permutation by `select` puts twice into one; what is added. CENTRED: scale and what is added, for each half; zeros.
template <typename Decoder, bool CENTRED>
struct Records {
    unsigned scales[2], step[4];
    unsigned both[2][2], zeros[2];

    template <int N>
    __device__ __forceinline__ void read(
        unsigned scales_at, unsigned offsets_at, int t, unsigned (&top)[2], float (&sum)[N]) {
        using W = Word<typename Decoder::Type>;
        unsigned now[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (CENTRED) {
                const uint2 pair = shared_at<uint2>(scales_at + i * 128 + t / 2 * 8),
                            other = shared_at<uint2>(offsets_at + i * 128 + t / 2 * 8);
                both[i][0] = pair.x, both[i][1] = pair.y, zeros[i] = other.x, now[i] = other.y;
                continue;
            }
            scales[i] = shared_at<unsigned>(scales_at + i * 128 + t / 2 * 4);
            now[i] = shared_at<unsigned>(scales_at + i * 128 + 8);
            const unsigned both = shared_at<unsigned>(offsets_at + i * 128 + t * 4);
            step[i] = W::multiply(__byte_perm(both, 0, 0x1010), W::pack(1.0f, 1.0f / REST)), step[2 + i] = both >> 16;
        }
        if constexpr (SameType<typename Decoder::Type, __half>::VALUE)
            if (__any_sync(FULL_WARP, now[0] != top[0] || now[1] != top[1])) {
                wgmma_wait<0>();
                fence_operands(sum);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float down = lowered_by(top[i], now[i]);
#pragma unroll
                    for (int j = 0; j < N; j += 4) sum[j + 2 * i] *= down, sum[j + 2 * i + 1] *= down;
                    top[i] = now[i];
                }
            }
    }

    __device__ __forceinline__ static unsigned select(int t, int h) {
        return (Decoder::SCALES > 1 ? h : t % 2) ? 0x3232 : 0x1010;
    }
};

// What comes between the codes of a row in shared memory and pairs of weights: of integers what is subtracted, of
// others where the lane's copy of the table stands.
template <typename Decoder>
__device__ __forceinline__ void set_base(
    const typename Decoder::Raw& raw, unsigned lane_offset, typename Decoder::Base (&base)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (Decoder::ENTRIES > 0) base[i] = lane_offset;
        else Decoder::set(base[i], raw.zero(i));
    }
}

// The words of half h of a stage of a lane's two rows, where so many are fields.
template <typename S>
__device__ __forceinline__ void read_half(unsigned address, int h, unsigned (&field)[2][S::Decoder::FIELDS]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) read_shared(field[i], (address ^ h * 16) + i * 8 * S::ROW_BYTES);
}

// Add the sums of a stage, which begin anew, to those of the stages before.
template <int N>
__device__ __forceinline__ void add_stage(float (&sum)[N], const float (&factor)[2], float (&total)[N]) {
    fence_operands(sum);
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] = fmaf(sum[j], factor[j / 2 % 2], total[j]), sum[j] = 0.0f;
    fence_operands(sum);
}

// Of the weights of a half, what needs no register that wgmma may still read: all but the last operation.
template <typename S>
__device__ __forceinline__ void decode_half(
    const unsigned (&field)[S::Decoder::FIELDS], int h, const typename S::Decoder::Base& base, unsigned (&pair)[8]) {
    S::Decoder::pairs(field, h, base, pair);
    if constexpr (S::Decoder::ENTRIES == 0 && S::OF_WEIGHTS)
#pragma unroll
        for (int q = 0; q < 8; ++q) pair[q] = S::Decoder::settle(pair[q], h, q, base);
}

// The last operation.
template <typename S>
__device__ __forceinline__ unsigned finish(
    unsigned pair, int h, int q, const typename S::Decoder::Base& base, unsigned own, unsigned plus) {
    if constexpr (S::FUSED) return fma_pairs<typename S::Decoder::Type>(pair, own, plus);
    else if constexpr (S::OF_WEIGHTS) return Word<typename S::Decoder::Type>::multiply(pair, own);
    else return S::Decoder::settle(pair, h, q, base);
}

// Decode and multiply the stages of a task: a warp of a warpgroup. Leaves the sums in shared memory, by tokens; the
// lanes of a warp meet in no bank.
template <typename S>
__device__ __forceinline__ void multiply_stages(
    Stages<S> ring, const Task& task, const TileScales& scales, int n, int k, int warp, int lane, unsigned own_block,
    char* sums) {
    using Decoder = typename S::Decoder;
    using T = typename Decoder::Type;
    const int g = lane / 4, t = lane % 4;
    const int k_group = warp / (4 * S::ROW_GROUPS);
    const int row = 16 * (warp % (4 * S::ROW_GROUPS)) + g;  // in the tile; the other one is 8 on
    const unsigned granules = Decoder::ENTRIES > 0 ? k / GRANULE_K : row_granules<Decoder>(k, scales),
                   above = S::GROUPED ? task.group.expert * n : 0;
    const unsigned origin[2] = {
        S::keep((above + min(task.row + row, n - 1)) * granules),
        S::keep((above + min(task.row + row + 8, n - 1)) * granules)};
    // Where x is zero any scale will do.
    auto granule = [&](unsigned item) { return min(item * (STAGE_K / GRANULE_K) + t, granules - 1); };
    typename Decoder::Raw raw;  // of the next stage
    // ... or of the next four, of which each lane of a row fetches one.
    constexpr int AHEAD = Decoder::Raw::STAGES;
    const unsigned ahead = AHEAD > 1 ? t * S::K_GROUPS : 0;
    unsigned turn = 0;
    if constexpr (!S::PREPARED) raw.fetch(scales, origin, granule(task.begin + k_group + ahead));

    float sum[S::TOKENS / 2] = {};
    unsigned top[2] = {1u << 23, 1u << 23};
    typename Decoder::Base base[2];
    const unsigned lane_offset = own_block | Decoder::LANE_BYTES * lane;
    if constexpr (Decoder::ENTRIES == 0) Decoder::keep(base);
    set_base<Decoder>(raw, lane_offset, base);
    // OF_SUMS: of the stages before `sum`, and by what that is multiplied.
    float total[S::OF_SUMS ? S::TOKENS / 2 : 1] = {}, factor[2] = {};
    // Rows of 32, 64 or 128 bytes come in the swizzle of that size, others in order and without bank conflicts.
    constexpr int SWIZZLE = S::ROW_BYTES == 128 ? 0x70 : S::ROW_BYTES == 64 ? 0x30 : S::ROW_BYTES == 32 ? 0x10 : 0;
    const unsigned w_offset =
        S::keep(S::W_AT + row * S::ROW_BYTES + (t * (S::ROW_BYTES / 4) ^ (row * S::ROW_BYTES >> 3 & SWIZZLE)));
    const unsigned x_low = (ring.data0 & 0xffffffu) >> 4 | 1u << 16;  // the lower half of its description
    // DIRECT: where a lane's granule of token g begins, in the 128-byte swizzle, and the sums of both halves.
    const unsigned x_row = (g + t / 2 * 2) % 8, x_offset = t / 2 * S::HALF_AT + g * 128 + ((t % 2 * 4 ^ x_row) << 4);
    float part[2][4] = {};
    unsigned sets[2][4][4] = {};
    unsigned last = 0;
    ring.step(k_group);
    for (int item = task.begin + k_group; item < task.end; item += S::K_GROUPS) {
        unsigned own[2] = {};
        Offsets<Decoder> offsets;
        float next_factor[2] = {};
        Records<Decoder, S::CENTRED> records;
        if constexpr (S::PREPARED) {
            barrier_wait(ring.ready(), ring.phase);
            const unsigned at = ring.data() + S::RECORDS_AT + row * 16;
            records.read(at, at + S::ROWS * 16, t, top, sum);
        } else if constexpr (S::OF_WEIGHTS) {
            if constexpr (AHEAD > 1) {
                if (turn == 0) raw.keep(), raw.fetch(scales, origin, granule(item + AHEAD * S::K_GROUPS + ahead));
                raw.take(turn, item * (STAGE_K / GRANULE_K)), turn = (turn + 1) % AHEAD;
            }
            scale_words<Decoder>(raw, scales, top, sum, part, own, offsets);
            own[0] = opaque(own[0]), own[1] = opaque(own[1]);  // now: the next ones may then come to where these were
        }
        if constexpr (Decoder::SHARES != OF_ROWS && !S::PREPARED) {
            set_base<Decoder>(raw, lane_offset, base);
            if constexpr (S::OF_SUMS) next_factor[0] = raw.value(scales, 0), next_factor[1] = raw.value(scales, 1);
            if constexpr (AHEAD == 1) raw.fetch(scales, origin, granule(item + S::K_GROUPS));
        }
        barrier_wait(ring.full(), ring.phase);
        unsigned field[2][Decoder::FIELDS];
#pragma unroll
        for (int i = 0; i < 2 && !S::HALVES; ++i) {
            unsigned word[S::ROW_BYTES / 16];
            read_shared(word, ring.data() + w_offset + i * 8 * S::ROW_BYTES);
#pragma unroll
            for (int p = 0; p < Decoder::FIELDS; ++p) field[i][p] = p < S::ROW_BYTES / 16 ? word[p] : 0u;
            Decoder::unpack(field[i]);
        }
        if constexpr (S::DIRECT) {
            unsigned x[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                read_chunk<Decoder::ORDER>(
                    x[i], i, [&](unsigned chunk) { return ring.data() + (x_offset ^ chunk << 4); });
                arrange<Decoder::ORDER>(x[i]);
            }
            if constexpr (!S::HALVES) {
                // What depends on all loads: an arrival overtakes those that are queued, and then the copy does, too.
                unsigned read = field[0][0] | field[1][0];
#pragma unroll
                for (int i = 0; i < 4; ++i) read |= x[i][0];
                __syncwarp();
                if (lane == 0) barrier_arrive(ordered_after(ring.empty(), read, unsigned(n) >> 30));
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                unsigned pair[2][8];
                if constexpr (S::HALVES) read_half<S>(ring.data() + w_offset, h, field);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    decode_half<S>(field[i], h, base[i], pair[i]);
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        pair[i][j] = finish<S>(
                            pair[i][j], h, j, base[i], Decoder::SCALES > 1 && h ? offsets.own[i] : own[i],
                            offsets.plus[i]);
                }
#pragma unroll
                for (int s = 0; s < 4; ++s)
                    mma<T>(
                        part[h], pair[0][2 * s], pair[1][2 * s], pair[0][2 * s + 1], pair[1][2 * s + 1],
                        x[2 * h + s / 2][s % 2 * 2], x[2 * h + s / 2][s % 2 * 2 + 1]);
            }
            if constexpr (S::HALVES) {
                __syncwarp();
                if (lane == 0) barrier_arrive(ring.empty());
            }
            ring.step(S::K_GROUPS);
            continue;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            unsigned code[4][4];
            // Operands may change only while no product reads them: so far nothing is scaled. Of two sets the other one
            // may still be read, and with it the stage before until the second half of this one.
            auto wait = [&] {
                if (h == 0 && !S::PREPARED) barrier_wait(ring.ready(), ring.phase);
                wgmma_wait<S::SETS - 1>();
                if constexpr (S::PREPARED) __syncwarp();  // all lanes have read their records
                if (h == S::SETS - 1 && last && lane == 0) barrier_arrive(last);
            };
            if constexpr (S::HALVES) read_half<S>(ring.data() + w_offset, h, field);
            if constexpr (S::SETS > 1) wait();
            if constexpr (S::CENTRED)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    Decoder::set_zeros(base[i], records.zeros[i], h);
                    own[i] = half_twice(records.both[i][h], 0), offsets.plus[i] = half_twice(records.both[i][h], 1);
                }
            if constexpr (S::SETS > 1) fence_operands(field);  // decoded behind the wait
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned pair[8];
                decode_half<S>(field[i], h, base[i], pair);
#pragma unroll
                for (int j = 0; j < 8; ++j) code[j / 2][j % 2 * 2 + i] = pair[j];
            }
            if constexpr (S::SETS == 1) {
                if constexpr (Decoder::ENTRIES == 0) fence_operands(code);  // decoded before the wait, not behind it
                wait();
            }
            auto& a = S::SETS == 1 ? code : sets[h];
            fence_operands(a);
            if constexpr (S::PREPARED && !S::CENTRED) {
#pragma unroll
                for (int i = 0; i < 2; ++i) own[i] = __byte_perm(records.scales[i], 0, decltype(records)::select(t, h));
            }
#pragma unroll
            for (int j = 0; j < 16; ++j)
                a[j / 4][j % 4] = finish<S>(
                    code[j / 4][j % 4], h, j / 4 * 2 + j % 4 / 2, base[j % 2],
                    Decoder::SCALES > 1 && h && !S::PREPARED ? offsets.own[j % 2] : own[j % 2], offsets.plus[j % 2]);
            fence_operands(a);
            if constexpr (S::OF_SUMS)
                if (h == 0) add_stage(sum, factor, total), factor[0] = next_factor[0], factor[1] = next_factor[1];
            const unsigned x = x_low + ring.stage * (S::STAGE / 16) + h * (S::X_BYTES / 32);
            wgmma_begin();
            if constexpr (S::STEP)
                if (h == 0)
                    wgmma<T>(
                        sum, S::PREPARED ? records.step : offsets.step, means_descriptor(ring.data() + S::MEANS_AT));
#pragma unroll
            for (int s = 0; s < 4; ++s) wgmma<T>(sum, a[s], wgmma_descriptor_of(x + 2 * s));  // in units of 16 bytes
            wgmma_commit();
        }
        last = ring.empty();
        ring.step(S::K_GROUPS);
    }
    if constexpr (S::DIRECT) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = part[0][i] + part[1][i];
    } else {
        wgmma_wait<0>();
        fence_operands(sum);
        if constexpr (S::OF_SUMS) add_stage(sum, factor, total);
    }
    if (last && lane == 0) barrier_arrive(last);
    warps_sync<S>();  // the sums before have been read
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; ++j) {
        const int token = j / 4 * 8 + 2 * t + j % 2, i = j / 2 % 2;
        float up = Decoder::SCALE != E4M4 && SameType<T, __half>::VALUE ? __uint_as_float(top[i]) : 1.0f;
        if constexpr (as_halves<Decoder>()) up = Decoder::Raw::POWER;
        if constexpr (S::OF_SUMS) up = 1.0f, sum[j] = total[j];
        if constexpr (Decoder::SHARES == OF_ROWS) up = raw.value(scales, i);
        *reinterpret_cast<float*>(sums + (k_group * S::SUMS + token * S::PITCH + row + 8 * i) * 4) = sum[j] * up;
    }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// gridDim.x: tiles of rows x CLUSTER; gridDim.y: tiles of tokens. GROUPED: gridDim.x thread blocks share out the tiles
// of rows of all groups.
//
// Decoder                  of the weights
// TOKENS                   of a thread block
// ROW_GROUPS, K_GROUPS     warpgroups of a thread block: those with other rows, 64 each, and those that share k
// CLUSTER                  thread blocks that share k
// GROUPED                  W is [experts][n][k], and a tile of tokens is one of the groups, of one expert
// Layout                   the sizes of the tiling that the host reckons with
template <typename Decoder, int TOKENS, int ROW_GROUPS, int K_GROUPS, int CLUSTER, bool GROUPED, typename Layout>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__((ROW_GROUPS * K_GROUPS + 1) * WARPGROUP, 1) linear_tile(
    const __grid_constant__ TensorMap x_map,  // [M, K], boxes of 128 bytes x TOKENS, or of one row where GROUPED; where
                                              // x is PREPARED, as arrange_tokens writes it
    const __grid_constant__ TensorMap w_map,  // [N, bytes], boxes of the bytes of a stage x 64 rows
    const void* absmax,                       // [n * k / block] scales, as Decoder stores them
    const void* second,                       // double quantization: float32[blocks / 256], the scales of the codes in
                                              // absmax; zero points, as Decoder stores them
    const float* nested_offset,               // [1], added to all of them
    const float* tensor_scale,                // [1], or [experts] with a scale_step of 1; null: 1
    const float* values,                      // [VALUES] the codebook, or null: then that of `codebook`
    const void* bias,                         // [n], see bias_at
    typename Decoder::Type* y,                // [tokens, n]
    float* partial,                           // GROUPED: [products, n] float32 products in place of y, or null; where
                                              // x is PREPARED: the means of arrange_tokens
    const Group* groups,                      // GROUPED: [tokens]
    const int* order,                         // [products], GROUPED: product number order[i] is entry i of the groups
    int divisor,                              // GROUPED: product p is that of row p / divisor of x
    int scale_step,                           // GROUPED: expert e has tensor_scale[e * scale_step]
    int bias_kind,                            // see bias_at
    int tokens,                               // rows of x; GROUPED: how many groups there are
    int n, int k,                             // rows of W (of one expert), elements of a row
    int block,                                // elements that share a scale, a power of two
    const __grid_constant__ Values codebook) {
    using T = typename Decoder::Type;
    using S = Tiling<Decoder, TOKENS, ROW_GROUPS, K_GROUPS, CLUSTER, GROUPED>;
    static_assert(Layout::template IS_OF<S>, "the host reckons with other sizes");
    static_assert(!GROUPED || CLUSTER == 1, "thread blocks have different tasks");
    extern __shared__ uint4 dynamic[];
    __shared__ unsigned scale;
    __shared__ alignas(8) unsigned long long barriers[3 * S::STAGES];  // full, ready, empty
    // In a cluster the upper byte of an address in shared memory is the block's number.
    const unsigned window = shared_address(dynamic), own_block = window & 0xff000000u;
    char* const shared0 = reinterpret_cast<char*>(dynamic) - (window - own_block);
    Stages<S> ring{{own_block | S::RING_AT, shared_address(barriers)}};
    // Of blockIdx the compiler knows that warps agree on it.
    const unsigned rank = CLUSTER == 1 ? 0 : S::SETS > 1 ? blockIdx.x % CLUSTER : block_in_cluster();
    const Job job{groups, order, divisor, tokens, n, k, rank, CLUSTER};
    const int warp = warp_number(), lane = threadIdx.x % WARP;
    launch_dependents();
    if (warp < 3 && elect_lane()) {  // each warp those of a kind: it is a long list for one
#pragma unroll
        for (int i = 0; i < S::STAGES; ++i)
            barrier_init(
                ring.barriers + 8 * (warp * S::STAGES + i),
                warp < 2 ? S::PREPARED && warp == READY ? WARPGROUP : 1 : 4 * ROW_GROUPS);
        fence_barrier_init();
    }
    __syncthreads();
    const TileScales scales{absmax, second, nested_offset, codebook.map, 31 - __clz(block / GRANULE_K)};
    // The sums of 64 tokens need registers that the other warps do not.
    constexpr bool SHIFT = TOKENS == 64 && S::WARPS == 16;
    if (warp >= S::WARPS) {
        if constexpr (SHIFT) lower_registers<64>();
        if (!GROUPED && warp > S::WARPS)
            prefetch_scales<S>(job.task<S>(0), scales, n, k, threadIdx.x - (S::WARPS + 1) * WARP, 3 * WARP);
        else if (lane == 0) prefetch_map(&x_map);
        if constexpr (!S::PREPARED) wait_for_previous();
        if constexpr (S::PREPARED) prepare_stages<S>(ring, job, &x_map, &w_map, partial, scales, warp - S::WARPS, lane);
        else if (warp == S::WARPS) copy_stages<S>(ring, job, &x_map, &w_map, lane);
        else if constexpr (!S::DIRECT) reorder_stages<S>(ring, job, warp - S::WARPS - 1, lane);
        __syncwarp();
        if constexpr (CLUSTER > 1) cluster_sync(), cluster_sync();
        return;
    }
    if constexpr (SHIFT) raise_registers<104>();
    float power = 1.0f;
    if constexpr (Decoder::ENTRIES > 0) {
        const float mine = Decoder::FACTOR *
                           table_value<Decoder>(
                               own_block | TABLE_AT, values, codebook, S::WARPS * WARP, [] { warps_sync<S>(); }, power);
        Decoder::fill(own_block | TABLE_AT, mine, threadIdx.x, S::WARPS * WARP);
    }
    wait_for_previous();
    if constexpr (S::PREPARED)
        if (threadIdx.x == 0) copy_first_tokens<S>(ring, job, &x_map, partial);
    if (!GROUPED && threadIdx.x == 0) {
        // Read at the end, where it would have to come from memory.
        if (tensor_scale) copy_async<4>(shared_address(&scale), tensor_scale), commit_copies();
        else scale = __float_as_uint(1.0f);
    }
    warps_sync<S>();
    for (int i = 0; GROUPED || i == 0; ++i) {
        const Task task = job.task<S>(i);
        if (task.group.count == 0) break;
        if (task.group.expert >= 0) {
            multiply_stages<S>(ring, task, scales, n, k, warp, lane, own_block, shared0 + S::SUMS_AT);
            if (GROUPED) ring.step((task.end - task.begin) % S::STAGES, (task.end - task.begin) / S::STAGES);
        }
        wait_copies<0>();
        if constexpr (CLUSTER == 1) warps_sync<S>();
        else cluster_sync();
        const float of_all = GROUPED && tensor_scale ? tensor_scale[max(task.group.expert, 0) * scale_step] : 1.0f;
        const float factor = (GROUPED ? of_all : __uint_as_float(scale)) / power;
        constexpr int PART = TOKENS / CLUSTER, FOURS = S::ROWS / 4;
        for (int j = threadIdx.x; j < PART * FOURS; j += S::WARPS * WARP) {
            const int token = rank * PART + j / FOURS, r = j % FOURS * 4, to_row = task.row + r;
            if (token >= task.group.count || to_row >= n) continue;
            const unsigned at = own_block + S::SUMS_AT + (token * S::PITCH + r) * 4;
            float total[4] = {};
#pragma unroll
            for (int q = 0; q < CLUSTER * K_GROUPS; ++q) {
                const unsigned part = at + q % K_GROUPS * S::SUMS * 4;
                const uint4 v =
                    CLUSTER == 1 ? shared_at<uint4>(part) : load_cluster<uint4>(cluster_address(part, q / K_GROUPS));
                total[0] += __uint_as_float(v.x), total[1] += __uint_as_float(v.y);
                total[2] += __uint_as_float(v.z), total[3] += __uint_as_float(v.w);
            }
            const long long to = job.product<S>(task, token) * n + to_row;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                total[i] = GROUPED && task.group.expert < 0 ? 0.0f : total[i] * factor;
                if (!GROUPED || !partial) total[i] += bias_at<T>(bias, bias_kind, min(to_row + i, n - 1));
            }
            if (!(GROUPED && partial) && to_row + 4 <= n && reinterpret_cast<unsigned long long>(y + to) % 8 == 0) {
                *reinterpret_cast<uint2*>(y + to) =
                    make_uint2(Word<T>::pack(total[0], total[1]), Word<T>::pack(total[2], total[3]));
            } else {
                for (int i = 0; i < min(4, n - to_row); ++i) {
                    if (GROUPED && partial) partial[to + i] = total[i];
                    else store(y + to + i, total[i]);
                }
            }
        }
    }
    if constexpr (CLUSTER > 1) cluster_sync();  // the others may still read here
}

// x in the order in which linear_tile reads it, and the means of its granules. A warp has eight tokens of a stage. With
// registers so few that a thread block of linear_tile finds room beside.
template <typename Decoder>
__global__ void __launch_bounds__(WARPGROUP, 16) arrange_tokens(
    const typename Decoder::Type* x,  // [tokens, k]
    typename Decoder::Type* ordered,  // [tokens, k up to a whole stage]
    char* means,                      // [tiles of tokens, stages, MEANS_BYTES * tile], or null
    int tile,                         // tokens of a thread block of linear_tile
    int tokens, int k) {
    using T = typename Decoder::Type;
    constexpr int ORDER = Decoder::ORDER;
    const int items = (k + STAGE_K - 1) / STAGE_K, unit = blockIdx.x * (WARPGROUP / WARP) + warp_number();
    const int item = unit % items, part = unit / items, lane = threadIdx.x % WARP, row = lane % 8, c = lane / 8;
    const int token = part * 8 + row;
    wait_for_previous();
    launch_dependents();  // not before: linear_tile fetches weights without waiting
    if (part * 8 >= tokens) return;
    unsigned word[4][4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const int from = item * STAGE_K + t / 2 * HALF_K + x_chunk<ORDER>(t % 2, c) * 8;
        if (token < tokens && from < k)
            to_words(word[t], load_written(reinterpret_cast<const uint4*>(x + (long long)token * k + from)));
    }
    if (means) {
        const Means of = means_of<T, ORDER>(word, c);
        const int first = part * 8 / tile, place = part * 8 % tile + row;
        char* to = means + ((long long)first * items + item) * tile * MEANS_BYTES + place / 8 * 256 + place % 8 * 16;
        *reinterpret_cast<unsigned*>(to + of.granule * 4) = of.first;
        *reinterpret_cast<unsigned*>(to + of.granule * 4 + 128) = of.second;
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) arrange<ORDER>(word[t]);
    if (token >= tokens) return;
    T* row_to = ordered + ((long long)token * items + item) * STAGE_K + c * 32;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        reinterpret_cast<uint4*>(row_to)[i] = make_uint4(word[0][i], word[1][i], word[2][i], word[3][i]);
}
