// Products of up to 64 int8 tokens and weights of q4_0 or q4_k on Hopper (sm_90a): every 32 k a sum of integers becomes
// a number, and that is most of the work. So it is mma.sync that multiplies, not wgmma: its sums begin with a number
// that stands beside them, for nothing.
//
//     TMA --full[stage]--> codes to registers, bytes, mma: 16 rows x 8 tokens x 32 k, scaled and added in float32
//     copiers: scales --full[stage]--^                                             --empty[stage]--> TMA, copiers
//
// A thread block has up to 16 tiles of 16 rows, all of K, and all tokens. Its warps, eight or with few tiles of q4_k
// sixteen, are row groups, up to TILES tiles each, times token groups, times k groups, which take stages of 256 k in
// turns; in the end their sums are added in their order.
//
// The sum of a unit begins at BEGIN, the bits of 1.5 * 2^23, and so it is the bits of a number, that and the sum: no
// conversion. Scales are halves, those of q4_k halves times integers of 6 bits: so a scale times BEGIN is exact, and
// one fma gives the product of scale and sum, rounded once.
//
// q4_k has minima beside: of 256 k these are eight integers a row, times what the scaled codes of a token add up to in
// each 32 k, which come as three bfloat16 numbers: a mma of 16 k and one of 8.
//
// The contract is that of kbitcupy/products/integers.py, terms of units being added in the order of k, parts of k in
// theirs.
#include "linear/bulk_runs.cuh"
#include "linear/int8.cuh"
#include "linear/integer_tiles.cuh"
#include "linear/output_runs.cuh"

// Of the host (kbitcupy/products/integer_batch.py), ahead of this source: BATCH_TOKENS = 64; BATCH_K = 256 of a stage,
// and BATCH_STAGES, the most of a ring; BATCH_RECORD, bytes of what stands beside the codes of tokens for 256 k of
// q4_k; BatchCut.
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

// d = a * b + c, where c are four words that stay; a of bytes with a sign or, UNSIGNED, without.
#define MMA_FROM(type)                                           \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." type            \
        ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%10, %11, %12, %13};"                                  \
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]))
template <bool UNSIGNED>
__device__ __forceinline__ void mma_from(
    int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const unsigned (&c)[4]) {
    if constexpr (UNSIGNED) MMA_FROM("u8");
    else MMA_FROM("s8");
}

