// Scales of integer codes and zero points beside them, as arrays store them. Of
// the host, ahead of the source: their kinds, FLOAT32_SCALES to UINT8_POINTS
// (kbitcupy/products/integer_tile.py).
#pragma once
#include "linear/integer_tiles.cuh"

struct Beside {
    const void *scale, *zero;
    int scale_kind, zero_kind;
    int lowest,
        middle;        // code, and what stands for 0 where there are no zero points
    unsigned per_row;  // scales of a row; 0 where all rows share one

    __device__ __forceinline__ int scale_bytes() const { return scale_kind == FLOAT32_SCALES ? 4 : 2; }
    __device__ __forceinline__ int point_bytes() const { return zero_kind == INT32_POINTS ? 4 : 1; }

    // The word that has number `at` of a plane: one of fewer bytes has neighbours beside it, in memory that is there as
    // well, as it comes in words.
    __device__ __forceinline__ static const unsigned* word_at(const void* plane, unsigned at, int bytes) {
        const unsigned long long place =
            reinterpret_cast<unsigned long long>(plane) + static_cast<unsigned long long>(at) * bytes;
        return reinterpret_cast<const unsigned*>(place & ~3ull);
    }
    // Starts to copy it.
    __device__ __forceinline__ static void copy_word(unsigned to, const void* plane, unsigned at, int bytes) {
        copy_word_of_line(to, word_at(plane, at, bytes));
    }
    __device__ __forceinline__ void copy(unsigned to, unsigned at) const {
        copy_word(to, scale, at, scale_bytes());
        if (zero_kind != NO_POINTS) copy_word(to + 4, zero, at, point_bytes());
    }

    // ... of it, from that word. Selected, not branched to: several are under way
    // at a time.
    __device__ __forceinline__ float scale_of(unsigned word, unsigned at) const {
        const unsigned place = static_cast<unsigned>(reinterpret_cast<unsigned long long>(scale)) + 2 * at & 2;
        const unsigned bits = word >> place * 8;
        const float half = to_float(__ushort_as_half(static_cast<unsigned short>(bits)));
        const unsigned wide = scale_kind == BFLOAT16_SCALES ? bits << 16 : word;
        const float s = scale_kind == FLOAT32_SCALES || scale_kind == BFLOAT16_SCALES ? __uint_as_float(wide) : half;
        return scale_kind == ANY_FLOAT16_SCALES ? half : usable(s);
    }
    // Four times that from the lowest code on.
    __device__ __forceinline__ unsigned points_of(unsigned word, unsigned at) const {
        const unsigned place = static_cast<unsigned>(reinterpret_cast<unsigned long long>(zero)) + at & 3;
        const int byte = static_cast<int>(word >> place * 8 & 0xff);
        const int narrow = zero_kind == INT8_POINTS ? static_cast<signed char>(byte) : byte;
        const int given = zero_kind == INT32_POINTS ? static_cast<int>(word) : narrow;
        const int point = zero_kind == NO_POINTS ? middle : given;
        return (min(max(point, lowest), lowest + 15) - lowest) * 0x01010101u;
    }

    // The same of an int32.
    __device__ __forceinline__ unsigned points_of_word(unsigned word) const {
        return (min(max(static_cast<int>(word), lowest), lowest + 15) - lowest) * 0x01010101u;
    }

    // Both, from memory.
    __device__ __forceinline__ float scale_at(unsigned at) const {
        if (scale_kind == FLOAT32_SCALES) return scale_of(static_cast<const unsigned*>(scale)[at], 0);
        const unsigned bits = static_cast<const unsigned short*>(scale)[at];
        return scale_of(bits | bits << 16, 0);
    }
    __device__ __forceinline__ unsigned points_at(unsigned at) const {
        if (zero_kind == NO_POINTS) return points_of(0, 0);
        if (zero_kind == INT32_POINTS) return points_of(static_cast<const unsigned*>(zero)[at], 0);
        return points_of(static_cast<const unsigned char*>(zero)[at] * 0x01010101u, 0);
    }
};
