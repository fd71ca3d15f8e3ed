// Products with compressed weights: dequantize and multiply is written once, over a decoder.
#include "linear_one.cuh"

// Where the scales of a weight come from, and how a turn of them gets to shared memory: for each of `rows` rows the
// bytes of `span` items.
struct Scales {
    const char* absmax;
    const float* nested_absmax;  // double quantization: float32[blocks / 256], or null
    const float* nested_offset;
    const float* map;  // the values of its 8-bit codes, in shared memory
    long long above;   // rows before the first
    int n, k;
    int width;  // bytes copied at a time, 16, 4 or 1; 0 where they are spread: one float32 for each SUB elements
    int shift;  // log2 of the elements of a block, where they are spread

    // Start to copy: of 16 rows from `row` on, ITEMS items from `item` on, of which `items` are wanted.
    template <typename Decoder, int ITEMS>
    __device__ __forceinline__ void start(char* stage, int row, int item, int items, int lane) const {
        constexpr int SCALE_BYTES = Decoder::SCALE_BYTES, ROW_BYTES = ITEMS * SCALE_BYTES;
        if (width) {
            // Bytes of a whole row, and of it what follows `item`.
            const long long pitch =
                (long long)k / ITEM_K * SCALE_BYTES + (long long)(k % ITEM_K) * SCALE_BYTES / ITEM_K;
            const int left = int(min((long long)items * SCALE_BYTES, pitch - (long long)item * SCALE_BYTES));
            const char* origin = absmax + (long long)item * SCALE_BYTES;
#pragma unroll 1
            for (int i = lane * width; i < ITEM_ROWS * ROW_BYTES; i += WARP * width) {
                const int at = i % ROW_BYTES;
                const char* source = origin + (above + min(row + i / ROW_BYTES, n - 1)) * pitch + at;
                if (at < left) {
                    if (width == 16) copy_async<16>(shared_address(stage + i), source);
                    else if (width == 4) copy_async<4>(shared_address(stage + i), source);
                    else stage[i] = *source;
                } else {
                    for (int b = 0; b < width; ++b) stage[i + b] = 0;
                }
            }
        } else if constexpr (Decoder::SPREAD_SCALES) {
            constexpr int SUB = ITEM_K * 4 / SCALE_BYTES, PER_ROW = ROW_BYTES / 4,
                          AT_ONCE = PER_ROW < 8 ? PER_ROW / 2 : 4;
#pragma unroll 1
            for (int i = lane; i < ITEM_ROWS * PER_ROW; i += AT_ONCE * WARP) {
                long long block[AT_ONCE];  // -1: not there
#pragma unroll
                for (int u = 0; u < AT_ONCE; ++u) {
                    const int place = i + u * WARP, start = item * ITEM_K + place % PER_ROW * SUB;
                    const bool there = start < k && place % PER_ROW < items * (SCALE_BYTES / 4);
                    block[u] = there ? ((above + min(row + place / PER_ROW, n - 1)) * k + start) >> shift : -1;
                }
                float* target = reinterpret_cast<float*>(stage) + i;
                if (nested_absmax) {
                    unsigned code[AT_ONCE];
                    float outer[AT_ONCE];
#pragma unroll
                    for (int u = 0; u < AT_ONCE; ++u) {  // all loads before the first use
                        const long long at = max(block[u], 0ll);
                        code[u] = reinterpret_cast<const unsigned char*>(absmax)[at],
                        outer[u] = nested_absmax[at / 256];
                    }
                    const float offset = *nested_offset;
#pragma unroll
                    for (int u = 0; u < AT_ONCE; ++u)
                        target[u * WARP] = block[u] < 0 ? 0.0f : __fadd_rn(__fmul_rn(map[code[u]], outer[u]), offset);
                } else {
                    const unsigned* source = reinterpret_cast<const unsigned*>(absmax);
#pragma unroll
                    for (int u = 0; u < AT_ONCE; ++u) {
                        if (block[u] < 0) target[u * WARP] = 0.0f;
                        else copy_async<4>(shared_address(target + u * WARP), source + block[u]);
                    }
                }
            }
        }
    }
};

// Scales that are not copied as they are stored, where rows are whole items: each lane brings those of an item of a row
// and of the row 8 below it to shared memory, by way of registers.
template <typename Decoder>
struct SpreadScales {
    static constexpr int SUBS = Decoder::SCALE_BYTES / 4, LEAST_SHIFT = SUBS == 2 ? 6 : SUBS == 4 ? 5 : 4;
    const char* absmax;
    const float* nested_absmax;  // or null
    unsigned map;                // address in the window
    long long above;
    int k, shift;  // as in Scales
    float offset = 0.0f;
    float outer[2] = {};       // the scale, or that of its code
    uint2 code[2] = {{}, {}};  // bytes

