// A grid of thread blocks on the host, for kernels that need barriers and shuffles and nothing else of the GPU, block
// after block. What is shared by a block is static. The threads of a block take turns in one of the host: each has a
// stack, and runs until it waits for others. Turns go up in one block and down in the next, so that a barrier that is
// missing shows.
#pragma once
#include <ucontext.h>

#include <csetjmp>
#include <cstring>

struct Index {
    unsigned x, y, z;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct Threads;
inline Threads *this_block, *this_warp;

namespace host_grid {  // so that no name is one of the C library's

// ---- turns ---------------------------------------------------------------------------------------------------------

// A thread of a block: where it begins, and where it goes on. A jump leaves the mask of signals alone, unlike a change
// of contexts, which asks the system.
struct Turn {
    static constexpr std::size_t STACK = 1 << 18;
    char* stack;
    ucontext_t first;
    jmp_buf next;
    bool begun, ended;
};
inline Turn turns[1024];  // whose stacks the next launch uses again
inline unsigned whose, step;
inline jmp_buf launched;

// What every thread does, in turns that begin here.
inline void (*work)();

// Let the next thread that has not ended go on; the launch, when none is left.
[[noreturn]] inline void next_turn() {
    for (unsigned i = 0; i < blockDim.x; ++i) {
        whose = (whose + step) % blockDim.x;
        Turn& next = turns[whose];
        if (next.ended) continue;
        if (next.begun) _longjmp(next.next, 1);
        next.begun = true;
        setcontext(&next.first);
    }
    _longjmp(launched, 1);
}

inline void begin_turn() {
    work();
    turns[whose].ended = true;
    next_turn();
}

// Have all others take their turns.
inline void give_way() {
    const Index thread = threadIdx, block = blockIdx;
    Threads* const warp = this_warp;
    const FloatMode mode = float_mode();
    if (!_setjmp(turns[whose].next)) next_turn();
    threadIdx = thread, blockIdx = block, this_warp = warp;
    set_float_mode(mode);
}

}  // namespace host_grid

// Threads that wait for each other, and what lanes of a warp show each other.
struct Threads {
    unsigned threads = 32, arrived = 0, rounds = 0;
    std::uint64_t shown[32];

    void wait() {
        if (++arrived == threads) {
            arrived = 0, ++rounds;
        } else {
            for (const unsigned round = rounds; round == rounds;) host_grid::give_way();
        }
    }
};

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
    using namespace host_grid;
    gridDim = {width, height, 1}, blockDim = {threads, 1, 1};
    Threads block{threads}, warps[32];
    static const Kernel* called;
    static Threads* all_warps;
    called = &kernel, all_warps = warps, this_block = &block;
    work = [] {
        set_float_mode(FLUSHING_MODE);
        threadIdx = {whose, 0, 0}, this_warp = all_warps + whose / 32;
        for (unsigned b = 0; b < gridDim.x * gridDim.y; ++b) {
            blockIdx = {b % gridDim.x, b / gridDim.x, 0};
            step = b % 2 ? blockDim.x - 1 : 1;
            (*called)();
            this_block->wait();
        }
    };
    for (unsigned t = 0; t < threads; ++t) {
        Turn& turn = turns[t];
        turn.begun = turn.ended = false;
        if (turn.stack == nullptr) turn.stack = new char[Turn::STACK];
        getcontext(&turn.first);
        turn.first.uc_stack.ss_sp = turn.stack, turn.first.uc_stack.ss_size = Turn::STACK;
        makecontext(&turn.first, begin_turn, 0);
    }
    const FloatMode mode = float_mode();
    whose = threads - 1, step = 1;
    if (!_setjmp(launched)) next_turn();
    set_float_mode(mode);
}
