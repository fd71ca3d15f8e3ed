// What products of some tokens in "q8_1" and weights of q4_0 or q4_k on Hopper (sm_90a) are made of: every 32 k a
// sum of integers becomes a number, and that is most of the work.
//
//     TMA --full[stage]--> codes to registers, bytes, wgmma: 64 rows x 64 tokens x 32 k, scaled and added in float32
//     copiers: scales --full[stage]--^                                              --empty[stage]--> TMA, copiers
//
// A thread block has 128 rows and 64 tokens at a time. Its two warpgroups take stages of 256 k in turns, each with
// two tiles of 64 rows: while sums of one tile are scaled and added, those of the other are multiplied. In the end the
// sums of warpgroups and of thread blocks are added in their order.
//
// No sum is converted: the bits of an integer from 0 to 2^24 are those of a number, 2^-149 times what it is, whose
// last bits are subnormal. So each sum begins at BEGIN, 2^20, which another wgmma of constants gives: then none is
// negative. Scales are halves, those of q4_k halves times integers of 6 bits: so a scale times BEGIN is exact, and one
// fma gives the product of scale and sum, rounded once.
//
// q4_k has minima beside: of 256 k these are eight integers a row, times what the scaled codes of a token add up to in
// each 32 k, which come as three bfloat16 numbers.
//
// The contract is that of kbitcupy/products/integers.py, terms of units being added in the order of k, parts of k in
// theirs.
#pragma once
#include "linear/bulk_runs.cuh"
#include "linear/int8.cuh"
#include "linear/integer_tiles.cuh"
#include "linear/output_runs.cuh"

// Of the host (kbitcupy/products/integer_units.py), ahead of this source: UNITS_TOKENS = 64; UNITS_K = 256 of a stage;
// UNITS_ROWS = 128 at a time; UNITS_STAGES of the ring, and bytes of one, UNITS_STAGE or with q4_k UNITS_INNER_STAGE;
// UNITS_SHARE thread blocks of a cluster, or UNITS_FLAGS for thread blocks of a grid.
constexpr int SUMS = UNITS_TOKENS / 2;  // of a thread and 64 rows
constexpr int TILES = 2, GROUPS = 2;    // of 64 rows, of a warpgroup; warpgroups
constexpr int CONSUMERS = GROUPS * WARPGROUP;
constexpr int COPIERS = WARPGROUP;  // threads that make tables
constexpr int UNITS = UNITS_K / 32, CODE_ROW = UNITS_K / 2;
constexpr int X_BOX = UNITS_TOKENS * 128;
constexpr unsigned BEGIN = 1u << 20;
constexpr int CONSTANTS = 2 * 16;  // of 16 bytes, in shared memory
static_assert(UNITS_ROWS == 64 * TILES, "a warpgroup has all rows");

template <bool INNER>
struct Layout {
    // A stage: tokens, their scales, three parts of what their codes add up to, codes, a table.
    static constexpr int SCALES_AT = UNITS_K / 128 * X_BOX, SCALE_BYTES = UNITS * UNITS_TOKENS * 4;
    static constexpr int PARTS_AT = SCALES_AT + SCALE_BYTES, PART_BYTES = UNITS_TOKENS * UNITS * 2;
    static constexpr int RECORD = SCALE_BYTES + (INNER ? 3 * PART_BYTES : 0);
    static constexpr int CODES_AT = (SCALES_AT + RECORD + 1023) / 1024 * 1024;
    // Of a row: scales; minima as bfloat16. Banks differ by row.
    static constexpr int TABLE_AT = CODES_AT + UNITS_ROWS * CODE_ROW, TABLE_ROW = 48, MINIMA = 32;
    static constexpr int FACTORS_AT = TABLE_AT + UNITS_ROWS * TABLE_ROW;  // of minima
    static constexpr int BYTES = (FACTORS_AT + (INNER ? UNITS_ROWS * 4 : 0) + 1023) / 1024 * 1024;
    static_assert(BYTES == (INNER ? UNITS_INNER_STAGE : UNITS_STAGE), "as the host counts them");
    // Registers of a thread that copies, and of one that multiplies.
    static constexpr int COPYING = 56, MULTIPLYING = 224;
    static constexpr int COPIED = SCALES_AT + RECORD + UNITS_ROWS * CODE_ROW;
    // Scales are so much larger than they are, and sums times scales so much smaller: a sum's bits count 2^-149, codes
    // of q4_0 16.
    static constexpr float RAISED = INNER ? 0x1p105f : 0x1p111f, LOWERED = INNER ? 0x1p44f : 0x1p34f;
};

