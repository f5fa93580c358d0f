// Runs a grid of CUDA threads on one CPU thread: each is a fiber, all blocks are resident, and a seed decides the order.
//
// A fiber gives way only where a CUDA thread may wait: barriers, shuffles, atomics, acquiring loads. So a run repeats
// exactly with its seed, and what a missing barrier breaks shows as a wrong result in one order or another. What is
// wrong with the kernel itself (it waits for ever, it leaves its shared memory, it misuses a barrier) ends the launch
// with a message that names block and thread.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace emulation {

struct Dim {
    uint32_t x, y, z;
};

constexpr uint32_t kWarp = 32;
constexpr size_t kStack = 256 * 1024;
constexpr size_t kSharedLimit = 227 * 1024;
constexpr uint32_t kWave = 1024;       // threads of the blocks that run together, unless all do
constexpr uint32_t kResident = 16384;  // threads for which there is memory
constexpr int kIdleRounds = 2000;     // rounds in which nothing happens before it is called a deadlock

enum class Collective : uint8_t { none, sync, shuffle, ballot };

struct Lane {
    Collective kind = Collective::none;
    uint32_t mask = 0, source = 0;
    uint64_t value = 0, result = 0;
    bool done = false;
};

struct Warp {
    Lane lanes[kWarp];
    uint32_t arrived = 0;
    uint32_t fragments[kWarp][6];
};

struct BlockBarrier {
    uint32_t arrived = 0, round = 0;
};

struct Block {
    Dim index;
    uint32_t number;
    unsigned char *mapped = nullptr, *shared = nullptr;
    std::vector<Warp> warps;
    BlockBarrier barrier;
};

struct Copy {
    void* to;
    const void* from;
    uint32_t bytes;
};

struct Fiber {
    jmp_buf at;
    bool started = false, finished = false;
    const char* waits = "";  // for what; empty: it can go on
    Dim thread;
    uint32_t lane;
    Block* block;
    Warp* warp;
    unsigned char* stack;
    std::vector<std::vector<Copy>> groups;  // cp.async: the last is not committed yet
};

struct Config {
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, seed, cooperative;
};

struct Grid {
    Dim grid, block;
    size_t shared_bytes = 0, shared_mapped = 0;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Fiber>> fibers;
    uint64_t random = 1, events = 0;
    void (*enter)(void**) = nullptr;
    void** params = nullptr;
    jmp_buf scheduler;
    sigjmp_buf failed;
    std::string message;
    Fiber* current = nullptr;
};

inline Grid* grid = nullptr;
inline std::vector<unsigned char*> spare_stacks;

inline uint32_t random_below(uint32_t bound) {
    grid->random = grid->random * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>((grid->random >> 33) % bound);
}

inline std::string place(const Fiber* fiber) {
    char text[128];
    const Dim b = fiber->block->index, t = fiber->thread;
    snprintf(text, sizeof text, "block (%u, %u, %u) thread (%u, %u, %u)", b.x, b.y, b.z, t.x, t.y, t.z);
    return text;
}

// Ends the launch: no other fiber runs again.
[[noreturn]] inline void fail(const std::string& what) {
    grid->message = grid->current ? place(grid->current) + ": " + what : what;
    siglongjmp(grid->failed, 1);
}

template <class... A>
[[noreturn]] void failf(const char* format, A... values) {
    char text[512];
    snprintf(text, sizeof text, format, values...);
    fail(text);
}

inline Fiber& self() { return *grid->current; }

inline void give_way() {
    Fiber* fiber = grid->current;
    if (_setjmp(fiber->at) == 0) _longjmp(grid->scheduler, 1);
}

// Waits until `ready` says so; `what` is for the report of a deadlock.
template <class Ready>
void wait_until(const char* what, Ready ready) {
    Fiber& fiber = self();
    fiber.waits = what;
    while (!ready()) give_way();
    fiber.waits = "";
}

// Something other fibers may have waited for.
inline void happened() { grid->events++; }

