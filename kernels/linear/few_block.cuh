// What the parts of linear_few (linear/small_batch.cu) share: what is known of an instance when it is compiled, the
// arguments of the kernel, and of a thread block its share of the work and its places in shared memory.
#pragma once
#include "linear/epilogue.cuh"
#include "linear/pipeline.cuh"
#include "linear/token_halves.cuh"

// How the work of linear_few is cut, which the host chooses and declares (CUT of kbitcupy/products/small_batch.py):
//     struct Cut
//         run                    tiles of 16 rows of a thread block
//         warps                  warps that share k, a team; each team takes other tiles
//         teams                  of a thread block
//         items                  items of k of a warp at a time, at most ITEMS
//         share                  items of k of a thread block
//         width                  see ScaleCopy
//         wide                   whether the weights can be copied in pieces of 16 bytes
//         staged                 whether x comes by way of shared memory
//         per_warps, per_teams   for quotients by these two numbers

// How the k of a thread block goes through:
//     IN_CHUNKS        a warp may have more than ITEMS k-tiles, so x is loaded again for each chunk of them
//     AT_ONCE          all of it at once, in whole tiles and rows of whole k-tiles that begin at multiples of 16 bytes.
//                      A warp has whole groups of k-tiles; x is zero where they are not its own. Scales are copied as
//                      they are
//     AT_ONCE_SPREAD   ... or expanded on their way, through registers
enum Flow { IN_CHUNKS, AT_ONCE, AT_ONCE_SPREAD };

// Bytes from the scales of a row in a stage to those of the row 8 below it.
template <typename Decoder, int ITEMS>
__host__ __device__ constexpr int eight_rows() {
    if constexpr (ExpansionOf<Decoder, ITEMS>::NESTED) return ITEM_ROWS * ITEMS * Decoder::SCALE_BYTES / 2;
    else return ExpansionOf<Decoder, ITEMS>::Type::EIGHT;
}

constexpr int MOST_WARPS = 16;

