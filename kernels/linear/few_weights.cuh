// The weights of linear_few (linear/small_batch.cu): the stages through which a warp's codes go, by TMA where there is
// one, else by cp.async, and with them their scales.
#pragma once
#include "linear/few_scales.cuh"

// The codes of a warp: GROUPS stages of GROUP k-tiles. As soon as one has been read, the copy of the next tile to it
// starts.
template <typename Kind>
struct FewWeights {
    using Decoder = typename Kind::Decoder;
    using WeightStage = typename Kind::WeightStage;
    using WeightCopy = typename Kind::WeightCopy;
    static constexpr bool EVEN = Kind::EVEN, BOXES = Kind::BOXES, MIXED = Kind::MIXED;
    static constexpr int GROUP = Kind::GROUP, GROUPS = Kind::GROUPS, GROUP_BYTES = Kind::GROUP_BYTES;
    // What a lane reads of a group: words as they are stored, or already unpacked.
    using Words = unsigned[GROUP][2][Decoder::WORDS];
    using Mixed = unsigned[MIXED ? GROUP : 1][2][Decoder::FIELDS];

    const FewBlock<Kind>& here;
    FewScales<Kind> scales;
    int pitch;           // bytes of codes of a row
    const char* origin;  // of the expert's codes
    // Addresses in the shared window: the stages of this warp, where in them this lane reads, and their barriers.
    unsigned stages, from, barriers;
    unsigned zero;  // see zero_after
    // What to copy next: `ahead` k-tiles, and their scales.
    unsigned ahead_pass = 0;
    int ahead_item, ahead_row, ahead = 0;
    const char *source, *lower;
    int scales_at = 0;  // the buffer of this tile's scales; those of the next one go elsewhere

    __device__ __forceinline__ explicit FewWeights(const FewBlock<Kind>& here) : here(here), scales(here) {
        const int k = here.given.k, t = here.t, swizzle = WeightStage::swizzle(here.my_row);
        pitch = int((long long)k / ITEM_K * Decoder::ITEM_BYTES + k % ITEM_K * Decoder::ITEM_BYTES / ITEM_K);
        origin = source = lower = here.given.packed + here.above * pitch;
        stages = shared_address(here.weight_stages) + here.warp * GROUPS * GROUP_BYTES;
        const int begin = Kind::PERMUTED ? t * Decoder::LANE_BYTES ^ swizzle : Decoder::ONE_READ ? t * 16 ^ swizzle : 0;
        from = opaque(stages + here.my_row * WeightStage::ROW + begin);
        if constexpr (Kind::MATRICES) {
            const int row = WeightStage::row(here.lane % 8);
            from = opaque(stages + row * WeightStage::ROW + (here.lane / 8 * 16 ^ WeightStage::swizzle(row)));
        }
        barriers = shared_address(here.factor) +
                   (GROUPS > 2 ? MORE_BARRIERS_AT + here.warp * 32 : BARRIERS_AT + here.warp * 16);
        zero = here.given.cut.wide >> 1;
        ahead_item = here.my_item, ahead_row = here.my_first * ITEM_ROWS;
    }

    __device__ __forceinline__ void init_barriers() const {
        if (BOXES && here.lane == 0) {
            barrier_init(barriers, 1), barrier_init(barriers + 8, 1);
            if (GROUPS > 2) barrier_init(barriers + 16, 1), barrier_init(barriers + 24, 1);
        }
    }

    // Find out where lies what to copy next.
    __device__ __forceinline__ void aim() {
        if (ahead_pass >= here.passes) {
            ahead = 0;
            return;
        }
        ahead = here.count_at(ahead_item);
        source = origin + ahead_item * Decoder::ITEM_BYTES;
        if constexpr (EVEN) {
            source += (long long)(ahead_row + WeightCopy::row(here.lane)) * pitch + WeightCopy::byte(here.lane);
            scales.aim(ahead_row, ahead_item);
        } else {
            lower = source + (long long)min(ahead_row + here.g + 8, here.given.n - 1) * pitch;
            source += (long long)min(ahead_row + here.g, here.given.n - 1) * pitch;
        }
    }
    // Go on to the next chunk, or tile.
    __device__ __forceinline__ void advance() {
        const int down = here.teams * ITEM_ROWS;
        if constexpr (Kind::ONCE) {
            ++ahead_pass, ahead_row += down, source += down * pitch;
            scales.advance(down);
        } else {
            ahead_item += here.step;
            if (ahead_item - here.my_item >= here.chunks * here.step)
                ahead_item = here.my_item, ++ahead_pass, ahead_row += down;
            aim();
        }
    }

    // Ask the L2 cache for what is needed first.
    __device__ __forceinline__ void prefetch() const {
        if (BOXES && here.passes > 0 && elect_lane())
            prefetch_box(here.given.map_of_weights, here.my_item * Decoder::ITEM_BYTES, int(here.above) + ahead_row);
    }

