// Rows of a compressed array by their numbers (an embedding lookup): eight neighbouring elements a thread. Each element
// is decoded with the operations of dequantize_kbit and dequantize_table4, in their order: the bytes are theirs.
#include "kbit.cuh"

// The group of eight elements that a thread decodes; row numbers wrap, as CuPy's indices do.
struct Eight {
    long long to, row;  // first element of the output; row of the array
    int group;          // in the row

    template <typename Id>
    __device__ __forceinline__ Eight(const Id* ids, long long rows, int per_row, long long i)
        : to(i * 8), row(ids[i / per_row] % rows), group(int(i % per_row)) {
        if (row < 0) row += rows;
    }
};

template <typename T>
__device__ __forceinline__ void write_eight(T* y, const float (&v)[8]) {
    constexpr int PER_WORD = Word<T>::COUNT, WORDS = 8 / PER_WORD;
    unsigned word[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = Word<T>::pack(v + i * PER_WORD);
    if (is_aligned(y)) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4)
            reinterpret_cast<uint4*>(y)[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = Word<T>::element(word[i / PER_WORD], i % PER_WORD);
    }
}

// Values of a codebook, passed by value.
struct TakenValues {
    float value[256];
    float map[256];  // of 8-bit scales
};

// ids  Id[count]      y  T[count, per_row * 8]      packed, absmax, tensor_scale  of an array of `rows` rows
template <typename T, typename Id>
__global__ void take_kbit(
    const unsigned* packed, const void* absmax, const float* tensor_scale, const float* values, const Id* ids, T* y,
    long long eights, long long rows, int per_row, int k, int format, const __grid_constant__ TakenValues codebook) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < eights; i += step) {
        const Eight at(ids, rows, per_row, i);
        const long long block = at.row * (per_row / 4) + at.group / 4;
        unsigned index[2] = {};  // a byte for each element
        for (int p = 0; p < k; ++p) {
            const unsigned bits = packed[block * k + p] >> at.group % 4 * 8 & 0xffu;
#pragma unroll
            for (int e = 0; e < 8; ++e) index[e / 4] |= (bits >> e & 1u) << (e % 4 * 8 + p);
        }
        const float a = format == E4M4      ? Absmax<E4M4>::decode(static_cast<const unsigned char*>(absmax)[block])
                        : format == FLOAT16 ? Absmax<FLOAT16>::decode(static_cast<const __half*>(absmax)[block])
                                            : static_cast<const float*>(absmax)[block];
        const float scale = __fmul_rn(a, *tensor_scale);
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const unsigned n = index[e / 4] >> e % 4 * 8 & 0xffu;
            v[e] = __fmul_rn(flush(values ? values[n] : codebook.value[n]), scale);
        }
        write_eight(y + at.to, v);
    }
}

template <typename T, typename Id>
__global__ void take_table4(
    const unsigned char* packed, const void* absmax, const float* nested_absmax, const float* nested_offset,
    const float* values, const Id* ids, T* y, long long eights, long long rows, int per_row, int block_log2,
    const __grid_constant__ TakenValues table) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < eights; i += step) {
        const Eight at(ids, rows, per_row, i);
        const long long element = (at.row * per_row + at.group) * 8;
        const long long block = element >> block_log2;
        const float scale =
            nested_absmax
                ? __fadd_rn(
                      __fmul_rn(
                          table.map[static_cast<const unsigned char*>(absmax)[block]], nested_absmax[block / 256]),
                      *nested_offset)
                : static_cast<const float*>(absmax)[block];
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const unsigned n = packed[element / 2 + e / 2] >> (e % 2 ? 0 : 4) & 15u;
            v[e] = __fmul_rn(values ? values[n] : table.value[n], scale);
        }
        write_eight(y + at.to, v);
    }
}
