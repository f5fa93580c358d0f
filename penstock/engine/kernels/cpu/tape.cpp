// Runs a recorded list of calls: a whole forward pass for the price of one call from Python.
//
// Invariant: what differs between two steps is the numbers of tokens and of sequences, and the contents of buffers
// whose addresses stay; so a tape is patched in a few places and otherwise only read.

#include "tape.h"

using namespace pk;

struct Call {
    int (*run)(Context*, const uint64_t*);
    const uint64_t* words;
    int64_t nanoseconds;  // spent here since the tape was made, where times are asked for
};

struct Patch {
    void* at;
    int32_t bytes;  // 4 or 8
    int32_t count;  // which of the step's counts belongs there
};

// 0: done. Otherwise 256 * (index of the call) + the code with which it stopped.
PK_API int64_t pk_run(Context* ctx, Call* calls, int64_t length, const Patch* patches, int64_t patched,
                      const int64_t* counts, int timed) {
    for (int64_t i = 0; i < patched; ++i) {
        const int64_t count = counts[patches[i].count];
        std::memcpy(patches[i].at, &count, size_t(patches[i].bytes));  // little-endian: the low bytes come first
    }
    auto now = [] { return std::chrono::steady_clock::now(); };
    auto before = now();
    for (int64_t i = 0; i < length; ++i) {
        if (int code = calls[i].run(ctx, calls[i].words)) return 256 * i + code;
        if (timed) {
            const auto after = now();
            calls[i].nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(after - before).count();
            before = after;
        }
    }
    return 0;
}

// Rows of a table by index. 1: an index outside it; nothing is written then.
PK_API int pk_embed(Context* ctx, const int64_t* ids, const void* table, void* out, int64_t rows, int64_t size,
                    int64_t row_bytes) {
    Guard hold(ctx->busy);
    for (int64_t r = 0; r < rows; ++r)
        if (uint64_t(ids[r]) >= uint64_t(size)) return 1;
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(static_cast<char*>(out) + r * row_bytes, static_cast<const char*>(table) + ids[r] * row_bytes,
                    size_t(row_bytes));
    return 0;
}
PK_TAPED(pk_embed)
