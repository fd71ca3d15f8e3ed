// linear_few: the small-batch GEMM y = x W^T with compressed weights, for 1 to 32 tokens and for mixtures of experts,
// on any GPU from sm_80 on (kbitcupy/products/small_batch.py).
//
//     W codes, scales --TMA or cp.async--> a stage for each k-tile of a warp --decode--> fragments \\
//     x --TMA, cp.async or plain loads--> registers, for as long as the block lives ------------------ mma.sync -->
//     sums sums of the warps that share k --ring in shared memory--> one of them adds up --epilogue--> y, or partial
//     sums
//
// Each thread block has a run of tiles of 16 rows. Teams of its warps share out the tiles, the warps of a team k: each
// keeps its part of x in registers, ITEMS k-tiles, and goes through one tile after the other. As soon as a warp has
// read a k-tile's codes from its stage, it starts to copy those of the next tile there.
//
// The sums of a tile go through a ring of slots in shared memory. One warp of the team, another for each tile, adds
// them up in the order of the warps, and only a few tiles later: so warps need not keep step.
//
// Split-k: gridDim.z thread blocks share k, each writes partial[blockIdx.z][m][n], and add_partials adds them up. Or
// they are a cluster, BLOCKS of them: each slot of the ring is in one of them, and the others write to it. Then each
// block has less of x to read than if it had all of k and fewer tiles.
//
// What limited each version, as a fraction of the time that the bytes of a 28672 x 8192 kbit4 weight need on an H200:
//   - the first prototype had an integer division in its loop and an uneven last wave, which cost .08;
//   - the second one, .62: the data pipe of shared memory was at 80 %, issue slots at 52 %, DRAM at 53 %. Loads of x,
//     one set for 16 rows, and of scales, a byte each, took three fifths of it; table lookups two fifths;
//   - this one keeps x in registers and copies four scales at once: .84 to .92; 8192 x 8192 .66 to .74. A weight of
//   4096 x
//     4096, .38 to .42 in 5 us, waits for its first data: .54 us from block to block, 1 us for the table, .6 us for the
//     first loads. All requests at once delay each other, so there one group of k-tiles is asked for first, and 8 warps
//     with half in flight beat 16 with everything.
//   - integers, which have no table to make meanwhile, all wait for x. Of 28,000 cycles of q4_k, 8192 x 8192, it came
//     after 4,500 where all weights were asked for with it, or prefetched to L2; was read in 1,000 more than need be
//     where lanes met in a bank; and took 1,700 to be added up by shuffles, 1,250 by mma with x as B, 700 with x as A.
//   - tables whose values are known are made while x and the first weights travel: 400 cycles. One token, 8192 x 8192:
//     x line by line, not as boxes of eight tokens, takes 850 cycles less; to ask for the other weights when x is
//     there, not when the first weights are, 450 to 750; to ask L2 for all of them at once costs 950.
//   - a shift of what was just loaded, which the compiler may put next to the load, makes all wait there: so it
//     was with the inner scales of iq4_xs.
#include "linear/epilogue.cuh"
#include "linear/pipeline.cuh"

// How the work of linear_few is cut, which the host chooses and declares (CUT of kbitcupy/products/small_batch.py):
//     struct Cut
//         run                    tiles of 16 rows of a thread block
//         warps                  warps that share k, a team; each team takes other tiles
//         teams                  of a thread block
//         items                  items of k of a warp at a time, at most ITEMS
//         share                  items of k of a thread block
//         width                  see Scales
//         wide                   whether the weights can be copied in pieces of 16 bytes
//         staged                 whether x comes by way of shared memory
//         per_warps, per_teams   for quotients by these two numbers

// How the k of a thread block goes through:
//     IN_CHUNKS        a warp may have more than ITEMS k-tiles, so x is loaded again for each chunk of them
//     AT_ONCE          all of it at once, in whole tiles and rows of whole k-tiles that begin at multiples of 16 bytes.
//     A
//                      warp has whole groups of k-tiles; x is zero where they are not its own. Scales are copied as
//                      they are
//     AT_ONCE_SPREAD   ... or expanded on their way, through registers
enum Flow { IN_CHUNKS, AT_ONCE, AT_ONCE_SPREAD };

#if __CUDA_ARCH__ >= 900
#define ALONG_Z(BLOCKS) __cluster_dims__(1, 1, BLOCKS)
#else
#define ALONG_Z(BLOCKS)
#endif

