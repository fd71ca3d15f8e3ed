// linear_records: y = x W^T of up to 8 tokens with weights of any GGUF type that has a decoder of records, and with
// mixtures of experts, on any GPU from sm_80 on (kbitcupy/products/records.py). KBIT_FORMAT_HEADER has the decoder.
//
//     fields of W --cp.async--> records of 16 rows, two stages a warp --decode--> fragments \\
//     x --once, in the order of fragments--> shared memory ------------------------------------ mma.sync --> sums
//
// A thread block has every gridDim.x-th tile of 16 rows. Its warps share k: each goes through every warps-th record of
// a row (256 elements), and has the next one under way, of this tile or the one behind it, while it multiplies. Their
// sums meet in shared memory, where one warp, another for each tile, adds them up in the order of the warps: the others
// go on, as there are two places for sums. So one barrier a tile is enough.
//
// Split-k: gridDim.y thread blocks share k where x is too long for shared memory; add_partials adds them up.
#include "linear/epilogue.cuh"
#include "linear/integers.cuh"
#include KBIT_FORMAT_HEADER

// Of the host, ahead of this source, beside what decoder.cuh names: struct RecordPlanes, the addresses of fields; and
//     struct RecordCut
//         records, share         of a row; of these a thread block's
//         table, x, sums_of_x, sums, stages    where they begin in shared memory

struct SharedRecord {
    unsigned at, narrow;
    __device__ __forceinline__ unsigned word(int byte) const { return shared_at<unsigned>(at + byte); }
};
struct SharedTable {
    unsigned at;
    __device__ __forceinline__ unsigned word(unsigned i) const { return shared_at<unsigned>(at + 4 * i); }
    __device__ __forceinline__ unsigned pair(unsigned i) const { return shared_at<unsigned short>(at + 2 * i); }
};

// How a warp copies the records of 16 rows.
template <typename R>
struct RecordCopy16 {
    using Layout = RecordLayout<R>;
    const RecordPlanes& planes;
    int lane;

    // Start to copy; the record of row `first` has number `number`, that of the row below is `pitch` further, and there
    // are `rows` of them.
    __device__ __forceinline__ void start(unsigned stage, unsigned number, unsigned pitch, int rows) const {
#pragma unroll
        for (int i = 0; i < R::FIELDS; ++i) {
            if (Layout::piece(i) == 16) field<16>(i, stage, number, pitch, rows);
            else if (Layout::piece(i) == 8) field<8>(i, stage, number, pitch, rows);
            else if (Layout::piece(i) == 4) field<4>(i, stage, number, pitch, rows);
        }
    }
    template <int PIECE>
    __device__ __forceinline__ void field(int i, unsigned stage, unsigned number, unsigned pitch, int rows) const {
        const int per_row = R::bytes(i) / PIECE, all = ITEM_ROWS * per_row;
        const char* from = reinterpret_cast<const char*>(planes.field[i]);
#pragma unroll
        for (int first = 0; first < all; first += WARP) {
            const int piece = first + lane, row = piece / per_row, at = piece % per_row * PIECE;
            const char* source = from + ((unsigned long long)(number + min(row, rows - 1) * pitch) * R::bytes(i) + at);
            copy_async_if<PIECE>(
                stage + row * Layout::stride() + Layout::at(i) + at, source, all % WARP == 0 || piece < all);
        }
    }

    // The fields of 2 bytes of one record.
    __device__ __forceinline__ unsigned narrow(unsigned number) const {
        unsigned found = 0;
        int shift = 0;
#pragma unroll
        for (int i = 0; i < R::FIELDS; ++i) {
            if (Layout::piece(i)) continue;
            found |= unsigned(__ldg(reinterpret_cast<const unsigned short*>(planes.field[i]) + number)) << shift;
            shift += 16;
        }
        return found;
    }
};

// Four bytes of a decoder as integers of T: elements 0 and 2, then 1 and 3.
template <typename T, typename R>
__device__ __forceinline__ void integers_of(const R& r, int s, unsigned (&a)[2]) {
    const unsigned codes = r.codes(s);
    constexpr bool HALF = SameType<T, __half>::VALUE;
    if constexpr (R::WIDE && !HALF) {
        // A bfloat16 has room for seven bits: 128 + u % 128, less 128 or 256, is u - 128.
        static_assert(R::BIAS == 128, "bytes with 128 in the middle");
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned bytes = i ? codes >> 8 : codes;
            a[i] = subtract_pairs<T>(masked<0x007f007fu>(bytes, 0x43004300u), masked<0x00800080u>(bytes, 0x43804380u));
        }
    } else {
        // Below the upper byte of 1024 (128), less that and the bias.
        constexpr unsigned UPPER = HALF ? 0x64646464u : 0x43434343u;
        constexpr unsigned MINUS = (HALF ? 0xe400u : 0xc300u) + R::BIAS;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            a[i] = add_pairs<T>(__byte_perm(codes, UPPER, i ? 0x4341 : 0x4240), MINUS * 0x00010001u);
    }
    if constexpr (R::FLIPS) {
#pragma unroll
        for (int i = 0; i < 2; ++i) a[i] = masked<0x80008000u>(r.flips(s, i), a[i]);
    }
}

