// Products with compressed weights: dequantize and multiply is written once, over a decoder.
#include "linear.cuh"

constexpr int FEW_THREADS = 512, FEW_WARPS = FEW_THREADS / WARP;

template <typename T>
__device__ __forceinline__ float bias_at(const void* bias, int kind, int row) {
    if (kind == 0) return 0.0f;
    return kind == 1 ? to_float(static_cast<const T*>(bias)[row]) : static_cast<const float*>(bias)[row];
}

__device__ __forceinline__ void store(__half* y, float v) { *y = __float2half_rn(v); }
__device__ __forceinline__ void store(__nv_bfloat16* y, float v) { *y = __float2bfloat16_rn(v); }
__device__ __forceinline__ void store(float* y, float v) { *y = v; }

// Where the scales of a weight come from, and how a turn of them gets to shared memory: for each of `rows` rows the
// bytes of `span` items.
struct Scales {
    const char* absmax;
    const float* nested_absmax;  // double quantization: float32[blocks / 256], or null
    const float* nested_offset;
    const float* map;  // the values of its 8-bit codes
    long long above;   // rows before the first
    int n, k;
    int width;  // bytes copied at a time, 16, 4 or 1; 0 where they are spread: one float32 for each SUB elements
    int shift;  // log2 of the elements of a block, where they are spread

    template <int SCALE_BYTES>
    __device__ __forceinline__ void start(char* stage, int row, int rows, int item, int span, int lane) const {
        const int row_bytes = span * SCALE_BYTES, row_shift = 31 - __clz(row_bytes);  // a power of two
        if (width) {
            const int item_bytes = SCALE_BYTES;
            // Bytes of a whole row, and of it what follows `item`.
            const long long pitch = (long long)k / ITEM_K * item_bytes + (long long)(k % ITEM_K) * item_bytes / ITEM_K;
            const long long left = pitch - (long long)item * item_bytes;
            for (int i = lane * width; i < rows * row_bytes; i += WARP * width) {
                const int r = i >> row_shift, at = i & (row_bytes - 1);
                const char* source = absmax + (above + min(row + r, n - 1)) * pitch + (long long)item * item_bytes + at;
                if (at < left) {
                    if (width == 16)
                        copy_async(reinterpret_cast<uint4*>(stage + i), reinterpret_cast<const uint4*>(source));
                    else if (width == 4)
                        copy_word_async(
                            reinterpret_cast<unsigned*>(stage + i), reinterpret_cast<const unsigned*>(source));
                    else stage[i] = *source;
                } else {
                    for (int b = 0; b < width; ++b) stage[i + b] = 0;
                }
            }
        } else {
            constexpr int SUB = ITEM_K * 4 / SCALE_BYTES;
            for (int i = lane; i < rows * row_bytes / 4; i += WARP) {
                const int r = i >> (row_shift - 2), start = item * ITEM_K + (i & (row_bytes / 4 - 1)) * SUB;
                float* target = reinterpret_cast<float*>(stage) + i;
                if (start >= k) {
                    *target = 0.0f;
                    continue;
                }
                const long long block = ((above + min(row + r, n - 1)) * k + start) >> shift;
                if (nested_absmax) {
                    const float v = map[reinterpret_cast<const unsigned char*>(absmax)[block]];
                    *target = __fadd_rn(__fmul_rn(v, nested_absmax[block / 256]), *nested_offset);
                } else {
                    copy_word_async(
                        reinterpret_cast<unsigned*>(target), reinterpret_cast<const unsigned*>(absmax) + block);
                }
            }
        }
    }
};

// How the work of linear_few is cut; the host chooses (see linear.py).
struct Cut {
    int run;         // tiles of 16 rows of a thread block
    int pairs;       // pairs of tiles that a warp takes at a time, at most PAIRS; with fewer, more items of k in turn
    int warps_log2;  // warps that share k; the others take other tiles
    int span;        // items of a turn, a power of two
    int share;       // items of k of a thread block, a multiple of span
    int width;       // see Scales
};

// The tokens that one expert multiplies in one thread block: order[first .. first + count] of them.
struct Group {
    int expert;  // -1: none, the products are zero
    int first, count, unused;
};