// ---- PTX -----------------------------------------------------------------------------------------------------------

// a b + c, rounded once, subnormal numbers kept.
__device__ __forceinline__ float fma_kept(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// sum (+)= a * b for 64 rows x 64 tokens; the old sum counts where KEEP is 1.
#define WGMMA_UNIT(shape, types, keep)                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64" shape "." types " {" LIST32 \
                 "}, {%32, %33, %34, %35}, %36, " keep ";"                         \
                 : OPERANDS32(sum, 0)                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// ... both operands being in shared memory.
__device__ __forceinline__ void wgmma_constants(int (&sum)[SUMS], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.u8 {" LIST32 "}, %32, %33, 0;"
                 : OPERANDS32(sum, 0)
                 : "l"(a), "l"(b));
}
template <bool UNSIGNED>
__device__ __forceinline__ void wgmma_unit(int (&sum)[SUMS], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (UNSIGNED) WGMMA_UNIT("k32", "s32.u8.s8", "1");
    else WGMMA_UNIT("k32", "s32.s8.s8", "1");
}
// ... of numbers of bfloat16, 16 k.
template <int KEEP>
__device__ __forceinline__ void wgmma_numbers(int (&sum)[SUMS], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (KEEP) WGMMA_UNIT("k16", "f32.bf16.bf16", "1, 1, 1, 0");
    else WGMMA_UNIT("k16", "f32.bf16.bf16", "0, 1, 1, 0");
}

// The descriptor of an operand of wgmma of which 8 tokens x 16 bytes lie together: how far it is to the next bytes of
// a token, and to the next eight tokens.
__device__ __forceinline__ unsigned long long plain_descriptor(unsigned address, unsigned along_k, unsigned next) {
    return static_cast<unsigned long long>(next >> 4) << 32 | along_k >> 4 << 16 | (address & 0x3ffffu) >> 4;
}

// ---- stages --------------------------------------------------------------------------------------------------------

// The stages of a thread block, each with two barriers for full, of even and of odd rounds, and one for empty.
// Warpgroups take stages in turns, and rings have an odd number of them: so all that a barrier for full says is for the
// same warpgroup. It has seen what came before, and parities tell the rest, in whatever order stages get full; were
// there one of a stage, a warpgroup could take the fullness before last of another's stage for that of its own.
template <int BYTES>
struct UnitsRing {
    static_assert(UNITS_STAGES % GROUPS == 1 && GROUPS == 2, "warpgroups have a stage in turns");
    static constexpr int BARRIERS = 3;
    unsigned data0, barriers;
    unsigned stage = 0, round = 0;

    // By one thread, ahead of a fence.
    __device__ __forceinline__ void begin() const {
        for (int i = 0; i < UNITS_STAGES; ++i) {
            const unsigned barrier = barriers + 8 * BARRIERS * i;
            barrier_init(barrier, 1 + COPIERS), barrier_init(barrier + 8, 1 + COPIERS);
            barrier_init(barrier + 16, WARPGROUP);
        }
    }
    __device__ __forceinline__ unsigned data() const { return data0 + stage * BYTES; }
    __device__ __forceinline__ unsigned full() const { return barriers + 8 * BARRIERS * stage + 8 * (round & 1); }
    __device__ __forceinline__ unsigned empty() const { return barriers + 8 * BARRIERS * stage + 16; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full(), round >> 1 & 1); }
    // What was here the round before is of no use any more; in the first round nothing was.
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), ~round & 1); }
    __device__ __forceinline__ void step(int by) {
        stage += by;
        if (stage >= UNITS_STAGES) stage -= UNITS_STAGES, ++round;
    }
};

