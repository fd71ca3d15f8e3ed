// Products of up to 64 int8 tokens and q4_0's weights on Hopper (sm_90a): every 32 k a sum of integers becomes a
// number, and that is most of the work. So it is mma.sync that multiplies, not wgmma: its sums begin with a number that
// stands beside them, for nothing.
//
//     TMA --full[stage]--> codes to registers, bytes, mma: 16 rows x 8 tokens x 32 k, scaled and added in float32
//     copiers: scales --full[stage]--^                                             --empty[stage]--> TMA, copiers
//
// A thread block has up to 16 tiles of 16 rows, all of K, and all tokens. Its eight warps are row groups, up to TILES
// tiles each, times k groups, which take stages of 256 k in turns; in the end their sums are added in their order.
//
// The sum of a unit begins at BEGIN, the bits of 1.5 * 2^23, and so it is the bits of a number, that and the sum: no
// conversion. Scales are halves, so a scale times BEGIN is exact, and one fma gives the product of scale and sum,
// rounded once.
//
// The contract is that of kbitcupy/products/integers.py, terms of units being added in the order of k, parts of k in
// theirs.
#include "linear/int8.cuh"
#include "linear/integer_tiles.cuh"

// Of the host (kbitcupy/products/integer_batch.py), ahead of this source: BATCH_TOKENS = 64; BATCH_K = 256 of a stage,
// and BATCH_STAGES, the most of a ring; BatchCut.
constexpr int CONSUMERS = 8 * WARP;        // threads that multiply
constexpr int COPIERS = WARPGROUP - WARP;  // threads that make tables
constexpr int BATCH_ROW = BATCH_K / 2;     // bytes of codes of a row in a stage
constexpr unsigned BEGIN = 0x4b400000u;
constexpr float BEGIN_NUMBER = 12582912.0f;

