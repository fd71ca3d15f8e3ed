// For kernels of one's own: a compressed array, read where it lies (kbitcupy/raw.py).
//
// kbitcupy.raw.decoder(q) names the C++ type F that decodes the format of q, gives the text that stands ahead of a
// kernel, which includes this file, and the argument that the kernel takes by value:
//
//     template <typename F>
//     __global__ void norm(const __grid_constant__ kbit::Array<F> q, float* y) {
//         const kbit::Reader<F> reader(q);                // every thread of the block
//         float sum = 0.0f;
//         reader.for_each([&](long long first, int count, const float (&v)[8]) {
//             for (int e = 0; e < 8; ++e) sum += v[e] * v[e];
//         });
//         atomicAdd(y, sum);
//     }
//
// What stands in the namespace kbit here is what other people's kernels may lean on, see there; the rest of the headers
// may change.
#pragma once
#include "formats/reader.cuh"

namespace kbit {

// The argument of a kernel, by value: the planes of an array, or of a stack of arrays of one shape, and the table of
// its format. It is some hundred bytes, up to 2 KiB with a table of 256 values: const __grid_constant__ keeps it from
// being copied.
template <typename F>
using Array = Argument<F>;

// Reads one array, member number `member` where it is a stack; elements count along the flattened array, 64 bits.
// Values are the float32 numbers that `dequantize` gives, the same bits.
//
// F      the decoder
// SLOT   arrays of one format in one kernel have tables of their own: give each of their readers another number
template <typename F, int SLOT = 0>
class Reader {
  public:
    // Every thread of the block makes one, at the same place: they fill the table together and wait for each other.
    __device__ __forceinline__ explicit Reader(const Array<F>& array, long long member = 0)
        : planes_(of_member(planes_of<0, SLOT>(array), array, member)), aligned_(are_aligned(planes_)) {}

    // Elements of the array.
    __device__ __forceinline__ long long size() const { return planes_.size; }

    // Octets of the array: runs of eight elements, the last one perhaps cut off.
    __device__ __forceinline__ long long octets() const { return (planes_.size + 7) / 8; }

    // Elements 8 * i to 8 * i + 7, of which at least one is there; zeros for what is behind the end.
    __device__ __forceinline__ void octet(long long i, float (&v)[8]) const {
        if (aligned_ && i < planes_.size / 8) {
            F::decode8(as_whole(planes_), i, v);
        } else {
            F::decode8(planes_, i, v);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (i * 8 + e >= planes_.size) v[e] = 0.0f;
        }
    }

    // One element. Neighbours cost less together: see octet.
    __device__ __forceinline__ float operator[](long long i) const {
        float v[8];
        octet(i / 8, v);
        const int at = static_cast<int>(i % 8);
        float found = v[0];
#pragma unroll
        for (int e = 1; e < 8; ++e) found = at == e ? v[e] : found;
        return found;
    }

    // Share all elements out among the threads of the grid, which is one-dimensional, as are its blocks:
    // each(first, count, v) has elements `first` to `first` + count - 1, count being 8 but for the last; zeros behind
    // them. Which thread has which elements depends on nothing but the number of threads. The loads of some octets are
    // under way together.
    template <typename Each>
    __device__ __forceinline__ void for_each(const Each& each) const {
        constexpr int TOGETHER = ::Together<F>::COUNT, APART = ::Together<F>::APART;
        constexpr int UNITS = TOGETHER >= 4 ? 1 : 4 / TOGETHER;  // octets, or groups of them, under way
        const long long thread = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
        const long long threads = gridDim.x * static_cast<long long>(blockDim.x);
        // Groups of octets that are decoded together and are whole; group number i begins at lead(i).
        auto lead = [](long long i) { return i / APART * (APART * TOGETHER) + i % APART; };
        const long long whole =
            aligned_ && ::Asked<F>::together(planes_) ? planes_.size / (8 * APART * TOGETHER) * APART : 0;
        const Planes planes = as_whole(planes_);
        long long i = thread;
        for (; i + (UNITS - 1) * threads < whole; i += UNITS * threads) {
            float v[UNITS][TOGETHER][8];
#pragma unroll
            for (int u = 0; u < UNITS; ++u) decode_some<F>(planes, lead(i + u * threads), v[u]);
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j) each((lead(i + u * threads) + j * APART) * 8, 8, v[u][j]);
        }
        for (; i < whole; i += threads) {
            float v[TOGETHER][8];
            decode_some<F>(planes, lead(i), v);
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) each((lead(i) + j * APART) * 8, 8, v[j]);
        }
        for (i = whole * TOGETHER + thread; i < octets(); i += threads) {
            float v[8];
            octet(i, v);
            const long long left = planes_.size - i * 8;
            each(i * 8, left < 8 ? static_cast<int>(left) : 8, v);
        }
    }

  private:
    Planes planes_;
    bool aligned_;
};

}  // namespace kbit