// What a thread fetches of a row for a stage, and keeps in the table.
template <bool INNER>
struct RowOfTable;

template <>
struct RowOfTable<false> {
    using S = Layout<false>;
    unsigned word[4];  // eight halves

    // Block `at` of 256 k of all rows. The 64 bytes around it come to the L2 cache, as those beside it are next; more
    // would delay the first weights.
    __device__ __forceinline__ void load(const void* scale, const unsigned*, unsigned at) {
        asm volatile("ld.global.nc.L2::64B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(static_cast<const uint4*>(scale) + at));
    }
    __device__ __forceinline__ void store(unsigned stage, int row) const {
        unsigned number[8];
#pragma unroll
        for (int h = 0; h < 8; ++h) number[h] = __float_as_uint(Word<__half>::get(word[h / 2], h % 2) * S::RAISED);
        const unsigned to = stage + S::TABLE_AT + row * S::TABLE_ROW;
        store_words(to, number[0], number[1], number[2], number[3]);
        store_words(to + 16, number[4], number[5], number[6], number[7]);
    }
};

template <>
struct RowOfTable<true> {
    using S = Layout<true>;
    unsigned word[4];  // d and dmin, and 8 times two numbers of 6 bits

    __device__ __forceinline__ void store(unsigned stage, int row) const {
        const unsigned low = word[1], high = word[2], rest = word[3];
        const unsigned scale[2] = {low & 0x3f3f3f3fu, (rest & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u)};
        const unsigned least[2] = {high & 0x3f3f3f3fu, (rest >> 4 & 0x0f0f0f0fu) | (high >> 2 & 0x30303030u)};
        // Codes of odd units are multiplied where the upper half of a byte is.
        const float d[2] = {
            Word<__half>::get(word[0], 0) * S::RAISED, Word<__half>::get(word[0], 0) * (S::RAISED / 16)};
        unsigned number[8], two[4];
#pragma unroll
        for (int h = 0; h < 8; ++h) {
            const float raised = __uint_as_float(__byte_perm(scale[h / 4], 0x4b000000u, 0x7440 + h % 4));
            number[h] = __float_as_uint((raised - 8388608.0f) * d[h % 2]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 128 and the byte, less 128
            using T = __nv_bfloat16;
            const unsigned raised = __byte_perm(least[j / 2], 0x43434343u, j % 2 ? 0x4342 : 0x4140);
            two[j] = Word<T>::bits(__hadd2(Word<T>::as(raised), Word<T>::as(0xc300c300u)));
        }
        const unsigned to = stage + S::TABLE_AT + row * S::TABLE_ROW;
        store_words(to, number[0], number[1], number[2], number[3]);
        store_words(to + 16, number[4], number[5], number[6], number[7]);
        store_words(to + S::MINIMA, two[0], two[1], two[2], two[3]);
        store_shared(stage + S::FACTORS_AT + row * 4, Word<__half>::get(word[0], 1) * (-1.0f / S::LOWERED));
    }
};

// Makes the tables of a thread block, of which a thread has a row. Ahead of each stage the first of them asks for what
// else the stage has: `copy` of the ring and of the stage's number.
static_assert(UNITS_ROWS == COPIERS, "a row each");
template <bool INNER>
struct TableMaker;

// What it fetches of the next AHEAD stages waits in registers.
template <>
struct TableMaker<false> {
    using S = Layout<false>;
    static constexpr int AHEAD = 3;
    const void* scale;
    const unsigned* inner;  // none
    int own;
    unsigned begin;  // blocks of 256 k ahead of its row
    RowOfTable<false> held[AHEAD];

