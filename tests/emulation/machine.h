// Runs CUDA kernels on a CPU, one fiber a thread, to test their logic where there is no GPU: barriers, rings of buffers,
// addresses, masks, scheduling.  Asynchronous work (copies, matrix products) is put off for as long as the program
// allows, or for a random time, so that a missing wait or a buffer given back too early changes the result; a set of
// threads that waits for itself is an error with a list of who waits for what.
//
// Thread blocks take turns, each with its own shared memory, so that they can wait for each other.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

// ---- the language -------------------------------------------------------------------------------------------------

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, gridDim, blockDim;

#define VECTOR_TYPE(T, N, ALIGN, ...)  \
    struct alignas(ALIGN) T##N {       \
        __VA_ARGS__;                   \
    };
using uint = unsigned;
VECTOR_TYPE(int, 2, 8, int x, y)
VECTOR_TYPE(int, 4, 16, int x, y, z, w)
VECTOR_TYPE(uint, 2, 8, unsigned x, y)
VECTOR_TYPE(uint, 4, 16, unsigned x, y, z, w)
VECTOR_TYPE(float, 2, 8, float x, y)
VECTOR_TYPE(float, 4, 16, float x, y, z, w)
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

using std::max;
using std::min;
template <class T> T __ldg(const T* address) { return *address; }
template <class T> T __ldcg(const T* address) { return *address; }
template <class T> T atomicAdd(T* address, T value) {
    const T old = *address;
    *address += value;
    return old;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float __fdividef(float x, float y) { return x / y; }

// ---- threads ------------------------------------------------------------------------------------------------------

namespace machine {

constexpr int kSharedBytes = 232448, kStackBytes = 128 << 10, kPendingProducts = 512;
alignas(1024) inline unsigned char shared_memory[kSharedBytes];  // of the block whose turn it is

struct Warp {
    int arrived = 0;
    unsigned generation = 0;
    uint64_t value[2][32][5];
    std::vector<std::array<std::array<uint32_t, 4>, 32>> a_registers;  // of pending products, by number
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    unsigned index;
    Warp* warp;
    bool done = false;
    std::function<bool()> ready;
    const char* waits_for = "";
    // Matrix products: numbered; `committed` has the number of products of each group that may still run.
    unsigned issued = 0;
    int uncommitted = 0;
    std::deque<std::function<void()>> products;
    std::deque<int> committed;
    // Bulk stores: open group, and of each committed group the stores that still read shared memory.
    std::shared_ptr<int> open_stores = std::make_shared<int>(0);
    std::deque<std::shared_ptr<int>> stores;
};

struct NamedBarrier {
    unsigned arrived = 0, generation = 0;
};

struct Block {
    unsigned index;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    NamedBarrier barriers[17];  // the last is __syncthreads
    std::vector<std::function<void()>> copies;  // pending
    std::vector<unsigned char> shared;          // while it is another block's turn
    unsigned running = 0;
};

inline ucontext_t scheduler;
inline Thread* self;
inline Block* block;
inline std::mt19937 random_bits;
inline std::function<void()> thread_main;
inline std::string failure;  // of a thread: exceptions do not leave its stack

inline void wait_until(const char* what, std::function<bool()> ready) {
    if (ready()) return;
    self->ready = std::move(ready);
    self->waits_for = what;
    Thread* const me = self;
    swapcontext(&me->context, &scheduler);
}

inline void run_thread() {
    try {
        thread_main();
    } catch (const std::exception& error) {
        failure = error.what();
    }
    self->done = true;
    --block->running;
    swapcontext(&self->context, &scheduler);
}

// All lanes of the warp; gives the half of Warp::value that holds what they brought.
template <class... Values> unsigned warp_exchange(const Values&... values) {
    Warp& warp = *self->warp;
    const unsigned generation = warp.generation, half = generation & 1;
    uint64_t* to = warp.value[half][self->index % 32];
    ((std::memcpy(to++, &values, sizeof(values))), ...);
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.generation;
    } else {
        wait_until("its warp", [&warp, generation] { return warp.generation != generation; });
    }
    return half;
}

inline void arrive(NamedBarrier& barrier, unsigned threads) {
    if (++barrier.arrived > threads) throw std::runtime_error("more threads at a named barrier than it counts");
    if (barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
}
inline void sync(NamedBarrier& barrier, unsigned threads) {
    const unsigned generation = barrier.generation;
    arrive(barrier, threads);
    wait_until("a named barrier", [&barrier, generation] { return barrier.generation != generation; });
}

// ---- scheduling ---------------------------------------------------------------------------------------------------

inline void finish_copy(size_t number) {
    auto copy = std::move(block->copies[number]);
    block->copies.erase(block->copies.begin() + static_cast<long>(number));
    copy();
}

// Every thread that can run does so until it must wait.  Whether any could.
inline bool run_round() {
    const size_t count = block->threads.size(), first = random_bits() % count;
    const bool backwards = random_bits() & 1;
    bool moved = false;
    for (size_t i = 0; i < count; ++i) {
        Thread& thread = block->threads[(first + (backwards ? count - i : i)) % count];
        if (thread.done || (thread.ready && !thread.ready())) continue;
        thread.ready = nullptr;
        self = &thread;
        threadIdx.x = thread.index;
        swapcontext(&scheduler, &thread.context);
        if (!failure.empty()) throw std::runtime_error(failure);
        moved = true;
    }
    if (!block->copies.empty() && (!moved || random_bits() % 2)) {
        finish_copy(random_bits() % block->copies.size());
        moved = true;
    }
    return moved;
}

inline std::string who_waits(const std::vector<std::unique_ptr<Block>>& blocks) {
    std::string text = "no thread can go on:";
    for (const auto& stuck : blocks) {
        for (size_t first = 0; first < stuck->threads.size();) {
            size_t end = first;
            const auto state = [&](size_t t) {
                return std::string(stuck->threads[t].done ? "done" : stuck->threads[t].waits_for);
            };
            while (end < stuck->threads.size() && state(end) == state(first)) ++end;
            text += " block " + std::to_string(stuck->index) + " threads " + std::to_string(first) + ".." +
                    std::to_string(end - 1) + ": " + state(first) + ";";
            first = end;
        }
    }
    return text;
}

inline std::unique_ptr<Block> make_block(unsigned index, unsigned threads) {
    auto made = std::make_unique<Block>();
    made->index = index;
    made->warps.resize(threads / 32);
    made->threads.resize(threads);
    made->running = threads;
    made->shared.assign(kSharedBytes, 0xff);  // NaN
    for (unsigned t = 0; t < threads; ++t) {
        Thread& thread = made->threads[t];
        thread.index = t;
        thread.warp = &made->warps[t / 32];
        thread.stack.reset(new char[kStackBytes]);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = kStackBytes;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, run_thread, 0);
    }
    return made;
}

// Runs `grid` blocks, up to `resident` of them by turns.
inline void run_grid(unsigned grid, unsigned threads, unsigned resident, unsigned seed, std::function<void()> body) {
    random_bits.seed(seed);
    thread_main = std::move(body);
    failure.clear();
    gridDim.x = grid;
    blockDim.x = threads;
    std::vector<std::unique_ptr<Block>> blocks;
    unsigned started = 0, stuck = 0;
    size_t turn = 0;
    while (started < grid || !blocks.empty()) {
        while (started < grid && blocks.size() < resident) blocks.push_back(make_block(started++, threads));
        turn = (turn + 1) % blocks.size();
        block = blocks[turn].get();
        blockIdx.x = block->index;
        std::memcpy(shared_memory, block->shared.data(), kSharedBytes);
        bool moved = false;
        for (unsigned rounds = 1 + random_bits() % 64; rounds > 0 && run_round(); --rounds) moved = true;
        std::memcpy(block->shared.data(), shared_memory, kSharedBytes);
        stuck = moved ? 0 : stuck + 1;
        if (block->running == 0 && block->copies.empty()) {
            blocks.erase(blocks.begin() + static_cast<long>(turn));
            stuck = 0;
        }
        if (stuck > blocks.size()) throw std::runtime_error(who_waits(blocks));
    }
}

}  // namespace machine

template <class T> T __shfl_xor_sync(unsigned, T value, int lanes) {
    const unsigned half = machine::warp_exchange(value);
    T other;
    std::memcpy(&other, machine::self->warp->value[half][(threadIdx.x % 32) ^ lanes], sizeof(T));
    return other;
}
template <class T> T __shfl_sync(unsigned, T value, int lane) {
    const unsigned half = machine::warp_exchange(value);
    T other;
    std::memcpy(&other, machine::self->warp->value[half][lane], sizeof(T));
    return other;
}
inline bool __any_sync(unsigned, bool value) {
    const unsigned half = machine::warp_exchange(static_cast<uint64_t>(value));
    for (int lane = 0; lane < 32; ++lane) {
        if (machine::self->warp->value[half][lane][0]) return true;
    }
    return false;
}
inline void __syncwarp() { machine::warp_exchange(); }
inline void __syncthreads() { machine::sync(machine::block->barriers[16], blockDim.x); }
inline void __threadfence() {}