// y[m, n] = x[m, k] W[n, k]^T, EIGHTS * 8 tokens a thread block, gridDim.x of them.
//
// Each thread block has a run of tiles of 16 rows. Teams of its warps share out the tiles, the warps of a team k, a
// turn of `span` items at a time; they add up in shared memory, in the order of the warps. gridDim.z thread blocks
// share k: then partial[gridDim.z][m][n] receives the sums, and add_partials adds them up.
//
// While a pair of tiles is multiplied, the weights of the next one are on their way to registers, and the scales of the
// next turn on their way to shared memory. All loads to registers are waited for at one point of a round, before any of
// the next is issued: a warp has six counters to wait for loads with, the lookups need most of them, and whatever loads
// share one are only known to have arrived together.
//
// GROUPED: W is [experts][n][k] and thread block x takes the tokens of groups[x]: product number p = order[i] is
// that of row p / divisor of x; expert e has tensor_scale[e * scale_step]. Otherwise the tokens are taken as they come.
template <typename Decoder, int EIGHTS, bool GROUPED>
__global__ void __launch_bounds__(FEW_THREADS, 1) linear_few(
    const char* packed, const char* absmax, const float* nested_absmax, const float* nested_offset,
    const float* tensor_scale, const float* values, const typename Decoder::Type* x, const void* bias,
    typename Decoder::Type* y, float* partial, const Group* groups, const int* order, int divisor, int scale_step,
    int bias_kind, int tokens, int n, int k, int block, const __grid_constant__ Cut cut,
    const __grid_constant__ Values codebook) {
#if __CUDA_ARCH__ >= 800  // Turing's 64 KiB of shared memory are too few: the host never asks it
    using T = typename Decoder::Type;
    constexpr int PAIRS = EIGHTS == 1 && !GROUPED ? Decoder::PAIRS : 1, TILES = 2 * PAIRS,
                  SUM_SIZE = ITEM_ROWS * TOKENS * EIGHTS;
    extern __shared__ uint4 dynamic[];
    const unsigned window = static_cast<unsigned>(__cvta_generic_to_shared(dynamic));
    char* table = reinterpret_cast<char*>(dynamic) + (TABLE_AT - window);
    float* factor = reinterpret_cast<float*>(table + Decoder::ENTRIES * ENTRY_STRIDE);
    float* sums = factor + 4;  // where the table has no gaps
    char* stages = reinterpret_cast<char*>(Decoder::GAPS ? sums : sums + FEW_WARPS * TILES * SUM_SIZE);

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int pairs = cut.pairs, tiles = 2 * pairs;
    const int k_warps = 1 << cut.warps_log2, teams = FEW_WARPS >> cut.warps_log2;
    const int first = blockIdx.y * cut.run, last = min((n + ITEM_ROWS - 1) / ITEM_ROWS, first + cut.run);
    const int my_first = first + (warp >> cut.warps_log2) * tiles;
    const int last_item = min((k + ITEM_K - 1) / ITEM_K, int(blockIdx.z + 1) * cut.share);
    const int my_item = blockIdx.z * cut.share + (warp & (k_warps - 1)) * cut.span, stride = k_warps * cut.span;

    // Read again where it is needed: registers are scarce in between.
    auto my_group = [&] {
        if constexpr (GROUPED) return groups[blockIdx.x];
        const int begin = int(blockIdx.x) * TOKENS * EIGHTS;
        return Group{0, begin, min(tokens - begin, TOKENS * EIGHTS), 0};
    };
    auto product_of = [&](int i) { return (long long)(GROUPED ? order[i] : i); };
    const Group group = my_group();
    const int m = group.count;
    if (GROUPED && m == 0) return;
    if (GROUPED && group.expert < 0) {
        const int rows = min(last * ITEM_ROWS, n) - first * ITEM_ROWS;
        for (int i = threadIdx.x; i < rows * m; i += FEW_THREADS) {
            const long long to = product_of(group.first + i / rows) * n + first * ITEM_ROWS + i % rows;
            if (partial) partial[to] = 0.0f;
            else store(y + to, 0.0f);
        }
        return;
    }
    const long long above = GROUPED ? (long long)group.expert * n : 0;  // rows of the experts before

    const unsigned row_bytes = cut.span * Decoder::SCALE_BYTES, stage_bytes = tiles * ITEM_ROWS * row_bytes;
    unsigned stage =
        warp * 2 * stage_bytes;  // offset of the scales of this turn; those of the next one are beside them
    const unsigned both_stages = 2 * stage + stage_bytes;
    const Scales scales{absmax, nested_absmax, nested_offset, codebook.map, above, n, k, cut.width, 31 - __clz(block)};
    // Offsets of 32 bits from the first weights that the thread block reads.
    const unsigned pitch =
        unsigned((long long)k / ITEM_K * Decoder::ITEM_BYTES + k % ITEM_K * Decoder::ITEM_BYTES / ITEM_K);
    const char* origin = packed + (above + first * ITEM_ROWS) * pitch;
    const int last_row = n - 1 - first * ITEM_ROWS;
    const T* token[EIGHTS];
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
        token[e] = x + product_of(group.first + (8 * e + g < m ? 8 * e + g : 0)) / (GROUPED ? divisor : 1) * k;

    constexpr bool EARLY = EIGHTS == 1 && Decoder::EARLY;
    unsigned word[2][2][Decoder::WORDS] = {}, next_x[EIGHTS][16] = {}, now_x[EIGHTS][16];
    auto fetch = [&](int tile, int item, int end) {
        if (item < end && tile < last) {
            const int row = (tile - first) * ITEM_ROWS + g;
            const unsigned at = item * Decoder::ITEM_BYTES + t * Decoder::LANE_BYTES;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                Decoder::load(
                    word[i / 2][i % 2], origin + (min(row + 8 * i, last_row) * pitch + at), k - item * ITEM_K, t);
        }
    };
    auto fetch_x = [&](int item, int end) {
        if (item < end) {
            const int left = k - item * ITEM_K;
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
                if (left < ITEM_K) {  // what is not there must be zero
#pragma unroll
                    for (int i = 0; i < 16; ++i) next_x[e][i] = 0;
                }
                Decoder::load_x(next_x[e], token[e] + item * ITEM_K, 8 * e + g < m, left, t);
            }
        }
    };
    auto start_scales = [&](int tile, int item, unsigned to) {
        if (item < last_item && tile < last)
            scales.start<Decoder::SCALE_BYTES>(stages + to, tile * ITEM_ROWS, tiles * ITEM_ROWS, item, cut.span, lane);
        close_copies();
    };
    auto end_of = [&](int turn) { return min(turn + cut.span, last_item); };

    fetch(my_first, my_item, end_of(my_item));
    fetch_x(my_item, last_item);
    start_scales(my_first, my_item, stage);
    const float* value = values ? values : codebook.value;
    const float power = power_below(value, Decoder::VALUES) * codebook.factor;
    Decoder::build(table, value, power, threadIdx.x, FEW_THREADS);
    if (threadIdx.x == 0)  // what the sums lack
        factor[0] = tensor_scale ? tensor_scale[group.expert * scale_step] : 1.0f, factor[1] = 1.0f / power;
    __syncthreads();

    const unsigned offset = Decoder::lane_offset(lane);
    for (int pass = first; pass < last; pass += teams * tiles) {
        const int tile = pass + my_first - first;
        float acc[PAIRS][2][EIGHTS][4] = {};
        for (int turn = my_item; turn < last_item && tile < last; turn += stride) {
            copies_arrived<0>();
            __syncwarp();
            // Where the next turn is: worked out again where it is needed, for the registers' sake.
            auto ends = [&] { return turn + stride >= last_item; };
            auto next_turn = [&] { return ends() ? my_item : turn + stride; };
            auto next_tile = [&] { return ends() ? tile + teams * tiles : tile; };
            const int end = end_of(turn);
            start_scales(next_tile(), next_turn(), both_stages - stage);
            unsigned scale_at = static_cast<unsigned>(__cvta_generic_to_shared(stages + stage)) + g * row_bytes;
            for (int item = turn; item < end; ++item) {
                const bool wraps = item + 1 == end;
                const int ahead = wraps ? next_turn() : item + 1, ahead_end = wraps ? end_of(ahead) : end;
                const int ahead_tile = wraps ? next_tile() : tile;
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    if (p == pairs) break;
                    if (p == 0) {
#pragma unroll
                        for (int e = 0; e < EIGHTS; ++e) {
#pragma unroll
                            for (int i = 0; i < 16; ++i) now_x[e][i] = next_x[e][i];
                            Decoder::arrange(now_x[e]);
                        }
                    }
                    unsigned field[2][2][Decoder::FIELDS];
                    Decoder::unpack(word, field);
                    const bool here = p + 1 < pairs;
                    fetch(here ? tile + 2 * (p + 1) : ahead_tile, here ? item : ahead, here ? end : ahead_end);
                    if (EARLY && p == 0) fetch_x(ahead, ahead_end);
                    if (tile + 2 * p < last)
                        Decoder::multiply(
                            field, now_x, offset, scale_at + 2 * p * ITEM_ROWS * row_bytes, 8 * row_bytes, t, acc[p]);
                    if (!EARLY && p + 1 == pairs) {
                        if (8 * (EIGHTS - 1) + g >= m) {  // the registers hold x in another order by now
#pragma unroll
                            for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                                for (int i = 0; i < 16; ++i) next_x[e][i] = 0;
                        }
                        fetch_x(ahead, ahead_end);
                    }
                }
                scale_at += Decoder::SCALE_BYTES;
            }
            stage = both_stages - stage;
        }

        // Where a sum stands among those of an item: by tokens, each pair of them turned by eight banks against the
        // pair before, so that the lanes of a warp meet in no bank; in the gaps of the table where there are any.
        auto sum_at = [&](int w, int slot, int at, int row) -> float& {
            const int i = (w * TILES + slot) * SUM_SIZE + at / 2 * 32 + ((at % 2 * ITEM_ROWS + row + at / 2 * 8) & 31);
            if (Decoder::GAPS) return *reinterpret_cast<float*>(table + (i / 32 * ENTRY_STRIDE + 128 + i % 32 * 4));
            return sums[i];
        };
        if (pass != first) __syncthreads();  // the sums before have been read