    __device__ __forceinline__ void load(int slot, unsigned stage) { held[slot].load(scale, inner, begin + stage); }
    // Of all stages, the first of which is number `first` of a row.
    template <typename F>
    __device__ __forceinline__ void run(UnitsRing<S::BYTES>& ring, unsigned first, int stages, const F& copy) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (i < stages) load(i, first + i);
        for (int base = 0; base < stages; base += AHEAD)
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int stage = base + i;
                if (i > 0 && stage >= stages) break;
                ring.wait_empty();
                copy(ring, stage);
                held[i].store(ring.data(), own);
                barrier_arrive(ring.full());
                ring.step(1);
                if (stage + AHEAD < stages) load(i, first + stage + AHEAD);
            }
    }
};

// It fetches four stages at a time, 16 and 48 bytes of a row, of which the rest waits in registers: words one by one
// would take four times the cycles of the L1 cache, which has a line of each row to look up. Thread blocks have a
// multiple of four stages.
template <>
struct TableMaker<true> {
    using S = Layout<true>;
    static constexpr int WIDE = 4;
    const void* scale;
    const unsigned* inner;
    int own;
    unsigned begin;           // as above
    unsigned held[4 * WIDE];  // d and dmin of each stage; three words of each

    // A fourth of what four stages want, `stage` being the first of them.
    template <int PART>
    __device__ __forceinline__ void load(unsigned stage) {
        const unsigned at = (begin + stage) / WIDE;
        const uint4* from = PART == 0 ? static_cast<const uint4*>(scale) + at
                                      : reinterpret_cast<const uint4*>(inner) + 3ull * at + (PART - 1);
        unsigned* const v = held + 4 * PART;
        asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "l"(from));
    }
    template <typename F>
    __device__ __forceinline__ void run(UnitsRing<S::BYTES>& ring, unsigned first, int stages, const F& copy) {
        if (stages > 0) load<0>(first), load<1>(first), load<2>(first), load<3>(first);
        for (int base = 0; base < stages; base += WIDE)
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                const bool more = base + WIDE < stages;
                const unsigned next = first + base + WIDE;
                ring.wait_empty();
                copy(ring, base + i);
                const unsigned (&v)[4 * WIDE] = held;
                const RowOfTable<true> row{{v[i], v[WIDE + 3 * i], v[WIDE + 3 * i + 1], v[WIDE + 3 * i + 2]}};
                row.store(ring.data(), own);
                barrier_arrive(ring.full());
                ring.step(1);
                // What is used up is fetched anew.
                if (more && i == 1) load<1>(next);
                if (more && i == 2) load<2>(next);
                if (more && i == 3) load<3>(next), load<0>(next);
            }
    }
};

// What the first of the copiers asks for: the codes of a stage, of all rows; tokens and what belongs to them.
template <bool INNER>
struct StageCopies {
    using S = Layout<INNER>;
    const TensorMap &x_map, &w_map;
    const unsigned char* records;
    // What is asked for at once delays each other: at first the stages that the warpgroups begin with.
    int ahead;

    __device__ __forceinline__ void begin(const UnitsRing<S::BYTES>& ring, int stage, int first_row) const {
        prefetch_map(&w_map);
        for (int i = 0; i < ahead; ++i) {
            const unsigned barrier = ring.barriers + 8 * UnitsRing<S::BYTES>::BARRIERS * i;
            barrier_expect(barrier, S::COPIED);
            const unsigned target = ring.data0 + i * S::BYTES + S::CODES_AT;
            copy_box(target, &w_map, (stage + i) * CODE_ROW, first_row, barrier);
        }
    }
    // Stage `stage` of rows, the thread block's number `number`; of tokens from `first_token` on, whose records begin
    // with number `record`.
    __device__ __forceinline__ void copy(
        const UnitsRing<S::BYTES>& ring, int number, int stage, int first_row, int first_token, int record) const {
        if (number == 0) wait_for_previous();
        if (number >= ahead) {
            if (number < UNITS_STAGES)
                barrier_wait(ring.barriers + 8 * UnitsRing<S::BYTES>::BARRIERS * (number - GROUPS), 0);
            barrier_expect(ring.full(), S::COPIED);
            copy_box(ring.data() + S::CODES_AT, &w_map, stage * CODE_ROW, first_row, ring.full());
        }
#pragma unroll
        for (int box = 0; box < 2; ++box)
            copy_box(ring.data() + box * X_BOX, &x_map, stage * UNITS_K + box * 128, first_token, ring.full());
        copy_run(
            ring.data() + S::SCALES_AT, records + static_cast<long long>(record + stage) * S::RECORD, S::RECORD,
            ring.full());
    }
};