// ---- warps ---------------------------------------------------------------------------------------------------------

// The last lane of the mask to arrive computes the results of all: one wait per collective.
inline uint64_t collective(Collective kind, uint32_t mask, uint64_t value, uint32_t source, const char* what) {
    Fiber& fiber = self();
    Warp& warp = *fiber.warp;
    Lane& mine = warp.lanes[fiber.lane];
    if (!(mask >> fiber.lane & 1)) failf("%s: the mask %08x leaves out the calling lane %u", what, mask, fiber.lane);
    mine.kind = kind;
    mine.mask = mask;
    mine.value = value;
    mine.source = source;
    mine.done = false;
    warp.arrived |= 1u << fiber.lane;
    if ((warp.arrived & mask) == mask) {
        uint32_t ballot = 0;
        for (uint32_t lane = 0; lane < kWarp; lane++) {
            if (!(mask >> lane & 1)) continue;
            const Lane& other = warp.lanes[lane];
            if (other.mask != mask || other.kind != kind)
                failf("%s with mask %08x meets another collective of lane %u, with mask %08x", what, mask, lane,
                      other.mask);
            ballot |= (other.value != 0 ? 1u : 0u) << lane;
        }
        for (uint32_t lane = 0; lane < kWarp; lane++) {
            if (!(mask >> lane & 1)) continue;
            Lane& other = warp.lanes[lane];
            if (kind == Collective::shuffle) {
                if (!(mask >> other.source & 1))
                    failf("%s: lane %u reads lane %u, which is not in the mask", what, lane, other.source);
                other.result = warp.lanes[other.source].value;
            } else {
                other.result = ballot;
            }
            other.done = true;
        }
        warp.arrived &= ~mask;
        happened();
    }
    wait_until(what, [&] { return mine.done; });
    return mine.result;
}

// ---- __syncthreads -------------------------------------------------------------------------------------------------

inline void block_barrier(uint32_t threads) {
    BlockBarrier& barrier = self().block->barrier;
    const uint32_t round = barrier.round;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        barrier.round++;
        happened();
    }
    wait_until("__syncthreads", [&] { return barrier.round != round; });
}

// ---- shared memory and copies --------------------------------------------------------------------------------------

inline void check_shared(const void* pointer, size_t bytes, const char* what) {
    const unsigned char* p = static_cast<const unsigned char*>(pointer);
    const unsigned char* begin = self().block->shared;
    if (p < begin || p + bytes > begin + grid->shared_bytes)
        failf("%s: %zu bytes at offset %td are outside the %zu bytes of shared memory", what, bytes, p - begin,
              grid->shared_bytes);
}

inline void land(const Copy& copy) { memcpy(copy.to, copy.from, copy.bytes); }

// A copy lands when its thread waits for it; until then its target is poisoned.
inline void start_copy(const Copy& copy, const char* what) {
    check_shared(copy.to, copy.bytes, what);
    const uintptr_t mixed = reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from);
    if ((mixed | copy.bytes) & 15) failf("%s: addresses and size must be multiples of 16", what);
    memset(copy.to, 0xff, copy.bytes);
}

// ---- the scheduler -------------------------------------------------------------------------------------------------

inline void fiber_main() {
    grid->enter(grid->params);
    grid->current->finished = true;
    happened();
    _longjmp(grid->scheduler, 1);
}

inline void resume(Fiber* fiber) {
    grid->current = fiber;
    if (_setjmp(grid->scheduler) == 0) {
        if (fiber->started) _longjmp(fiber->at, 1);
        fiber->started = true;
        ucontext_t start;
        getcontext(&start);
        start.uc_stack.ss_sp = fiber->stack;
        start.uc_stack.ss_size = kStack;
        start.uc_link = nullptr;
        makecontext(&start, fiber_main, 0);
        setcontext(&start);
    }
    grid->current = nullptr;
}