    __device__ __forceinline__ void load(int row, int item, bool there) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            outer[i] = 0.0f, code[i] = uint2{};
            const long long at = ((above + row + 8 * i) * k + item * ITEM_K) >> shift;
            if (!there) continue;
            outer[i] = nested_absmax ? nested_absmax[at >> 8] : reinterpret_cast<const float*>(absmax)[at];
            if (!nested_absmax) continue;
            // All blocks of an item are of one outer block.
            if (SUBS == 2 && shift > LEAST_SHIFT)
                code[i].x = 0x0101u * reinterpret_cast<const unsigned char*>(absmax)[at];
            else if (SUBS == 2) code[i].x = *reinterpret_cast<const unsigned short*>(absmax + at);
            else if (SUBS == 4) code[i].x = *reinterpret_cast<const unsigned*>(absmax + at);
            else code[i] = *reinterpret_cast<const uint2*>(absmax + at);
        }
    }

    __device__ __forceinline__ void store(unsigned to, int eight) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < SUBS; ++j) {
                float scale = outer[i];
                if (nested_absmax) {
                    const unsigned byte = (j < 4 ? code[i].x : code[i].y) >> j % 4 * 8 & 255u;
                    scale = __fadd_rn(__fmul_rn(shared_at<float>(map + byte * 4), scale), offset);
                }
                store_shared(to + i * eight + 4 * j, scale);
            }
    }
};

// How the work of linear_few is cut; the host chooses (see fused.py).
struct Cut {
    int run;                        // tiles of 16 rows of a thread block
    int warps;                      // warps that share k, a team; each team takes other tiles
    int teams;                      // of a thread block
    int items;                      // items of k of a warp at a time, at most ITEMS
    int share;                      // items of k of a thread block
    int width;                      // see Scales
    int wide;                       // whether the weights can be copied in pieces of 16 bytes
    int staged;                     // whether x comes by way of shared memory
    unsigned per_warps, per_teams;  // for quotients by these two numbers
};

// a / b, given 2^32 / b + 1: exact for a < 2^32 / b.
__device__ __forceinline__ unsigned divided(unsigned a, unsigned reciprocal, unsigned b) {
    return b == 1 ? a : __umulhi(a, reciprocal);
}

// Whether weights are copied by the bulk copy engine, in boxes of an item; not where ptxas gives such kernels a stack.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool BULK = true;
#else
constexpr bool BULK = false;
#endif
// Behind the table of values: two numbers, and the barriers of the copies, two for each warp, and those of x.
constexpr int HEAD = 1024, BARRIERS_AT = 64, X_BARRIERS_AT = BARRIERS_AT + 16 * 16;
// ... and in linear_few behind these the barriers of its sums.
constexpr int FEW_HEAD = HEAD + 1024;

// The weights of BOX items in shared memory: rows as they are stored, or permuted in pieces of 16 bytes as the swizzle
// of the copy engine for rows of 64 or 128 bytes does it, so that the lanes which read together meet in no bank.
template <typename Decoder, int BOX = 1>
struct Slot {
    static constexpr int ROW = BOX * Decoder::ITEM_BYTES, BYTES = ITEM_ROWS * ROW;

    // The same for a row and the one 8 below it.
    __device__ __forceinline__ static int turn(int row) {
        return BOX == 1 ? row / 2 % Decoder::TURNS * 16 : row % 8 * 16;
    }

    // Of a tile the row that with the one 8 below it is that of the lanes g: of those that read 16 bytes together, or
    // 8, the turns must differ in the item's bit, or in the two bits of 32 bytes.
    __device__ __forceinline__ static int row(int g) {
        if (BOX == 1) return Decoder::row(g);
        return Decoder::OWN ? (g & 1) << 2 | g >> 1 : (g & 3) << 1 | g >> 2;
    }

    // Start to copy the part of lane t of a row, of which `left` bytes are there; it may start anywhere if not `wide`.
    __device__ __forceinline__ static void start(
        unsigned slot, const char* source, int left, bool wide, int row, int t) {
        const int size = wide ? 16 : 4;
#pragma unroll 1
        for (int at = t * size; at < min(left, ROW); at += 4 * size) {
            const unsigned to = slot + row * ROW + (at ^ turn(row));
            copy_async_if<16>(to, source + at, wide);
            copy_async_if<4>(to, source + at, !wide);
        }
    }
};

// How a warp copies 16 rows of ITEMS items that begin at multiples of 16 bytes, to slots of BOX: as few rows at once as
// can be, because each takes a pass through the tags of the L1 cache.
template <typename Decoder, int ITEMS, int BOX = 1>
struct Rows {
    using Slot = ::Slot<Decoder, BOX>;
    static constexpr int BYTES = ITEMS * Decoder::ITEM_BYTES, PIECES = BYTES / 16;
    static constexpr bool WHOLE = PIECES >= 4 && (PIECES & (PIECES - 1)) == 0;
    static constexpr int AT_ONCE = WHOLE ? WARP / PIECES : 8;

