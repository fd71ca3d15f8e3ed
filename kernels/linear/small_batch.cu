// linear_few: the small-batch GEMM y = x W^T with compressed weights, for 1 to 32 tokens and for mixtures of experts,
// on any GPU from sm_80 on (kbitcupy/products/small_batch.py).
//
//     W codes, scales --TMA or cp.async--> a stage for each k-tile of a warp --decode--> fragments
//     x --TMA, cp.async or plain loads--> registers, for as long as the block lives
//     fragments, x --mma.sync--> sums
//     sums of the warps that share k --ring in shared memory--> one of them adds up --epilogue--> y, or partial sums
//
// These are few_weights.cuh with few_scales.cuh, few_tokens.cuh, and few_sums.cuh; what they share is in few_block.cuh.
// The kernel has the order in which they begin, and the loop over tiles.
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
//     4096 x 4096, .38 to .42 in 5 us, waits for its first data: .54 us from block to block, 1 us for the table, .6 us
//     for the first loads. All requests at once delay each other, so there one group of k-tiles is asked for first, and
//     8 warps with half in flight beat 16 with everything.
//   - integers, which have no table to make meanwhile, all wait for x. Of 28,000 cycles of q4_k, 8192 x 8192, it came
//     after 4,500 where all weights were asked for with it, or prefetched to L2; was read in 1,000 more than need be
//     where lanes met in a bank; and took 1,700 to be added up by shuffles, 1,250 by mma with x as B, 700 with x as A.
//   - tables whose values are known are made while x and the first weights travel: 400 cycles. One token, 8192 x 8192:
//     x line by line, not as boxes of eight tokens, takes 850 cycles less; to ask for the other weights when x is
//     there, not when the first weights are, 450 to 750; to ask L2 for all of them at once costs 950.
//   - one token of q4_0 waited for x among all weights, since lanes read it from memory: line by line to shared
//     memory, and the other weights when it is there, takes 1 us less of 13.
//   - seven of eight columns of an mma are empty for one token. With a column for each part that has a scale of its own
//     (columns.cuh) two k-tiles of q4_k take 160 instructions instead of 300, and x, of which a lane then has 8 of 256
//     elements, two loads of a warp: 11.2 us instead of 13.1.
//   - a shift of what was just loaded, which the compiler may put next to the load, makes all wait there: so it
//     was with the inner scales of iq4_xs.
#include "linear/few_sums.cuh"
#include "linear/few_tokens.cuh"
#include "linear/few_weights.cuh"

// Multiply the k-tiles of group i of a warp, of whose codes `word` or `mixed` are what it has read: acc += W x. `item`
// is the first k-tile of this chunk, of which there are `count`; its scales begin at `scale_at`, and `with` are the
// places or constants by which codes become values.
template <typename Kind, typename With>
__device__ __forceinline__ void multiply_items(
    const typename FewWeights<Kind>::Words& word, typename FewWeights<Kind>::Mixed& mixed,
    const FewTokens<Kind>& tokens, const With& with, unsigned scale_at, int i, int item, int count,
    float (&acc)[Kind::EIGHTS][4]) {
    using Decoder = typename Kind::Decoder;
    constexpr int EIGHTS = Kind::EIGHTS, GROUP = Kind::GROUP;
    if constexpr (Kind::COLUMNS) {
        Decoder::multiply_block(
            word, tokens.x[GROUP * i][0], tokens.x[GROUP * i + 1][0], with,
            FewScales<Kind>::of_item(scale_at, GROUP * i), FewScales<Kind>::eight(tokens.here.given.cut),
            tokens.part_scales[i], acc[0]);
    } else {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const int nth = i * GROUP + j;
            if (nth >= count) continue;
            unsigned (&field)[2][Decoder::FIELDS] = mixed[Kind::MIXED ? j : 0];
            if constexpr (!Kind::MIXED) Decoder::unpack(word[j], field);
            const unsigned at = FewScales<Kind>::of_item(scale_at, nth);
            const auto of_tokens = tokens.scales_of(item + nth);
            if constexpr (Kind::TABLE)
                Decoder::template multiply<EIGHTS>(field, tokens.x[nth], with, at, Kind::EIGHT, of_tokens, acc);
            else
                Decoder::template multiply<EIGHTS, Kind::EVEN>(
                    field, tokens.x[nth], with, at, Kind::EIGHT, tokens.beside + nth * EIGHTS * 256,
                    Kind::EVEN ? nth : item + nth, of_tokens, acc);
        }
    }
}

