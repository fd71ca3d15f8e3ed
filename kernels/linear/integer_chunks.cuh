// Products of integer codes on Hopper in which sums of 64 rows x many tokens are float32 and fill the registers: those
// in int32, of a unit of k, come for CHUNK tokens at a time, to two sets of registers in turns. While the tensor cores
// have one chunk, the one before is scaled and added:
//
//     wgmma   u0 c0 | u0 c1 | u0 c2 | u0 c3 | u1 c0 | u1 c1 ...
//     add             u0 c0 | u0 c1 | u0 c2 | u0 c3 | u1 c0 ...
//
// Operand A stays in registers for all chunks. What comes next is decoded when the last of them has been multiplied:
// the other warpgroup has the tensor cores meanwhile. Where a stage is one unit they have turns: else both would decode
// at a time, and then wait for each other.
#pragma once
#include "linear/integer_tiles.cuh"

// A stage of a ring is FULL when the copies have arrived, EMPTY when it has been multiplied; tables likewise.
enum Barrier { FULL, EMPTY };

// a b + c, rounded once, subnormal numbers kept.
__device__ __forceinline__ float fma_ieee(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// What was made of codes to operand A, while nothing is multiplied: until then its registers must stay as they are, and
// the compiler knows that only of what defines them last.
template <typename Decoder, int N>
__device__ __forceinline__ void finish(unsigned (&a)[N][4], const typename Decoder::Zero& zero) {
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) a[i / 4][i % 4] = Decoder::finished(a[i / 4][i % 4], zero);
}

// Tells whoever fills a stage, in all blocks of a cluster, that this warp needs it no more.
template <typename S, typename Stages>
__device__ __forceinline__ void release(const Stages& ring, unsigned s) {
    const int lane = threadIdx.x % WARP;
    if constexpr (S::SHARE == 1) {
        if (lane == 0) barrier_arrive(ring.empty(s));
    } else {
        if (lane < S::SHARE) barrier_arrive(ring.empty(s), lane);
    }
}

// Scales and zero points of two rows, in turn; those of row g stand `numbers` behind the beginning of a table.
template <typename S, typename Tables>
struct RowScales {
    Tables& tables;
    unsigned numbers;
    unsigned reached = 0;  // units up to which tables have been gone through, with the one at hand

    __device__ __forceinline__ void next_table(bool wait) {
        if (reached > 0) {
            barrier_arrive(tables.barrier(EMPTY, tables.stage));
            tables.step(1);
        }
        if (wait) barrier_wait(tables.barrier(FULL, tables.stage), tables.phase);
        reached += TABLE_UNITS;
    }
    // The scales of unit u; its zero points from here on.
    __device__ __forceinline__ void take(unsigned u, float (&by)[2], typename S::Decoder::Zero& zero) {
        while (u >= reached) next_table(true);
        read(u, 0, by, zero);
    }
    // Where those of a unit stand, of the table at hand.
    __device__ __forceinline__ unsigned place(unsigned u) const {
        return tables.data() + numbers + u % TABLE_UNITS * S::TABLE_PITCH;
    }
    // The same of rows `below`, of a unit that has been reached.
    __device__ __forceinline__ void read(
        unsigned u, unsigned below, float (&by)[2], typename S::Decoder::Zero& zero) const {
        const unsigned at = place(u) + 8 * below;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint2 v = shared_at<uint2>(at + 64 * i);
            by[i] = __uint_as_float(v.x), zero.take(i, v.y);
        }
    }
    // Each of the two by itself.
    __device__ __forceinline__ static void scales_at(unsigned place, float (&by)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) by[i] = shared_at<float>(place + 64 * i);
    }
    __device__ __forceinline__ static void points_at(unsigned place, typename S::Decoder::Zero& zero) {
#pragma unroll
        for (int i = 0; i < 2; ++i) zero.take(i, shared_at<unsigned>(place + 64 * i + 4));
    }
    // Lets go the tables of a tile, those that others still need too.
    __device__ __forceinline__ void finish(int units) {
        while (reached < static_cast<unsigned>(units)) next_table(true);
        next_table(false);
    }
};

// Turns of two warpgroups: one waits for its own, and gives the other the next one. The second one gives the first.
__device__ __forceinline__ void wait_for_turn(int warpgroup) {
    asm volatile("bar.sync %0, 256;" ::"r"(3 + warpgroup) : "memory");
}
__device__ __forceinline__ void give_turn(int warpgroup) {
    asm volatile("bar.arrive %0, 256;" ::"r"(4 - warpgroup) : "memory");
}