// a b + c, rounded once, subnormal numbers kept.
__device__ __forceinline__ float fma_kept(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// d = a * b + c, where c are four words that stay.
__device__ __forceinline__ void mma_from(
    int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const unsigned (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// BLOCKED   whether tokens have a scale for 32 k, not one
// TILES     of 16 rows, that a warp has at the most; some have one less
template <bool BLOCKED_, int TILES_>
struct Batch {
    static constexpr bool BLOCKED = BLOCKED_;
    static constexpr int TILES = TILES_, TOKENS = BATCH_TOKENS, EIGHTS = TOKENS / 8, UNITS = BATCH_K / 32;
    static constexpr int PITCH = (UNITS + 1) * 4;  // of a table: a row's scales of a stage; banks differ by row
    // A stage: tokens, their scales, codes, a table.
    static constexpr int X_BOX = TOKENS * 128, SCALES_AT = 2 * X_BOX;
    static constexpr int COPIED = SCALES_AT + (BLOCKED ? UNITS * TOKENS * 4 : 0);  // but for codes
    static constexpr int CODES_AT = (COPIED + 1023) / 1024 * 1024;
};

// The stages of a thread block, each with a barrier for full and one for empty.
struct BatchRing {
    unsigned data0, barriers;
    int stages, bytes;
    unsigned stage = 0, phase = 0;

    __device__ __forceinline__ unsigned data() const { return data0 + stage * bytes; }
    __device__ __forceinline__ unsigned full() const { return barriers + 16 * stage; }
    __device__ __forceinline__ unsigned empty() const { return barriers + 16 * stage + 8; }
    __device__ __forceinline__ void step(int by) {
        stage += by;
        if (stage >= stages) stage -= stages, phase ^= 1;
    }
};

// ---- tables of a stage ---------------------------------------------------------------------------------------------

// Makes the tables of a thread block. A thread has every COPIERS-th row; what it fetches, eight halves each, waits in
// registers until the stage before has been multiplied. Few instructions between a fetch and the next are what counts
// here.
template <typename S>
struct TableCopier {
    static constexpr int HELD = 3;
    static_assert(S::UNITS == 8, "a row's scales of a stage are 16 bytes");
    const uint4* scale;
    unsigned per_row;               // scales
    int rows, row;                  // of the thread block; the thread's first one
    unsigned scales, begin, limit;  // of all rows; where those of that row begin; the last place there is
    unsigned held[HELD][4], place;

    __device__ __forceinline__
    TableCopier(const uint4* scale, unsigned per_row, int first_row, int rows, int all_rows, int thread)
        : scale(scale), per_row(per_row), rows(rows), row(thread) {
        begin = (first_row + row) * per_row;
        scales = all_rows * per_row;
        limit = scales - S::UNITS;
    }
    // Of HELD rows of a thread.
    __device__ __forceinline__ int chunks() const { return (rows + HELD * COPIERS - 1) / (HELD * COPIERS); }
    // Of row i of a chunk. What is beyond all rows is not stored.
    __device__ __forceinline__ unsigned at(int i) const { return min(place + i * COPIERS * per_row, limit); }
    __device__ __forceinline__ void load(int stage, int chunk) {
        place = begin + chunk * HELD * COPIERS * per_row;
        place += stage * S::UNITS;
#pragma unroll
        for (int i = 0; i < HELD; ++i) load_line(held[i], scale + at(i) / 8);
    }
    // The 256 bytes around them come to the L2 cache, as those beside them are next.
    __device__ __forceinline__ static void load_line(unsigned (&word)[4], const uint4* from) {
        asm volatile("ld.global.nc.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(from));
    }
    __device__ __forceinline__ void store(int chunk, unsigned table) const {
        const int first = row + chunk * HELD * COPIERS;
        const unsigned target = table + first * S::PITCH;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (first + i * COPIERS >= rows) return;
            const unsigned to = target + i * COPIERS * S::PITCH;
            const unsigned (&word)[4] = held[i];
#pragma unroll
            for (int h = 0; h < 8; ++h) store_shared(to + 4 * h, Word<__half>::get(word[h / 2], h % 2));
        }
    }
};

// ---- the product of a warp -----------------------------------------------------------------------------------------

// The sum of a unit, in the bits of `number`, counts: BEGIN comes off, and scales go on.
template <typename S>
__device__ __forceinline__ float added_to(float sum, float number, float scale, float less, float of_token) {
    const float term = fma_kept(number, scale, less);
    if constexpr (S::BLOCKED) return fma_kept(term, of_token, sum);
    else return add_ieee(sum, term);
}

// Words of codes of 16 rows and 32 k as operand A: the lane's of row g, and of row g + 8.
__device__ __forceinline__ void decode_tile(unsigned (&a)[4], const unsigned (&word)[2], unsigned flipped) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        a[h] = cut_bytes<0xf0f0f0f0u>(word[h] << 4, flipped);
        a[2 + h] = cut_bytes<0xf0f0f0f0u>(word[h], flipped);
    }
}

// What a warp adds up of MINE tiles and all tokens, in the stages of its k group; it goes where the ring was: [k
// group][token][row].
template <typename S, int MINE>
__device__ __forceinline__ void multiply_batch(
    BatchRing ring, const BatchCut& cut, int k_group, int k_groups, int stages, int first, unsigned flipped,
    unsigned nothing) {
    float total[MINE][S::EIGHTS][4] = {};
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    // Where the lane's row of a matrix begins: of codes 32 rows, of tokens 16, whose halves of 32 k lie apart.
    const unsigned codes = S::CODES_AT + (first + lane) * BATCH_ROW + (lane % 8 << 4);
    const unsigned x = (lane / 16 * 8 + lane % 8) * 128 + ((lane / 8 % 2 ^ lane % 8) << 4);
    const unsigned entries = cut.table_at + (first + g) * S::PITCH;
    const unsigned begin[4] = {opaque(BEGIN), opaque(BEGIN), opaque(BEGIN), opaque(BEGIN)};
    ring.step(k_group);
    for (int stage = k_group; stage < stages; stage += k_groups) {
        barrier_wait(ring.full(), ring.phase);
        const unsigned data = ring.data();
        unsigned word[S::TILES][2];
        float next[S::TILES][2];
        // Codes of a unit, and scales.
        auto fetch_codes = [&](int unit) {
            const unsigned from = (data + codes) ^ unit << 4;
#pragma unroll
            for (int i = 0; i < MINE; i += 2) {  // two tiles
                unsigned four[4];
                load_matrices(four, from + i * 16 * BATCH_ROW);
#pragma unroll
                for (int h = 0; h < 4; ++h)
                    if (i + h / 2 < S::TILES) word[i + h / 2][h % 2] = four[h];
            }
#pragma unroll
            for (int i = 0; i < 2 * MINE; ++i) {
                const unsigned entry = data + entries + 8 * i * S::PITCH + unit * 4;
                next[i / 2][i % 2] = shared_at<float>(entry);
            }
        };
        fetch_codes(0);
#pragma unroll 1
        for (int unit = 0; unit < S::UNITS; ++unit) {
            unsigned a[S::TILES][4];
            float scale[S::TILES][2], less[S::TILES][2];
#pragma unroll
            for (int i = 0; i < MINE; ++i) {
#pragma unroll
                for (int h = 0; h < 2; ++h) scale[i][h] = next[i][h], less[i][h] = next[i][h] * -BEGIN_NUMBER;
                decode_tile(a[i], word[i], flipped);
            }
            const unsigned tokens = (data + unit / 4 * S::X_BOX + x) ^ unit % 4 << 5;
            unsigned fetched[2][4];
            float of_token[2][2][2] = {};
            auto fetch = [&](int j) {
                const int to = j / 2 % 2;
                load_matrices(fetched[to], tokens + j * 1024);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    if constexpr (S::BLOCKED) {
                        const uint2 v =
                            shared_at<uint2>(data + S::SCALES_AT + (unit * S::TOKENS + (j + n) * 8 + 2 * t) * 4);
                        of_token[to][n][0] = __uint_as_float(v.x), of_token[to][n][1] = __uint_as_float(v.y);
                    }
                }
            };
            fetch(0);
#pragma unroll
            for (int j = 0; j < S::EIGHTS; j += 2) {
                // What is fetched here is not fetched earlier: there are no registers for all of it.
                if (j > 0) __syncwarp();
                if (j + 2 < S::EIGHTS) fetch(j + 2);
                else fetch_codes((unit + 1) % S::UNITS);
                const unsigned (&b)[4] = fetched[j / 2 % 2];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float (&e)[2] = of_token[j / 2 % 2][n];
#pragma unroll
                    for (int i = 0; i < MINE; ++i) {
                        int d[4];
                        mma_from(d, a[i], b[2 * n], b[2 * n + 1], begin);
                        float (&sum)[4] = total[i][j + n];
#pragma unroll
                        for (int c = 0; c < 4; ++c)
                            sum[c] =
                                added_to<S>(sum[c], __int_as_float(d[c]), scale[i][c / 2], less[i][c / 2], e[c % 2]);
                    }
                }
            }
        }
        // Sums that the last of what was read here is in: the copy engine would not wait for a load in its queue.
        barrier_arrive(ordered_after(ring.empty(), __float_as_uint(total[MINE - 1][S::EIGHTS - 1][3]), nothing));
        ring.step(k_groups);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    const int rows = 16 * cut.tiles + 4;
    const unsigned to = ring.data0 + ((k_group * S::TOKENS + 2 * t) * rows + first + g) * 4;
#pragma unroll
    for (int j = 0; j < S::EIGHTS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const unsigned token = to + (8 * j + e) * rows * 4;
#pragma unroll
            for (int i = 0; i < 2 * MINE; ++i) store_shared(token + 32 * i, total[i / 2][j][i % 2 * 2 + e]);
        }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

// Adds the sums of k groups, which lie from `sums` on, in their order, and writes the outputs of a thread block.
template <typename S>
__device__ __forceinline__ void write_outputs(
    const Rescaling& rescaling, unsigned sums, int k_groups, int of_block, int first_row, void* __restrict__ y,
    int tokens, int rows, int token_step, int y_kind) {
    const int pitch = of_block + 4;
    const int eights = of_block / 8;
    const int width = y_kind == FLOAT32_BIAS ? 4 : 2;
    const bool aligned = reinterpret_cast<unsigned long long>(y) % 16 == 0 && rows % 8 == 0;
    for (int item = threadIdx.x; item < tokens * eights; item += CONSUMERS) {
        const int token = item / eights, of = item % eights * 8, row = first_row + of;
        if (row >= rows) continue;
        float v[8] = {};
        for (int part = 0; part < k_groups; ++part) {
            const unsigned from = sums + ((part * S::TOKENS + token) * pitch + of) * 4;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 four = shared_at<float4>(from + 16 * h);
                v[4 * h] += four.x, v[4 * h + 1] += four.y, v[4 * h + 2] += four.z, v[4 * h + 3] += four.w;
            }
        }
        // Codes were multiplied where the upper half of a byte is.
        if constexpr (!S::BLOCKED) {
            const float given = rescaling.of_token(static_cast<long long>(token) * token_step);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = multiply_ieee(multiply_ieee(v[i], 0.0625f), given);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = multiply_ieee(v[i], 0.0625f);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (row + i < rows) v[i] = add_ieee(v[i], rescaling.bias_of(row + i));
        const long long at = static_cast<long long>(token) * rows + row;
        if (width == 4) {
            float* target = static_cast<float*>(y) + at;
            if (aligned) {
                *reinterpret_cast<float4*>(target) = make_float4(v[0], v[1], v[2], v[3]);
                *reinterpret_cast<float4*>(target + 4) = make_float4(v[4], v[5], v[6], v[7]);
            } else {
                for (int i = 0; i < 8; ++i)
                    if (row + i < rows) target[i] = v[i];
            }
        } else {
            unsigned word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                word[i] = y_kind == FLOAT16_BIAS ? Word<__half>::pack(v[2 * i], v[2 * i + 1])
                                                 : Word<__nv_bfloat16>::pack(v[2 * i], v[2 * i + 1]);
            unsigned short* target = static_cast<unsigned short*>(y) + at;
            if (aligned) {
                *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (row + i < rows) target[i] = static_cast<unsigned short>(word[i / 2] >> i % 2 * 16);
            }
        }
    }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

template <bool BLOCKED, int TILES>
__global__ void __launch_bounds__(CONSUMERS + WARPGROUP, 1) batch_integers(
    const __grid_constant__ TensorMap x_map,  // int8 [tokens, pitch], boxes of 128 bytes x TOKENS
    const __grid_constant__ TensorMap w_map,  // codes [rows, K / 2], boxes of 128 bytes x the rows of a thread block
    const __grid_constant__ TensorMap e_map,  // BLOCKED: float32 [units, tokens or more], boxes of 256 bytes x UNITS
    const BatchCut cut,
    void* __restrict__ y,                   // [tokens, rows] of the type that y_kind names
    const float* __restrict__ token_scale,  // [tokens], or [1] where token_step is 0; not of BLOCKED
    const void* __restrict__ scale,         // [rows, per_row]
    const void* __restrict__ bias,          // [rows] of the type that bias_kind names, or null
    int tokens, int rows, int depth, int per_row, int token_step,
    int lowest,  // code: below 0 they are signed, else less 8
    int bias_kind, int y_kind, unsigned nothing) {
    using S = Batch<BLOCKED, TILES>;
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * BATCH_STAGES];
    const unsigned ring0 = (shared_address(memory) + 1023u) & ~1023u;
    BatchRing ring{ring0, shared_address(barriers), cut.stages, cut.stage_bytes};
    const int row_groups = cut.row_groups, k_groups = CONSUMERS / WARP / row_groups;
    const int of_block = 16 * cut.tiles, first_row = blockIdx.x * of_block;
    const int stages = (depth + BATCH_K - 1) / BATCH_K;
    if (threadIdx.x == 0) {
        for (int i = 0; i < cut.stages; ++i) {
            barrier_init(ring.barriers + 16 * i, 1 + COPIERS);
            barrier_init(ring.barriers + 16 * i + 8, WARP * row_groups);
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int warp = warp_number(), lane = threadIdx.x % WARP;
    if (threadIdx.x >= CONSUMERS) {
        lower_registers<40>();
        const int thread = static_cast<int>(threadIdx.x) - CONSUMERS - WARP;
        if (thread == -WARP) {
            const unsigned bytes = S::COPIED + of_block * BATCH_ROW;
            const int ahead = min(stages, cut.stages);
            for (int stage = 0; stage < ahead; ++stage) {
                const unsigned barrier = ring.barriers + 16 * stage;
                barrier_expect(barrier, bytes);
                copy_box(ring.data0 + stage * ring.bytes + S::CODES_AT, &w_map, stage * BATCH_ROW, first_row, barrier);
            }
            wait_for_previous();
            for (int stage = 0; stage < stages; ++stage) {
                if (stage >= ahead) {
                    barrier_wait(ring.empty(), ring.phase ^ 1);
                    barrier_expect(ring.full(), bytes);
                    copy_box(ring.data() + S::CODES_AT, &w_map, stage * BATCH_ROW, first_row, ring.full());
                }
#pragma unroll
                for (int box = 0; box < 2; ++box)
                    copy_box(ring.data() + box * S::X_BOX, &x_map, stage * BATCH_K + box * 128, 0, ring.full());
                if constexpr (BLOCKED) copy_box(ring.data() + S::SCALES_AT, &e_map, 0, stage * S::UNITS, ring.full());
                ring.step(1);
            }
        } else if (thread >= 0) {
            TableCopier<S> copier(static_cast<const uint4*>(scale), per_row, first_row, of_block, rows, thread);
            const int chunks = copier.chunks();
            copier.load(0, 0);
            for (int stage = 0; stage < stages; ++stage) {
                barrier_wait(ring.empty(), ring.phase ^ 1);
#pragma unroll 1
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    copier.store(chunk, ring.data() + cut.table_at);
                    const bool last = chunk == chunks - 1;
                    if (!last || stage + 1 < stages) copier.load(stage + last, last ? 0 : chunk + 1);
                }
                barrier_arrive(ring.full());
                ring.step(1);
            }
        }
        return;
    }
    raise_registers<232>();
    // Warps of a scheduler have row groups of more and of fewer tiles.
    const int k_group = warp / row_groups;
    const int row_group = warp / max(4, row_groups) % 2 ? row_groups - 1 - warp % row_groups : warp % row_groups;
    const int base = cut.tiles / row_groups, rest = cut.tiles % row_groups;
    const int mine = base + (row_group < rest), first = 16 * (row_group * base + min(row_group, rest));
    const unsigned flipped = opaque(lowest < 0 ? 0u : RAISED);
    if (mine == TILES) multiply_batch<S, TILES>(ring, cut, k_group, k_groups, stages, first, flipped, nothing);
    else multiply_batch<S, TILES - 1>(ring, cut, k_group, k_groups, stages, first, flipped, nothing);
    wait_for_previous();
    const Rescaling rescaling{token_scale, nullptr, bias, bias_kind};
    write_outputs<S>(rescaling, ring0, k_groups, of_block, first_row, y, tokens, rows, token_step, y_kind);
}