// ---- the product of a warpgroup ------------------------------------------------------------------------------------

// Operand A of a unit, even or odd, of a pair whose words are those of rows g and g + 8, then those of the second 16
// bytes.
template <bool INNER, int ODD>
__device__ __forceinline__ void decode(unsigned (&a)[4], const unsigned (&word)[4], unsigned flipped) {
    if constexpr (INNER) {
#pragma unroll
        for (int w = 0; w < 4; ++w) a[w] = word[w] & (ODD ? 0xf0f0f0f0u : 0x0f0f0f0fu);
    } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = cut_bytes<0xf0f0f0f0u>(word[2 * ODD + h] << 4, flipped);
            a[2 + h] = cut_bytes<0xf0f0f0f0u>(word[2 * ODD + h], flipped);
        }
    }
}

template <bool INNER>
struct Multiplier {
    using S = Layout<INNER>;
    unsigned codes, table, minima, factors, scales;  // in a stage: of the lane
    unsigned flipped;
    unsigned long long constants[2];
    int sum[2][SUMS];
    unsigned a[2][4], word[TILES][4];
    float scale[TILES][2][2], e[SUMS / 2];

    // What both operands of a product of constants are, 28 k of 192 and one of 128, which together are 28 * 192^2 +
    // 128^2 = BEGIN: eight rows of 32 k, which serve for all. Each has its own, or ptxas would copy the one's address
    // to where it has the other's every time.
    __device__ __forceinline__ static void make_constants(uint4 (&made)[CONSTANTS]) {
        if (threadIdx.x < CONSTANTS) {
            constexpr unsigned ALL = 0xc0c0c0c0u;
            made[threadIdx.x] = make_uint4(ALL, ALL, ALL, threadIdx.x / 8 % 2 ? 0x00000080u : ALL);
            fence_async_proxy();
        }
    }
    __device__ __forceinline__ Multiplier(int warp, int lane, const uint4 (&made)[CONSTANTS]) {
        const int of_group = warp % 4 * 16, g = lane / 4, t = lane % 4;
        codes = S::CODES_AT + (of_group + lane % 16) * CODE_ROW + ((lane / 16 ^ lane % 8) << 4);
        table = S::TABLE_AT + (of_group + g) * S::TABLE_ROW;
        minima = table + S::MINIMA + 4 * t;
        factors = S::FACTORS_AT + (of_group + g) * 4;
        scales = S::SCALES_AT + 16 * t;
        flipped = opaque(RAISED);
        for (int i = 0; i < 2; ++i) constants[i] = plain_descriptor(shared_address(made + i * 16), 128, 0);
    }

