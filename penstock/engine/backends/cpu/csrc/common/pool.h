// One persistent thread pool per context; the calling thread works too.
//
// Invariant: `run` returns when every task has finished, and never waits for a worker that did not start:
// when other processes hold the cores, the caller simply does the work itself. Workers spin for a few
// microseconds between jobs (a decoder step issues hundreds) and then sleep, so an idle engine costs nothing.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace pk::PK_SET {

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();  // without the header of all intrinsics, which takes long to compile
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores; isb stalls for a few tens of cycles
#endif
}

class Pool {
  public:
    explicit Pool(int threads, int spin_us) : spin_(std::chrono::microseconds(spin_us)), shares_(new Share[threads]) {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    int threads() const { return int(workers_.size()) + 1; }

    // task(index, thread) for every index in [0, count), in any order, on any thread.
    template <class F>
    void run(int count, F&& task) {
        if (count <= 1 || workers_.empty()) {
            for (int i = 0; i < count; ++i) task(i, 0);
            return;
        }
        call_ = [](void* body, int index, int thread) { (*static_cast<F*>(body))(index, thread); };
        body_ = (void*)&task;
        count_ = count;
        next_.store(0, std::memory_order_relaxed);
        open_.store(true);
        epoch_.fetch_add(1);
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> hold(mutex_); }
            wake_.notify_all();
        }
        work(0);
        // A worker enters by raising `inside_` and then looking at `open_`; we close and then look at
        // `inside_`. Both are sequentially consistent, so one of the two sees the other.
        open_.store(false);
        await_workers();
    }

    // Splits [0, rows) into pieces of at least `grain` rows: body(begin, end, thread). As far as possible a thread gets the
    // same rows in every call with as many rows: what it wrote last time is still in its cache.
    template <class F>
    void rows(int64_t rows, int64_t grain, F&& body) {
        const int64_t pieces = std::min(int64_t(threads()) * 4, rows / std::max<int64_t>(grain, 1));
        if (pieces <= 1 || workers_.empty()) {
            if (rows > 0) body(int64_t(0), rows, 0);
            return;
        }
        spread(rows, (rows + pieces - 1) / pieces, [&](auto& next, int thread) {
            for (int64_t begin, end; next(&begin, &end);) body(begin, end, thread);
        });
    }

    // Where the share of a thread begins in `spread`.
    int64_t share(int64_t rows, int thread) const { return rows * thread / threads(); }

    // Work stealing: every thread goes through its share of [0, rows) from the front, so that prefetching is of use; a
    // thread that is done early steals from the back of another share, a `piece` at a time.
    // body(next, thread): next(&begin, &end) returns false when no rows are left.
    template <class F>
    void spread(int64_t rows, int64_t piece, F&& body) {
        const int shares = int(std::min<int64_t>(threads(), (rows + piece - 1) / piece));
        for (int s = 0; s < shares; ++s) shares_[s].left.store(pack_range(rows * s / shares, rows * (s + 1) / shares));
        run(shares, [&](int, int thread) {
            int other = 0;
            const auto next = [&](int64_t* begin, int64_t* end) {
                for (; other < shares; ++other)
                    if (take((thread + other) % shares, piece, other == 0 && thread < shares, begin, end)) return true;
                return false;
            };
            body(next, thread);
        });
    }

    // The same, in pieces small enough that no thread waits long for the last one, even on a shared core.
    template <class F>
    void spread(int64_t rows, F&& body) {
        spread(rows, std::max<int64_t>(1, rows / (int64_t(threads()) * 8)), std::forward<F>(body));
    }

  private:
    using Clock = std::chrono::steady_clock;

    struct alignas(64) Share {
        std::atomic<uint64_t> left{0};  // begin in the upper half, end in the lower
    };

    static uint64_t pack_range(int64_t begin, int64_t end) { return uint64_t(begin) << 32 | uint64_t(end); }

    bool take(int of, int64_t piece, bool front, int64_t* begin, int64_t* end) {
        std::atomic<uint64_t>& left = shares_[of].left;
        uint64_t seen = left.load(std::memory_order_relaxed), rest;
        do {
            const int64_t from = int64_t(seen >> 32), to = int64_t(seen & 0xffffffff);
            if (from >= to) return false;
            const int64_t count = std::min(piece, to - from);
            *begin = front ? from : to - count;
            *end = *begin + count;
            rest = front ? pack_range(*end, to) : pack_range(from, *begin);
        } while (!left.compare_exchange_weak(seen, rest, std::memory_order_relaxed));
        return true;
    }

    void work(int thread) {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(body_, i, thread);
    }

    // Spins for a moment, then goes on but yields the core: on a shared one the thread we wait for may be queued behind us.
    template <class F>
    bool spin_until(F&& happened) const {
        const auto began = Clock::now();
        for (auto now = began; now < began + spin_; now = Clock::now()) {
            for (int i = 0; i < 16; ++i) {
                if (happened()) return true;
                cpu_relax();
            }
            if (now > began + spin_ / 8) std::this_thread::yield();
        }
        return false;
    }

    void await_workers() {
        if (spin_until([this] { return inside_.load() == 0; })) return;
        std::unique_lock<std::mutex> hold(mutex_);
        caller_waits_.store(true);
        done_.wait(hold, [this] { return inside_.load() == 0; });
        caller_waits_.store(false);
    }

    void serve(int thread) {
        uint64_t seen = 0;
        while (await_epoch(seen)) {
            seen = epoch_.load();
            inside_.fetch_add(1);
            if (open_.load()) work(thread);
            if (inside_.fetch_sub(1) == 1 && caller_waits_.load()) {
                { std::lock_guard<std::mutex> hold(mutex_); }
                done_.notify_one();
            }
        }
    }

    bool await_epoch(uint64_t seen) {
        if (spin_until([&] { return epoch_.load(std::memory_order_acquire) != seen; })) return true;
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(hold, [&] { return stop_ || epoch_.load() != seen; });
        sleepers_.fetch_sub(1);
        return !stop_;
    }

    std::vector<std::thread> workers_;
    const Clock::duration spin_;
    const std::unique_ptr<Share[]> shares_;
    void (*call_)(void*, int, int) = nullptr;
    void* body_ = nullptr;
    int count_ = 0;
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<uint64_t> epoch_{0};
    std::atomic<bool> open_{false};
    alignas(64) std::atomic<int> inside_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> caller_waits_{false};
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    bool stop_ = false;
};

}  // namespace pk::PK_SET