inline void report_deadlock() {
    std::map<std::string, std::pair<int, std::string>> waiting;
    int finished = 0;
    for (const auto& fiber : grid->fibers) {
        if (fiber->finished) {
            finished++;
            continue;
        }
        std::string what = *fiber->waits ? fiber->waits : "a value in global memory";
        auto& entry = waiting[what];
        if (entry.first++ == 0) entry.second = place(fiber.get());
    }
    std::string text = "deadlock: no thread can go on; " + std::to_string(finished) + " have ended";
    for (const auto& [what, entry] : waiting)
        text += "; " + std::to_string(entry.first) + " wait for " + what + ", first " + entry.second;
    fail(text);
}

inline void run_fibers() {
    std::vector<Fiber*> order;
    for (const auto& fiber : grid->fibers) order.push_back(fiber.get());
    int idle = 0;
    for (uint64_t round = 0; !order.empty(); round++) {
        if (round % 16 == 0)
            for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_below(static_cast<uint32_t>(i))]);
        const uint64_t before = grid->events;
        size_t kept = 0;
        for (Fiber* fiber : order) {
            resume(fiber);
            if (!fiber->finished) order[kept++] = fiber;
        }
        order.resize(kept);
        if (grid->events != before) {
            idle = 0;
        } else if (++idle > kIdleRounds) {
            report_deadlock();
        }
    }
}

// ---- memory with unmapped pages around it --------------------------------------------------------------------------

inline size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

inline unsigned char* map_guarded(size_t bytes) {
    void* mapped = mmap(nullptr, bytes + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) fail("no memory for the emulation");
    unsigned char* begin = static_cast<unsigned char*>(mapped) + page();
    mprotect(begin, bytes, PROT_READ | PROT_WRITE);
    return begin;
}

inline void unmap_guarded(unsigned char* begin, size_t bytes) { munmap(begin - page(), bytes + 2 * page()); }

inline void on_signal(int number, siginfo_t* info, void*) {
    const unsigned char* at = static_cast<const unsigned char*>(info->si_addr);
    if (!grid || !grid->current) _exit(128 + number);
    if (number == SIGTRAP || number == SIGILL) fail("a misaligned access, an index outside an array, or __trap()");
    for (const auto& block : grid->blocks)
        if (at >= block->mapped - page() && at < block->mapped + grid->shared_mapped + page())
            failf("access to offset %td, outside the %zu bytes of shared memory of block %u", at - block->shared,
                  grid->shared_bytes, block->number);
    if (at >= self().stack - page() && at < self().stack) fail("the stack of a thread is full: it recurses, or keeps a large array");
    failf("access to the invalid address %p", static_cast<const void*>(at));
}

