// Products of integer codes and few tokens on Hopper, where every STAGE_K a sum of integers becomes a number: a
// warpgroup has two tiles of 64 rows, whose sums come to two sets of registers in turns. While the tensor cores have
// one of them, the one before is scaled and added, and the next one is decoded:
//
//     wgmma    k0 r0 | k0 r1 | k1 r0 | k1 r1 ...
//     add              k0 r0 | k0 r1 | k1 r0 ...
#pragma once
#include "linear/integer_chunks.cuh"

// What a warpgroup multiplies of its tiles; arguments as those of multiply_stages. Sums of the second tile follow those
// of the first one.
template <typename S, typename Stages, typename Tables>
__device__ __forceinline__ void multiply_pairs(
    Stages& ring, Tables& tables, unsigned codes, unsigned numbers, int stages, int units,
    typename S::Decoder::Zero& zero, float (&total)[S::TILES * S::SUMS]) {
    using Decoder = typename S::Decoder;
    static_assert(TABLE_UNITS % S::BOXES == 0, "a stage has what it needs from one table");
    static_assert(S::UNIT == STAGE_K && S::TILES == 2 && S::K_GROUPS == 1 && !S::EACH, "sets take turns");
    constexpr int STEPS = 2 * S::BOXES;
    RowScales<S, Tables> scales{tables, numbers};
    int sum[2][S::SUMS];
    float scale[2][2], next[2];
    unsigned a[2][4][4], raw[Decoder::RAW];
    // The sums of a tile, which have come, count.
    auto add = [&](int n) {
        fence_sums(sum[n % 2]);
        fence_operands(a[n % 2]);
#pragma unroll
        for (int j = 0; j < S::SUMS; ++j) {
            float& t = total[n % 2 * S::SUMS + j];
            t = fma_ieee(__int2float_rn(sum[n % 2][j]), scale[n % 2][j / 2 % 2], t);
        }
    };
    for (int stage = 0; stage < stages; ++stage) {
        if (stage * S::BOXES % TABLE_UNITS == 0) scales.next_table(true);
        barrier_wait(ring.full(ring.stage), ring.phase);
        const unsigned data = ring.data(ring.stage);
        auto fetch = [&](int n) {
            const unsigned from = data + codes + n % 2 * (64 * S::ROW_BYTES);
            scales.read(stage * S::BOXES + n / 2, n % 2 * 64, next, zero);
            Decoder::fetch(raw, from ^ n / 2 * Decoder::ROW_BYTES);
        };
        fetch(0);
#pragma unroll
        for (int n = 0; n < STEPS; ++n) {
            const int i = n % 2;
#pragma unroll
            for (int s = 0; s < 4; ++s) Decoder::begun(raw, s, zero, a[i][s]);
            finish<Decoder>(a[i], zero);
            scale[i][0] = next[0], scale[i][1] = next[1];
            if (n + 1 < STEPS) fetch(n + 1);  // which has time until it is needed
            fence_operands(a[i]);
            fence_sums(sum[i]);
            wgmma_begin();
            const unsigned long long x = wgmma_descriptor(data + n / 2 * S::X_BYTES);
#pragma unroll
            for (int s = 0; s < 4; ++s) wgmma_bytes(sum[i], a[i][s], x + 2 * s, s > 0);  // in units of 16 bytes
            wgmma_commit();
            if (n == 0) continue;
            wgmma_wait<1>();
            add(n - 1);
        }
        wgmma_wait<0>();
        release<S>(ring, ring.stage);
        ring.step(1);
        add(STEPS - 1);
    }
    scales.finish(units);
}
