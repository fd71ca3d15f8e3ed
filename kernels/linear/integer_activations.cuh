// Where the codes of quantized tokens lie for products of integers. What reads them names a layout:
//
//     ROWS          row after row, each of `pitch` bytes
//     HALF_ROWS     the same, as halves
//     ROWS_SPLIT    as ROWS, but of every 32 k the even ones stand first, then the odd ones
//
// and the others are by fragments of 64 k and 8 tokens, of which lane (g, t), g = lane / 4 and t = lane % 4, has 16
// bytes: b0 and b1 of two mma m16n8k32 of token g. Which k are in a lane's eight bytes, beginning at
//
//     IN_TURN       8 t of the 32 of the mma, in order
//     NIBBLES       8 t of them, the even ones first: four bits each, in order
//     HALVES        4 t and 16 + 4 t of them: fields of 16 bytes
//     HALVES_IN_TURN  the same, one of the first four and one of the others in turn
//     OWN_BYTES     16 t of 64, and 8 more for the second mma
//     OWN_NIBBLES   32 t of 128, and 8 more for each mma, the even ones first
#pragma once
#include "common/types.cuh"

// Of the host (kbitcupy/products/integer_activations.py), ahead of this source: these names, and FRAGMENT_K = 64.
constexpr int MEMBER_BYTES = FRAGMENT_K;  // of a token in a fragment

__device__ __forceinline__ constexpr bool evens_first(int layout) {
    return layout == ROWS_SPLIT || layout == NIBBLES || layout == OWN_NIBBLES;
}

// Of fragments: number of the 64 k, and where among the bytes of a token in it, k to k + 3 lie, or, where evens are
// first, the even ones of k to k + 7, for k a multiple of 8; and how far behind them the other four.
struct Place {
    int fragment, at, behind;
};
__device__ __forceinline__ constexpr Place place_in_fragment(int layout, int k) {
    int lane = k % 32 / 8, mma = k / 32, half = 0, behind = 4;
    if (layout == HALVES) half = lane / 2 * 4, lane = lane % 2 * 2, behind = 16;
    if (layout == OWN_BYTES) lane = k % 64 / 16, mma = k / 64 * 2 + k % 16 / 8;
    if (layout == OWN_NIBBLES) lane = k % 128 / 32, mma = k / 128 * 4 + k % 32 / 8;
    return {mma / 2, lane * 16 + mma % 2 * 8 + half, behind};
}

// Where those bytes of token m lie in any layout. `padded`: tokens of which fragments are.
__device__ __forceinline__ long long place_of_octet(
    int layout, int k, int m, int padded, long long pitch, int& behind) {
    behind = 4;
    if (layout == ROWS) return m * pitch + k;
    if (layout == ROWS_SPLIT) {
        behind = 16;
        return m * pitch + k / 32 * 32 + k % 32 / 2;
    }
    const Place place = place_in_fragment(layout, k);
    behind = place.behind;
    return (static_cast<long long>(place.fragment) * padded + m) * MEMBER_BYTES + place.at;
}