// All that is known of an instance when it is compiled. Its parameters: linear_few.
template <typename Decoder_, int EIGHTS_, int ITEMS_, bool GROUPED_, int FLOW, int BLOCKS>
struct FewKind {
    using Decoder = Decoder_;
    using T = typename Decoder::Type;
    static constexpr int EIGHTS = EIGHTS_, ITEMS = ITEMS_, TOGETHER = TOKENS * EIGHTS;
    static constexpr int CLUSTER = __CUDA_ARCH__ >= 900 ? BLOCKS : 1;
    static constexpr bool GROUPED = GROUPED_;
    // Whether lanes load codes together, see ByMatrices; then scales of tokens lie two by two, and those of weights are
    // settled when they come. And whether 16 tokens are rows of sums, not columns.
    static constexpr bool MATRICES = ByMatrices<Decoder>::VALUE, TOKEN_ROWS = MATRICES && EIGHTS == 2;
    // Whether tiles are whole, and rows whole k-tiles that begin at multiples of 16 bytes; how many k-tiles are copied
    // at a time, and how many of them in one box.
    static constexpr bool EVEN = ITEMS > 1, ONCE = FLOW != IN_CHUNKS, SPREAD = FLOW == AT_ONCE_SPREAD;
    static constexpr bool PAIRS = ITEMS == 2 && (Decoder::ENTRIES == 0 || TOKEN_ROWS);
    static constexpr int GROUP = ITEMS == 4 || PAIRS ? Decoder::MOST_TOGETHER : 1;
    static constexpr int BOX = GROUP * Decoder::ITEM_BYTES == 128 ? GROUP : 1;
    using WeightStage = ::WeightStage<Decoder, BOX>;
    using WeightCopy = ::WeightCopy<Decoder, GROUP, BOX>;
    // Whether weights come by TMA. Whether values come out of a table; and whether rows are permuted, those of 128
    // bytes.
    static constexpr bool BOXES = BULK && EVEN, TABLE = Decoder::ENTRIES > 0, PERMUTED = WeightStage::ROW == 128;
    static constexpr int GROUP_BYTES = GROUP / BOX * WeightStage::BYTES, GROUPS = ITEMS / GROUP;
    // Whether TMA waits for words that are unpacked, which takes less than for all that were read.
    static constexpr bool MIXED = BOXES && Decoder::MIXED;
    using Expansion = typename ExpansionOf<Decoder, ITEMS>::Type;
    using Records = typename RecordsOf<TABLE, Decoder>::Type;
    static constexpr bool NARROW = EVEN && Records::NARROW;
    // Whether scales that are expanded may be codes that have scales of their own; else they are inner scales, which
    // are made when those before are used up where k goes through at once, and lie by rows.
    static constexpr bool NESTED = ExpansionOf<Decoder, ITEMS>::NESTED;
    static constexpr int SCALES = ITEM_ROWS * ITEMS * Decoder::SCALE_BYTES, BUFFERS = NESTED || !ONCE ? 2 : 1;
    static constexpr int EIGHT = eight_rows<Decoder, ITEMS>();
    // Whether tokens are integers that have scales of 32.
    static constexpr bool BLOCKED = IsBlocked<Decoder>::VALUE;
    // Whether tokens are sums of two halves, see InHalves; bytes of the powers of two by which a warp multiplies sums
    // of its part of a token: a word for each column and warp, of which tokens have the first ones.
    static constexpr bool HALVES = IsInHalves<Decoder>::VALUE;
    static constexpr int POWERS = HALVES ? TOKENS * MOST_WARPS * 4 : 0;
    // Whether a team hands out blocks of inner scales. With 16 tokens, or tokens that have scales, registers are too
    // few.
    static constexpr bool HANDED = SPREAD && !NESTED && EIGHTS == 1 && !BLOCKED;
    // Whether there is one token, whose parts with scales of their own have columns of their own. That is read where
    // it is: each lane has 8 of 256 elements, and shared memory would be a way round.
    static constexpr bool COLUMNS = ByColumns<Decoder>::VALUE, QUANTIZED = ByColumns<Decoder>::QUANTIZED;
    static_assert(!COLUMNS || (EIGHTS == 1 && GROUP == 2 && !GROUPED && ONCE && !MIXED), "two k-tiles at a time");
    // Whether scales of a block that was handed out are made where weights are multiplied by them, of which a lane then
    // has as many as it would make for others; tiles of the ring, and bytes of a block in it.
    static constexpr bool MADE_LATE = HANDED && COLUMNS;
    static constexpr unsigned HANDED_TILES = MADE_LATE ? MADE_OUT : HANDED_OUT, HANDED_BLOCK = MADE_LATE ? 16 : 8;
    static constexpr int X_BYTES = TOKENS * ITEM_K * 2;
    // By way of shared memory whole lines of x are read, once for all teams; in a cluster by TMA.
    static constexpr bool X_BULK = BOXES && CLUSTER > 1;
    // Where records leave every second place free, those are for the last word of each lane's x.
    static constexpr bool X_BESIDE = Decoder::PAIRED && EVEN && !COLUMNS;
    // Whether the table is made while the first weights are on their way: its values are known, so that takes little
    // and needs nothing of the kernel before.
    static constexpr bool LATE_TABLE = KnownValues<Decoder>::VALUE;
    // Codes of 4 bits that are worked out have x of one or two tokens by way of shared memory, too: until it is there,
    // all weights but the first then leave it room in the queues. Codes of 8 bits have fewer weights to ask for, and
    // paired records gain nothing.
    static constexpr bool QUICK = X_BULK && !TABLE && !BLOCKED && !Decoder::PAIRED && GROUP > 1 && GROUPS > 1;
    // Whether one or two tokens come by way of shared memory, and whether line by line.
    static constexpr bool FEW_STAGED = (X_BULK && TABLE) || QUICK, BY_LINES = LATE_TABLE || QUICK;
    // Whether TMA is at first asked for one group only: where all thread blocks ask for everything at once,
    // all of them get it late, x too. The rest is asked for when that group is there, or, where no table is made
    // meanwhile, when x is.
    static constexpr bool HELD_BACK = X_BULK && (FLOW == AT_ONCE || !NESTED);
    // ... by those that have a table to make before x is there.
    static constexpr bool TILL_WEIGHTS = HELD_BACK && TABLE && !LATE_TABLE;
    // Slots of the ring of sums.
    static constexpr int RING = EIGHTS == 2 ? 2 : 4;
    static_assert(RING % CLUSTER == 0 && (CLUSTER == 1 || (ONCE && !GROUPED)), "");
};

// What linear_few is given, there is said what it is.
template <typename T>
struct FewArguments {
    const T* x;
    const char *packed, *absmax;
    const float *nested_absmax, *nested_offset, *tensor_scale, *values;
    const void* bias;
    T* y;
    float* partial;
    const Group* groups;
    const int* order;
    int divisor, scale_step, bias_kind, tokens, n, k, block;
    const Cut& cut;
    const Values& codebook;
    const TensorMap *map_of_weights, *map_of_x;
};