    __device__ __forceinline__ void fetch_codes(unsigned data, int pair, int i) {
        load_matrices(word[i], ((data + codes) ^ pair << 5) + i * 64 * CODE_ROW);
    }
    __device__ __forceinline__ void fetch_scales(unsigned data, int pair) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint2 v = shared_at<uint2>(data + table + (64 * i + 8 * h) * S::TABLE_ROW + pair * 8);
                scale[i][h][0] = __uint_as_float(v.x), scale[i][h][1] = __uint_as_float(v.y);
            }
    }
    __device__ __forceinline__ void fetch_tokens(unsigned data, int unit) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const float4 four = shared_at<float4>(data + scales + unit * (UNITS_TOKENS * 4) + 64 * q);
            e[4 * q] = four.x, e[4 * q + 1] = four.y, e[4 * q + 2] = four.z, e[4 * q + 3] = four.w;
        }
    }
    // A unit of a tile is under way.
    template <int ODD>
    __device__ __forceinline__ void begin(unsigned data, int pair, int i) {
        decode<INNER, ODD>(a[i], word[i], flipped);
        fence_operand(a[i]);
        fence_sums(sum[i]);
        wgmma_begin();
        wgmma_constants(sum[i], constants[0], constants[1]);
        const unsigned at = pair / 2 * X_BOX + (pair % 2 * 2 + ODD) * 32;
        wgmma_unit<INNER>(sum[i], a[i], wgmma_descriptor(data) + at / 16);
        wgmma_commit();
    }
    __device__ __forceinline__ static void fence_operand(unsigned (&v)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(v[i])::"memory");
    }
    // Its sums have come, when all but PENDING are there.
    template <int ODD, int PENDING>
    __device__ __forceinline__ void add(int i, float (&total)[SUMS]) {
        wgmma_wait<PENDING>();
        fence_sums(sum[i]);
        fence_operand(a[i]);
        float less[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) less[h] = multiply_ieee(scale[i][h][ODD], __uint_as_float(0x80000000u | BEGIN));
        // An fma of three registers takes two cycles, with one that the instruction before had in its place one: so
        // those with the same scales follow each other.
#pragma unroll
        for (int from = 0; from < SUMS; from += 8) {
            float term[8];
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int j = 2 * h; j < 8; j += j % 2 ? 3 : 1)
                    term[j] = fma_kept(__int_as_float(sum[i][from + j]), scale[i][h][ODD], less[h]);
#pragma unroll
            for (int column = 0; column < 4; ++column)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int j = column / 2 * 4 + 2 * h + column % 2;
                    total[from + j] = fma_kept(term[j], e[from / 2 + column], total[from + j]);
                }
        }
    }
    // The same of minima, behind this pair: ahead of the first units nothing would hide that these are waited for.
    static constexpr int MINIMA_BEHIND = 1;
    __device__ __forceinline__ void begin_minima(unsigned data, int i) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            a[i][h] = a[i][2 + h] = shared_at<unsigned>(data + minima + (64 * i + 8 * h) * S::TABLE_ROW);
        const unsigned rest[4] = {a[i][0], a[i][1], 0, 0};
        fence_operand(a[i]);
        fence_sums(sum[i]);
        wgmma_begin();
        wgmma_numbers<0>(sum[i], a[i], plain_descriptor(data + S::PARTS_AT, S::PART_BYTES, 128));
        wgmma_numbers<1>(sum[i], rest, plain_descriptor(data + S::PARTS_AT + 2 * S::PART_BYTES, 0, 128));
        wgmma_commit();
    }
    __device__ __forceinline__ void add_minima(unsigned data, int i, float (&total)[SUMS]) {
        float less[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) less[h] = shared_at<float>(data + factors + (64 * i + 8 * h) * 4);
        wgmma_wait<1>();
        fence_sums(sum[i]);
        fence_operand(a[i]);
#pragma unroll
        for (int j = 0; j < SUMS; ++j) total[j] = fma_kept(__int_as_float(sum[i][j]), less[j / 2 % 2], total[j]);
    }

    // What a stage adds to the sums of a warpgroup.
    // EVEN, ODD   whether the scales of tokens are fetched behind the beginning of a unit, of even and of odd units. It
    //             makes no difference but to ptxas, which has registers in banks that cost fmas up to a cycle in ten
    template <bool EVEN, bool ODD>
    __device__ __forceinline__ void stage(unsigned data, float (&total)[TILES][SUMS]) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) fetch_codes(data, 0, i);
        begin<0>(data, 0, 0);