#pragma unroll
        for (int s = 0; s < TILES; ++s) {
            if (s == tiles) break;
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sum_at(warp, s, e * TOKENS + t * 2 + i % 2, g + i / 2 * 8) = acc[s / 2][s % 2][e][i];
        }
        __syncthreads();
        const Group mine = my_group();
        for (int i = threadIdx.x; i < teams * tiles * SUM_SIZE; i += FEW_THREADS) {
            const int down = i / SUM_SIZE, at = i / ITEM_ROWS % (TOKENS * EIGHTS), r = i % ITEM_ROWS;
            const int row = (pass + down) * ITEM_ROWS + r;
            if (at >= mine.count || row >= n || pass + down >= last) continue;
            const int w = down / tiles << cut.warps_log2;
            float sum = 0.0f;
            for (int j = 0; j < k_warps; ++j) sum += sum_at(w + j, down & (tiles - 1), at, r);
            sum = sum * factor[0] * factor[1];
            const long long to = product_of(mine.first + at) * n + row;
            if (partial) partial[(long long)blockIdx.z * tokens * n + to] = sum;
            else store(y + to, sum + bias_at<T>(bias, bias_kind, row));
        }
    }
#endif
}

// y[m, n] = the sum of partial[parts][m, n], in the order of the parts, plus the bias.
template <typename T>
__global__ void add_partials(
    const float* partial, int parts, const void* bias, int bias_kind, T* y, long long size, int n) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size;
         i += (long long)gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (int p = 0; p < parts; ++p) sum += partial[p * size + i];
        store(y + i, sum + bias_at<T>(bias, bias_kind, int(i % n)));
    }
}

// y[t, n] = the sum over the slots s of weights[t, s] * products[t, s, n], in their order.
template <typename T>
__global__ void combine_slots(const float* products, const float* weights, int slots, T* y, long long size, int n) {
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
    group_tokens(const Id* ids, int products, int experts, int* order, Group* groups, int room) {
    extern __shared__ uint4 dynamic[];
    int* count = reinterpret_cast<int*>(dynamic);  // of each expert, then where its next product goes
    auto bin_of = [&](int p) { return ids[p] >= Id(0) && ids[p] < Id(experts) ? int(ids[p]) : experts; };
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) count[e] = 0;
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