    // The first row and byte that a lane copies.
    __device__ __forceinline__ static int row(int lane) { return lane / (WARP / AT_ONCE); }
    __device__ __forceinline__ static int byte(int lane) { return lane % (WARP / AT_ONCE) * 16; }

    // Where byte `at` of a row of a unit stands in its slots.
    __device__ __forceinline__ static int place(int row, int at) {
        return at / Slot::ROW * Slot::BYTES + row * Slot::ROW + (at % Slot::ROW ^ Slot::turn(row));
    }

    // Start to copy; `source` is where this lane begins, and `left` bytes of each row are there.
    __device__ __forceinline__ static void start(unsigned slots, const char* source, int pitch, int left, int lane) {
#pragma unroll
        for (int down = 0; down < ITEM_ROWS; down += AT_ONCE)
#pragma unroll
            for (int at = 0; at < BYTES; at += WARP / AT_ONCE * 16)
                copy_async_if<16>(
                    slots + place(row(lane) + down, byte(lane) + at), source + (long long)down * pitch + at,
                    byte(lane) + at < min(left, BYTES));
    }
};

// The tokens that one expert multiplies in one thread block: order[first .. first + count] of them.
struct Group {
    int expert;  // -1: none, the products are zero
    int first, count, unused;
};

// Fill the table with the values of the codebook, and return `power` of take_value. Waits for the kernel before this
// one when nothing else is left to do.
template <typename Decoder, bool ONE>
__device__ __forceinline__ float fill_table(unsigned table, const float* values, const Values& codebook) {
    float power;
    const float mine = take_value<Decoder::VALUES>(values, codebook, power);
    Decoder::template build<ONE>(table, mine, threadIdx.x, blockDim.x);
    wait_for_previous();
    return power;
}

// y[m, n] = x[m, k] W[n, k]^T for EIGHTS * 8 tokens a thread block, gridDim.x of them.
//
// Each thread block has a run of tiles of 16 rows. Teams of its warps share out the tiles, the warps of a team k: each
// keeps its part of x in registers, ITEMS items of k, and meets with it one tile after the other. The weights pass
// through shared memory: a warp has a slot of its own there for each of its items, and as soon as it has read an item
// starts to copy that of the next tile. gridDim.z thread blocks share k: then partial[gridDim.z][m][n] receives the
// sums, and add_partials adds them up.
//
// The sums of a tile go through a ring of slots in shared memory. One warp of the team, another for each tile, adds
// them up in the order of the warps, and only a few tiles later: so warps need not keep step.
//
// Or BLOCKS thread blocks, a cluster, share k: each slot of the ring is in one of them, and the others write to it.
// Then each block has less of x to read than if it had all of k and fewer tiles.
//
// FLOW: IN_CHUNKS where a warp may have more than ITEMS items. Otherwise all of them go through at once, in whole tiles
// and rows of whole items that begin at multiples of 16 bytes. A warp has whole groups of them; x is zero where they
// are not its own. Scales are copied as they are, or SPREAD, by way of registers.
//
// GROUPED: W is [experts][n][k] and thread block x takes the tokens of groups[x]: product number p = order[i] is
// that of row p / divisor of x; expert e has tensor_scale[e * scale_step]. Otherwise the tokens are taken as they come.
enum Flow { IN_CHUNKS, AT_ONCE, AT_ONCE_SPREAD };

#if __CUDA_ARCH__ >= 900
#define ALONG_Z(BLOCKS) __cluster_dims__(1, 1, BLOCKS)
#else
#define ALONG_Z(BLOCKS)
#endif

