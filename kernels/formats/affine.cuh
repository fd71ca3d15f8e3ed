// Affine integers: int8, uint8, int4, uint4. The contract is that of kbitcupy/formats/affine.
#pragma once
#include "formats/planes.cuh"

// plane   codes, scale, zero_point (null: all have number[3])
// number  row, run, per_row: element i has scale number i / row * per_row + i % row / run; and the zero point of all
template <int BITS, bool SIGNED>
struct Affine {
    static constexpr int TABLE = 0;
    static constexpr int HALF = SIGNED ? 1 << (BITS - 1) : 0, LOWEST = -HALF, HIGHEST = (1 << BITS) - 1 - HALF;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        const long long row = planes.number[0], run = planes.number[1], first = octet * 8;
        unsigned word[BITS / 4];
        load_words(planes.plane[0], first * BITS / 8, (planes.size * BITS + 7) / 8, word);
        long long r = divide(first, row), column = first - r * row, block = divide(column, run);
        long long rest = 0;  // elements that the block still has
        float scale = 0.0f;
        int zero = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e, ++column, --rest) {
            if (e == 0 || (rest == 0 && first + e < planes.size)) {
                if (column == row) ++r, column = 0, block = 0;
                else if (e > 0) ++block;
                const long long end = (block + 1) * run;
                rest = (end < row ? end : row) - column;
                const long long number = r * planes.number[2] + block;
                scale = usable(planes.at<float>(1)[number]);
                zero = static_cast<int>(planes.plane[2] ? planes.at<int>(2)[number] : planes.number[3]);
                zero = zero < LOWEST ? LOWEST : zero > HIGHEST ? HIGHEST : zero;
            }
            const int code = static_cast<int>(word[e * BITS / 32] >> e * BITS % 32 & ((1 << BITS) - 1));
            // Adding a half, flipping its bit back and taking it away leaves the sign.
            v[e] = multiply_ieee(scale, static_cast<float>((code ^ HALF) - HALF - zero));
        }
    }
};