#pragma unroll
        for (int pair = 0; pair < UNITS / 2; ++pair) {
            fetch_scales(data, pair);
            if (!EVEN) fetch_tokens(data, 2 * pair);
            begin<0>(data, pair, 1);
            if (EVEN) fetch_tokens(data, 2 * pair);
            add<0, 1>(0, total[0]);
            begin<1>(data, pair, 0);
            const bool minima_next = INNER && pair == MINIMA_BEHIND;
            if (!minima_next && pair + 1 < UNITS / 2) fetch_codes(data, pair + 1, 0);
            add<0, 1>(1, total[1]);
            if (!ODD) fetch_tokens(data, 2 * pair + 1);
            begin<1>(data, pair, 1);
            if (ODD) fetch_tokens(data, 2 * pair + 1);
            if (!minima_next && pair + 1 < UNITS / 2) fetch_codes(data, pair + 1, 1);
            add<1, 1>(0, total[0]);
            if (minima_next) {
                begin_minima(data, 0);
                add<1, 1>(1, total[1]);
                begin_minima(data, 1);
                fetch_codes(data, pair + 1, 0);
                add_minima(data, 0, total[0]);
                begin<0>(data, pair + 1, 0);
                fetch_codes(data, pair + 1, 1);
                add_minima(data, 1, total[1]);
            } else if (pair + 1 < UNITS / 2) {
                begin<0>(data, pair + 1, 0);
                add<1, 1>(1, total[1]);
            } else {
                add<1, 0>(1, total[1]);
            }
        }
    }
    // Sums that the last of what was read of a stage is in: the copy engine would not wait for a load in its queue.
    __device__ __forceinline__ static void release(
        const UnitsRing<S::BYTES>& ring, const float (&total)[TILES][SUMS], unsigned nothing) {
        barrier_arrive(ordered_after(ring.empty(), __float_as_uint(total[TILES - 1][SUMS - 1]), nothing));
    }
};

// ---- results -------------------------------------------------------------------------------------------------------

// Sums of a warpgroup in shared memory: [pairs of tokens][PITCH rows][2], the odd token first.
constexpr int PITCH = UNITS_ROWS + 4, QUARTERS = UNITS_ROWS / 4;
constexpr int ITEMS_OF_ALL = UNITS_TOKENS / 2 * QUARTERS;  // of two tokens and four rows
// ptxas has what is stored together in registers beside each other, and so a sum in another bank than the token's
// scale, which lies as it came from shared memory: an fma of both waits less for its operands.
__device__ __forceinline__ void keep_sums(unsigned at, int warp, int lane, const float (&total)[TILES][SUMS]) {
    const int of_group = warp % 4 * 16, g = lane / 4, t = lane % 4;
    const unsigned to = at + (t * PITCH + of_group + g) * 8;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < SUMS; j += 2)
            asm volatile(
                "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (j / 4 * 4 * PITCH + 64 * i + j / 2 % 2 * 8) * 8),
                "f"(total[i][j + 1]), "f"(total[i][j])
                : "memory");
}
// Of an item, where its numbers stand.
__device__ __forceinline__ unsigned place_of(int item) { return (item / QUARTERS * PITCH + item % QUARTERS * 4) * 8; }
// Adds eight numbers, of which `four` gives each half.
template <typename F>
__device__ __forceinline__ void add_eight(float (&total)[8], const F& four) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float4 half = four(h);
        const float v[4] = {half.x, half.y, half.z, half.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) total[4 * h + j] = add_ieee(total[4 * h + j], v[j]);
    }
}
// Adds an item of one of them.
__device__ __forceinline__ void add_item(float (&total)[8], unsigned at) {
    add_eight(total, [&](int h) { return shared_at<float4>(at + 16 * h); });
}
// Writes an item, the results of tokens and rows from these on.
template <bool INNER>
__device__ __forceinline__ void write_item(
    const float (&total)[8], const Rescaling& rescaling, void* __restrict__ y, int token, int tokens, int row, int rows,
    int y_kind, bool aligned) {
    if (row >= rows) return;
    float bias[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = row + i < rows ? rescaling.bias_of(row + i) : 0.0f;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        if (token + n >= tokens) break;
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = add_ieee(multiply_ieee(total[2 * i + 1 - n], Layout<INNER>::LOWERED), bias[i]);
        write_run(y, y_kind, static_cast<long long>(token + n) * rows + row, v, row, rows, aligned);
    }
}
__device__ __forceinline__ bool is_aligned(const void* y, int rows) {
    return reinterpret_cast<unsigned long long>(y) % 16 == 0 && rows % 4 == 0;
}
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 3, %0;" ::"n"(CONSUMERS) : "memory"); }
