// Paged attention straight from the cache blocks: one new token per sequence (decode) and many (prefill).
//
// A decode task is (sequence, kv head, 128 consecutive keys); a prefill task is (sequence, kv head, tile of
// queries). The split depends only on the sequence, never on the batch or on the number of threads, so a sequence
// gets the same bits in any company.

#include "attention_decode.h"
#include "attention_prefill.h"
#include "attention_tiles.h"
#include "tape.h"

using namespace pk;

namespace {

void zero_output(const AttentionArgs& a, int64_t token) {
    const size_t row = size_t(a.heads) * a.head_dim * (a.dtype == 0 ? 4 : 2);
    std::memset(static_cast<char*>(a.out) + token * row, 0, row);
}

template <class C>
void prefill(const AttentionArgs& a, const Task& task, float* scratch) {
#if defined(PK_AMX)
    if (by_tiles(a)) return PrefillTile(a, task, scratch).run();
#endif
    prefill_tile<C>(a, task, scratch);
}

template <class C>
void decode(const AttentionArgs& a, const Task& task, const Task* following, float* scratch, float* partial) {
#if defined(PK_AMX)
    if (by_tiles(a)) return decode_part_by_tiles(a, task, following, scratch, partial);
#else
    (void)following;
#endif
    decode_part<C>(a, task, scratch, partial);
}

}  // namespace

PK_API void pk_attention(Context* ctx, const AttentionArgs* args) {
    Guard hold(ctx->busy);
    const AttentionArgs& a = *args;
    const int group = a.heads / a.kv_heads, width = padded(a.head_dim);
    const int tile = std::max(1, kTileRows / group);

    // Sizes first, so that the task list is one allocation that stays.
    size_t ntasks = 0, nparts = 0, nmerges = 0;
    for (int s = 0; s < a.sequences; ++s) {
        const int context = a.context_lens[s], fresh = a.query_starts[s + 1] - a.query_starts[s];
        if (fresh == 1) {
            const int from = a.window ? std::max(0, context - a.window) : 0;
            const size_t parts = context > 0 ? (context - 1) / kPart - from / kPart + 1 : 0;
            ntasks += parts * a.kv_heads;
            nparts += parts * a.kv_heads;
            nmerges += a.kv_heads;
        } else {
            ntasks += size_t((fresh + tile - 1) / tile) * a.kv_heads;
        }
    }
    Task* tasks = static_cast<Task*>(ctx->tasks.reserve(ntasks * sizeof(Task) + 1));
    Merge* merges = static_cast<Merge*>(ctx->counters.reserve(nmerges * sizeof(Merge) + 1));
    const int64_t partial = int64_t(group) * (width + VL);
    float* partials = ctx->shared.floats(nparts * partial + 1);

    // The longest tasks come first: late query tiles of a prefill see the most keys.
    int n = 0;
    for (int s = 0; s < a.sequences; ++s) {
        const int fresh = a.query_starts[s + 1] - a.query_starts[s];
        if (fresh <= 1) continue;
        for (int t = (fresh + tile - 1) / tile - 1; t >= 0; --t)
            for (int h = 0; h < a.kv_heads; ++h)
                tasks[n++] = {s, h, t * tile, std::min(fresh, (t + 1) * tile), -1, 0};
    }
    int m = 0, part = 0;
    const int first_decode = n;
    for (int s = 0; s < a.sequences; ++s) {
        if (a.query_starts[s + 1] - a.query_starts[s] != 1) continue;
        const int context = a.context_lens[s], from = a.window ? std::max(0, context - a.window) : 0;
        if (context <= 0) {
            zero_output(a, a.query_starts[s]);
            continue;
        }
        for (int h = 0; h < a.kv_heads; ++h, ++m) {
            merges[m].first = part;
            for (int begin = from; begin < context;) {
                const int end = std::min(context, (begin / kPart + 1) * kPart);
                tasks[n++] = {s, h, begin, end, m, part++};
                begin = end;
            }
            merges[m].parts = part - merges[m].first;
            merges[m].left.store(merges[m].parts, std::memory_order_relaxed);
        }
    }

    const size_t decode_floats = size_t(group) * (width + kPart) + kPart * sizeof(Span) / sizeof(float);
    const size_t prefill_floats = size_t(tile) * group * (2 * width + kPanel + 2) + size_t(kPanel) * 2 * width;
    size_t scratch = first_decode ? std::max(decode_floats, prefill_floats) : decode_floats;
#if defined(PK_AMX)
    if (by_tiles(a)) scratch = std::max(decode_tile_floats(a), first_decode ? prefill_tile_floats(a, tile * group) : 0);
#endif
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].floats(scratch);

    dispatch_cache(a.cache_dtype, [&](auto* c) {
        using C = elem<decltype(c)>;
        ctx->pool.run(n, [&](int i, int thread) {
            const Task& task = tasks[i];
            float* mine = ctx->scratch[thread].floats(0);
            if (task.group < 0) return prefill<C>(a, task, mine);
            const int following = i + ctx->pool.threads();
            decode<C>(a, task, following < n ? tasks + following : nullptr, mine, partials + task.part * partial);
            Merge& merge = merges[task.group];
            if (merge.left.fetch_sub(1, std::memory_order_acq_rel) == 1)
                merge_parts(a, task, partials + merge.first * partial, merge.parts);
        });
    });
}

PK_TAPED(pk_attention)
