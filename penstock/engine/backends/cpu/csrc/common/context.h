// What a handle owns: the pool, one lock (one call at a time per handle), and scratch memory that only ever grows, so
// that a step in steady state allocates nothing.

#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "common/arguments.h"
#include "common/export.h"
#include "common/pool.h"

namespace pk::PK_SET {

class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    // Contents are not kept; 64-byte aligned.
    void* reserve(size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = (bytes + bytes / 2 + 4095) / 4096 * 4096;
            data_ = std::aligned_alloc(4096, size_);
            if (!data_) throw std::bad_alloc();
        }
        return data_;
    }
    float* floats(size_t count) { return static_cast<float*>(reserve(count * sizeof(float))); }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

struct Context {
    Context(int threads, int spin_us) : pool(threads, spin_us), scratch(new Buffer[threads]) {}
    Pool pool;
    std::mutex busy;
    std::unique_ptr<Buffer[]> scratch;  // one per thread
    Buffer shared, tasks, counters, ungated;
};

using Guard = std::lock_guard<std::mutex>;

}  // namespace pk::PK_SET
