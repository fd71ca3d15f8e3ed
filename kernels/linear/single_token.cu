// Products of one token with compressed weights on any GPU from sm_80 on.
#include "linear/epilogue.cuh"
#include "linear/single_token.cuh"

// y[n] = x[k] W[n, k]^T for one token; tiles are whole, and rows whole units of ITEMS items that begin at multiples of
// 16 bytes.
//
// Each thread block has a run of tiles of 16 rows, whose units of ITEMS items stand in a row, tile after tile; each
// warp takes an equal part of them. x is in shared memory, arranged. The weights pass through a slot of a warp, which
// starts to copy a box of the next unit as soon as it has read that of this one. A warp leaves a sum for each tile that
// it meets: at place tile + warp, which grows with every one of them. Those of a tile are added up in their order.
template <typename Decoder, int ITEMS, int WARPS, typename Layout>
__global__ void __launch_bounds__(WARPS* WARP, 1) linear_one(
    const typename Decoder::Type* x, const char* packed, const char* absmax, const float* tensor_scale,
    const float* values, const void* bias, typename Decoder::Type* y, int bias_kind, int n, int k, int run,
    const __grid_constant__ Values codebook, const __grid_constant__ TensorMap map_of_weights) {
#if __CUDA_ARCH__ >= 800
    static_assert(Layout::template IS_OF<Decoder>, "the host reckons with other sizes");
    using T = typename Decoder::Type;
    using One = OneToken<Decoder>;
    using Box = ::Box<Decoder, ITEMS>;
    using Line = ::Line<Decoder>;
    constexpr int UNIT = ITEMS * Decoder::ITEM_BYTES, SCALE_UNIT = ITEMS * Decoder::SCALE_BYTES;
    constexpr int UNIT_BYTES = Box::BOXES * Box::BYTES, SCALES = ITEM_ROWS * SCALE_UNIT;
    constexpr int SCALE_PIECE = SCALE_UNIT < 16 ? SCALE_UNIT : 16, SCALE_PIECES = SCALE_UNIT / SCALE_PIECE;
    extern __shared__ uint4 dynamic[];
    const unsigned window = shared_address(dynamic);
    char* table = reinterpret_cast<char*>(dynamic) + (TABLE_AT - window);
    char* head = table + Decoder::ENTRIES * ENTRY_STRIDE;
    char* slots = head + HEAD;
    char* stages = slots + WARPS * UNIT_BYTES;  // of scales
    float* sums = reinterpret_cast<float*>(stages + WARPS * SCALES);
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

    // What to copy next.
    const int pitch = items * Decoder::ITEM_BYTES, scale_pitch = items * Decoder::SCALE_BYTES;
    const unsigned my_slot = shared_address(slots) + warp * UNIT_BYTES;
    const unsigned my_scales = shared_address(stages) + warp * SCALES;
    const unsigned scales_to = opaque(my_scales + lane * SCALE_PIECE);
    const unsigned barriers = shared_address(head) + BARRIERS_AT + warp * (Box::BOXES * 8);
    if (BULK && lane == 0) {
        for (int b = 0; b < Box::BOXES; ++b) barrier_init(barriers + b * 8, 1);
        fence_barrier_init();
    }
    __syncwarp();
    int ahead_byte = unit * UNIT, ahead_row = (first + tile) * ITEM_ROWS;
    unsigned scale_source =
        unsigned(ahead_row + lane / SCALE_PIECES) * scale_pitch + unit * SCALE_UNIT + lane % SCALE_PIECES * SCALE_PIECE;
    // Box b of it, and its scales, behind which comes the next unit. Where they go depends on `seen`, bits of all that
    // was read from there, as far as the compiler knows: a read that still waits in its queue could otherwise find what
    // the copy engine brings.
    const unsigned nothing = unsigned(bias_kind) >> 8;
    auto start = [&](int b, bool there, unsigned seen) {
        const unsigned target = my_slot + b * Box::BYTES + (seen & nothing);
        if constexpr (BULK) {
            if (there && elect_lane()) {
                barrier_expect(barriers + b * 8, Box::BYTES);
                copy_box(target, &map_of_weights, ahead_byte + b * Box::ROW, ahead_row, barriers + b * 8);
            }
        } else {
            const char* source = packed + (long long)ahead_row * pitch + ahead_byte + b * Box::ROW;
#pragma unroll
            for (int i = 0; i < Box::BYTES; i += WARP * 16) {
                const int at = i + lane * 16, row = at / Box::ROW, byte = at % Box::ROW;
                copy_async_if<16>(
                    target + Box::place(row, byte), source + (long long)row * pitch + byte, there && at < Box::BYTES);
            }
        }
    };
    auto start_scales = [&](bool there, unsigned seen) {
#pragma unroll
        for (int i = 0; i < ITEM_ROWS * SCALE_PIECES; i += WARP)
            copy_async_if<SCALE_PIECE>(
                scales_to + (seen & nothing) + i * SCALE_PIECE,
                absmax + (scale_source + unsigned(i / SCALE_PIECES) * scale_pitch),
                there && i + lane < ITEM_ROWS * SCALE_PIECES);
        commit_copies();
        ahead_byte += UNIT, scale_source += SCALE_UNIT;
        if (ahead_byte == pitch) ahead_byte = 0, ahead_row += ITEM_ROWS, scale_source += 15 * scale_pitch;
    };
    if (BULK && begin < end && elect_lane()) prefetch_box(&map_of_weights, ahead_byte, ahead_row);
    const float power = fill_table<Decoder, true>(TABLE_AT, values, codebook);

    // x for the blocks of 32, in the order of the boxes, where lane t has COUNT blocks in a row. It is asked for before
    // the weights, which would keep it waiting.
    auto store_x = [&](unsigned (&w)[16], int i) {
        One::arrange(w);
        const int own = i % (4 * Box::COUNT), item = i / (4 * Box::COUNT) * Box::COUNT + own % Box::COUNT;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned* v = w + j / 2 * 8 + j % 2;
            *reinterpret_cast<uint4*>(lines + (2 * item + j / 2) * Line::STEP + j % 2 * 64 + own / Box::COUNT * 16) =
                make_uint4(v[0], v[2], v[4], v[6]);
        }
    };
    const int mine = threadIdx.x, blocks = items * 4;
    unsigned w[16];
    if (mine < blocks) One::load_x(w, x + mine * ROW);
    float tensor = 1.0f;
    read_number(tensor, tensor_scale);