// sum += a * b for 16 rows x 8 tokens x 8 k of bfloat16.
__device__ __forceinline__ void mma_of_eight(float (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// BLOCKED   whether tokens have a scale for 32 k, not one
// TILES     of 16 rows, that a warp has at the most; some have one less
// INNER     whether weights are q4_k's, with inner scales and minima; BLOCKED
template <bool BLOCKED_, int TILES_, bool INNER_>
struct Batch {
    static constexpr bool BLOCKED = BLOCKED_, INNER = INNER_;
    static_assert(BLOCKED || !INNER, "what tokens add up to is for 32 k");
    static constexpr int TILES = TILES_, TOKENS = BATCH_TOKENS, UNITS = BATCH_K / 32;
    // With few tiles of q4_k a stage is soon multiplied: tables are fetched some stages ahead, and twice as many warps
    // have half of the tokens each, so that they hide how long sums take. With q4_0 that was no sooner.
    static constexpr bool FEW = INNER && TILES <= 2;
    static constexpr int TOKEN_GROUPS = FEW ? 2 : 1, EIGHTS = TOKENS / 8 / TOKEN_GROUPS;
    static constexpr int CONSUMERS = 8 * TOKEN_GROUPS * WARP;  // threads that multiply
    static constexpr int REGISTERS = FEW ? 104 : 232;          // of each of them
    static constexpr int PITCH = (UNITS + 1) * 4;  // of a table: a row's scales of a stage; banks differ by row
    // A stage: tokens, their scales, three parts of what their codes add up to, codes, a table.
    static constexpr int X_BOX = TOKENS * 128, SCALES_AT = 2 * X_BOX;
    static constexpr int PARTS_AT = SCALES_AT + (BLOCKED ? UNITS * TOKENS * 4 : 0), PART_BYTES = TOKENS * UNITS * 2;
    static constexpr int COPIED = PARTS_AT + (INNER ? 3 * PART_BYTES : 0);  // but for codes
    static_assert(!INNER || COPIED - SCALES_AT == BATCH_RECORD, "the host reckons with the same record");
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

// Numbers of bfloat16 of two neighbouring bytes up to 63.
__device__ __forceinline__ unsigned small_numbers(unsigned two) {
    using T = __nv_bfloat16;
    const unsigned raised = __byte_perm(two, 0x43434343u, 0x4140);  // 128 and the byte
    return Word<T>::bits(__hadd2(Word<T>::as(raised), Word<T>::as(0xc300c300u)));
}

// Tables of q4_k, of all rows of a thread block: inner scales, halves, those of odd units divided by 16, as their codes
// are multiplied where the upper half of a byte is; then eight minima, bytes, d and -dmin.
constexpr int INNER_ROW = 16, FACTORS_AT = 8;

// Makes them. A thread has every COPIERS-th row; what it fetches of the next AHEAD stages waits in registers.
template <typename S>
struct InnerCopier {
    static constexpr int HELD = S::FEW ? 1 : 3, AHEAD = S::FEW ? 3 : 1;
    static_assert(16 * S::TILES * (S::FEW ? 2 : 4) <= HELD * COPIERS, "threads have all rows");
    const unsigned *factors, *inner;  // of all rows: a word and three for each 256 k
    int rows, own;                    // of the thread block; the thread's first one
    unsigned begin, step,
        last;  // blocks of 256 k: the first of its rows, how far to the next row, the last row's first
    unsigned held[AHEAD][HELD][4];

    // A word; the bytes around it come to the L2 cache, as those beside it are next.
    __device__ __forceinline__ static unsigned load_word_of_line(const unsigned* from) {
        unsigned v;
        asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from));
        return v;
    }
    // What is beyond all rows is not stored, or of no use.
    __device__ __forceinline__ void load(int slot, unsigned stage) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const unsigned at = min(begin + i * step, last) + stage;
            held[slot][i][0] = load_word_of_line(factors + at);
#pragma unroll
            for (int w = 0; w < 3; ++w) held[slot][i][1 + w] = load_word_of_line(inner + 3ull * at + w);
        }
    }
    __device__ __forceinline__ void store(int slot, unsigned table) const {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int row = own + i * COPIERS;
            if (row >= rows) return;
            const unsigned low = held[slot][i][1], high = held[slot][i][2], rest = held[slot][i][3];
            const unsigned scale[2] = {low & 0x3f3f3f3fu, (rest & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u)};
            const unsigned least[2] = {high & 0x3f3f3f3fu, (rest >> 4 & 0x0f0f0f0fu) | (high >> 2 & 0x30303030u)};
            unsigned half[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // 1024 and the byte, less 1024
                const unsigned raised = __byte_perm(scale[j / 2], 0x64646464u, j % 2 ? 0x4342 : 0x4140);
                const unsigned two =
                    Word<__half>::bits(__hadd2(Word<__half>::as(raised), Word<__half>::as(0xe400e400u)));
                half[j] = Word<__half>::multiply(two, 0x2c003c00u);
            }
            const unsigned d = __float_as_uint(Word<__half>::get(held[slot][i][0], 0));
            const unsigned dmin = __float_as_uint(-Word<__half>::get(held[slot][i][0], 1));
            store_words(table + row * INNER_ROW, half[0], half[1], half[2], half[3]);
            store_words(table + (rows + row) * INNER_ROW, least[0], least[1], d, dmin);
        }
    }
    // Of all stages.
    __device__ __forceinline__ void run(BatchRing ring, int stages, unsigned table_at) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (i == 0 || i < stages) load(i, i);
        BatchRing before = ring;
        for (int first = 0; first < stages; first += AHEAD)
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int stage = first + i;
                if (i > 0 && stage >= stages) break;
                barrier_wait(ring.empty(), ring.phase ^ 1);
                store(i, ring.data() + table_at);
                // Stages are full in their order: who has one may ask for any that there is room for.
                if (stage > 0) barrier_wait(before.full(), before.phase);
                before = ring;
                barrier_arrive(ring.full());
                ring.step(1);
                if (stage + AHEAD < stages) load(i, stage + AHEAD);
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

