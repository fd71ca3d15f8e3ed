// The sums of linear_few (linear/small_batch.cu): a ring of slots in shared memory in which the warps of a team, or of
// all blocks of a cluster, leave those of a tile, and one of them adds them up.
#pragma once
#include "linear/few_block.cuh"

// The ring of a team, and the epilogue.
template <typename Kind>
struct FewSums {
    using Decoder = typename Kind::Decoder;
    using T = typename Kind::T;
    static constexpr int EIGHTS = Kind::EIGHTS, CLUSTER = Kind::CLUSTER, RING = Kind::RING;
    // After how many tiles sums are added up.
    static constexpr int LATER = RING / 2;
    // Arrivals of a warp at the barriers: every lane that has read or written what others write or read. In a cluster
    // copies of the sums count themselves, and no lane reads what it tells others of.
    static constexpr int ARRIVALS = CLUSTER == 1 ? WARP : 1;
    // The sums of a warp: 16 bytes a lane, as mma leaves them. They are in the gaps of the table where there are any.
    static constexpr int EIGHT_LANES = Decoder::GAPS ? ENTRY_STRIDE : 128, EIGHT_TOKENS = 4 * EIGHT_LANES;
    static constexpr int SUMS = EIGHTS * EIGHT_TOKENS;
    const FewBlock<Kind>& here;
    // Barriers of each slot: where it is full and where it is free.
    unsigned ring;
    unsigned mine;  // where this lane's sums begin, of the first slot
    unsigned rank;  // of the block in its cluster
    int turn;       // in so many tiles of those that this block adds up it is this warp's turn

    __device__ __forceinline__ explicit FewSums(const FewBlock<Kind>& here) : here(here) {
        ring = shared_address(here.factor) + HEAD + here.team * RING * 16;
        rank = CLUSTER == 1 ? 0 : blockIdx.z;
        turn = here.mate;
    }

    __device__ __forceinline__ void init_barriers() const {
#pragma unroll
        for (int i = 0; i < RING; ++i) {
            barrier_init(ring + i * 16, CLUSTER == 1 ? here.given.cut.warps * ARRIVALS : 1);
            barrier_init(ring + i * 16 + 8, ARRIVALS);
        }
    }

    // Find out where sums go, which needs a register only from here on.
    __device__ __forceinline__ void begin() {
        const unsigned slots = Decoder::GAPS ? here.own_block + TABLE_AT + 128 : shared_address(here.sums);
        mine = opaque(slots + here.lane / 8 * EIGHT_LANES + here.lane % 8 * 16);
    }

    // Where those of a slot of the ring begin, of all blocks of the cluster, and in which of them.
    __device__ __forceinline__ unsigned sums_of(unsigned slot) const {
        return mine + (slot / CLUSTER * here.teams + here.team) * (CLUSTER * here.given.cut.warps * SUMS);
    }
    __device__ __forceinline__ unsigned owner_of(unsigned slot) const { return (slot + here.team) % CLUSTER; }

