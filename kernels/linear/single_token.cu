// linear_one: the GEMV y = W x with compressed weights on any GPU from sm_80 on (kbitcupy/products/small_batch.py).
//
//     W codes, scales --TMA or cp.async--> a stage of ITEMS k-tiles for each warp --decode--> fragments --mma.sync-->
//     sums x --once, in the order of the fragments--> shared memory --------------------------------------------^
//
// linear_few keeps x in registers, so that a warp stays in its part of k. One token is so little that all of it fits
// shared memory: any warp takes any k-tile, and all have the same work to the last one. What limits it is what limits
// linear_few: see small_batch.cu.
#include "linear/epilogue.cuh"
#include "linear/single_token.cuh"

// The copies of a warp: of a unit its boxes, each to its place in the stage of the warp, and its scales.
template <typename Decoder, int ITEMS>
struct OneCopies {
    using TmaBox = ::TmaBox<Decoder, ITEMS>;
    static constexpr int UNIT = ITEMS * Decoder::ITEM_BYTES, SCALE_UNIT = ITEMS * Decoder::SCALE_BYTES;
    static constexpr int SCALE_PIECE = SCALE_UNIT < 16 ? SCALE_UNIT : 16, SCALE_PIECES = SCALE_UNIT / SCALE_PIECE;
    const char *packed, *absmax;
    const TensorMap* map;
    int pitch, scale_pitch;                       // bytes of a row
    unsigned stage, scales, scales_to, barriers;  // addresses in the shared window
    unsigned zero;                                // see ordered_after
    int byte, row;                                // what to copy next
    unsigned scale_source;

    __device__ __forceinline__ OneCopies(
        const char* packed, const char* absmax, const TensorMap* map, int k, unsigned stage, unsigned scales,
        unsigned barriers, unsigned zero)
        : packed(packed),
          absmax(absmax),
          map(map),
          pitch(k / ITEM_K * Decoder::ITEM_BYTES),
          scale_pitch(k / ITEM_K * Decoder::SCALE_BYTES),
          stage(stage),
          scales(scales),
          barriers(barriers),
          zero(zero) {
        const int lane = threadIdx.x % WARP;
        scales_to = opaque(scales + lane * SCALE_PIECE);
        if (BULK && lane == 0) {
            for (int b = 0; b < TmaBox::BOXES; ++b) barrier_init(barriers + b * 8, 1);
            fence_barrier_init();
        }
        __syncwarp();
    }

    // Begin with this unit of the tile at this row.
    __device__ __forceinline__ void begin(int unit, int first_row) {
        const int lane = threadIdx.x % WARP;
        byte = unit * UNIT, row = first_row;
        scale_source =
            unsigned(row + lane / SCALE_PIECES) * scale_pitch + unit * SCALE_UNIT + lane % SCALE_PIECES * SCALE_PIECE;
    }

    // Start to copy box b of the unit, behind `seen`, bits of all that was read from there.
    __device__ __forceinline__ void start(int b, bool there, unsigned seen) const {
        const unsigned target = ordered_after(stage + b * TmaBox::BYTES, seen, zero);
        if constexpr (BULK) {
            if (there && elect_lane()) {
                barrier_expect(barriers + b * 8, TmaBox::BYTES);
                copy_box(target, map, byte + b * TmaBox::ROW, row, barriers + b * 8);
            }
        } else {
            const char* source = packed + (long long)row * pitch + byte + b * TmaBox::ROW;
#pragma unroll
            for (int i = 0; i < TmaBox::BYTES; i += WARP * 16) {
                const int at = i + threadIdx.x % WARP * 16, down = at / TmaBox::ROW, column = at % TmaBox::ROW;
                copy_async_if<16>(
                    target + TmaBox::place(down, column), source + (long long)down * pitch + column,
                    there && at < TmaBox::BYTES);
            }
        }
    }

    // ... and its scales, behind which comes the next unit.
    __device__ __forceinline__ void start_scales(bool there, unsigned seen) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < ITEM_ROWS * SCALE_PIECES; i += WARP)
            copy_async_if<SCALE_PIECE>(
                ordered_after(scales_to + i * SCALE_PIECE, seen, zero),
                absmax + (scale_source + unsigned(i / SCALE_PIECES) * scale_pitch),
                there && i + lane < ITEM_ROWS * SCALE_PIECES);
        commit_copies();
        byte += UNIT, scale_source += SCALE_UNIT;
        if (byte == pitch) byte = 0, row += ITEM_ROWS, scale_source += 15 * scale_pitch;
    }
};