template <typename Decoder, int EIGHTS, int ITEMS, bool GROUPED, int FLOW, int BLOCKS>
__global__ void ALONG_Z(BLOCKS) __launch_bounds__(512, 1) linear_few(
    const typename Decoder::Type* x, const char* packed, const char* absmax, const float* nested_absmax,
    const float* nested_offset, const float* tensor_scale, const float* values, const void* bias,
    typename Decoder::Type* y, float* partial, const Group* groups, const int* order, int divisor, int scale_step,
    int bias_kind, int tokens, int n, int k, int block, const __grid_constant__ Cut cut,
    const __grid_constant__ Values codebook, const __grid_constant__ TensorMap map_of_weights,
    const __grid_constant__ TensorMap map_of_x) {
#if __CUDA_ARCH__ >= 800  // Turing's 64 KiB of shared memory are too few: the host never asks it
    using T = typename Decoder::Type;
    constexpr int TOGETHER = TOKENS * EIGHTS, CLUSTER = __CUDA_ARCH__ >= 900 ? BLOCKS : 1;
    // Whether tiles are whole, and rows whole items that begin at multiples of 16 bytes; how many items are copied at a
    // time, and how many of them in one box.
    constexpr bool EVEN = ITEMS > 1, ONCE = FLOW != IN_CHUNKS, SPREAD = FLOW == AT_ONCE_SPREAD;
    constexpr int GROUP = ITEMS == 4 ? 2 : 1, BOX = GROUP * Decoder::ITEM_BYTES == 128 ? GROUP : 1;
    using Slot = ::Slot<Decoder, BOX>;
    using Rows = ::Rows<Decoder, GROUP, BOX>;
    constexpr int GROUP_BYTES = GROUP / BOX * Slot::BYTES, GROUPS = ITEMS / GROUP;
    constexpr int SCALES = ITEM_ROWS * ITEMS * Decoder::SCALE_BYTES, EIGHT = SCALES / 2;
    constexpr int X_BYTES = TOKENS * ITEM_K * 2, X_GAP = 256;
    // By way of shared memory whole lines of x are read, once for all teams; in a cluster by the copy engine.
    constexpr bool X_BULK = BULK && EVEN && CLUSTER > 1;
    // Whether the copy engine is at first asked for one group only: where all thread blocks ask for everything at once,
    // all of them get it late, x too.
    constexpr bool HELD_BACK = X_BULK && FLOW == AT_ONCE;
    extern __shared__ uint4 dynamic[];
    // In a cluster the upper byte of an address in shared memory is the block's number.
    const unsigned window = shared_address(dynamic), own_block = CLUSTER == 1 ? 0 : window & 0xff000000u;
    const int warps = blockDim.x / WARP;
    char* table = reinterpret_cast<char*>(dynamic) + (TABLE_AT + own_block - window);
    float* factor = reinterpret_cast<float*>(table + Decoder::ENTRIES * ENTRY_STRIDE);
    char* slots = reinterpret_cast<char*>(factor) + FEW_HEAD;
    char* stages = slots + warps * GROUPS * GROUP_BYTES;  // of scales
    char* x_stage = stages + warps * 2 * SCALES;
    float* sums =
        reinterpret_cast<float*>(x_stage + cut.staged * (cut.warps * cut.items * X_BYTES + X_GAP));  // if without gaps

    const int lane = threadIdx.x % WARP, warp = warp_number(), g = lane / 4, t = lane % 4;
    const int my_row = Slot::row(g);
    const int teams = cut.teams, team = divided(warp, cut.per_warps, cut.warps), mate = warp - team * cut.warps;
    const int first = blockIdx.y * cut.run, last = min((n + ITEM_ROWS - 1) / ITEM_ROWS, first + cut.run);
    const int my_first = first + team;
    const int upto = team < teams ? max(0, last - my_first + teams - 1) : 0;
    const unsigned passes = divided(upto, cut.per_teams, teams);
    // k goes through in chunks of cut.warps * cut.items items; where mine starts, and where the thread block's end.
    const int step = cut.warps * cut.items, first_item = blockIdx.z * cut.share;
    const int my_item = first_item + mate * cut.items;
    const int last_item = min((k + ITEM_K - 1) / ITEM_K, first_item + cut.share);
    const int chunks = ONCE ? 1 : (cut.share + step - 1) / step;

    let_next_start();
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
    if (nested_absmax) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) map[i] = codebook.map[i];
        __syncthreads();
    }
    SpreadScales<Decoder> spread{absmax, nested_absmax, own_block + TABLE_AT - 1024, above, k, 31 - __clz(block)};
    const Scales scales{absmax, nested_absmax, nested_offset, map, above, n, k, cut.width, 31 - __clz(block)};
    const int pitch = int((long long)k / ITEM_K * Decoder::ITEM_BYTES + k % ITEM_K * Decoder::ITEM_BYTES / ITEM_K);
    const unsigned scale_pitch = unsigned(k) / (ITEM_K / Decoder::SCALE_BYTES);  // where rows are whole items
    const char* origin = packed + above * pitch;
    // Addresses of this lane in the shared window, which the compiler must not work out again in each turn: where it
    // copies weights and scales to, and where it reads them.
    const unsigned my_slots = shared_address(slots) + warp * GROUPS * GROUP_BYTES;
    const unsigned my_scales = shared_address(stages) + warp * 2 * SCALES;
    const unsigned scales_to = kept(my_scales + (g * ITEMS + t) * Decoder::SCALE_BYTES);
    const unsigned slot_from = kept(
        BOX > 1 ? my_slots + my_row * Slot::ROW + (t * Decoder::LANE_BYTES ^ Slot::turn(my_row))
                : my_slots + my_row * Slot::ROW + (Decoder::OWN ? t * 16 : 0));
    const unsigned scales_from = kept(my_scales + my_row * ITEMS * Decoder::SCALE_BYTES + t * Decoder::SCALE_STEP);
    // Barriers: of the copies of a warp, and of the slots of sums of a team, each where it is full and where it is
    // free.
    const unsigned barriers = shared_address(factor) + BARRIERS_AT + warp * 16;
    const unsigned x_barrier = shared_address(factor) + X_BARRIERS_AT + mate * 8;
    constexpr int RING = EIGHTS == 2 ? 2 : 4, LATER = RING / 2;
    static_assert(RING % CLUSTER == 0 && (CLUSTER == 1 || (ONCE && !GROUPED)), "");
    // Arrivals of a warp at them: one is enough, but racecheck follows each lane by itself, and here there is time.
    constexpr int ARRIVALS = EVEN ? 1 : WARP;
    const unsigned ring = shared_address(factor) + HEAD + team * RING * 16;
    if (BULK && EVEN && lane == 0) {
        barrier_init(barriers, 1), barrier_init(barriers + 8, 1);
        if (X_BULK && team == 0) barrier_init(x_barrier, 1);
    }
    if (mate == 0 && lane == 0 && team < teams) {
#pragma unroll
        for (int i = 0; i < RING; ++i) {
            barrier_init(ring + i * 16, CLUSTER == 1 ? cut.warps * ARRIVALS : 1);
            barrier_init(ring + i * 16 + 8, ARRIVALS);
        }
    }
    if (BULK) barriers_ready();
    __syncwarp();
    if constexpr (CLUSTER > 1) cluster_arrive();
    auto count_at = [&](int item) { return max(0, min(cut.items, last_item - item)); };

    // What to copy next: `ahead` items, and their scales.
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
            source += (long long)(ahead_row + Rows::row(lane)) * pitch + Rows::byte(lane);
            scale_source = (ahead_row + g) * scale_pitch + (ahead_item + t) * Decoder::SCALE_BYTES;
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
    // Have the copy engine fetch group i of the items from `item` on, of the tile at `row`. It does not wait for
    // earlier reads of shared memory: what was `read` from there must have arrived. `never` is 0, which the compiler
    // does not know.
    const unsigned never = cut.wide >> 1;
    auto fetch_group = [&](int i, int item, int row, unsigned read) {
        if (!elected()) return;
        barrier_expect(barriers + i * 8, GROUP_BYTES | read & never);
#pragma unroll
        for (int j = 0; j < GROUP / BOX; ++j)
            copy_box(
                my_slots + i * GROUP_BYTES + j * Slot::BYTES, &map_of_weights,
                (item + i * GROUP + j * BOX) * Decoder::ITEM_BYTES, int(above) + row, barriers + i * 8);
    };
    // Start to copy group i of what is next, and with the first one the scales.
    auto start = [&](int i, int other, unsigned read) {
        const bool there = ahead_pass < passes;
        if constexpr (BULK && EVEN) {
            if (there) fetch_group(i, ahead_item, ahead_row, read);
        } else if constexpr (EVEN) {
            Rows::start(
                my_slots + i * GROUP_BYTES, source + i * GROUP * Decoder::ITEM_BYTES, pitch,
                there ? (ahead - i * GROUP) * Decoder::ITEM_BYTES : 0, lane);
        } else {
            const int left = there && ahead ? pitch - ahead_item * Decoder::ITEM_BYTES : 0;
            Slot::start(my_slots, source, left, cut.wide, g, t);
            Slot::start(my_slots, lower, left, cut.wide, g + 8, t);
        }
        if (i == 0) {
            if constexpr (SPREAD) {
                if (there) spread.load(ahead_row + g, ahead_item + t, t < ahead);
            } else if (EVEN && (!Decoder::SPREAD_SCALES || ONCE || cut.width)) {
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
                scales.start<Decoder, ITEMS>(stages + warp * 2 * SCALES + other, ahead_row, ahead_item, ahead, lane);
            }
        }
        if (!(BULK && EVEN) || i == 0) close_copies();
    };
    aim();
    if (BULK && EVEN && passes > 0 && elected())
        prefetch_box(&map_of_weights, my_item * Decoder::ITEM_BYTES, int(above) + ahead_row);
    const float power = fill_table<Decoder, false>(own_block | TABLE_AT, values, codebook);
    const float scale_of_all = tensor_scale && threadIdx.x == 0 ? tensor_scale[group.expert * scale_step] : 1.0f;
    auto token_at = [&](int at) { return x + product_of(group.first + at) / (GROUPED ? divisor : 1) * k; };
    // x in shared memory, from a multiple of 1024 bytes on: for each half of the items, 64 elements, for each item 8
    // tokens, in the 128-byte swizzle of the copy engine. The gap between the halves lets the lanes which read together
    // meet in no bank. Where it is not that engine which copies, one or two tokens are few lines anyway.
    const bool staged = ONCE && EIGHTS == 1 && cut.staged && (X_BULK || m > 2);
    const int second_half = step * (X_BYTES / 2) + X_GAP;
    auto place_of = [&](int element, int token) {
        const int half = element / 64 % 2, row = element / ITEM_K * (X_BYTES / 2) + half * second_half + token * 128;
        return row + ((element / 8 % 8 ^ (token + half * 2) % 8) * 16) + element % 8 * 2;
    };
    if (X_BULK && staged) {
        if (team == 0 && elected()) {
            barrier_expect(x_barrier, cut.items * X_BYTES);
            for (int i = 0; i < cut.items; ++i) {
                // Zeros where they are not its own: what is beyond the row.
                const int column = my_item + i < last_item ? (my_item + i) * (ITEM_K * 2) : 2 * k;
                const unsigned to = shared_address(x_stage) + (mate * cut.items + i) * (X_BYTES / 2);
                copy_box(to, &map_of_x, column, group.first, x_barrier);
                copy_box(to + second_half, &map_of_x, column + 128, group.first, x_barrier);
            }
        }
    } else if (staged) {
        const int token = warp % TOKENS;
        const bool there = token < m;
        const char* from = reinterpret_cast<const char*>(token_at(there ? token : 0) + (long long)first_item * ITEM_K);
        const unsigned to = shared_address(x_stage);
        const int pieces = step * (ITEM_K / 8), all = there ? (last_item - first_item) * (ITEM_K / 8) : 0;
#pragma unroll 4
        for (int i = warp / TOKENS * WARP + lane; i < pieces; i += warps / TOKENS * WARP)
            copy_async_or_zero<16>(to + place_of(i * 8, token), from + i * 16, i < all ? 16 : 0);
        close_copies();
    }
    unsigned my_x[ITEMS][EIGHTS][16];
    auto fetch_x = [&](int item) {
        const int count = count_at(item);
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const bool there = 8 * e + g < m;
            const T* token = token_at(there ? 8 * e + g : 0);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
                for (int j = 0; j < 16; ++j) my_x[i][e][j] = 0;
                Decoder::load_x(
                    my_x[i][e], token + (item + i) * ITEM_K, there && i < count, k - (item + i) * ITEM_K, t);
            }
        }
    };
    auto arrange_x = [&] {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) Decoder::arrange(my_x[i][e]);
    };
    if (chunks == 1 && !staged) fetch_x(my_item);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
        if (i * GROUP < cut.items && (i == 0 || !HELD_BACK)) start(i, 0, 0);
    if (SPREAD && nested_absmax) spread.offset = *nested_offset;
    if (SPREAD && t < ITEMS) spread.store(scales_to, EIGHT);

    // What the sums lack.
    if (threadIdx.x == 0) factor[0] = scale_of_all, factor[1] = Decoder::AFTER / power;
    // The copies of x came first.
    if (!X_BULK && staged) copies_arrived<1>();
    __syncthreads();
    if (staged) {
        if (X_BULK) barrier_wait(x_barrier, 0);
        const unsigned from = shared_address(x_stage) + mate * cut.items * (X_BYTES / 2);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = min(i, cut.items - 1);  // there may be less of them, and nothing behind
            Decoder::take_x(my_x[i][0], [&](int at) { return from + item * (X_BYTES / 2) + place_of(at, g); }, t);
        }
    }
    if (chunks == 1) arrange_x();

    // The sums of a warp: 16 bytes a lane, as mma leaves them. They are in the gaps of the table where there are any.
    constexpr int EIGHT_LANES = Decoder::GAPS ? ENTRY_STRIDE : 128, EIGHT_TOKENS = 4 * EIGHT_LANES;
    constexpr int SUMS = EIGHTS * EIGHT_TOKENS;
    const unsigned my_sums = kept(
        (Decoder::GAPS ? own_block + TABLE_AT + 128 : shared_address(sums)) + lane / 8 * EIGHT_LANES + lane % 8 * 16);
    // Where those of a slot of the ring begin, of all blocks of the cluster, and in which of them.
    const unsigned rank = CLUSTER == 1 ? 0 : blockIdx.z;
    auto sums_of = [&](unsigned slot) {
        return my_sums + (slot / CLUSTER * teams + team) * (CLUSTER * cut.warps * SUMS);
    };
    auto owner_of = [&](unsigned slot) { return (slot + team) % CLUSTER; };
    const unsigned offset = kept(own_block | Decoder::lane_offset(lane));
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
                const unsigned scale_at = scales_from + scales_at;
                advance();