// A thread block of linear_few, and who this thread is in it.
template <typename Kind>
struct FewBlock {
    using Decoder = typename Kind::Decoder;
    using T = typename Kind::T;
    const FewArguments<T>& given;
    // In a cluster the upper byte of an address in shared memory is the block's number.
    unsigned own_block;
    // Places in shared memory, in their order; that of x has gaps, and of the sums only those that have none elsewhere.
    char* table;
    float* factor;
    char *weight_stages, *scale_stages, *x_stage;
    float* sums;
    // Of this thread; the row of a tile and the token of eight that it has.
    int lane, warp, g, t, my_row, my_token;
    // Its team and which warp of the team it is; the tiles from `first` to `last`, and how many are the team's.
    int teams, team, mate, first, last, my_first;
    unsigned passes;
    // k goes through in chunks of cut.warps * cut.items k-tiles; where mine starts, and where the thread block's end.
    int step, first_item, my_item, last_item, chunks;
    Group group;
    long long above;  // rows of the experts before

    __device__ __forceinline__ FewBlock(const FewArguments<T>& given, uint4* dynamic) : given(given) {
        place(dynamic), take_share();
        launch_dependents();
        if (Kind::GROUPED) wait_for_previous();  // groups come from the kernel before
        group = my_group();
        above = Kind::GROUPED ? (long long)group.expert * given.n : 0;
    }

    // Where everything is in shared memory, as the host reckons with it.
    __device__ __forceinline__ void place(uint4* dynamic) {
        const Cut& cut = given.cut;
        const unsigned window = shared_address(dynamic);
        const int warps = blockDim.x / WARP;
        own_block = Kind::CLUSTER == 1 ? 0 : window & 0xff000000u;
        table = reinterpret_cast<char*>(dynamic) + (TABLE_AT + own_block - window);
        factor = reinterpret_cast<float*>(table + Decoder::ENTRIES * ENTRY_STRIDE);
        weight_stages = reinterpret_cast<char*>(factor) + FEW_HEAD;
        scale_stages = weight_stages + warps * Kind::GROUPS * Kind::GROUP_BYTES;
        x_stage = scale_stages + warps * Kind::BUFFERS * Kind::SCALES;
        const int staged = cut.staged * (cut.warps * cut.items * Kind::X_BYTES + X_GAP);
        sums = reinterpret_cast<float*>(x_stage + staged + Kind::POWERS);
    }

    // What this thread has to do.
    __device__ __forceinline__ void take_share() {
        const Cut& cut = given.cut;
        // With 16 tokens beside pairs of scales, the compiler would rather read it again in each turn than keep it.
        lane = threadIdx.x % WARP;
        if constexpr (Kind::BOXES && Decoder::PAIRED && Kind::EIGHTS == 2) lane = int(opaque(unsigned(lane)));
        warp = warp_number(), g = lane / 4, t = lane % 4;
        my_row = Kind::WeightStage::row(g), my_token = Decoder::token(g);
        teams = cut.teams, team = divided(warp, cut.per_warps, cut.warps), mate = warp - team * cut.warps;
        first = blockIdx.y * cut.run, last = min((given.n + ITEM_ROWS - 1) / ITEM_ROWS, first + cut.run);
        my_first = first + team;
        const int upto = team < teams ? max(0, last - my_first + teams - 1) : 0;
        passes = divided(upto, cut.per_teams, teams);
        step = cut.warps * cut.items, first_item = blockIdx.z * cut.share;
        my_item = first_item + mate * cut.items;
        last_item = min((given.k + ITEM_K - 1) / ITEM_K, first_item + cut.share);
        chunks = Kind::ONCE ? 1 : (cut.share + step - 1) / step;
    }

    // The tokens of this thread block. Read again where it is needed: registers are scarce in between.
    __device__ __forceinline__ Group my_group() const {
        if constexpr (Kind::GROUPED) return opaque(given.groups)[blockIdx.x];
        const int begin = int(blockIdx.x) * Kind::TOGETHER;
        return Group{0, begin, min(given.tokens - begin, Kind::TOGETHER), 0};
    }

    // The number of entry i of the groups among all products.
    __device__ __forceinline__ long long product_of(int i) const { return Kind::GROUPED ? given.order[i] : i; }

    // How many k-tiles of a chunk that begins for this warp at `item` are there.
    __device__ __forceinline__ int count_at(int item) const { return max(0, min(given.cut.items, last_item - item)); }

    // Products of no expert are zero.
    __device__ __forceinline__ void store_zeros() const {
        const int rows = min(last * ITEM_ROWS, given.n) - first * ITEM_ROWS;
        for (int i = threadIdx.x; i < rows * group.count; i += blockDim.x) {
            const long long to = product_of(group.first + i / rows) * given.n + first * ITEM_ROWS + i % rows;
            if (given.partial) given.partial[to] = 0.0f;
            else store(given.y + to, 0.0f);
        }
    }
};