// Of 256 k of q4_k the minima, eight of a row, times what the codes of a token add up to, in three parts: `rows` is
// where those of the lane's first row lie in the stage.
template <typename S, int MINE>
__device__ __forceinline__ void add_minima(
    float (&total)[MINE][S::EIGHTS][4], unsigned data, unsigned rows, int first_token) {
    const unsigned lane = threadIdx.x % WARP, t = lane % 4;
    unsigned least[MINE][2];
    float less[MINE][2];
#pragma unroll
    for (int i = 0; i < MINE; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned row = data + rows + (16 * i + 8 * h) * INNER_ROW;
            least[i][h] = shared_at<unsigned short>(row + 2 * t);
            less[i][h] = shared_at<float>(row + FACTORS_AT + 4);
        }
#pragma unroll
    for (int i = 0; i < 2 * MINE; ++i) least[i / 2][i % 2] = small_numbers(least[i / 2][i % 2]);
    // Row l % 8 of part l / 8; a fourth one is not looked at.
    const unsigned parts = data + S::PARTS_AT + lane / 8 * S::PART_BYTES + (first_token + lane % 8) * (2 * S::UNITS);
#pragma unroll
    for (int j = 0; j < S::EIGHTS; ++j) {
        if (j > 0) __syncwarp();  // not fetched earlier: there are no registers for all of it
        unsigned b[4];
        load_matrices(b, parts + j * (8 * 2 * S::UNITS));
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            float d[4] = {};
            const unsigned a0 = least[i][0], a1 = least[i][1];
            mma<__nv_bfloat16>(d, a0, a1, a0, a1, b[0], b[1]);
            mma_of_eight(d, a0, a1, b[2]);
#pragma unroll
            for (int c = 0; c < 4; ++c) total[i][j][c] = fma_kept(d[c], less[i][c / 2], total[i][j][c]);
        }
    }
}

// What a warp adds up of MINE tiles and all tokens, in the stages of its k group; it goes where the ring was: [k
// group][token][row].
template <typename S, int MINE>
__device__ __forceinline__ void multiply_batch(
    BatchRing ring, const BatchCut& cut, int k_group, int k_groups, int stages, int first, int first_token,
    unsigned flipped, unsigned nothing) {
    float total[MINE][S::EIGHTS][4] = {};
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    // Where the lane's row of a matrix begins: of codes 32 rows, of tokens 16, whose halves of 32 k lie apart.
    const unsigned codes = S::CODES_AT + (first + lane) * BATCH_ROW + (lane % 8 << 4);
    const unsigned x = (first_token + lane / 16 * 8 + lane % 8) * 128 + ((lane / 8 % 2 ^ lane % 8) << 4);
    const unsigned entries = cut.table_at + (first + g) * S::PITCH;
    const unsigned inner = cut.table_at + (first + g) * INNER_ROW, beside = 16 * cut.tiles * INNER_ROW;
    const unsigned begin[4] = {opaque(BEGIN), opaque(BEGIN), opaque(BEGIN), opaque(BEGIN)};
    ring.step(k_group);
    for (int stage = k_group; stage < stages; stage += k_groups) {
        barrier_wait(ring.full(), ring.phase);
        const unsigned data = ring.data();
        unsigned word[S::TILES][S::INNER ? 4 : 2];
        float next[S::TILES][2];
        if constexpr (S::INNER) add_minima<S, MINE>(total, data, beside + inner, first_token);
        // Codes of a unit, of two tiles; a unit of q4_k is a half of all bytes of two chunks of 16.
        auto fetch_two = [&](int unit, int i) {
            constexpr int CHUNKS = S::INNER ? 2 : 1;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const unsigned from = (data + codes) ^ unit / CHUNKS * CHUNKS + chunk << 4;
                unsigned four[4];
                load_matrices(four, from + i * 16 * BATCH_ROW);
#pragma unroll
                for (int h = 0; h < 4; ++h)
                    if (i + h / 2 < S::TILES) word[i + h / 2][2 * chunk + h % 2] = four[h];
            }
        };
        auto fetch_scales = [&](int unit) {
#pragma unroll
            for (int i = 0; i < 2 * MINE; ++i) {
                if constexpr (S::INNER) {
                    const unsigned row = data + inner + 8 * i * INNER_ROW;
                    const float d = shared_at<float>(row + beside + FACTORS_AT);
                    next[i / 2][i % 2] = Word<__half>::get(shared_at<unsigned short>(row + unit * 2), 0) * d;
                } else {
                    const unsigned entry = data + entries + 8 * i * S::PITCH + unit * 4;
                    next[i / 2][i % 2] = shared_at<float>(entry);
                }
            }
        };
        auto fetch_codes = [&](int unit) {
#pragma unroll
            for (int i = 0; i < MINE; i += 2) fetch_two(unit, i);
            if (!S::INNER) fetch_scales(unit);
        };
        fetch_codes(0);
#pragma unroll 1
        for (int unit = 0; unit < S::UNITS; ++unit) {
            unsigned a[S::TILES][4];
            float scale[S::TILES][2], less[S::TILES][2];
            // These come while the first sums do: there are no registers for them earlier.
            if (S::INNER) fetch_scales(unit);
            const unsigned mask = unit % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu;
#pragma unroll
            for (int i = 0; i < MINE; ++i) {
#pragma unroll
                for (int h = 0; h < 2; ++h) scale[i][h] = next[i][h], less[i][h] = next[i][h] * -BEGIN_NUMBER;
                if constexpr (S::INNER) {
#pragma unroll
                    for (int w = 0; w < 4; ++w) a[i][w] = word[i][w] & mask;
                } else {
                    decode_tile(a[i], word[i], flipped);
                }
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
                        const uint2 v = shared_at<uint2>(
                            data + S::SCALES_AT + (unit * S::TOKENS + first_token + (j + n) * 8 + 2 * t) * 4);
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
                else if (!S::INNER) fetch_codes((unit + 1) % S::UNITS);
                const unsigned (&b)[4] = fetched[j / 2 % 2];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float (&e)[2] = of_token[j / 2 % 2][n];
#pragma unroll
                    for (int i = 0; i < MINE; ++i) {
                        int d[4];
                        mma_from<S::INNER>(d, a[i], b[2 * n], b[2 * n + 1], begin);
                        float (&sum)[4] = total[i][j + n];
#pragma unroll
                        for (int c = 0; c < 4; ++c)
                            sum[c] =
                                added_to<S>(sum[c], __int_as_float(d[c]), scale[i][c / 2], less[i][c / 2], e[c % 2]);
                        // Where those of two tiles have been used for the last time, there is room for the next ones.
                        if (S::INNER && j + n == S::EIGHTS - 1 && (i % 2 || i == MINE - 1))
                            fetch_two((unit + 1) % S::UNITS, i / 2 * 2);
                    }
                }
            }
        }
        // Sums that the last of what was read here is in: the copy engine would not wait for a load in its queue.
        barrier_arrive(ordered_after(ring.empty(), __float_as_uint(total[MINE - 1][S::EIGHTS - 1][3]), nothing));
        ring.step(k_groups);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(S::CONSUMERS) : "memory");
    const int rows = 16 * cut.tiles + 4;
    const unsigned to = ring.data0 + ((k_group * S::TOKENS + first_token + 2 * t) * rows + first + g) * 4;