// Store x for block i of 32, in the order of the boxes, where lane t has COUNT blocks in a row.
template <typename Decoder, int ITEMS>
__device__ __forceinline__ void store_x(char* lines, unsigned (&w)[16], int i) {
    constexpr int COUNT = TmaBox<Decoder, ITEMS>::COUNT;
    SingleToken<Decoder>::arrange_x(w);
    const int own = i % (4 * COUNT), item = i / (4 * COUNT) * COUNT + own % COUNT;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const unsigned* v = w + j / 2 * 8 + j % 2;
        char* to = lines + (2 * item + j / 2) * XLine<Decoder>::STEP + j % 2 * 64 + own / COUNT * 16;
        *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[2], v[4], v[6]);
    }
}

// Tiles are whole, and rows whole units of ITEMS k-tiles that begin at multiples of 16 bytes. Each thread block has a
// run of tiles of 16 rows, whose units stand in a row, tile after tile; each warp takes an equal part of them. As soon
// as a warp has read a box of a unit from its stage, it starts to copy that of the next one there. It leaves a sum for
// each tile that it meets: at place tile + warp, which grows with every one of them. Those of a tile are added up in
// their order.
//
// Decoder   of the weights (decoder.cuh)
// ITEMS     k-tiles of a unit
// WARPS     of a thread block
// Layout    the sizes of Decoder that the host reckons with
// KNOWN     whether `codebook` has words (fill_known_pairs) in place of values
template <typename Decoder, int ITEMS, int WARPS, typename Layout, bool KNOWN>
__global__ void __launch_bounds__(WARPS* WARP, 1) linear_one(
    const typename Decoder::Type* x,  // [k]
    const char* packed,               // [n, bytes of a row] codes
    const char* absmax,               // [n * k / block] scales, used as they are stored
    const float* tensor_scale,        // [1], or null: 1
    const float* values,              // [VALUES] the codebook, or null: then that of `codebook`
    const void* bias,                 // [n], see bias_at
    typename Decoder::Type* y,        // [n]
    int bias_kind,                    // see bias_at
    int n, int k,                     // rows of W, elements of a row
    int run,                          // tiles of a thread block, or one less
    const __grid_constant__ Values codebook,
    const __grid_constant__ TensorMap map_of_weights) {  // of packed: boxes of 16 rows x the bytes of TmaBox
#if __CUDA_ARCH__ >= 800
    static_assert(Layout::template IS_OF<Decoder>, "the host reckons with other sizes");
    using T = typename Decoder::Type;
    using One = SingleToken<Decoder>;
    using TmaBox = ::TmaBox<Decoder, ITEMS>;
    using XLine = ::XLine<Decoder>;
    // Whether the table is made while x and the first weights are on their way: the kernel before this one ends soon
    // where it has few weights, too. Where it takes long to end, a table of more values is better made meanwhile.
    constexpr bool LATE_TABLE = Decoder::ENTRIES > 32 && (Decoder::VALUES < 16 || WARPS < 16);
    constexpr int SCALE_UNIT = ITEMS * Decoder::SCALE_BYTES;
    constexpr int UNIT_BYTES = TmaBox::BOXES * TmaBox::BYTES, SCALES = ITEM_ROWS * SCALE_UNIT;
    extern __shared__ uint4 dynamic[];
    const unsigned window = shared_address(dynamic);
    char* table = reinterpret_cast<char*>(dynamic) + (TABLE_AT - window);
    char* head = table + Decoder::ENTRIES * ENTRY_STRIDE;
    char* weight_stages = head + HEAD;
    char* scale_stages = weight_stages + WARPS * UNIT_BYTES;  // of scales
    float* sums = reinterpret_cast<float*>(scale_stages + WARPS * SCALES);
    char* lines = Decoder::GAPS ? table + 128 : reinterpret_cast<char*>(sums + (run + WARPS) * ITEM_ROWS);

    const int lane = threadIdx.x % WARP, warp = warp_number(), g = lane / 4, t = lane % 4;
    // The first so many thread blocks have `run` tiles, the others one less.
    const int full = n / ITEM_ROWS - (run - 1) * gridDim.x, me = blockIdx.x;
    const int first = me * (run - 1) + min(me, full), tiles = run - (me >= full);
    const int items = k / ITEM_K, units = items / ITEMS, part = (tiles * units + WARPS - 1) / WARPS;
    const int begin = min(warp * part, tiles * units), end = min(begin + part, tiles * units);
    int tile = quotient(begin, units);
    const int unit = begin - tile * units;

    launch_dependents();

    OneCopies<Decoder, ITEMS> copies(
        packed, absmax, &map_of_weights, k, shared_address(weight_stages) + warp * UNIT_BYTES,
        shared_address(scale_stages) + warp * SCALES, shared_address(head) + BARRIERS_AT + warp * (TmaBox::BOXES * 8),
        unsigned(bias_kind) >> 8);
    copies.begin(unit, (first + tile) * ITEM_ROWS);
    if (BULK && begin < end && elect_lane()) prefetch_box(&map_of_weights, copies.byte, copies.row);
    float power;
    auto make_table = [&] {
        if constexpr (KNOWN) {
            static_assert(!LATE_TABLE && Decoder::VALUES == 16 && WARPS == 16);
            if (!values) {
                fill_known_pairs<Decoder>(TABLE_AT, codebook, warp);
                power = codebook.power;
                wait_for_previous();
                return;
            }
        }
        power = fill_table<Decoder, true>(TABLE_AT, values, codebook);
    };
    if constexpr (LATE_TABLE) wait_for_previous();
    else make_table();

    // x is asked for before the weights, which would keep it waiting.
    const int mine = threadIdx.x, blocks = items * 4;
    unsigned w[16];
    if (mine < blocks) One::load_x_global(w, x + mine * ROW);
    float tensor = 1.0f;
    read_number(tensor, tensor_scale);
#pragma unroll
    for (int b = 0; b < TmaBox::BOXES; ++b) copies.start(b, begin < end, 0u);
    copies.start_scales(begin < end, 0u);
    if constexpr (LATE_TABLE) make_table();
    // What the epilogue needs and can know by now: at the end all would wait for it.
    const float factor = __uint_as_float(opaque(__float_as_uint(One::EPILOGUE_SCALE / power)));
    const int rows = opaque(tiles * ITEM_ROWS);
    auto first_warp = [&](int i) { return quotient(i / ITEM_ROWS * units, part); };  // of those with a sum of row i
    int from_warp = opaque(first_warp(mine));
    if (mine < blocks) store_x<Decoder, ITEMS>(lines, w, mine);
    for (int i = mine + blockDim.x; i < blocks; i += blockDim.x) {
        One::load_x_global(w, x + i * ROW);
        store_x<Decoder, ITEMS>(lines, w, i);
    }
    __syncthreads();

    const unsigned offset = opaque(Decoder::lane_offset(lane));
    const unsigned stage_from = opaque(copies.stage + TmaBox::place(g, t * TmaBox::OWN));
    const unsigned scales_from = opaque(copies.scales + g * SCALE_UNIT);
    const unsigned first_line = opaque(shared_address(lines) + g % 2 * 64 + t * 16);
    const unsigned line_end = opaque(first_line + items * 2 * XLine::STEP);
    const unsigned has_x = opaque(g / 2 == t);
    unsigned word_x[8] = {}, line = first_line + unit * ITEMS * 2 * XLine::STEP, parity = 0, seen_scales;
    float acc[2] = {};
    auto leave = [&] {  // the sums of a tile, of the four lanes
        float* to = sums + (tile + warp) * ITEM_ROWS;
        float sum = (t & 1 ? acc[1] : acc[0]) + __shfl_xor_sync(FULL_WARP, t & 1 ? acc[0] : acc[1], 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (t < 2) to[g + t * 8] = sum;
        acc[0] = acc[1] = 0.0f;
    };
    for (int left = opaque(end - begin); left > 0; --left) {
#pragma unroll
        for (int b = 0; b < TmaBox::BOXES; ++b) {
            if (BULK) barrier_wait(copies.barriers + b * 8, parity);
            if (b == 0) wait_copies<0>();
            __syncwarp();
            unsigned word[2][TmaBox::WORDS], seen = 0;
            if (b == 0) seen_scales = 0;
            typename One::template Scales<TmaBox::COUNT> scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[h].read(
                    scales_from + h * 8 * SCALE_UNIT + b * TmaBox::COUNT * Decoder::SCALE_BYTES, t, seen_scales);
                TmaBox::read(word[h], stage_from + b * TmaBox::BYTES + h * 8 * TmaBox::ROW, seen);
            }
            __syncwarp();
            copies.start(b, left > 1, seen);
            if (b == TmaBox::BOXES - 1) copies.start_scales(left > 1, seen_scales);
            float part[2][4] = {};
#pragma unroll
            for (int j = 0; j < TmaBox::COUNT; ++j) {
                const XLine from{line + (b * TmaBox::COUNT + j) * 2 * XLine::STEP, has_x != 0};
                One::template multiply<TmaBox::COUNT>(word, j, word_x, from, offset, scale, part, acc);
            }
        }
        parity ^= 1, line += ITEMS * 2 * XLine::STEP;
        if (line == line_end) {
            leave();
            ++tile, line = first_line;
        }
    }
    if (line != first_line && begin < end) leave();
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const int down = i / ITEM_ROWS, to = first * ITEM_ROWS + i;
        float sum = 0.0f;
        for (int w = from_warp; w * part < (down + 1) * units; ++w) sum += sums[(down + w) * ITEM_ROWS + i % ITEM_ROWS];
        store(y + to, sum * tensor * factor + bias_at<T>(bias, bias_kind, to));
        from_warp = first_warp(i + blockDim.x);
    }
#endif
}