// Decoder   of the weights (decoder.cuh)
// EIGHTS    tokens of a thread block, in n-tiles of 8
// ITEMS     the most k-tiles of a warp at a time; 1: tiles or rows may be cut off, and start anywhere
// GROUPED   W is [experts][n][k] and thread block x takes the products of groups[x], of one expert
// FLOW      see Flow
// BLOCKS    of a cluster that shares k; 1: no cluster
// Layout    the sizes of Decoder that the host reckons with
template <typename Decoder, int EIGHTS, int ITEMS, bool GROUPED, int FLOW, int BLOCKS, typename Layout>
__global__ void ALONG_Z(BLOCKS) __launch_bounds__(512, 1) linear_few(
    const typename Decoder::Type* x,  // [tokens, k]
    const char* packed,               // [n, bytes of a row] codes
    const char* absmax,               // [n * k / block] scales, as Decoder stores them
    const float* nested_absmax,       // [blocks / 256], double quantization: the scales of the codes in absmax; or null
    const float* nested_offset,       // [1], added to all of them
    const float* tensor_scale,        // [1], or [experts] with a scale_step of 1; null: 1
    const float* values,              // [VALUES] the codebook, or null: then that of `codebook`
    const void* bias,                 // [n], see bias_at
    typename Decoder::Type* y,        // [tokens, n]
    float* partial,                   // [gridDim.z, tokens, n] sums in place of y, or null
    const Group* groups,              // [gridDim.x], GROUPED
    const int* order,                 // [products], GROUPED: product number order[i] is entry i of the groups. Or of
                                      // tokens with scales of 32 these, float [k / 32, divisor]
    int divisor,                      // GROUPED: product p is that of row p / divisor of x
    int scale_step,                   // GROUPED: expert e has tensor_scale[e * scale_step]
    int bias_kind,                    // see bias_at
    int tokens, int n, int k,         // rows of x, rows of W (of one expert), elements of a row
    int block,                        // elements that share a scale, a power of two
    const __grid_constant__ Cut cut, const __grid_constant__ Values codebook,
    const __grid_constant__ TensorMap map_of_weights,  // of packed: boxes of 16 rows x the bytes of BOX k-tiles
    const __grid_constant__ TensorMap map_of_x) {      // boxes of 8 tokens x 64 elements, in the 128-byte swizzle
#if __CUDA_ARCH__ >= 800  // Turing's 64 KiB of shared memory are too few: the host never asks it
    static_assert(Layout::template IS_OF<Decoder>, "the host reckons with other sizes");
    using T = typename Decoder::Type;
    constexpr int TOGETHER = TOKENS * EIGHTS, CLUSTER = __CUDA_ARCH__ >= 900 ? BLOCKS : 1;
    // Whether tiles are whole, and rows whole k-tiles that begin at multiples of 16 bytes; how many k-tiles are copied
    // at a time, and how many of them in one box.
    constexpr bool EVEN = ITEMS > 1, ONCE = FLOW != IN_CHUNKS, SPREAD = FLOW == AT_ONCE_SPREAD;
    constexpr int GROUP = ITEMS == 4 || (ITEMS == 2 && Decoder::ENTRIES == 0) ? Decoder::MOST_TOGETHER : 1,
                  BOX = GROUP * Decoder::ITEM_BYTES == 128 ? GROUP : 1;
    using WeightStage = ::WeightStage<Decoder, BOX>;
    using WeightCopy = ::WeightCopy<Decoder, GROUP, BOX>;
    // Whether values come out of a table; and whether rows are permuted, those of 128 bytes.
    constexpr bool TABLE = Decoder::ENTRIES > 0, PERMUTED = WeightStage::ROW == 128;
    constexpr int GROUP_BYTES = GROUP / BOX * WeightStage::BYTES, GROUPS = ITEMS / GROUP;
    // Whether TMA waits for words that are unpacked, which takes less than for all that were read.
    constexpr bool MIXED = BULK && EVEN && Decoder::MIXED;
    // Whether scales that are expanded may be codes that have scales of their own; else they are inner scales, which
    // are made when those before are used up where k goes through at once, and lie by rows.
    constexpr bool NESTED = ExpansionOf<Decoder, ITEMS>::NESTED;
    constexpr int SCALES = ITEM_ROWS * ITEMS * Decoder::SCALE_BYTES, BUFFERS = NESTED || !ONCE ? 2 : 1;
    // From a row to the row 8 below it.
    constexpr int EIGHT = [] {
        if constexpr (NESTED) return SCALES / 2;
        else return ExpansionOf<Decoder, ITEMS>::Type::EIGHT;
    }();
    constexpr int X_BYTES = TOKENS * ITEM_K * 2;
    // By way of shared memory whole lines of x are read, once for all teams; in a cluster by TMA.
    constexpr bool X_BULK = BULK && EVEN && CLUSTER > 1;
    // Whether the table is made while the first weights are on their way: its values are known, so that takes little
    // and needs nothing of the kernel before.
    constexpr bool LATE_TABLE = KnownValues<Decoder>::VALUE;
    // Whether TMA is at first asked for one group only: where all thread blocks ask for everything at once,
    // all of them get it late, x too. The rest is asked for when that group is there, or, where no table is made
    // meanwhile, when x is.
    constexpr bool HELD_BACK = X_BULK && (FLOW == AT_ONCE || !NESTED);
    // ... by those that have a table to make before x is there.
    constexpr bool TILL_WEIGHTS = HELD_BACK && TABLE && !LATE_TABLE;
    extern __shared__ uint4 dynamic[];
    // In a cluster the upper byte of an address in shared memory is the block's number.
    const unsigned window = shared_address(dynamic), own_block = CLUSTER == 1 ? 0 : window & 0xff000000u;
    const int warps = blockDim.x / WARP;
    char* table = reinterpret_cast<char*>(dynamic) + (TABLE_AT + own_block - window);
    float* factor = reinterpret_cast<float*>(table + Decoder::ENTRIES * ENTRY_STRIDE);
    char* weight_stages = reinterpret_cast<char*>(factor) + FEW_HEAD;
    char* scale_stages = weight_stages + warps * GROUPS * GROUP_BYTES;  // of scales
    char* x_stage = scale_stages + warps * BUFFERS * SCALES;
    float* sums =
        reinterpret_cast<float*>(x_stage + cut.staged * (cut.warps * cut.items * X_BYTES + X_GAP));  // if without gaps

    const int lane = threadIdx.x % WARP, warp = warp_number(), g = lane / 4, t = lane % 4;
    const int my_row = WeightStage::row(g), my_token = Decoder::token(g);
    const int teams = cut.teams, team = divided(warp, cut.per_warps, cut.warps), mate = warp - team * cut.warps;
    const int first = blockIdx.y * cut.run, last = min((n + ITEM_ROWS - 1) / ITEM_ROWS, first + cut.run);
    const int my_first = first + team;
    const int upto = team < teams ? max(0, last - my_first + teams - 1) : 0;
    const unsigned passes = divided(upto, cut.per_teams, teams);
    // k goes through in chunks of cut.warps * cut.items k-tiles; where mine starts, and where the thread block's end.
    const int step = cut.warps * cut.items, first_item = blockIdx.z * cut.share;
    const int my_item = first_item + mate * cut.items;
    const int last_item = min((k + ITEM_K - 1) / ITEM_K, first_item + cut.share);
    const int chunks = ONCE ? 1 : (cut.share + step - 1) / step;

    launch_dependents();
    if (GROUPED) wait_for_previous();
    // Read again where it is needed: registers are scarce in between.
    auto my_group = [&] {
        if constexpr (GROUPED) return groups[blockIdx.x];
        const int begin = int(blockIdx.x) * TOGETHER;
        return Group{0, begin, min(tokens - begin, TOGETHER), 0};
    };
    auto product_of = [&](int i) { return (long long)(GROUPED ? order[i] : i); };
    const Group group = my_group();
    const int m = group.count;
    if (GROUPED && m == 0) return;
    if (GROUPED && group.expert < 0) {
        const int rows = min(last * ITEM_ROWS, n) - first * ITEM_ROWS;
        for (int i = threadIdx.x; i < rows * m; i += blockDim.x) {
            const long long to = product_of(group.first + i / rows) * n + first * ITEM_ROWS + i % rows;
            if (partial) partial[to] = 0.0f;
            else store(y + to, 0.0f);
        }
        return;
    }
    const long long above = GROUPED ? (long long)group.expert * n : 0;  // rows of the experts before

    float* map = reinterpret_cast<float*>(table - 1024);
    if (TABLE && NESTED && nested_absmax) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) map[i] = codebook.map[i];
        __syncthreads();
    }
    using Expansion = typename ExpansionOf<Decoder, ITEMS>::Type;
    // Whether a team hands out blocks of inner scales, and how many of a row. A lane loads the block of its number in
    // the team, counted row by row.
    constexpr bool BLOCKED = IsBlocked<Decoder>::VALUE;
    // With 16 tokens, or tokens that have scales, registers are too few.
    constexpr bool HANDED = SPREAD && !NESTED && EIGHTS == 1 && !BLOCKED;
    const unsigned blocks_of_row = HANDED ? cut.warps * cut.items / 2 : 1;
    auto handed_row = [&](unsigned number) {
        return divided(cut.items == 2 ? number : number / 2, cut.per_warps, cut.warps);
    };
    Expansion spread{absmax, nested_absmax, own_block + TABLE_AT - 1024, above, k, 31 - __clz(block)};
    if constexpr (!NESTED) spread.high = reinterpret_cast<const unsigned short*>(nested_offset);
    const ScaleCopy scales{absmax, nested_absmax, nested_offset, map, above, n, k, cut.width, 31 - __clz(block)};
    using Records = typename RecordsOf<TABLE, Decoder>::Type;
    Records records(absmax, reinterpret_cast<const char*>(nested_absmax), above, n, k, block);
    constexpr bool NARROW = EVEN && Records::NARROW;
    const int pitch = int((long long)k / ITEM_K * Decoder::ITEM_BYTES + k % ITEM_K * Decoder::ITEM_BYTES / ITEM_K);
    // Where rows are whole k-tiles: bytes of scales of a row, or records.
    const unsigned scale_pitch = [&] {
        if constexpr (!NESTED) return unsigned(k) / Expansion::BLOCK;
        else if constexpr (TABLE) return unsigned(k) / (ITEM_K / Decoder::SCALE_BYTES);
        else return unsigned(records.per_row);
    }();
    const char* origin = packed + above * pitch;
    // Of the ring in which a team hands them out: of HANDED_OUT tiles a barrier where all blocks are there and one
    // where all warps have theirs, then the blocks, 8 bytes each, with a gap behind each row.
    const unsigned handed_bytes = HANDED ? ITEM_ROWS * (blocks_of_row + 1) * 8 : 0;
    const unsigned handed_ring = HANDED ? HANDED_OUT * (16 + handed_bytes) : 0;
    const unsigned handed = shared_address(sums) + team * handed_ring, handed_blocks = handed + HANDED_OUT * 16;
    // Addresses of this lane in the shared window, which the compiler must not work out again in each turn: where it
    // copies weights and scales to, and where it reads them.
    const unsigned my_stages = shared_address(weight_stages) + warp * GROUPS * GROUP_BYTES;
    const unsigned my_scales = shared_address(scale_stages) + warp * BUFFERS * SCALES;
    const unsigned scales_to = opaque(my_scales + [&] {
        if constexpr (NESTED) return (g * ITEMS + t) * Decoder::SCALE_BYTES;
        else return Expansion::place(lane);
    }());
    const unsigned stage_from = opaque(
        PERMUTED
            ? my_stages + my_row * WeightStage::ROW + (t * Decoder::LANE_BYTES ^ WeightStage::swizzle(my_row))
            : my_stages + my_row * WeightStage::ROW + (Decoder::ONE_READ ? t * 16 ^ WeightStage::swizzle(my_row) : 0));
    const unsigned scales_from = opaque(
        NESTED ? my_scales + my_row * ITEMS * Decoder::SCALE_BYTES + t * Decoder::SCALE_STEP
               : my_scales + my_row * Decoder::SCALE_BYTES);
    // Barriers: of the copies of a warp, and of the slots of sums of a team, each where it is full and where it is
    // free.
    const unsigned barriers =
        shared_address(factor) + (GROUPS > 2 ? MORE_BARRIERS_AT + warp * 32 : BARRIERS_AT + warp * 16);
    const unsigned x_barrier = shared_address(factor) + X_BARRIERS_AT + mate * 8;
    constexpr int RING = EIGHTS == 2 ? 2 : 4, LATER = RING / 2;
    static_assert(RING % CLUSTER == 0 && (CLUSTER == 1 || (ONCE && !GROUPED)), "");
    // Arrivals of a warp at them: every lane that has read or written what others write or read. In a cluster copies of
    // the sums count themselves, and no lane reads what it tells others of.
    constexpr int ARRIVALS = CLUSTER == 1 ? WARP : 1;
    const unsigned ring = shared_address(factor) + HEAD + team * RING * 16;
    if (BULK && EVEN && lane == 0) {
        barrier_init(barriers, 1), barrier_init(barriers + 8, 1);
        if (GROUPS > 2) barrier_init(barriers + 16, 1), barrier_init(barriers + 24, 1);
        if (X_BULK && team == 0) barrier_init(x_barrier, 1);
    }
    if (mate == 0 && lane == 0 && team < teams) {
#pragma unroll
        for (int i = 0; i < RING; ++i) {
            barrier_init(ring + i * 16, CLUSTER == 1 ? cut.warps * ARRIVALS : 1);
            barrier_init(ring + i * 16 + 8, ARRIVALS);
        }
        if constexpr (HANDED) {
#pragma unroll
            for (unsigned i = 0; i < 2 * HANDED_OUT; ++i) barrier_init(handed + i * 8, cut.warps * WARP);
        }
    }
    if (BULK) fence_barrier_init();
    __syncwarp();
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
    auto count_at = [&](int item) { return max(0, min(cut.items, last_item - item)); };

    // What to copy next: `ahead` k-tiles, and their scales.
    unsigned ahead_pass = 0;
    int ahead_item = my_item, ahead_row = my_first * ITEM_ROWS, ahead = 0;
    const char *source = origin, *lower = origin;
    const char* const scale_origin = absmax + above * scale_pitch;
    unsigned scale_source = 0;  // from there
    auto aim = [&] {
        if (ahead_pass >= passes) {
            ahead = 0;
            return;
        }
        ahead = count_at(ahead_item);
        source = origin + ahead_item * Decoder::ITEM_BYTES;
        if constexpr (EVEN) {
            source += (long long)(ahead_row + WeightCopy::row(lane)) * pitch + WeightCopy::byte(lane);
            if constexpr (HANDED) {
                scale_source = ahead_row * scale_pitch + first_item / 2;
            } else if constexpr (!NESTED) {
                scale_source =
                    (ahead_row + Expansion::row(lane)) * scale_pitch + ahead_item / 2 + Expansion::block(lane);
            } else if constexpr (TABLE)
                scale_source = (ahead_row + g) * scale_pitch + (ahead_item + t) * Decoder::SCALE_BYTES;
            else
                scale_source =
                    (ahead_row + g) * scale_pitch + records.of(ahead_item + (Decoder::PAIRED ? t * ITEMS / 8 * 2 : t));
        } else {
            lower = source + (long long)min(ahead_row + g + 8, n - 1) * pitch;
            source += (long long)min(ahead_row + g, n - 1) * pitch;
        }
    };
    auto advance = [&] {
        if constexpr (ONCE) {
            const int down = teams * ITEM_ROWS;
            ++ahead_pass, ahead_row += down, source += down * pitch, scale_source += down * scale_pitch;
        } else {
            ahead_item += step;
            if (ahead_item - my_item >= chunks * step)
                ahead_item = my_item, ++ahead_pass, ahead_row += teams * ITEM_ROWS;
            aim();
        }
    };
    // Have TMA fetch group i of the k-tiles from `item` on, of the tile at `row`, behind what was `read` from there.
    const unsigned zero = cut.wide >> 1;  // see zero_after
    auto fetch_group = [&](int i, int item, int row, unsigned read) {
        if (!elect_lane()) return;
        barrier_expect(barriers + i * 8, GROUP_BYTES | zero_after(read, zero));
#pragma unroll
        for (int j = 0; j < GROUP / BOX; ++j)
            copy_box(
                my_stages + i * GROUP_BYTES + j * WeightStage::BYTES, &map_of_weights,
                (item + i * GROUP + j * BOX) * Decoder::ITEM_BYTES, int(above) + row, barriers + i * 8);
    };
    // Start to copy group i of what is next, and with the first one the scales.
    auto start = [&](int i, int other, unsigned read) {
        const bool there = ahead_pass < passes;
        if constexpr (BULK && EVEN) {
            if (there) fetch_group(i, ahead_item, ahead_row, read);
        } else if constexpr (EVEN) {
            WeightCopy::start(
                my_stages + i * GROUP_BYTES, source + i * GROUP * Decoder::ITEM_BYTES, pitch,
                there ? (ahead - i * GROUP) * Decoder::ITEM_BYTES : 0, lane);
        } else {
            const int left = there && ahead ? pitch - ahead_item * Decoder::ITEM_BYTES : 0;
            WeightStage::start(my_stages, source, left, cut.wide, g, t);
            WeightStage::start(my_stages, lower, left, cut.wide, g + 8, t);
        }
        if (i == 0) {
            if constexpr (!TABLE && EVEN) {
                if constexpr (Decoder::PAIRED) {
                    const unsigned to = my_scales + other + g * ITEMS * Decoder::SCALE_BYTES;
                    if (there) {
                        records.template start_paired<ITEMS>(to, scale_source, t, ahead);
                        records.template start_paired<ITEMS>(to + EIGHT, scale_source + 8 * scale_pitch, t, ahead);
                    }
                } else if (there && t < ITEMS) {
                    records.start(scales_to + other, scale_source, t < ahead);
                    records.start(scales_to + other + EIGHT, scale_source + 8 * scale_pitch, t < ahead);
                }
                if constexpr (NARROW) {
                    records.load(0, scale_source, there && t < ahead);
                    records.load(1, scale_source + 8 * scale_pitch, there && t < ahead);
                }
            } else if constexpr (!TABLE) {
                if (there && ahead)
                    records.copy(scale_stages + warp * BUFFERS * SCALES + other, ahead_row, ahead_item, lane);
            } else if constexpr (SPREAD) {
                if constexpr (NESTED) {
                    if (there) spread.load(ahead_row + g, ahead_item + t, t < ahead);
                } else if constexpr (!HANDED) {
                    const int at = Expansion::block(lane);  // others stay zero
                    if (there && at < Expansion::BLOCKS && 2 * at < ahead)
                        spread.load(above * scale_pitch + scale_source);
                }
            } else if (EVEN && (!Decoder::SPREAD_SCALES || ONCE || (NESTED && cut.width))) {
                constexpr int PIECE = Decoder::SCALE_BYTES < 16 ? Decoder::SCALE_BYTES : 16;
                const unsigned target = scales_to + other;
                const int bytes = t < ahead ? PIECE : 0;
                if (there && t < ITEMS) {
#pragma unroll
                    for (int at = 0; at < Decoder::SCALE_BYTES; at += PIECE) {
                        copy_async_or_zero<PIECE>(target + at, scale_origin + (scale_source + at), bytes);
                        copy_async_or_zero<PIECE>(
                            target + at + EIGHT, scale_origin + (scale_source + 8 * scale_pitch + at), bytes);
                    }
                }
            } else if (there && ahead) {
                char* const stage = scale_stages + warp * BUFFERS * SCALES + other;
                if constexpr (NESTED) scales.start<Decoder, ITEMS>(stage, ahead_row, ahead_item, ahead, lane);
                else spread.copy(stage, ahead_row, n, ahead_item, ahead, lane);
            }
        }
        if (!(BULK && EVEN) || i == 0) commit_copies();
    };
    aim();
    // Inner scales: the number of the block that this lane hands out of tile `tile`, which is `later` tiles behind that
    // to copy next; -1: none. What the lane needs for that is no register of the loop.
    auto block_of = [&](unsigned tile, unsigned later) {
        const unsigned number = mate * WARP + opaque(threadIdx.x % WARP), down = handed_row(number);
        const unsigned block = number - down * blocks_of_row;
        const bool there = tile < passes && down < ITEM_ROWS && first_item + 2 * int(block) < last_item;
        const unsigned behind = (down + later * teams * ITEM_ROWS) * scale_pitch + block;
        return there ? above * scale_pitch + (scale_source + behind) : -1ll;
    };
    // Ahead of all weights, behind which they would wait: to find out where planes lie takes its time, too.
    if constexpr (HANDED) {
#pragma unroll
        for (unsigned tile = 0; tile < 2; ++tile)
            if (const long long number = block_of(tile, tile); number >= 0) spread.prefetch(number);
    }
    if (BULK && EVEN && passes > 0 && elect_lane())
        prefetch_box(&map_of_weights, my_item * Decoder::ITEM_BYTES, int(above) + ahead_row);
    // What quantizes tokens has waited for all before it, and writes no weights: these are fetched meanwhile, as many
    // as below.
    if constexpr (BLOCKED) {
        const bool first_only = HELD_BACK && (TABLE || (EIGHTS == 1 && cut.staged && m > 2));
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
            if (i * GROUP < cut.items && (i == 0 || !first_only)) start(i, 0, 0);
    }
    float power;
    auto make_table = [&] { power = fill_table<Decoder, false>(own_block | TABLE_AT, values, codebook); };
    if constexpr (LATE_TABLE) wait_for_previous();
    else make_table();
    const float scale_of_all = tensor_scale && threadIdx.x == 0 ? tensor_scale[group.expert * scale_step] : 1.0f;
    auto token_at = [&](int at) { return x + product_of(group.first + at) / (GROUPED ? divisor : 1) * k; };
    // x in shared memory, from a multiple of 1024 bytes on: for each half of the k-tiles, 64 elements, for each k-tile
    // 8 tokens, in the 128-byte swizzle of TMA. The gap between the halves lets the lanes which read together meet in
    // no bank. One or two tokens are few lines anyway: they need not wait behind weights in the queue of TMA, unless a
    // table is made meanwhile.
    const bool staged = ONCE && EIGHTS == 1 && cut.staged && ((X_BULK && TABLE) || m > 2);
    // Few tokens come line by line: TMA would bring zeros for those of eight that are not there.
    const bool by_lines = LATE_TABLE && m <= 2;
    const int second_half = step * (X_BYTES / 2) + X_GAP;
    auto place_of = [&](int element, int token) {
        const int half = element / 64 % 2, row = element / ITEM_K * (X_BYTES / 2) + half * second_half + token * 128;
        return row + ((element / 8 % 8 ^ (token + half * 2) % 8) * 16) + element % 8 * 2;
    };
    if (X_BULK && staged && !by_lines) {
        if (team == 0 && elect_lane()) {
            barrier_expect(x_barrier, cut.items * X_BYTES);
            for (int i = 0; i < cut.items; ++i) {
                // Zeros where they are not its own: what is beyond the row.
                const int column = my_item + i < last_item ? (my_item + i) * (ITEM_K * 2) : 2 * k;
                const unsigned to = shared_address(x_stage) + (mate * cut.items + i) * (X_BYTES / 2);
                copy_box(to, &map_of_x, column, group.first, x_barrier);
                copy_box(to + second_half, &map_of_x, column + 128, group.first, x_barrier);
            }
        }
    } else if (staged && by_lines) {
        const unsigned to = shared_address(x_stage);
        const int pieces = step * (ITEM_K / 8), all = (last_item - first_item) * (ITEM_K / 8);
        for (int i = threadIdx.x; i < m * pieces; i += blockDim.x) {
            const int token = i >= pieces, piece = i - token * pieces;
            const char* from = reinterpret_cast<const char*>(token_at(token) + (long long)first_item * ITEM_K);
            copy_async_or_zero<16>(to + place_of(piece * 8, token), from + piece * 16, piece < all ? 16 : 0);
        }
        commit_copies();
    } else if (staged) {
        const int token = warp % TOKENS;
        const bool there = token < m;
        const char* from = reinterpret_cast<const char*>(token_at(there ? token : 0) + (long long)first_item * ITEM_K);
        const unsigned to = shared_address(x_stage);
        const int pieces = step * (ITEM_K / 8), all = there ? (last_item - first_item) * (ITEM_K / 8) : 0;
#pragma unroll 4
        for (int i = warp / TOKENS * WARP + lane; i < pieces; i += warps / TOKENS * WARP)
            copy_async_or_zero<16>(to + place_of(i * 8, token), from + i * 16, i < all ? 16 : 0);
        commit_copies();
    }
    // The scales of tokens, for each 32 k of this block those of 8 EIGHTS tokens, in the order in which lanes have
    // them.
    constexpr int SCALES_OF_ITEM = ITEM_K / 32 * TOGETHER * 4;
    const unsigned token_scales = BLOCKED ? shared_address(sums) + teams * handed_ring +
                                                (Decoder::GAPS ? 0 : (EIGHTS == 2 ? 2 : 4) * warps * EIGHTS * 512)
                                          : 0;
    if constexpr (BLOCKED) {
        const float* const from =
            reinterpret_cast<const float*>(order) + (long long)first_item * (ITEM_K / 32) * divisor;
        const int blocks = min(cut.share * ITEM_K, k - first_item * ITEM_K) / 32;
        const int items = ONCE ? step : cut.share;  // zeros, too, for those of warps that have no own
        for (int i = threadIdx.x; i < items * (ITEM_K / 32) * TOGETHER; i += blockDim.x) {
            const int block = i / TOGETHER, column = i % TOKENS, token = i % TOGETHER - column + Decoder::token(column);
            const bool there = block < blocks && token < m;
            store_shared(token_scales + i * 4, there ? from[(long long)block * divisor + group.first + token] : 0.0f);
        }
    }
    unsigned my_x[ITEMS][EIGHTS][Decoder::X_WORDS];
    auto fetch_x = [&](int item) {
        const int count = count_at(item);
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const bool there = 8 * e + my_token < m;
            const T* token = token_at(there ? 8 * e + my_token : 0);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
                for (int j = 0; j < Decoder::X_WORDS; ++j) my_x[i][e][j] = 0;
                Decoder::load_x_global(
                    my_x[i][e], token + (item + i) * ITEM_K, there && i < count, k - (item + i) * ITEM_K, t);
            }
        }
    };
    // Where records leave every second place free, those are for the last word of each lane's x.
    constexpr bool X_BESIDE = Decoder::PAIRED && EVEN;
    const unsigned x_beside = my_scales + g * 32 + 16 + t * 4;
    auto arrange_x = [&] {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
                Decoder::arrange_x(my_x[i][e]);
                if constexpr (X_BESIDE)
                    store_shared(x_beside + (i * EIGHTS + e) * 256, __uint_as_float(my_x[i][e][16]));
            }
    };
    if (chunks == 1 && !staged) fetch_x(my_item);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
        if (!BLOCKED && i * GROUP < cut.items && (i == 0 || !HELD_BACK || (!TILL_WEIGHTS && !staged))) start(i, 0, 0);
    // Load the block of inner scales that this lane hands out of a tile, see block_of; what is not there stays zero.
    auto load_block = [&](Expansion& own, unsigned tile, unsigned later) {
        if constexpr (HANDED)
            if (const long long number = block_of(tile, later); number >= 0) own.load(number);
    };
    // Hand it out.
    auto hand_out = [&](const Expansion& own, unsigned tile) {
        if constexpr (HANDED) {
            if (tile >= passes) return;
            const unsigned at = tile % HANDED_OUT;
            barrier_wait(handed + at * 16 + 8, tile / HANDED_OUT & 1 ^ 1);
            const unsigned number = mate * WARP + opaque(threadIdx.x % WARP), down = handed_row(number);
            if (down < ITEM_ROWS) own.hand_out(handed_blocks + at * handed_bytes + (number + down) * 8);
            barrier_arrive(handed + at * 16);
        }
    };
    // Take the block of `tile` that this lane makes to scales.
    auto expand = [&](unsigned tile) {
        if constexpr (HANDED) {
            if (tile >= passes) return;
            const unsigned at = tile % HANDED_OUT, which = opaque(threadIdx.x % WARP);
            const bool has = Expansion::block(which) < Expansion::BLOCKS;
            const unsigned number =
                Expansion::row(which) * (blocks_of_row + 1) + mate * cut.items / 2 + Expansion::block(which);
            barrier_wait(handed + at * 16, tile / HANDED_OUT & 1);
            Expansion own{};  // not a copy of what is still on its way
            if (has) own.take(handed_blocks + at * handed_bytes + number * 8);
            barrier_arrive(handed + at * 16 + 8);
            if (has) own.store(scales_to);
        }
    };
    // Two tiles are on their way before the first product.
    Expansion begin = spread;
    load_block(begin, 0, 0), load_block(spread, 1, 1);
    if constexpr (LATE_TABLE) make_table();
    if constexpr (SPREAD && NESTED) {
        if (nested_absmax) spread.offset = *nested_offset;
        if (t < ITEMS) spread.store(scales_to, EIGHT);
    }
    auto store_narrow = [&](int other) {
        if constexpr (NARROW)
            if (t < ITEMS) records.store(0, scales_to + other), records.store(1, scales_to + other + EIGHT);
    };
    store_narrow(0);

    // What the epilogue multiplies sums by.
    if (threadIdx.x == 0) factor[0] = scale_of_all, factor[1] = Decoder::EPILOGUE_SCALE / power;
    // The copies of x came first.
    if ((!X_BULK || by_lines) && staged) wait_copies<1>();
    __syncthreads();
    if (staged) {
        if (X_BULK && !by_lines) barrier_wait(x_barrier, 0);
        if constexpr (HELD_BACK && !TILL_WEIGHTS) {
            for (int i = 1; passes > 0 && i * GROUP < cut.items; ++i) fetch_group(i, my_item, my_first * ITEM_ROWS, 0);
        }
        const unsigned from = shared_address(x_stage) + mate * cut.items * (X_BYTES / 2);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = min(i, cut.items - 1);  // there may be less of them, and nothing behind
            const auto address = [&](int at) { return from + item * (X_BYTES / 2) + place_of(at, my_token); };
            if constexpr (!TABLE || LATE_TABLE) {
#pragma unroll
                for (int j = 0; j < Decoder::X_WORDS; ++j) my_x[i][0][j] = 0;
            }
            // Those of tokens that are not there would be read for nothing, which nothing hides without a table, or
            // where it has been made before.
            if ((TABLE && !LATE_TABLE) || my_token < m) Decoder::load_x_shared(my_x[i][0], address, t);
        }
    }
    if (chunks == 1) arrange_x();
    if constexpr (SPREAD && !NESTED) {  // which x would wait for
        if (!HANDED && Expansion::block(lane) < Expansion::BLOCKS) begin.store(scales_to);
        hand_out(begin, 0), hand_out(spread, 1);
        load_block(spread, 2, 2);
        expand(0);
    }

    // The sums of a warp: 16 bytes a lane, as mma leaves them. They are in the gaps of the table where there are any.
    constexpr int EIGHT_LANES = Decoder::GAPS ? ENTRY_STRIDE : 128, EIGHT_TOKENS = 4 * EIGHT_LANES;
    constexpr int SUMS = EIGHTS * EIGHT_TOKENS;
    const unsigned my_sums = opaque(
        (Decoder::GAPS ? own_block + TABLE_AT + 128 : shared_address(sums)) + lane / 8 * EIGHT_LANES + lane % 8 * 16);
    // Where those of a slot of the ring begin, of all blocks of the cluster, and in which of them.
    const unsigned rank = CLUSTER == 1 ? 0 : blockIdx.z;
    auto sums_of = [&](unsigned slot) {
        return my_sums + (slot / CLUSTER * teams + team) * (CLUSTER * cut.warps * SUMS);
    };
    auto owner_of = [&](unsigned slot) { return (slot + team) % CLUSTER; };
    const auto with = [&] {
        if constexpr (TABLE) return opaque(own_block | Decoder::lane_offset(lane));
        else return Decoder::constants(codebook);
    }();
    if constexpr (CLUSTER > 1) cluster_wait();
    int scales_at = 0;  // of this tile; the scales of the next one go elsewhere
    int turn = mate;    // in so many tiles of those that this block adds up it is this warp's turn
    for (unsigned pass = 0; pass < passes + LATER; ++pass) {
        if (pass < passes) {
            float acc[EIGHTS][4] = {};
            for (int item = my_item, chunk = 0; chunk < chunks; item += step, ++chunk) {
                if (!ONCE && chunks > 1) {
                    fetch_x(item);
                    arrange_x();
                }
                const int count = ONCE ? GROUPS * GROUP : count_at(item);
                const unsigned scale_at = scales_from + (BUFFERS == 2 ? scales_at : 0);
                advance();
#pragma unroll
                for (int i = 0; i < GROUPS; ++i) {
                    if (i * GROUP >= cut.items) break;
                    if (BULK && EVEN) barrier_wait(barriers + i * 8, scales_at != 0);
                    if constexpr (TILL_WEIGHTS && GROUPS == 2)
                        if (pass == 0 && i == 0 && GROUP < cut.items) fetch_group(1, my_item, my_first * ITEM_ROWS, 0);
                    if constexpr (TILL_WEIGHTS && GROUPS > 2)
                        if (pass == 0 && i == 0)
                            for (int later = 1; later * GROUP < cut.items; ++later)
                                fetch_group(later, my_item, my_first * ITEM_ROWS, 0);
                    if (!(BULK && EVEN) && cut.items > (GROUPS > 2 ? GROUPS - 1 : 1) * GROUP) wait_copies<GROUPS - 1>();
                    else if (!(BULK && EVEN) && GROUPS > 2 && cut.items > GROUP) wait_copies<1>();
                    else if (!(BULK && EVEN) || i == 0) wait_copies<0>();
                    __syncwarp();
                    unsigned word[GROUP][2][Decoder::WORDS], read = 0;
#pragma unroll
                    for (int j = 0; j < GROUP; ++j)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int behind = i * GROUP_BYTES + h * 8 * WeightStage::ROW;
                            if constexpr (PERMUTED) Decoder::read_swizzled(word[j][h], stage_from, j, behind);
                            else
                                Decoder::template read<Decoder::ONE_READ>(
                                    word[j][h], stage_from + j * WeightStage::BYTES + behind,
                                    WeightStage::swizzle(my_row), t);
                            if constexpr (!MIXED) read |= bits_read<Decoder>(word[j][h]);
                        }
                    unsigned mixed[MIXED ? GROUP : 1][2][Decoder::FIELDS];
                    if constexpr (MIXED)
#pragma unroll
                        for (int j = 0; j < GROUP; ++j) {
                            Decoder::unpack(word[j], mixed[j]);
                            read |= mixed[j][0][0] | mixed[j][1][0];
                        }
                    __syncwarp();
                    start(i, SCALES - scales_at, read);
                    // They were on their way while the groups before were multiplied.
                    if constexpr (SPREAD && NESTED)
                        if (t < ITEMS && (i == GROUPS - 1 || (i + 1) * GROUP >= cut.items))
                            spread.store(scales_to + SCALES - scales_at, EIGHT);
                    if (NARROW && (i == GROUPS - 1 || (i + 1) * GROUP >= cut.items)) store_narrow(SCALES - scales_at);
#pragma unroll
                    for (int j = 0; j < GROUP; ++j) {
                        const int nth = i * GROUP + j;
                        if (nth >= count) continue;
                        unsigned (&field)[2][Decoder::FIELDS] = mixed[MIXED ? j : 0];
                        if constexpr (!MIXED) Decoder::unpack(word[j], field);
                        const unsigned at = scale_at + [&] {
                            if constexpr (NESTED) return nth * Decoder::SCALE_BYTES;
                            else return Expansion::of_item(nth);
                        }();
                        const auto scales_of_tokens = [&] {
                            if constexpr (BLOCKED)
                                return TokenScales{token_scales + (item + nth - first_item) * SCALES_OF_ITEM + t * 8};
                            else return NoTokenScales{};
                        }();
                        if constexpr (TABLE)
                            Decoder::template multiply<EIGHTS>(
                                field, my_x[nth], with, at, EIGHT, scales_of_tokens, acc);
                        else
                            Decoder::template multiply<EIGHTS, EVEN>(
                                field, my_x[nth], with, at, EIGHT, x_beside + nth * EIGHTS * 256,
                                EVEN ? nth : item + nth, scales_of_tokens, acc);
                    }
                }
                if constexpr (SPREAD && !NESTED) {
                    __syncwarp();
                    if (!HANDED && Expansion::block(lane) < Expansion::BLOCKS) spread.store(scales_to);
                    hand_out(spread, pass + 2);
                    expand(pass + 1);
                    load_block(spread, pass + 3, 2);
                }
                scales_at = SCALES - scales_at;
            }
            const unsigned slot = pass % RING;
            barrier_wait(ring + slot * 16 + 8, pass / RING & 1 ^ 1);
            const unsigned to = sums_of(slot) + (rank * cut.warps + mate) * SUMS;
            if constexpr (CLUSTER == 1) {
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) store_shared(to + e * EIGHT_TOKENS, acc[e]);
                __syncwarp();
                if (lane < ARRIVALS) barrier_arrive(ring + slot * 16);
            } else {
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e)
                    store_async(to + e * EIGHT_TOKENS, acc[e], ring + slot * 16, owner_of(slot));
            }
        }
        const unsigned before = pass - LATER, slot = before % RING;
        const bool mine_to_add = pass >= LATER && (CLUSTER == 1 || owner_of(slot) == rank);
        if (mine_to_add && turn == 0) {
            constexpr int ROOM = CLUSTER * EIGHTS * WARP * 16;
            if (CLUSTER > 1 && lane == 0) barrier_expect(ring + slot * 16, cut.warps * ROOM);
            barrier_wait(ring + slot * 16, before / RING & 1);
            const unsigned from = sums_of(slot);
            float sum[EIGHTS][4] = {};
#pragma unroll 4
            for (int j = 0; j < CLUSTER * cut.warps; ++j)
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) {
                    const float4 v = shared_at<float4>(from + j * SUMS + e * EIGHT_TOKENS);
                    sum[e][0] += v.x, sum[e][1] += v.y, sum[e][2] += v.z, sum[e][3] += v.w;
                }
            const Group mine = my_group();
            const float scale = factor[0] * factor[1];
