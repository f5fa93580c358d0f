// Runs a recorded step: the list of calls of a whole forward pass, for the price of one call from Python.
//
// Invariant: two runs differ in the numbers of tokens and of sequences, and in the contents of buffers whose addresses
// stay; so a recorded step is patched in a few places and otherwise only read.

#include "common/noise.h"
#include "common/recorded_call.h"

using namespace pk::PK_SET;

// 0: done. Otherwise 256 * (index of the call) + the code with which it stopped.
PK_FUNCTION(int64_t, pk_run)(Context* ctx, RecordedCall* calls, int64_t length, const CountPatch* patches,
                             int64_t patched, const int64_t* counts, int timed) {
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

struct Decode {
    int64_t token;  // negative: the last one sampled for its row
    int64_t position, row;
};

// Fills in the inputs of a step in which each of `count` sequences computes one token and samples the next.
// Returns the union of their rows' flags; negative when a position lies outside its block table.
PK_FUNCTION(int, pk_load_decodes)(const DecodeArgs* args, const Decode* decodes, int64_t count) {
    const DecodeArgs& a = *args;
    int flags = 0;
    for (int64_t i = 0; i < count; ++i) {
        const auto [token, position, row] = decodes[i];
        const int64_t block = position / a.block_size;
        if (uint64_t(block) >= uint64_t(a.width)) return -1;
        a.ids[i] = token < 0 ? a.last_tokens[row] : token;
        a.positions[i] = position;
        a.slots[i] = a.tables[row * a.width + block] * a.block_size + position % a.block_size;
        a.query_starts[i] = int32_t(i);
        a.context_lens[i] = int32_t(position + 1);
        a.rows[i] = a.sample_rows[i] = int32_t(row);
        a.at[i] = i;
        a.keys[i] = int64_t(row_key(a.seeds[row], position + 1));
        a.temperatures[i] = a.row_temperatures[row * a.temperature_stride];
        flags |= a.flags[row];
    }
    a.query_starts[count] = int32_t(count);
    return flags;
}

// Stores the token sampled for each row; of several the last.
PK_FUNCTION(void, pk_keep)(Context* ctx, const int64_t* tokens, const int32_t* rows, int64_t* last_tokens,
                           int64_t count) {
    Guard hold(ctx->busy);
    for (int64_t i = 0; i < count; ++i) last_tokens[rows[i]] = tokens[i];
}
PK_RECORDABLE(pk_keep)

// Rows of a table by index. 1: an index outside it; nothing is written then.
PK_FUNCTION(int, pk_embed)(Context* ctx, const int64_t* ids, const void* table, void* out, int64_t rows, int64_t size,
                           int64_t row_bytes) {
    Guard hold(ctx->busy);
    for (int64_t r = 0; r < rows; ++r)
        if (uint64_t(ids[r]) >= uint64_t(size)) return 1;
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(static_cast<char*>(out) + r * row_bytes, static_cast<const char*>(table) + ids[r] * row_bytes,
                    size_t(row_bytes));
    return 0;
}
PK_RECORDABLE(pk_embed)