#pragma unroll
                for (int i = 0; i < GROUPS; ++i) {
                    if (i * GROUP >= cut.items) break;
                    if (BULK && EVEN) barrier_wait(barriers + i * 8, scales_at != 0);
                    if constexpr (HELD_BACK && GROUPS == 2)
                        if (pass == 0 && i == 0 && GROUP < cut.items) fetch_group(1, my_item, my_first * ITEM_ROWS, 0);
                    if (!(BULK && EVEN) && cut.items > GROUP) copies_arrived<GROUPS - 1>();
                    else if (!(BULK && EVEN) || i == 0) copies_arrived<0>();
                    __syncwarp();
                    unsigned word[GROUP][2][Decoder::WORDS], read = 0;
#pragma unroll
                    for (int j = 0; j < GROUP; ++j)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int behind = i * GROUP_BYTES + h * 8 * Slot::ROW;
                            if constexpr (BOX > 1) Decoder::read_turned(word[j][h], slot_from, j, behind);
                            else
                                Decoder::template read<Decoder::OWN>(
                                    word[j][h], slot_from + j * Slot::BYTES + behind, Slot::turn(my_row), t);
                            read |= word[j][h][Decoder::WORDS - 1];  // the last one to arrive
                        }
                    __syncwarp();
                    start(i, SCALES - scales_at, read);
                    // They were on their way while the groups before were multiplied.
                    if (SPREAD && t < ITEMS && (i == GROUPS - 1 || (i + 1) * GROUP >= cut.items))
                        spread.store(scales_to + SCALES - scales_at, EIGHT);