// acc += W x of one record of 16 rows. `stage` is the address of row g's, x that of the lane's part of this record's x,
// sums_of_x of the sums of its tokens.
template <typename T, typename R>
__device__ __forceinline__ void multiply_record(
    unsigned stage, const unsigned (&narrow)[2], const SharedTable& table, unsigned x, unsigned pitch,
    unsigned sums_of_x, int t, float (&acc)[4]) {
    constexpr int STEPS = R::SUB / 16, STRIDE = RecordLayout<R>::stride();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        R r[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) r[i].load(SharedRecord{stage + i * 8 * STRIDE, narrow[i]}, table, t, half);
        float part[4];
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            uint4 four;
            if (s % 2 == 0) four = shared_at<uint4>(x + (half * 4 + s / 2) * pitch);
            if (s % STEPS == 0) part[0] = part[1] = part[2] = part[3] = 0.0f;
            unsigned a[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) integers_of<T>(r[i], s, a[i]);
            mma<T>(part, a[0][0], a[1][0], a[0][1], a[1][1], s % 2 ? four.z : four.x, s % 2 ? four.w : four.y);
            if (s % STEPS != STEPS - 1) continue;
            const int j = s / STEPS;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float factor = r[i].factor(j);
                acc[2 * i] = fmaf(part[2 * i], factor, acc[2 * i]);
                acc[2 * i + 1] = fmaf(part[2 * i + 1], factor, acc[2 * i + 1]);
            }
            if constexpr (R::OFFSETS) {
                const uint2 both = shared_at<uint2>(sums_of_x + (half * (8 / STEPS) + j) * (TOKENS * 4));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float offset = r[i].offset(j);
                    acc[2 * i] = fmaf(__uint_as_float(both.x), offset, acc[2 * i]);
                    acc[2 * i + 1] = fmaf(__uint_as_float(both.y), offset, acc[2 * i + 1]);
                }
            }
        }
    }
}

// x of the tokens in the order of fragments: of each record, two steps and token 16 bytes a lane t; and the sums of SUB
// neighbours. `token_at(m)` is where token m's part begins, `records` of it.
template <typename T, typename R, typename Token>
__device__ __forceinline__ void stage_x(const Token& token_at, int m, int records, unsigned x, unsigned sums_of_x) {
    for (int token = 0; token < m; ++token) {
        const uint4* from = reinterpret_cast<const uint4*>(token_at(token));
        for (int octet = threadIdx.x; octet < records * (RECORD / 8); octet += blockDim.x) {
            unsigned w[4];
            to_words(w, __ldg(from + octet));
            const int record = octet / (RECORD / 8), k = octet % (RECORD / 8) * 8;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = k + 4 * i;
                const int step = R::ORDER == BY_SIXTEEN ? at / 16 : at / 32 * 2 + at / 4 % 2;
                const int lane = R::ORDER == BY_SIXTEEN ? at / 4 % 4 : at / 8 % 4;
                const unsigned to = x + ((record * 8 + step / 2) * m + token) * 64 + lane * 16 + step % 2 * 8;
                asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to),
                             "r"(__byte_perm(w[2 * i], w[2 * i + 1], 0x5410)),
                             "r"(__byte_perm(w[2 * i], w[2 * i + 1], 0x7632))
                             : "memory");
            }
            if constexpr (R::OFFSETS) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) sum += Word<T>::get(w[i], 0) + Word<T>::get(w[i], 1);
#pragma unroll
                for (int other = 1; other < R::SUB / 8; other *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, other);
                if (octet % (R::SUB / 8) == 0)
                    store_shared(sums_of_x + (octet / (R::SUB / 8) * TOKENS + token) * 4, sum);
            }
        }
    }
}

// The sums of a tile: 16 bytes a lane, as mma leaves them.
constexpr int TILE_SUMS = WARP * 16;

