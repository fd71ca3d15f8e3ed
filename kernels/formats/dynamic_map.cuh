// How numbers of [-1, 1] are coded by the dynamic map: elements of dynamic8, and the absmax of double quantization.
#pragma once
#include "common/scalar.cuh"

// A magnitude |y| has a level, counted from zero; the code is 127 plus or minus that. What is searched is |y| + 2^-23:
// the sum leaves the order of numbers around every threshold as it is, and small numbers close together. Float bits
// divided by four are the bits of about its fourth root, up to a factor. Buckets of equal width of that are as narrow
// as thresholds are close: none holds two.
//
// Of the host: DYNAMIC_BUCKETS of them; DYNAMIC_SCALE, 167 * 2^96, with which the bits of 1, so divided, those of 1.75
// * 2^-96, are bucket 292; DYNAMIC_OFFSET, 2^-23; and
//     struct Dynamic
//         entry   unsigned[DYNAMIC_BUCKETS]: added to the float bits of a number in the bucket, gives the level in the
//                 highest byte

// The bucket of a number from 2^-23 to 1 + 2^-23, in the low bits of a float from 2^23.
__device__ __forceinline__ unsigned dynamic_bucket(unsigned bits) {
    return __float_as_uint(__fmaf_rn(__uint_as_float(bits >> 2), DYNAMIC_SCALE, 0x1p23f));
}

// The codes of four numbers, one a byte, from their levels; `negative` is 0xff in each byte of a number below zero.
__device__ __forceinline__ unsigned signed_levels(unsigned level, unsigned negative) {
    // There is no code for level 128 below zero: 127 stands for it.
    level -= (level & negative & 0x80808080u) >> 7;
    // 127 + level, or 127 - level, which is level with seven bits flipped.
    const unsigned flip = negative & 0x7f7f7f7fu;
    return level + (flip ^ 0x7f7f7f7fu) ^ flip;
}

// The code of one number, with a single copy of the table.
__device__ __forceinline__ unsigned encode_dynamic(float y, const unsigned* entry) {
    const unsigned bits = __float_as_uint(__fadd_rn(y == y ? fabsf(y) : 0.0f, DYNAMIC_OFFSET));
    const unsigned level = (bits + entry[dynamic_bucket(bits) & 511]) >> 24;
    return y == y ? signed_levels(level, y < 0.0f ? 0xffu : 0u) & 0xffu : 0u;
}