#pragma unroll
                    for (int j = 0; j < GROUP; ++j) {
                        const int nth = i * GROUP + j;
                        if (nth >= count) continue;
                        unsigned field[2][Decoder::FIELDS];
                        Decoder::unpack(word[j], field);
                        const unsigned at = scale_at + nth * Decoder::SCALE_BYTES;
                        Decoder::template multiply<EIGHTS>(field, my_x[nth], offset, at, EIGHT, acc);
                    }
                }
                scales_at = SCALES - scales_at;
            }
            const unsigned slot = pass % RING;
            ring_wait(ring + slot * 16 + 8, pass / RING & 1 ^ 1);
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
            ring_wait(ring + slot * 16, before / RING & 1);
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
                const int at = i / 4 * TOKENS + t * 2 + i % 2;
                const int row = (my_first + before * teams) * ITEM_ROWS + my_row + i / 2 % 2 * 8;
                if (at >= mine.count || (!EVEN && row >= n)) continue;
                const float product = sum[i / 4][i % 4] * scale;
                const long long to = product_of(mine.first + at) * n + row;
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

// y[n] = x[k] W[n, k]^T for one token; tiles are whole, and rows whole units of ITEMS items that begin at multiples of
// 16 bytes.
//
// Each thread block has a run of tiles of 16 rows, whose units of ITEMS items stand in a row, tile after tile; each
// warp takes an equal part of them. x is in shared memory, arranged. The weights pass through a slot of a warp, which
// starts to copy a box of the next unit as soon as it has read that of this one. A warp leaves a sum for each tile that
// it meets: at place tile + warp, which grows with every one of them. Those of a tile are added up in their order.
template <typename Decoder, int ITEMS, int WARPS>
__global__ void __launch_bounds__(WARPS* WARP, 1) linear_one(
    const typename Decoder::Type* x, const char* packed, const char* absmax, const float* tensor_scale,
    const float* values, const void* bias, typename Decoder::Type* y, int bias_kind, int n, int k, int run,
    const __grid_constant__ Values codebook, const __grid_constant__ TensorMap map_of_weights) {
#if __CUDA_ARCH__ >= 800
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

    let_next_start();

    // What to copy next.
    const int pitch = items * Decoder::ITEM_BYTES, scale_pitch = items * Decoder::SCALE_BYTES;
    const unsigned my_slot = shared_address(slots) + warp * UNIT_BYTES;
    const unsigned my_scales = shared_address(stages) + warp * SCALES;
    const unsigned scales_to = kept(my_scales + lane * SCALE_PIECE);
    const unsigned barriers = shared_address(head) + BARRIERS_AT + warp * (Box::BOXES * 8);
    if (BULK && lane == 0) {
        for (int b = 0; b < Box::BOXES; ++b) barrier_init(barriers + b * 8, 1);
        barriers_ready();
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
            if (there && elected()) {
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
        close_copies();
        ahead_byte += UNIT, scale_source += SCALE_UNIT;
        if (ahead_byte == pitch) ahead_byte = 0, ahead_row += ITEM_ROWS, scale_source += 15 * scale_pitch;
    };
    if (BULK && begin < end && elected()) prefetch_box(&map_of_weights, ahead_byte, ahead_row);
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

    const unsigned offset = kept(Decoder::lane_offset(lane));
    const unsigned slot_from = kept(my_slot + Box::place(g, t * Box::OWN));
    const unsigned scales_from = kept(my_scales + g * SCALE_UNIT);
    const unsigned first_line = kept(shared_address(lines) + g % 2 * 64 + t * 16);
    const unsigned line_end = kept(first_line + items * 2 * Line::STEP);
    const unsigned has_x = kept(g / 2 == t);
    unsigned word_x[8] = {}, line = first_line + unit * ITEMS * 2 * Line::STEP, parity = 0, seen_scales;
    float acc[2] = {};
    auto leave = [&] {  // the sums of a tile, of the four lanes
        float* to = sums + (tile + warp) * ITEM_ROWS;
        float sum = (t & 1 ? acc[1] : acc[0]) + __shfl_xor_sync(FULL_WARP, t & 1 ? acc[0] : acc[1], 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (t < 2) to[g + t * 8] = sum;
        acc[0] = acc[1] = 0.0f;
    };
    for (int left = kept(end - begin); left > 0; --left) {
#pragma unroll
        for (int b = 0; b < Box::BOXES; ++b) {
            if (BULK) barrier_wait(barriers + b * 8, parity);
            if (b == 0) copies_arrived<0>();
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

// y[m, n] = the sum of partial[parts][m, n], in the order of the parts, plus the bias.
template <typename T>
__global__ void add_partials(
    const float* partial, const void* bias, T* y, long long size, int parts, int bias_kind, int n) {
    let_next_start();
    wait_for_previous();
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size;
         i += (long long)gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (int p = 0; p < parts; ++p) sum += partial[p * size + i];
        store(y + i, sum + bias_at<T>(bias, bias_kind, int(i % n)));
    }
}

// y[t, n] = the sum over the slots s of weights[t, s] * products[t, s, n], in their order.
template <typename T>
__global__ void combine_slots(const float* products, const float* weights, T* y, long long size, int slots, int n) {
    let_next_start();
    wait_for_previous();
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size;
         i += (long long)gridDim.x * blockDim.x) {
        const long long token = i / n;
        float sum = 0.0f;
        for (int s = 0; s < slots; ++s)
            sum = fmaf(weights[token * slots + s], products[(token * slots + s) * n + i % n], sum);
        store(y + i, sum);
    }
}

// Sort products by expert: order[products] lists them, groups[room] cuts that list into at most 8 of one expert each.
// Ids outside 0 .. experts - 1 stand for no expert. One thread block; dynamic shared memory: experts + 1 numbers.
template <typename Id>
__global__ void __launch_bounds__(1024, 1)
    group_tokens(const Id* ids, int* order, Group* groups, int products, int experts, int room) {
    let_next_start();
    extern __shared__ uint4 dynamic[];
    int* count = reinterpret_cast<int*>(dynamic);  // of each expert, then where its next product goes
    auto bin_of = [&](int p) { return ids[p] >= Id(0) && ids[p] < Id(experts) ? int(ids[p]) : experts; };
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) count[e] = 0;
    wait_for_previous();
    for (int i = threadIdx.x; i < room; i += blockDim.x) groups[i] = Group{-1, 0, 0, 0};
    __syncthreads();
    for (int p = threadIdx.x; p < products; p += blockDim.x) atomicAdd(count + bin_of(p), 1);
    __syncthreads();
    if (threadIdx.x < WARP) {  // one warp adds up, 32 experts at a time
        int products_before = 0, groups_before = 0;
        for (int base = 0; base <= experts; base += WARP) {
            const int e = base + threadIdx.x, mine = e <= experts ? count[e] : 0, cuts = (mine + TOKENS - 1) / TOKENS;
            int sum = mine, cut_sum = cuts;
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                const int a = __shfl_up_sync(FULL_WARP, sum, step), b = __shfl_up_sync(FULL_WARP, cut_sum, step);
                if (int(threadIdx.x) >= step) sum += a, cut_sum += b;
            }
            if (e <= experts) {
                const int begin = products_before + sum - mine, group = groups_before + cut_sum - cuts;
                count[e] = begin;
                for (int i = 0; i < cuts; ++i)
                    groups[group + i] =
                        Group{e < experts ? e : -1, begin + i * TOKENS, min(TOKENS, mine - i * TOKENS), 0};
            }
            products_before += __shfl_sync(FULL_WARP, sum, WARP - 1);
            groups_before += __shfl_sync(FULL_WARP, cut_sum, WARP - 1);
        }
    }
    __syncthreads();
    for (int p = threadIdx.x; p < products; p += blockDim.x) order[atomicAdd(count + bin_of(p), 1)] = p;
}