// What a warpgroup multiplies of a tile, stages from `begin` to `end`, where UNIT is STAGE_K; else from 0 on. `group`
// of the first stage, less a multiple of TABLE_UNITS, ends ahead of stage `group_end`. Other arguments are those of
// multiply_stages. Tokens from number `offset` of the tile on: ALL of them, or half.
template <typename S, bool ALL, typename Stages, typename Tables>
__device__ __forceinline__ void multiply_chunks(
    Stages& ring, Tables& tables, unsigned codes, unsigned numbers, int begin, int end, int group_stages, int group,
    int group_end, typename S::Decoder::Zero& zero, int warpgroup, int offset, float (&total)[S::SUMS]) {
    using Decoder = typename S::Decoder;
    constexpr int CHUNK = S::CHUNK, STEPS = 4 / S::UNITS, SUMS = CHUNK / 2;
    constexpr int CHUNKS = S::TOKENS / CHUNK / (ALL ? 1 : 2), PARTS = S::UNITS * CHUNKS;
    static_assert(S::UNIT != 0 && !S::EACH && S::K_GROUPS == 1 && S::BOXES == 1 && CHUNKS % 2 == 0, "sets take turns");
    RowScales<S, Tables> scales{tables, numbers};
    float scale[S::SCALES][2];
    unsigned a[4][4];
    int sum[2][SUMS];
    unsigned raw[Decoder::RAW];
    // Sums of chunk c begin with k from that of operand `from` on; x stands for the tokens of the stage.
    auto multiply = [&](unsigned long long x, int c, int from, int set) {
        fence_sums(sum[set]);
        wgmma_begin();
#pragma unroll
        for (int s = from; s < from + STEPS; ++s)  // descriptors count in units of 16 bytes
            wgmma_bytes(sum[set], a[s], x + (c * (CHUNK * STAGE_K / 16) + 2 * s), s > from);
        wgmma_commit();
    };
    // The sums of part i of a stage, which have come, count.
    auto add = [&](int i) {
        fence_sums(sum[i % 2]);
        // An fma of three registers takes two cycles, with one that the fma before had in its place one: so some with
        // the same scale follow each other.
#pragma unroll
        for (int from = 0; from < SUMS; from += 16)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int j = from + 2 * h; j < from + 16; j += j % 2 ? 3 : 1) {
                    float& t = total[i % CHUNKS * SUMS + j];
                    t = fma_ieee(__int2float_rn(sum[i % 2][j]), scale[i / CHUNKS][h], t);
                }
    };
    const unsigned first_token = offset * STAGE_K / 16;
    if constexpr (S::UNITS == 1) {
        // What the next stage needs is fetched ahead of the last sums of this one, and its scales when those are
        // added: between two turns, each cycle until the codes are decoded counts.
        scales.next_table(true);
        unsigned place = scales.place(group);
        const unsigned long long first = wgmma_descriptor(ring.data0) + first_token;
        unsigned long long x = first + ring.stage * (S::STAGE / 16);
        barrier_wait(ring.full(ring.stage), ring.phase);
        Decoder::fetch(raw, ring.data() + codes);
        scales.points_at(place, zero);
        for (int stage = begin;;) {
            // Up to the end of the table.
            const int stop = min(end, group_end + (TABLE_UNITS - 1 - group % TABLE_UNITS) * group_stages);
            do {
                const unsigned own = ring.stage;
                ring.step(1), ++stage;
                scales.scales_at(place, scale[0]);
#pragma unroll
                for (int s = 0; s < 4; ++s) Decoder::begun(raw, s, zero, a[s]);
                finish<Decoder>(a, zero);
                fence_operands(a);
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    if (S::IN_TURNS && c == 0) wait_for_turn(warpgroup);
                    multiply(x, c, 0, c % 2);
                    if (S::IN_TURNS && c == CHUNKS - 1) give_turn(warpgroup);
                    if (c == 0) continue;
                    wgmma_wait<1>();
                    add(c - 1);
                }
                wgmma_wait<0>();
                release<S>(ring, own);
                x = ring.stage == 0 ? first : x + S::STAGE / 16;
                if (stage < end) {
                    barrier_wait(ring.full(ring.stage), ring.phase);
                    Decoder::fetch(raw, ring.data() + codes);
                }
                if (stage == group_end && stage < stop) {
                    group_end += group_stages, ++group, place += S::TABLE_PITCH;
                    scales.points_at(place, zero);
                }
                add(CHUNKS - 1);
            } while (stage < stop);
            if (stage == end) break;
            group_end += group_stages, ++group;
            scales.next_table(true);
            place = scales.place(0);
            scales.points_at(place, zero);
        }
        scales.finish(group + 1);
    } else {
        for (int stage = begin; stage < end; ++stage) {
            barrier_wait(ring.full(ring.stage), ring.phase);
            Decoder::fetch(raw, ring.data() + codes);
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                if (s % STEPS == 0) scales.take(stage * S::SCALES + s / STEPS, scale[s / STEPS], zero);
                Decoder::begun(raw, s, zero, a[s]);
            }
            finish<Decoder>(a, zero);
            fence_operands(a);
            // All 64 bits of it: where its words are joined for each wgmma, both are set anew every time.
            const unsigned long long x = wgmma_descriptor(ring.data()) + first_token;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                multiply(x, i % CHUNKS, i / CHUNKS * STEPS, i % 2);
                if (i == 0) continue;
                wgmma_wait<1>();
                add(i - 1);
            }
            wgmma_wait<0>();
            release<S>(ring, ring.stage);
            ring.step(1);
            add(PARTS - 1);
        }
        scales.finish(end * S::SCALES);
    }
}
