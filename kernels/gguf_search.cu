// Quantizers of GGUF's types whose scales are searched for; what a lane computes stands in
// formats/gguf_search_encoders.cuh.
#include "formats/gguf_search_encoders.cuh"

constexpr int THREADS = 128;

// What both kernels do; `weigh` gives a lane of a block its weights.
template <typename T, typename E, typename Weigh>
__device__ __forceinline__ void search_blocks(
    const T* x, long long blocks, const Fields& fields, typename E::Shared& shared, const Weigh& weigh) {
    constexpr int PER_BLOCK = THREADS / E::LANES;
    shared.build(threadIdx.x, THREADS);
    __syncthreads();
    // All threads make as many rounds: those beyond the end work on the last block, and do not write.
    for (long long start = (long long)blockIdx.x * PER_BLOCK; start < blocks;
         start += (long long)gridDim.x * PER_BLOCK) {
        const long long block = start + threadIdx.x / E::LANES, found = block < blocks ? block : blocks - 1;
        E lane;
        lane.number = threadIdx.x % E::LANES;
        Source<T>{x + found * E::BLOCK}.load(lane.number * E::SUB, lane.x);
        weigh(lane, found);
        lane.search(shared);
        lane.agree(shared);
        lane.store(fields, block, block < blocks);
        if constexpr (E::WEIGHED) __syncthreads();  // all have read what the next round writes
    }
}

// x       T[blocks * E::BLOCK]
// blocks  how many
// a to e  the planes of the fields, in their order; null where there are fewer
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS) search_gguf(
    const T* x, long long blocks, unsigned char* a, unsigned char* b, unsigned char* c, unsigned char* d,
    unsigned char* e) {
    __shared__ typename E::Shared shared;
    search_blocks<T, E>(x, blocks, Fields{{a, b, c, d, e}}, shared, [](E&, long long) {});
}

// Errors weighed by the importance of columns. Blocks are those of rows, rows those of matrices.
//
// importance  float[matrices * blocks_of_row * E::BLOCK]
// means       float[rows]: the mean of x * x; null where the type asks for none
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS) search_gguf_weighed(
    const T* x, long long blocks, unsigned char* a, unsigned char* b, unsigned char* c, unsigned char* d,
    unsigned char* e, const float* importance, const float* means, long long blocks_of_row, long long rows_of_matrix) {
    __shared__ typename E::Shared shared;
    const auto weigh = [&](E& lane, long long block) {
        const long long row = divide(block, blocks_of_row), matrix = divide(row, rows_of_matrix);
        const long long first = (matrix * blocks_of_row + block - row * blocks_of_row) * E::BLOCK;
        float v[E::SUB];
#pragma unroll
        for (int i = 0; i < E::SUB; ++i) v[i] = importance[first + lane.number * E::SUB + i];
        lane.weigh(v, means == nullptr ? 0.0f : means[row]);
    };
    search_blocks<T, E>(x, blocks, Fields{{a, b, c, d, e}}, shared, weigh);
}

// The mean of x * x over each row, one sum in the order of the elements. A thread block takes 32 rows: all of its
// threads fetch 256 columns of these, and while the next are on their way each lane of one warp sums a row.
//
// x      T[rows * columns], columns a multiple of 32
// means  float[rows]
constexpr int MEANS_THREADS = 256;
template <typename T>
__global__ void __launch_bounds__(MEANS_THREADS)
    row_means(const T* x, long long rows, long long columns, float* means) {
    __shared__ float tile[WARP][MEANS_THREADS + 1];
    const int lane = threadIdx.x;
    for (long long start = (long long)blockIdx.x * WARP; start < rows; start += (long long)gridDim.x * WARP) {
        float sum = 0.0f;
        T next[WARP];
        const auto fetch = [&](long long first) {
            if (first + lane >= columns) return;
#pragma unroll
            for (int r = 0; r < WARP; ++r)
                next[r] = x[(start + r < rows ? start + r : rows - 1) * columns + first + lane];
        };
        fetch(0);
        for (long long first = 0; first < columns; first += MEANS_THREADS) {
#pragma unroll
            for (int r = 0; r < WARP; ++r) tile[r][lane] = Source<T>::within_half(to_float(next[r]));
            __syncthreads();
            fetch(first + MEANS_THREADS);
            if (lane < WARP) {
                for (int part = 0; part < MEANS_THREADS && first + part < columns; part += 32) {
#pragma unroll
                    for (int i = 0; i < 32; ++i) {
                        const float number = tile[lane][part + i];
                        sum = ieee::add(sum, ieee::multiply(number, number));
                    }
                }
            }
            __syncthreads();
        }
        if (lane < WARP && start + lane < rows) {
            means[start + lane] = ieee::divide(sum, static_cast<float>(columns));
        }
    }
}