    // Leave the sums of this warp.
    __device__ __forceinline__ void leave(unsigned pass, const float (&acc)[EIGHTS][4]) const {
        const unsigned slot = pass % RING;
        barrier_wait(ring + slot * 16 + 8, pass / RING & 1 ^ 1);
        const unsigned to = sums_of(slot) + (rank * here.given.cut.warps + here.mate) * SUMS;
        if constexpr (CLUSTER == 1) {
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) store_shared(to + e * EIGHT_TOKENS, acc[e]);
            __syncwarp();
            if (here.lane < ARRIVALS) barrier_arrive(ring + slot * 16);
        } else {
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
                store_async(to + e * EIGHT_TOKENS, acc[e], ring + slot * 16, owner_of(slot));
        }
    }

    // In turn with the other warps, add up and store those of the tile that is due now.
    __device__ __forceinline__ void add_up(unsigned pass) {
        const unsigned before = pass - LATER, slot = before % RING;
        const bool mine_to_add = pass >= LATER && (CLUSTER == 1 || owner_of(slot) == rank);
        if (mine_to_add && turn == 0) {
            float sum[EIGHTS][4] = {};
            take(before, slot, sum);
            if constexpr (Kind::COLUMNS) join_columns(sum[0]);
            store_tile(before, sum);
            __syncwarp();
            if constexpr (CLUSTER == 1) {
                if (here.lane < ARRIVALS) barrier_arrive(ring + slot * 16 + 8);
            } else {
                // Only where a warp waits for it: a block must not write to one that has ended.
                if (here.lane < CLUSTER && before + RING < here.passes) barrier_arrive(ring + slot * 16 + 8, here.lane);
            }
        }
        if (mine_to_add) turn = turn == 0 ? here.given.cut.warps - 1 : turn - 1;
    }

    // Add those of a slot to `sum`, in the order of the warps, when they are there.
    __device__ __forceinline__ void take(unsigned before, unsigned slot, float (&sum)[EIGHTS][4]) const {
        constexpr int ROOM = CLUSTER * EIGHTS * WARP * 16;
        const int warps = here.given.cut.warps;
        if (CLUSTER > 1 && here.lane == 0) barrier_expect(ring + slot * 16, warps * ROOM);
        barrier_wait(ring + slot * 16, before / RING & 1);
        const unsigned from = sums_of(slot);
#pragma unroll 4
        for (int j = 0; j < CLUSTER * warps; ++j)
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
                const float4 v = shared_at<float4>(from + j * SUMS + e * EIGHT_TOKENS);
                sum[e][0] += v.x, sum[e][1] += v.y, sum[e][2] += v.z, sum[e][3] += v.w;
            }
    }

    // Add up all columns of a row, to the first one.
    static __device__ __forceinline__ void join_columns(float (&sum)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            sum[i] += sum[i + 1];
            sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 1);
            sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 2);
        }
    }

    // The epilogue of tile `before` of the team: one loop for each place and bias, so that none branches for a sum.
    __device__ __forceinline__ void store_tile(unsigned before, const float (&sum)[EIGHTS][4]) const {
        // A cluster has all of k: it is asked for partial sums of integers for another type.
        constexpr bool WHOLE = (Kind::BLOCKED || Kind::HALVES || Kind::QUANTIZED) && CLUSTER > 1;
        const auto& given = here.given;
        const void* const bias = given.bias;
        if (given.partial) {
            float* const part = given.partial + (WHOLE ? 0 : (long long)blockIdx.z * given.tokens * given.n);
            store_each(before, sum, part, [](float v, int) { return v; });
        } else if (given.bias_kind == NO_BIAS) {
            store_each(before, sum, given.y, [](float v, int) { return v + 0.0f; });
        } else if (given.bias_kind == OWN_BIAS) {
            store_each(before, sum, given.y, [=](float v, int row) { return v + bias_at<T>(bias, OWN_BIAS, row); });
        } else {
            store_each(before, sum, given.y, [=](float v, int row) { return v + bias_at<T>(bias, FLOAT_BIAS, row); });
        }
    }
    // Store biased(product, row) of each sum of this lane that is there.
    template <typename Out, typename Biased>
    __device__ __forceinline__ void store_each(
        unsigned before, const float (&sum)[EIGHTS][4], Out* out, const Biased& biased) const {
        const Group group = here.my_group();
        // Between copies of long scales and sums there is no register to keep that.
        constexpr bool ANEW = Kind::TABLE && Decoder::SCALE_BYTES == 8 && EIGHTS == 1;
        const int t = ANEW ? int(opaque(threadIdx.x % 4)) : here.t;
        const float scale = here.factor[0] * here.factor[1];
        const int n = here.given.n;
        const int tile = (here.my_first + before * here.teams) * ITEM_ROWS, first_row = tile + here.my_row;
        if constexpr (Kind::TOKEN_ROWS) {
            store_rows(tile, scale, group, sum, out, biased);
            return;
        }
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; ++i) {
            if (Kind::HALVES && i > 0) break;
            const int at = Kind::HALVES ? t : i / 2 * TOKENS + Decoder::token(t * 2 + i % 2);
            if (at >= group.count) continue;
            const long long to = here.product_of(group.first + at) * n + first_row;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = first_row + h * 8;
                if (Kind::EVEN || row < n) store(out + to + h * 8, biased(sum[i / 2][h * 2 + i % 2] * scale, row));
            }
        }
    }

    // The same where tokens are rows of sums, and rows of W columns.
    template <typename Out, typename Biased>
    __device__ __forceinline__ void store_rows(
        int tile, float scale, const Group& group, const float (&sum)[EIGHTS][4], Out* out,
        const Biased& biased) const {
        const int n = here.given.n;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = i * TOKENS + Decoder::token(here.g);
            if (at >= group.count) continue;
            Out* const to = out + here.product_of(group.first + at) * n;
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                const int row = tile + h / 2 * 8 + Kind::WeightStage::row(here.t * 2 + h % 2);
                if (Kind::EVEN || row < n) store(to + row, biased(sum[h / 2][2 * i + h % 2] * scale, row));
            }
        }
    }
};
