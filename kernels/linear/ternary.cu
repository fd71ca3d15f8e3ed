// Ternary weights for integer products: their trits as int8, which the W8A8 kernels multiply, and a plain product for
// weights whose scales belong to groups. How codes lie is said in kbitcupy/formats/ternary.py.
#include "common/ieee.cuh"
#include "common/types.cuh"

constexpr int BLOCK = 128, RUN = 32;  // elements whose codes lie together, and those of one field of the bytes

// ---- trits -------------------------------------------------------------------------------------------------------

// Four codes, in the low two bits of each byte, less 1.
__device__ __forceinline__ unsigned trits_of(unsigned codes) {
    return ((codes | 0x80808080u) - 0x01010101u) ^ 0x80808080u;
}

// A thread has 16 bytes of codes, 64 elements in four runs, at a time.
__global__ void __launch_bounds__(DECODE_THREADS) decode_trits(
    const unsigned char* __restrict__ codes,  // [32 * ceil(size / 128)]
    const float* __restrict__ scale,          // [1] if it is shared, else [rows]; null: none are wanted
    signed char* __restrict__ trits,          // [size]
    float* __restrict__ scales,               // [rows]
    long long size, long long rows, int shared) {
    const long long first = blockIdx.x * static_cast<long long>(DECODE_THREADS) + threadIdx.x;
    const long long step = gridDim.x * static_cast<long long>(DECODE_THREADS);
    const long long pieces = (size + BLOCK - 1) / BLOCK * (RUN / 16);
    const bool aligned = is_aligned(codes) && is_aligned(trits);
    for (long long piece = first; piece < pieces; piece += step) {
        const long long element = piece / (RUN / 16) * BLOCK + piece % (RUN / 16) * 16;
        if (aligned && element + 3 * RUN + 16 <= size) {
            const uint4 c = __ldcs(reinterpret_cast<const uint4*>(codes) + piece);
            uint4* target = reinterpret_cast<uint4*>(trits + element);
#pragma unroll
            for (int field = 0; field < 4; ++field)
                target[field * (RUN / 16)] = make_uint4(
                    trits_of(c.x >> 2 * field & 0x03030303u), trits_of(c.y >> 2 * field & 0x03030303u),
                    trits_of(c.z >> 2 * field & 0x03030303u), trits_of(c.w >> 2 * field & 0x03030303u));
        } else {
            for (int i = 0; i < 16; ++i) {
                const int byte = codes[16 * piece + i];
                for (int field = 0; field < 4; ++field) {
                    const long long e = element + field * RUN + i;
                    if (e < size) trits[e] = static_cast<signed char>((byte >> 2 * field & 3) - 1);
                }
            }
        }
    }
    if (scale != nullptr)
        for (long long row = first; row < rows; row += step) scales[row] = scale[shared ? 0 : row];
}

// ---- groups ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float bias_of(const void* bias, int kind, long long row) {
    switch (kind) {
        case FLOAT32_BIAS:
            return static_cast<const float*>(bias)[row];
        case FLOAT16_BIAS:
            return to_float(static_cast<const __half*>(bias)[row]);
        default:
            return to_float(static_cast<const __nv_bfloat16*>(bias)[row]);
    }
}

// y[m, n] = sum over groups, one after the other, of fl(fl(float(sum of q t) * token scale) * scale of the group), then
// the bias. A warp has one y: each lane the integer sum of one of 32 groups, whose terms all lanes then add.
__global__ void __launch_bounds__(GROUP_THREADS) multiply_groups(
    const signed char* __restrict__ a,        // [tokens, pitch]
    const unsigned char* __restrict__ codes,  // of [channels, depth]
    const float* __restrict__ token_scale,    // [tokens], or [1] if it is shared
    const float* __restrict__ scale,          // [channels, groups]
    const void* __restrict__ bias,            // [channels] of the type that bias_kind names; 0 for none
    float* __restrict__ y,                    // [tokens, channels]
    long long tokens, long long channels, long long depth, long long pitch, long long group, int shared,
    int bias_kind) {
    const int lane = threadIdx.x % WARP;
    const long long groups = (depth + group - 1) / group;
    const long long warps = static_cast<long long>(gridDim.x) * (GROUP_THREADS / WARP);
    for (long long i = blockIdx.x * static_cast<long long>(GROUP_THREADS / WARP) + threadIdx.x / WARP;
         i < tokens * channels; i += warps) {
        const long long m = i / channels, n = i % channels;
        const float of_token = usable(token_scale[shared ? 0 : m]);
        float total = 0;
        for (long long first = 0; first < groups; first += WARP) {
            float term = 0;
            if (first + lane < groups) {
                int sum = 0;
                const long long begin = (first + lane) * group, end = min(begin + group, depth);
                for (long long k = begin; k < end; ++k) {
                    const long long e = n * depth + k;
                    const int byte = codes[e / BLOCK * RUN + e % RUN];
                    sum += a[m * pitch + k] * ((byte >> e % BLOCK / RUN * 2 & 3) - 1);
                }
                term = ieee::multiply(
                    ieee::multiply(__int2float_rn(sum), of_token), usable(scale[n * groups + first + lane]));
            }
            const int count = static_cast<int>(min(groups - first, static_cast<long long>(WARP)));
            for (int j = 0; j < count; ++j) {
                const float next = __shfl_sync(FULL_WARP, term, j);
                total = first + j == 0 ? next : ieee::add(total, next);
            }
        }
        if (lane == 0) y[i] = bias_kind == 0 ? total : ieee::add(total, bias_of(bias, bias_kind, n));
    }
}