#pragma unroll
    for (int b = 0; b < Box::BOXES; ++b) start(b, begin < end, 0u);
    start_scales(begin < end, 0u);
    if (mine < blocks) store_x(w, mine);
    for (int i = mine + blockDim.x; i < blocks; i += blockDim.x) {
        One::load_x(w, x + i * ROW);
        store_x(w, i);
    }
    __syncthreads();

    const unsigned offset = opaque(Decoder::lane_offset(lane));
    const unsigned slot_from = opaque(my_slot + Box::place(g, t * Box::OWN));
    const unsigned scales_from = opaque(my_scales + g * SCALE_UNIT);
    const unsigned first_line = opaque(shared_address(lines) + g % 2 * 64 + t * 16);
    const unsigned line_end = opaque(first_line + items * 2 * Line::STEP);
    const unsigned has_x = opaque(g / 2 == t);
    unsigned word_x[8] = {}, line = first_line + unit * ITEMS * 2 * Line::STEP, parity = 0, seen_scales;
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
        for (int b = 0; b < Box::BOXES; ++b) {
            if (BULK) barrier_wait(barriers + b * 8, parity);
            if (b == 0) wait_copies<0>();
            __syncwarp();
            unsigned word[2][Box::WORDS], seen = 0;
            if (b == 0) seen_scales = 0;
            typename One::template Scales<Box::COUNT> scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[h].read(scales_from + h * 8 * SCALE_UNIT + b * Box::COUNT * Decoder::SCALE_BYTES, t, seen_scales);
                Box::read(word[h], slot_from + b * Box::BYTES + h * 8 * Box::ROW, seen);
            }
            __syncwarp();
            start(b, left > 1, seen);
            if (b == Box::BOXES - 1) start_scales(left > 1, seen_scales);
            float part[2][4] = {};
#pragma unroll
            for (int j = 0; j < Box::COUNT; ++j) {
                const Line from{line + (b * Box::COUNT + j) * 2 * Line::STEP, has_x != 0};
                One::template multiply<Box::COUNT>(word, j, word_x, from, offset, scale, part, acc);
            }
        }
        parity ^= 1, line += ITEMS * 2 * Line::STEP;
        if (line == line_end) {
            leave();
            ++tile, line = first_line;
        }
    }
    if (line != first_line && begin < end) leave();
    __syncthreads();
    for (int i = threadIdx.x; i < tiles * ITEM_ROWS; i += blockDim.x) {
        const int down = i / ITEM_ROWS, to = first * ITEM_ROWS + i;
        float sum = 0.0f;
        for (int w = quotient(down * units, part); w * part < (down + 1) * units; ++w)
            sum += sums[(down + w) * ITEM_ROWS + i % ITEM_ROWS];
        store(y + to, sum * tensor * (One::AFTER / power) + bias_at<T>(bias, bias_kind, to));
    }
#endif
}