#pragma unroll
    for (int j = 0; j < S::EIGHTS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const unsigned token = to + (8 * j + e) * rows * 4;
#pragma unroll
            for (int i = 0; i < 2 * MINE; ++i) store_shared(token + 32 * i, total[i / 2][j][i % 2 * 2 + e]);
        }
    asm volatile("bar.sync 1, %0;" ::"n"(S::CONSUMERS) : "memory");
}

// Adds the sums of k groups, which lie from `sums` on, in their order, and writes the outputs of a thread block.
template <typename S>
__device__ __forceinline__ void write_outputs(
    const Rescaling& rescaling, unsigned sums, int k_groups, int of_block, int first_row, void* __restrict__ y,
    int tokens, int rows, int token_step, int y_kind) {
    const int pitch = of_block + 4;
    const int eights = of_block / 8;
    const bool aligned = reinterpret_cast<unsigned long long>(y) % 16 == 0 && rows % 8 == 0;
    for (int item = threadIdx.x; item < tokens * eights; item += S::CONSUMERS) {
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
        // Codes were multiplied where the upper half of a byte is; scales of q4_k know it.
        if constexpr (!S::BLOCKED) {
            const float given = rescaling.of_token(static_cast<long long>(token) * token_step);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = multiply_ieee(multiply_ieee(v[i], 0.0625f), given);
        } else if constexpr (!S::INNER) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = multiply_ieee(v[i], 0.0625f);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (row + i < rows) v[i] = add_ieee(v[i], rescaling.bias_of(row + i));
        write_run(y, y_kind, static_cast<long long>(token) * rows + row, v, row, rows, aligned);
    }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

template <bool BLOCKED, int TILES, bool INNER>
__global__ void __launch_bounds__(Batch<BLOCKED, TILES, INNER>::CONSUMERS + WARPGROUP, 1) batch_integers(
    const __grid_constant__ TensorMap x_map,  // int8 [tokens, pitch], boxes of 128 bytes x TOKENS
    const __grid_constant__ TensorMap w_map,  // codes [rows, K / 2], boxes of 128 bytes x the rows of a thread block
    const __grid_constant__ TensorMap e_map,  // BLOCKED: float32 [units, tokens or more], boxes of 256 bytes x UNITS
    const BatchCut cut,
    void* __restrict__ y,                       // [tokens, rows] of the type that y_kind names
    const float* __restrict__ token_scale,      // [tokens], or [1] where token_step is 0; not of BLOCKED
    const void* __restrict__ scale,             // [rows, per_row]; of q4_k d and dmin, two halves, [rows, K / 256]
    const unsigned* __restrict__ inner,         // q4_k: inner scales and minima, 12 bytes, beside them
    const unsigned char* __restrict__ records,  // q4_k: BATCH_RECORD bytes of tokens, [K / 256]
    const void* __restrict__ bias,              // [rows] of the type that bias_kind names, or null
    int tokens, int rows, int depth, int per_row, int token_step,
    int lowest,  // code: below 0 they are signed, else less 8
    int bias_kind, int y_kind, unsigned nothing) {
    using S = Batch<BLOCKED, TILES, INNER>;
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * BATCH_STAGES];
    const unsigned ring0 = (shared_address(memory) + 1023u) & ~1023u;
    BatchRing ring{ring0, shared_address(barriers), cut.stages, cut.stage_bytes};
    const int row_groups = cut.row_groups, k_groups = S::CONSUMERS / WARP / S::TOKEN_GROUPS / row_groups;
    const int of_block = 16 * cut.tiles, first_row = blockIdx.x * of_block;
    const int stages = (depth + BATCH_K - 1) / BATCH_K;
    if (threadIdx.x == 0) {
        for (int i = 0; i < cut.stages; ++i) {
            barrier_init(ring.barriers + 16 * i, 1 + COPIERS);
            barrier_init(ring.barriers + 16 * i + 8, WARP * row_groups * S::TOKEN_GROUPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int warp = warp_number(), lane = threadIdx.x % WARP;
    if (threadIdx.x >= S::CONSUMERS) {
        lower_registers<40>();
        const int thread = static_cast<int>(threadIdx.x) - S::CONSUMERS - WARP;
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
                if constexpr (INNER) {
                    const unsigned char* const from = records + static_cast<long long>(stage) * BATCH_RECORD;
                    copy_run(ring.data() + S::SCALES_AT, from, BATCH_RECORD, ring.full());
                } else if constexpr (BLOCKED) {
                    copy_box(ring.data() + S::SCALES_AT, &e_map, 0, stage * S::UNITS, ring.full());
                }
                ring.step(1);
            }
        } else if (thread >= 0 && INNER) {
            const unsigned blocks = stages;
            InnerCopier<S> copier{
                static_cast<const unsigned*>(scale),
                inner,
                of_block,
                thread,
                (first_row + thread) * blocks,
                COPIERS * blocks,
                (rows - 1) * blocks};
            copier.run(ring, stages, cut.table_at);
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
    raise_registers<S::REGISTERS>();
    // Warps of a scheduler have row groups of more and of fewer tiles.
    const int token_group = warp % S::TOKEN_GROUPS, turn = warp / S::TOKEN_GROUPS, k_group = turn / row_groups;
    const bool back = !S::FEW && turn / max(4, row_groups) % 2;
    const int row_group = back ? row_groups - 1 - turn % row_groups : turn % row_groups;
    const int base = cut.tiles / row_groups, rest = cut.tiles % row_groups;
    const int mine = base + (row_group < rest), first = 16 * (row_group * base + min(row_group, rest));
    const int first_token = token_group * (8 * S::EIGHTS);
    const unsigned flipped = opaque(lowest < 0 ? 0u : RAISED);
    if (mine == TILES)
        multiply_batch<S, TILES>(ring, cut, k_group, k_groups, stages, first, first_token, flipped, nothing);
    else multiply_batch<S, TILES - 1>(ring, cut, k_group, k_groups, stages, first, first_token, flipped, nothing);
    wait_for_previous();
    const Rescaling rescaling{token_scale, nullptr, bias, bias_kind};
    write_outputs<S>(rescaling, ring0, k_groups, of_block, first_row, y, tokens, rows, token_step, y_kind);
}