    // Have TMA fetch group i of the k-tiles from `item` on, of the tile at `row`, behind what was `read` from there.
    __device__ __forceinline__ void fetch_group(int i, int item, int row, unsigned read) const {
        if (!elect_lane()) return;
        barrier_expect(barriers + i * 8, GROUP_BYTES | zero_after(read, zero));
#pragma unroll
        for (int j = 0; j < GROUP / Kind::BOX; ++j)
            copy_box(
                stages + i * GROUP_BYTES + j * WeightStage::BYTES, here.given.map_of_weights,
                (item + i * GROUP + j * Kind::BOX) * Decoder::ITEM_BYTES, int(here.above) + row, barriers + i * 8);
    }
    // Of the first tile all groups but the first, which were held back.
    __device__ __forceinline__ void fetch_others(unsigned read = 0) const {
        const int row = here.my_first * ITEM_ROWS;
        if constexpr (GROUPS == 2) {
            if (GROUP < here.given.cut.items) fetch_group(1, here.my_item, row, read);
        } else if constexpr (GROUPS > 2) {
            for (int i = 1; i * GROUP < here.given.cut.items; ++i) fetch_group(i, here.my_item, row, read);
        }
    }

    // Start to copy group i of what is next, and with the first one the scales, to their other buffer. `read`: what was
    // read of the stage.
    __device__ __forceinline__ void start(int i, int other, unsigned read) {
        const bool there = ahead_pass < here.passes;
        if constexpr (BOXES) {
            if (there) fetch_group(i, ahead_item, ahead_row, read);
        } else if constexpr (EVEN) {
            WeightCopy::start(
                stages + i * GROUP_BYTES, source + i * GROUP * Decoder::ITEM_BYTES, pitch,
                there ? (ahead - i * GROUP) * Decoder::ITEM_BYTES : 0, here.lane);
        } else {
            const int left = there && ahead ? pitch - ahead_item * Decoder::ITEM_BYTES : 0;
            const bool wide = here.given.cut.wide;
            WeightStage::start(stages, source, left, wide, here.g, here.t);
            WeightStage::start(stages, lower, left, wide, here.g + 8, here.t);
        }
        if (i == 0) scales.start(there, ahead_row, ahead_item, ahead, other);
        if (!BOXES || i == 0) commit_copies();
    }
    // Start to copy the first tile, or of it the first group.
    __device__ __forceinline__ void start_first(bool one_group) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
            if (i * GROUP < here.given.cut.items && (i == 0 || !one_group)) start(i, 0, 0);
    }

    // Wait until group i is there.
    __device__ __forceinline__ void wait(int i, unsigned pass) const {
        const int items = here.given.cut.items;
        if (BOXES) barrier_wait(barriers + i * 8, scales_at != 0);
        if constexpr (Kind::TILL_WEIGHTS)
            if (pass == 0 && i == 0) fetch_others();
        if (!BOXES && items > (GROUPS > 2 ? GROUPS - 1 : 1) * GROUP) wait_copies<GROUPS - 1>();
        else if (!BOXES && GROUPS > 2 && items > GROUP) wait_copies<1>();
        else if (!BOXES || i == 0) wait_copies<0>();
        __syncwarp();
        if (i == 0) scales.settle(Kind::BUFFERS == 2 ? scales_at : 0);
    }

    // Read it. What comes back depends on each load, for zero_after.
    __device__ __forceinline__ unsigned read(int i, Words& word, Mixed& mixed) const {
        unsigned read = 0;
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int behind = i * GROUP_BYTES + h * 8 * WeightStage::ROW;
                if constexpr (Kind::MATRICES)
                    load_matrices(
                        word[j][h],
                        __cvta_shared_to_generic(
                            (Kind::PERMUTED ? from ^ j * Decoder::ITEM_BYTES : from + j * WeightStage::BYTES) +
                            behind));
                else if constexpr (Kind::PERMUTED) Decoder::read_swizzled(word[j][h], from, j, behind);
                else
                    Decoder::template read<Decoder::ONE_READ>(
                        word[j][h], from + j * WeightStage::BYTES + behind, WeightStage::swizzle(here.my_row), here.t);
                if constexpr (Kind::MATRICES) read |= word[j][h][0];
                else if constexpr (!MIXED) read |= bits_read<Decoder>(word[j][h]);
            }
        if constexpr (MIXED) {
#pragma unroll
            for (int j = 0; j < GROUP; ++j) {
                Decoder::unpack(word[j], mixed[j]);
                read |= mixed[j][0][0] | mixed[j][1][0];
            }
        }
        return read;
    }

    // Start to copy the next tile to the stage of group i, of which this was `read`. Scales on their way through
    // registers travelled while the groups before the last one were multiplied.
    __device__ __forceinline__ void refill(int i, unsigned read) {
        const int other = Kind::SCALES - scales_at;
        __syncwarp();
        start(i, other, read);
        if (i == GROUPS - 1 || (i + 1) * GROUP >= here.given.cut.items)
            scales.store_spread(other), scales.store_narrow(other);
    }
};