// Multiply the tile of number `pass` of a team: acc += W x for the k of this warp. The copies of the tiles behind it
// start meanwhile.
template <typename Kind, typename With>
__device__ __forceinline__ void multiply_tile(
    const FewBlock<Kind>& here, FewWeights<Kind>& weights, FewTokens<Kind>& tokens, const With& with, unsigned pass,
    float (&acc)[Kind::EIGHTS][4]) {
    constexpr int GROUP = Kind::GROUP, GROUPS = Kind::GROUPS;
    for (int item = here.my_item, chunk = 0; chunk < here.chunks; item += here.step, ++chunk) {
        if (!Kind::ONCE && here.chunks > 1) tokens.fetch(item), tokens.arrange();
        const int count = Kind::ONCE ? GROUPS * GROUP : here.count_at(item);
        const unsigned scale_at = Kind::MADE_LATE ? weights.scales.blocks_of(pass)
                                                  : weights.scales.from + (Kind::BUFFERS == 2 ? weights.scales_at : 0);
        weights.advance();
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            if (i * GROUP >= here.given.cut.items) break;
            weights.wait(i, pass);
            typename FewWeights<Kind>::Words word;
            typename FewWeights<Kind>::Mixed mixed;
            weights.refill(i, weights.read(i, word, mixed));
            multiply_items<Kind>(word, mixed, tokens, with, scale_at, i, item, count, acc);
        }
        if constexpr (Kind::MADE_LATE) weights.scales.give_back(pass);
        weights.scales.next_inner(pass);
        weights.scales_at = Kind::SCALES - weights.scales_at;
    }
}

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
    int divisor,                      // GROUPED: product p is that of row p / divisor of x. InHalves: the type of x
    int scale_step,                   // GROUPED: expert e has tensor_scale[e * scale_step]
    int bias_kind,                    // see bias_at
    int tokens, int n, int k,         // rows of x, rows of W (of one expert), elements of a row
    int block,                        // elements that share a scale, a power of two
    const __grid_constant__ Cut cut, const __grid_constant__ Values codebook,
    const __grid_constant__ TensorMap map_of_weights,  // of packed: boxes of 16 rows x the bytes of BOX k-tiles
    const __grid_constant__ TensorMap map_of_x) {      // boxes of 8 tokens x 64 elements, in the 128-byte swizzle
#if __CUDA_ARCH__ >= 800  // Turing's 64 KiB of shared memory are too few: the host never asks it
    static_assert(Layout::template IS_OF<Decoder>, "the host reckons with other sizes");
    using Kind = FewKind<Decoder, EIGHTS, ITEMS, GROUPED, FLOW, BLOCKS>;
    constexpr bool TABLE = Kind::TABLE, LATE_TABLE = Kind::LATE_TABLE, HELD_BACK = Kind::HELD_BACK;
    extern __shared__ uint4 dynamic[];
    const FewArguments<typename Decoder::Type> given{
        x, packed,  absmax, nested_absmax, nested_offset, tensor_scale,    values,    bias,
        y, partial, groups, order,         divisor,       scale_step,      bias_kind, tokens,
        n, k,       block,  cut,           codebook,      &map_of_weights, &map_of_x};
    const FewBlock<Kind> here(given, dynamic);
    const int m = here.group.count;
    if (GROUPED && m == 0) return;
    if (GROUPED && here.group.expert < 0) {
        here.store_zeros();
        return;
    }
    FewWeights<Kind> weights(here);
    FewTokens<Kind> own_x(here, weights.scales.mine);
    FewSums<Kind> sums(here);
    weights.scales.fill_map();
    weights.init_barriers(), own_x.init_barriers();
    if (here.mate == 0 && here.lane == 0 && here.team < here.teams)
        sums.init_barriers(), weights.scales.init_barriers();
    if (BULK) fence_barrier_init();
    __syncwarp();
    if constexpr (Kind::CLUSTER > 1) cluster_arrive_relaxed();

    // To find out where scales lie may take divisions, so codes are asked for ahead of it.
    weights.prefetch();
    weights.aim();
    // What quantizes tokens has waited for all before it, and writes no weights: these are fetched meanwhile, as many
    // as below.
    if constexpr (Kind::BLOCKED) weights.start_first(HELD_BACK && (TABLE || (EIGHTS == 1 && cut.staged && m > 2)));
    float power;
    auto make_table = [&] { power = fill_table<Decoder, false>(here.own_block | TABLE_AT, values, codebook); };
    if constexpr (LATE_TABLE) wait_for_previous();
    else make_table();
    const float scale_of_all = tensor_scale && threadIdx.x == 0 ? tensor_scale[here.group.expert * scale_step] : 1.0f;
    const auto keep_scale = [&] {
        if (threadIdx.x == 0) here.factor[0] = scale_of_all;
    };
    if constexpr (Kind::HANDED) keep_scale();  // behind blocks of inner scales it would wait for these, and all for it
    own_x.start();
    own_x.store_scales();
    // ... and so would x by way of shared memory, where x that is not may be on its way to the same registers.
    constexpr bool FETCHED_LATE = Kind::HANDED && Kind::FEW_STAGED && !Kind::COLUMNS;
    if (!FETCHED_LATE && here.chunks == 1 && !own_x.staged) own_x.fetch(here.my_item);
    // Beside one token the other weights wait for it, too, where a table is made meanwhile, or where these are all.
    const bool late = Kind::COLUMNS && (TABLE || here.passes == 1);
    if constexpr (!Kind::BLOCKED) weights.start_first(HELD_BACK && (Kind::TILL_WEIGHTS || own_x.staged || late));
    // Two tiles of inner scales are on their way before the first product.
    auto first_inner = weights.scales.spread;
    weights.scales.load_block(first_inner, 0), weights.scales.load_block(weights.scales.spread, 1);
    if constexpr (LATE_TABLE) make_table();
    if constexpr (Kind::HALVES) {
        if (HELD_BACK && here.passes > 0) weights.fetch_others();
        own_x.quantize();
    }
    weights.scales.read_offset();
    weights.scales.store_spread(0), weights.scales.store_narrow(0);

    // What the epilogue multiplies sums by.
    if constexpr (!Kind::HANDED) keep_scale();
    if (threadIdx.x == 0) here.factor[1] = Decoder::EPILOGUE_SCALE / power;
    own_x.wait_own();
    __syncthreads();
    // Blocks of inner scales are there before x is, which takes longer by way of shared memory.
    constexpr bool INNER_FIRST = FETCHED_LATE || (Kind::HANDED && Kind::COLUMNS);
    if (INNER_FIRST) weights.scales.begin_inner(first_inner);
    if (own_x.staged) {
        own_x.wait_boxes();
        if (HELD_BACK && !Kind::TILL_WEIGHTS && !Kind::HALVES && here.passes > 0) weights.fetch_others();
        own_x.read_stage();
    } else if (FETCHED_LATE) {
        own_x.fetch(here.my_item);
    }
    // What is quantized here takes longer than to ask for them.
    if (Kind::QUANTIZED && HELD_BACK && late && here.passes > 0) weights.fetch_others(own_x.arrived());
    if (here.chunks == 1) own_x.arrange();
    if (!Kind::QUANTIZED && HELD_BACK && late && here.passes > 0) weights.fetch_others();
    if (!INNER_FIRST) weights.scales.begin_inner(first_inner);
    weights.scales.load_block(weights.scales.spread, 2);  // whatever waits for x may wait for it, too

    sums.begin();
    const auto with = [&] {
        if constexpr (TABLE) return opaque(here.own_block | Decoder::lane_offset(here.lane));
        else return Decoder::constants(codebook);
    }();
    if constexpr (Kind::CLUSTER > 1) cluster_wait();
    for (unsigned pass = 0; pass < here.passes + sums.LATER; ++pass) {
        if (pass < here.passes) {
            float acc[EIGHTS][4] = {};
            multiply_tile<Kind>(here, weights, own_x, with, pass, acc);
            if constexpr (Kind::HALVES) {
                float joined[1][4];
                own_x.join_halves(acc[0], joined[0]);
                sums.leave(pass, joined);
            } else {
                sums.leave(pass, acc);
            }
        }
        sums.add_up(pass);
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
