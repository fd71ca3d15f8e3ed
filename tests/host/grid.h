// A grid of thread blocks on the host, for kernels that need barriers and shuffles and nothing else of the GPU: one
// thread of the host for each of a block's, block after block. What is shared by a block is static.
#pragma once
#include <pthread.h>

#include <cstring>
#include <thread>
#include <vector>

struct Index {
    unsigned x, y, z;
};
inline thread_local Index threadIdx, blockIdx;
inline Index blockDim, gridDim;

#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

// Threads that wait for each other, and what lanes of a warp show each other.
struct Threads {
    pthread_barrier_t barrier;
    std::uint64_t shown[32];

    explicit Threads(unsigned threads) { pthread_barrier_init(&barrier, nullptr, threads); }
    ~Threads() { pthread_barrier_destroy(&barrier); }
    void wait() { pthread_barrier_wait(&barrier); }
};
inline thread_local Threads *this_block, *this_warp;

inline void __syncthreads() { this_block->wait(); }
inline void __syncwarp() { this_warp->wait(); }

template <typename A>
A __shfl_xor_sync(unsigned, A value, int mask) {
    const unsigned lane = threadIdx.x % 32;
    std::memcpy(&this_warp->shown[lane], &value, sizeof(value));
    this_warp->wait();
    std::memcpy(&value, &this_warp->shown[lane ^ static_cast<unsigned>(mask)], sizeof(value));
    this_warp->wait();
    return value;
}

// Of the lane of that number among `width`.
template <typename A>
A __shfl_sync(unsigned, A value, int number, int width = 32) {
    const unsigned lane = threadIdx.x % 32, first = lane & ~static_cast<unsigned>(width - 1);
    std::memcpy(&this_warp->shown[lane], &value, sizeof(value));
    this_warp->wait();
    std::memcpy(&value, &this_warp->shown[first + static_cast<unsigned>(number)], sizeof(value));
    this_warp->wait();
    return value;
}

template <typename A>
void __stcs(A* to, const A& value) {
    *to = value;
}

// Have every thread of width * height blocks call `kernel`.
template <typename Kernel>
void launch(unsigned width, unsigned height, unsigned threads, const Kernel& kernel) {
    gridDim = {width, height, 1}, blockDim = {threads, 1, 1};
    Threads block(threads);
    std::vector<Threads*> warps;
    for (unsigned i = 0; i < threads; i += 32) warps.push_back(new Threads(32));
    std::vector<std::thread> all;
    for (unsigned t = 0; t < threads; ++t) {
        all.emplace_back([&, t] {
            set_float_mode(FLUSHING_MODE);
            threadIdx = {t, 0, 0}, this_block = &block, this_warp = warps[t / 32];
            for (unsigned b = 0; b < width * height; ++b) {
                blockIdx = {b % width, b / width, 0};
                kernel();
                block.wait();
            }
        });
    }
    for (std::thread& thread : all) thread.join();
    for (Threads* warp : warps) delete warp;
}