#pragma unroll
            for (int i = 0; i < EIGHTS * 4; ++i) {
                const int at = i / 4 * TOKENS + Decoder::token(t * 2 + i % 2);
                const int row = (my_first + before * teams) * ITEM_ROWS + my_row + i / 2 % 2 * 8;
                if (at >= mine.count || (!EVEN && row >= n)) continue;
                const float product = sum[i / 4][i % 4] * scale;
                const long long to = product_of(mine.first + at) * n + row;
                if constexpr (BLOCKED && CLUSTER > 1) {  // a cluster has all of k: it is asked for sums for another
                                                         // type
                    if (partial) partial[to] = product;
                    else store(y + to, product + bias_at<T>(bias, bias_kind, row));
                    continue;
                }
                if (partial) partial[(long long)blockIdx.z * tokens * n + to] = product;
                else store(y + to, product + bias_at<T>(bias, bias_kind, row));
            }
            __syncwarp();
            if constexpr (CLUSTER == 1) {
                if (lane < ARRIVALS) barrier_arrive(ring + slot * 16 + 8);
            } else {
                // Only where a warp waits for it: a block must not write to one that has ended.
                if (lane < CLUSTER && before + RING < passes) barrier_arrive(ring + slot * 16 + 8, lane);
            }
        }
        if (mine_to_add) turn = turn == 0 ? cut.warps - 1 : turn - 1;
    }
#endif
}

// Split-k: y[m, n] = the sum of partial[parts][m, n], in the order of the parts, plus the bias.
//
// partial  float32[parts, size]      y  T[size], size = m * n      bias  [n], see bias_at
template <typename T>
__global__ void add_partials(
    const float* partial, const void* bias, T* y, long long size, int parts, int bias_kind, int n) {
    launch_dependents();
    wait_for_previous();
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size;
         i += (long long)gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (int p = 0; p < parts; ++p) sum += partial[p * size + i];
        store(y + i, sum + bias_at<T>(bias, bias_kind, int(i % n)));
    }
}
