// Paged attention straight from the cache blocks: one new token per sequence (decode) and many (prefill).
//
// A decode task is (sequence, kv head, 128 consecutive keys); a prefill task is (sequence, kv head, tile of
// queries). The split depends only on the sequence, never on the batch or on the number of threads, so a sequence
// gets the same bits in any company.

#include "attention_bytes.h"
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
    if constexpr (std::is_same<C, bf16>::value || std::is_same<C, s8>::value)
        if (by_tiles(a, a.cache_dtype)) return PrefillTile<C>(a, task, scratch).run();
#endif
    prefill_tile<C>(a, task, scratch);
}

// How many decode tasks are done together, at most.
int decode_span(const AttentionArgs& a) {
    (void)a;
#if defined(PK_BYTE_TILES)
    if (by_byte_tiles(a)) return kByteTasks;
#endif
    return 1;
}

// `count` decode tasks from `tasks` on, and those this thread will probably do then. partial(i): where results go.
template <class C, class F>
void decode(const AttentionArgs& a, const Task* tasks, int count, const Task* following, int followers,
            float* scratch, F&& partial) {
    (void)following, (void)followers;
#if defined(PK_BYTE_TILES)
    if (by_byte_tiles(a)) {
        if (byte_lanes(a.heads / a.kv_heads) == 4)
            return decode_bytes<4>(a, tasks, count, following, followers, scratch, partial);
        return decode_bytes<8>(a, tasks, count, following, followers, scratch, partial);
    }
#endif
    for (int i = 0; i < count; ++i) {
#if defined(PK_AMX)
        if (by_tiles(a)) {
            decode_part_by_tiles(a, tasks[i], i < followers ? following + i : nullptr, scratch, partial(i));
            continue;
        }
#endif
        decode_part<C>(a, tasks[i], scratch, partial(i));
    }
}

}  // namespace

// Whether an int8 cache is read faster than one of bfloat16 by such heads.
PK_API int pk_attention_likes_bytes(int heads, int kv_heads, int head_dim, int block_size) {
#if defined(PK_BYTE_TILES)
    AttentionArgs a{};
    a.heads = heads, a.kv_heads = kv_heads, a.head_dim = head_dim, a.block_size = block_size;
    a.dtype = 2, a.cache_dtype = 3;
    return by_byte_tiles(a);
#else
    (void)heads, (void)kv_heads, (void)head_dim, (void)block_size;
    return 0;
#endif
}

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
    scratch = std::max({scratch, decode_tile_floats(a), first_decode ? prefill_tile_floats(a, tile * group) : 0});
#endif
#if defined(PK_BYTE_TILES)
    scratch = std::max(scratch, decode_byte_floats(a));
#endif
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].floats(scratch);

    const int decodes = n - first_decode;
    const int span = std::clamp(decodes / (4 * ctx->pool.threads()), 1, decode_span(a));
    dispatch_cache(a.cache_dtype, [&](auto* c) {
        using C = elem<decltype(c)>;
        ctx->pool.run(first_decode + (decodes + span - 1) / span, [&](int i, int thread) {
            float* mine = ctx->scratch[thread].floats(0);
            if (i < first_decode) return prefill<C>(a, tasks[i], mine);
            const int first = first_decode + (i - first_decode) * span, then = first + ctx->pool.threads() * span;
            const int count = std::min(span, n - first);
            decode<C>(a, tasks + first, count, tasks + then, std::min(span, n - then), mine,
                      [&](int j) { return partials + tasks[first + j].part * partial; });
            for (int j = first; j < first + count; ++j) {
                Merge& merge = merges[tasks[j].group];
                if (merge.left.fetch_sub(1, std::memory_order_acq_rel) == 1)
                    merge_parts(a, tasks[j], partials + merge.first * partial, merge.parts);
            }
        });
    });
}

PK_TAPED(pk_attention)