struct Signals {
    static constexpr int kNumbers[] = {SIGSEGV, SIGBUS, SIGTRAP, SIGILL};
    struct sigaction before[4];
    stack_t stack_before;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    Signals() {
        stack_t mine{};
        mine.ss_sp = stack.data();
        mine.ss_size = stack.size();
        sigaltstack(&mine, &stack_before);
        struct sigaction action {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < 4; i++) sigaction(kNumbers[i], &action, &before[i]);
    }
    ~Signals() {
        for (int i = 0; i < 4; i++) sigaction(kNumbers[i], &before[i], nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

inline void add_block(uint32_t number, uint32_t threads) {
    const Dim size = grid->block;
    const size_t rounded = (grid->shared_bytes + 127) / 128 * 128;
    grid->shared_mapped = (rounded + page() - 1) / page() * page();
    grid->blocks.push_back(std::make_unique<Block>());
    Block& block = *grid->blocks.back();
    block.number = number;
    block.index = {number % grid->grid.x, number / grid->grid.x % grid->grid.y, number / grid->grid.x / grid->grid.y};
    block.warps.resize((threads + kWarp - 1) / kWarp);
    block.mapped = map_guarded(grid->shared_mapped);
    block.shared = block.mapped + grid->shared_mapped - rounded;
    memset(block.mapped, 0xff, grid->shared_mapped);
    for (uint32_t t = 0; t < threads; t++) {
        auto fiber = std::make_unique<Fiber>();
        fiber->thread = {t % size.x, t / size.x % size.y, t / size.x / size.y};
        fiber->lane = t % kWarp;
        fiber->block = &block;
        fiber->warp = &block.warps[t / kWarp];
        fiber->groups.resize(1);
        if (spare_stacks.empty()) spare_stacks.push_back(map_guarded(kStack));
        fiber->stack = spare_stacks.back();
        spare_stacks.pop_back();
        grid->fibers.push_back(std::move(fiber));
    }
}

inline void remove_blocks() {
    for (const auto& fiber : grid->fibers) spare_stacks.push_back(fiber->stack);
    for (const auto& block : grid->blocks)
        if (block->mapped) unmap_guarded(block->mapped, grid->shared_mapped);
    grid->fibers.clear();
    grid->blocks.clear();
}

inline void check_padding() {
    for (const auto& block : grid->blocks)
        for (const unsigned char* p = block->shared + grid->shared_bytes; p < block->mapped + grid->shared_mapped; p++)
            if (*p != 0xff) failf("block %u wrote just behind its %zu bytes of shared memory", block->number, grid->shared_bytes);
}

// A cooperative grid is resident as a whole; another runs in waves, and a block must not wait for a later one.
inline void run_grid(bool cooperative) {
    const uint32_t threads = grid->block.x * grid->block.y * grid->block.z;
    const uint32_t count = grid->grid.x * grid->grid.y * grid->grid.z;
    if (threads == 0 || threads > 1024) failf("a block of %u threads", threads);
    if (grid->shared_bytes > kSharedLimit) failf("%zu bytes of shared memory in a block; an H200 has 232448", grid->shared_bytes);
    if (cooperative && uint64_t(count) * threads > kResident) failf("%u blocks of %u threads are too many to be resident here", count, threads);
    const uint32_t wave = cooperative ? count : std::max(1u, kWave / threads);
    for (uint32_t number = 0; number < count; number++) {
        add_block(number, threads);
        if (grid->blocks.size() == wave || number + 1 == count) {
            run_fibers();
            check_padding();
            remove_blocks();
        }
    }
}

// 0, or 1 with a message.
inline int launch(const Config& config, void (*enter)(void**), void** params, char* message, size_t room) {
    Grid made;
    grid = &made;
    made.grid = {config.grid[0], config.grid[1], config.grid[2]};
    made.block = {config.block[0], config.block[1], config.block[2]};
    made.shared_bytes = config.shared_bytes;
    made.random = config.seed * 2654435761ull + 1;
    made.enter = enter;
    made.params = params;
    int status = 0;
    {
        Signals signals;
        if (sigsetjmp(made.failed, 1) == 0) {
            run_grid(config.cooperative != 0);
        } else {
            snprintf(message, room, "%s", made.message.c_str());
            status = 1;
        }
    }
    remove_blocks();
    grid = nullptr;
    return status;
}

template <class... A, size_t... I>
void call_with(void (*kernel)(A...), void** params, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(params[I])...);
}
template <class... A>
void call(void (*kernel)(A...), void** params) {
    call_with(kernel, params, std::index_sequence_for<A...>{});
}
template <class... A>
size_t parameter_sizes(void (*)(A...), size_t* sizes, size_t room) {
    const size_t known[] = {sizeof(A)..., 0};
    for (size_t i = 0; i < sizeof...(A) && i < room; i++) sizes[i] = known[i];
    return sizeof...(A);
}

}  // namespace emulation

// What the library of an emulated source exports of each kernel.
#define PENSTOCK_EMULATED(entry)                                                                                \
    extern "C" int launch_##entry(const emulation::Config* config, void** params, char* message, size_t room) { \
        return emulation::launch(*config, [](void** p) { emulation::call(entry, p); }, params, message, room);  \
    }                                                                                                           \
    extern "C" size_t parameters_##entry(size_t* sizes, size_t room) {                                          \
        return emulation::parameter_sizes(entry, sizes, room);                                                  \
    }
