// What a thread block needs before it decodes: the planes of an array with its table in shared memory, and octets one
// by one or several together.
#pragma once
#include "formats/planes.cuh"

// The planes of the first member, with the table in shared memory. Every thread of the block calls it.
//
// THREADS  of a block, where the compiler may know them; 0: they are found out
// SLOT     tells tables of one decoder apart, where a kernel reads several arrays
template <int THREADS, int SLOT = 0, typename F>
__device__ __forceinline__ Planes planes_of(const Argument<F>& argument) {
    Planes planes = argument.planes;
    if constexpr (Fixed<F>::TABLE && THREADS > 0) {
        // Nothing is stored before all is loaded: a table of some kilobytes would take a while otherwise.
        constexpr int PIECES = F::TABLE / 4, EACH = (PIECES + THREADS - 1) / THREADS;
        __shared__ uint4 table[PIECES];
        const uint4* from = reinterpret_cast<const uint4*>(F::entries());
        const int first = threadIdx.x;
        uint4 piece[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (first + i * THREADS < PIECES) piece[i] = __ldg(from + first + i * THREADS);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (first + i * THREADS < PIECES) table[first + i * THREADS] = piece[i];
        __syncthreads();
        planes.table = reinterpret_cast<const float*>(table);
    } else if constexpr (F::TABLE > 0) {
        __shared__ float table[F::TABLE];
        const int step = THREADS > 0 ? THREADS : blockDim.x * blockDim.y * blockDim.z;
        const int first =
            THREADS > 0 ? threadIdx.x : threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
#pragma unroll 1
        for (int i = first; i < F::TABLE; i += step) table[i] = number_of(argument, i);
        __syncthreads();
        planes.table = table;
    }
    return planes;
}

// Octets `octet` + j * F::APART, all of them whole; of decoders that have none together, one.
template <typename F, int COUNT>
__device__ __forceinline__ void decode_some(const Planes& planes, long long octet, float (&v)[COUNT][8]) {
    if constexpr (COUNT == 1) F::decode8(planes, octet, v[0]);
    else F::decode_together(planes, octet, v);
}