// GROUPED   W is [experts][n][k] and thread block z takes the products of groups[z], of one expert
template <typename T, typename R, bool GROUPED>
__global__ void __launch_bounds__(512, 1) linear_records(
    const T* x,                                   // [tokens, k]
    const __grid_constant__ RecordPlanes planes,  // of W
    const float* tensor_scale,                    // [1], or [experts] with a scale_step of 1; null: 1
    const void* bias,                             // [n], see bias_at
    T* y,                                         // [tokens, n]
    float* partial,                               // [gridDim.y, tokens, n] sums in place of y, or null
    const Group* groups,                          // [gridDim.z], GROUPED
    const int* order,                             // [products], GROUPED: product order[i] is entry i of the groups
    int divisor,                                  // GROUPED: product p is that of row p / divisor of x
    int scale_step,                               // GROUPED: expert e has tensor_scale[e * scale_step]
    int bias_kind,                                // see bias_at
    int tokens, int n,                            // rows of x and of W (of one expert)
    const __grid_constant__ RecordCut cut) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 dynamic[];
    constexpr int STAGE = ITEM_ROWS * RecordLayout<R>::stride();
    const int warps = blockDim.x / WARP, lane = threadIdx.x % WARP, warp = warp_number(), g = lane / 4, t = lane % 4;
    const unsigned base = shared_address(dynamic);
    const SharedTable table{base + cut.table};
    launch_dependents();
    if constexpr (R::TABLE > 0) {
        const unsigned* entries = R::entries();
        for (int i = threadIdx.x; i < R::TABLE; i += blockDim.x)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(table.at + 4 * i), "r"(__ldg(entries + i)) : "memory");
    }
    wait_for_previous();
    const Group group = [&] {
        if constexpr (GROUPED) return groups[blockIdx.z];
        const int begin = int(blockIdx.z) * TOKENS;
        return Group{0, begin, min(tokens - begin, TOKENS), 0};
    }();
    auto product_of = [&](int i) { return (long long)(GROUPED ? order[group.first + i] : group.first + i); };
    const int m = group.count, tiles = (n + ITEM_ROWS - 1) / ITEM_ROWS;
    if (m == 0) return;
    if (GROUPED && group.expert < 0) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n * m; i += gridDim.x * blockDim.x) {
            const long long to = product_of(i / n) * n + i % n;
            if (partial) partial[to] = 0.0f;
            else store(y + to, 0.0f);
        }
        return;
    }
    const unsigned records = cut.records;
    const int first = int(blockIdx.y) * cut.share, last = min(cut.records, first + cut.share);
    const unsigned above = GROUPED ? group.expert * unsigned(n) : 0;
    const RecordCopy16<R> copies{planes, lane};

    // What to copy next, and where.
    int ahead_tile = blockIdx.x, ahead = first + warp;
    unsigned slot = 0, coming[2] = {};
    const unsigned stages = base + cut.stages + warp * (2 * STAGE);
    auto start = [&] {
        if (ahead_tile < tiles && ahead < last) {
            const int row = ahead_tile * ITEM_ROWS, rows = n - row;
            const unsigned number = (above + row) * records + ahead;
            copies.start(stages + slot * STAGE, number, records, rows);
            coming[0] = copies.narrow(number + min(g, rows - 1) * records);
            coming[1] = copies.narrow(number + min(g + 8, rows - 1) * records);
            ahead += warps;
            if (ahead >= last) ahead = first + warp, ahead_tile += gridDim.x;
        }
        commit_copies();
    };
    start();
    stage_x<T, R>(
        [&](int i) { return x + (product_of(i) / (GROUPED ? divisor : 1) * records + first) * RECORD; }, m,
        last - first, base + cut.x, base + cut.sums_of_x);
    __syncthreads();
    // Tokens that are not there may be any.
    const unsigned my_x = base + cut.x + min(g, m - 1) * 64 + t * 16, x_pitch = m * 64;
    const unsigned my_sums_of_x = base + cut.sums_of_x + t * 8;
    const unsigned my_sums = base + cut.sums + lane * 16;
    const float scale = tensor_scale ? tensor_scale[GROUPED ? group.expert * scale_step : 0] : 1.0f;
    int turn = 0;  // the warp that adds up
    for (int tile = blockIdx.x, nth = 0; tile < tiles; tile += gridDim.x, ++nth) {
        float acc[4] = {};
        for (int item = first + warp; item < last; item += warps) {
            wait_copies<0>();
            __syncwarp();
            const unsigned stage = stages + slot * STAGE + g * RecordLayout<R>::stride();
            const unsigned narrow[2] = {coming[0], coming[1]};
            slot ^= 1;
            start();
            const int at = item - first;
            multiply_record<T, R>(
                stage, narrow, table, my_x + at * 8 * x_pitch, x_pitch,
                my_sums_of_x + at * (RECORD / R::SUB) * (TOKENS * 4), t, acc);
        }
        const unsigned sums = my_sums + nth % 2 * warps * TILE_SUMS;
        store_shared(sums + warp * TILE_SUMS, acc);
        __syncthreads();
        if (warp == turn) {
            float sum[4] = {};
            for (int other = 0; other < warps; ++other) {
                const float4 v = shared_at<float4>(sums + other * TILE_SUMS);
                sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = t * 2 + i % 2, row = tile * ITEM_ROWS + g + i / 2 * 8;
                if (at >= m || row >= n) continue;
                const long long to = product_of(at) * n + row;
                if (partial) partial[(long long)blockIdx.y * tokens * n + to] = sum[i] * scale;
                else store(y + to, sum[i] * scale + bias_at<T>(bias, bias_kind, row));
            }
        }
        turn = turn + 1 == warps ? 0 : turn + 1;
    }
#endif
}
