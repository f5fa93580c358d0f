// Paged attention straight from the cache blocks: one new token per sequence (decode) and many (prefill).
//
// A decode task is (sequence, kv head, 256 consecutive keys, or 128 where threads would be idle); a prefill task is
// (sequence, kv head, tile of queries). With `fixed` the split depends only on the sequence, never on the batch or on
// the number of threads: results are batch-invariant.

#include "attention/amx/decode_int8.h"
#include "attention/decode.h"
#include "attention/amx/decode_bfloat16.h"
#include "attention/prefill.h"
#include "attention/prefill_int8.h"
#include "attention/amx/prefill.h"
#include "common/recorded_call.h"

using namespace pk::PK_SET;

namespace {

void zero_output(const AttentionArgs& a, int64_t token) {
    const size_t row = size_t(a.heads) * a.head_dim * (a.dtype == 0 ? 4 : 2);
    std::memset(static_cast<char*>(a.out) + token * row, 0, row);
}

template <class C>
void prefill(const AttentionArgs& a, const Task& task, float* scratch) {
#if defined(PK_AMX)
    if constexpr (std::is_same<C, bf16>::value || std::is_same<C, s8>::value)
        if (by_tiles(a)) return PrefillTile<C>(a, task, scratch).run();
#endif
#if defined(PK_PAIR_PRODUCTS)
    if constexpr (std::is_same<C, s8>::value)
        if (by_pairs(a, task)) return Int8PrefillTile(a, task, scratch).run();
#endif
    prefill_tile<C>(a, task, scratch);
}

#if defined(PK_AMX)
// Calls f with a null pointer to the class that decodes such a cache on tiles; false where there is none.
template <class F>
bool on_tiles(const AttentionArgs& a, F&& f) {
#if defined(PK_BYTE_TILES)
    if (by_byte_groups(a)) {
        group_lanes(a) == 4 ? f((DecodeBytes<4>*)nullptr) : f((DecodeBytes<8>*)nullptr);
        return true;
    }
#endif
    if (!by_half_groups(a)) return false;
    group_lanes(a) == 4 ? f((DecodeHalves<4>*)nullptr) : f((DecodeHalves<8>*)nullptr);
    return true;
}
#endif

// The keys of a decode task.
int part_of(const AttentionArgs& a, int threads) {
    int64_t tasks = 0;
    for (int s = 0; s < a.sequences; ++s) {
        const int context = a.context_lens[s];
        if (a.query_starts[s + 1] - a.query_starts[s] == 1) tasks += (context + kPart - 1) / kPart * a.kv_heads;
    }
    return a.fixed || tasks >= 4 * threads ? kPart : kPart / 2;
}

}  // namespace

// Whether keys and values of an int8 cache are multiplied without widening them.
PK_FUNCTION(int, pk_attention_has_bytes)() {
#if defined(PK_BYTE_TILES)
    return 1;
#else
    return 0;
#endif
}

PK_FUNCTION(void, pk_attention)(Context* ctx, const AttentionArgs* args) {
    Guard hold(ctx->busy);
    const AttentionArgs& a = *args;
    const int group = a.heads / a.kv_heads, width = padded(a.head_dim);
    const int tile = std::max(1, kTileRows / group), most = part_of(a, ctx->pool.threads());

    // Sizes first, so that the task list is one allocation that stays.
    size_t ntasks = 0, nparts = 0, nmerges = 0;
    for (int s = 0; s < a.sequences; ++s) {
        const int context = a.context_lens[s], fresh = a.query_starts[s + 1] - a.query_starts[s];
        if (fresh == 1) {
            const int from = first_visible(a, std::max(0, context - 1));
            const size_t parts = context > 0 ? (context - 1) / most - from / most + 1 : 0;
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
    int64_t decoded_keys = 0;
    const int first_decode = n;
    for (int s = 0; s < a.sequences; ++s) {
        if (a.query_starts[s + 1] - a.query_starts[s] != 1) continue;
        const int context = a.context_lens[s], from = first_visible(a, std::max(0, context - 1));
        if (context <= 0) {
            zero_output(a, a.query_starts[s]);
            continue;
        }
        decoded_keys += int64_t(context - from) * a.kv_heads;
        for (int h = 0; h < a.kv_heads; ++h, ++m) {
            merges[m].first = part;
            for (int begin = from; begin < context;) {
                const int end = std::min(context, (begin / most + 1) * most);
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
#if defined(PK_PAIR_PRODUCTS)
    if (first_decode && by_pairs(a)) scratch = std::max(scratch, prefill_int8_floats(a, tile * group));
#endif
    int span = 1;  // decode tasks that are done together
    const int decodes = n - first_decode;
#if defined(PK_AMX)
    if (first_decode) scratch = std::max(scratch, prefill_tile_floats(a, tile * group));
    on_tiles(a, [&](auto* part) {
        scratch = std::max(scratch, together_floats<elem<decltype(part)>>(a));
        const int64_t fitting = int64_t(kTogetherKeys) * decodes / std::max<int64_t>(1, decoded_keys);
        span = std::clamp(decodes / (4 * ctx->pool.threads()), 1, int(std::clamp<int64_t>(fitting, 1, kTogether)));
    });
#endif
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].floats(scratch);

    dispatch_cache(a.cache_dtype, [&](auto* c) {
        using C = elem<decltype(c)>;
        // Runs the tasks from `first` on with `some`; those from `then` on will probably be the thread's next.
        const auto decode = [&](int first, int then, auto&& some) {
            const int count = std::min(span, n - first);
            some(tasks + first, count, tasks + then, std::clamp(n - then, 0, span),
                 [&](int j) { return partials + tasks[first + j].part * partial; });
            for (int j = first; j < first + count; ++j) {
                Merge& merge = merges[tasks[j].group];
                if (merge.left.fetch_sub(1, std::memory_order_acq_rel) == 1)
                    merge_parts(a, tasks[j], partials + merge.first * partial, merge.parts);
            }
        };
        // Calls f with the function that runs several tasks of a thread.
        const auto with_decoder = [&](int thread, auto&& f) {
            float* const mine = ctx->scratch[thread].floats(0);
#if defined(PK_AMX)
            if (on_tiles(a, [&](auto* part) {
                    DecodeRun<elem<decltype(part)>> run(a, mine);
                    f([&](auto&&... of) { run.together(of...); });
                }))
                return;
#endif
            f([&](const Task* some, int count, const Task*, int, auto&& result) {
                for (int j = 0; j < count; ++j) decode_part<C>(a, some[j], mine, result(j));
            });
        };
        const int units = (decodes + span - 1) / span;
        if (!first_decode && units >= 4 * ctx->pool.threads())
            return ctx->pool.spread(units, [&](auto& next, int thread) {
                with_decoder(thread, [&](auto&& some) {
                    for (int64_t begin, end; next(&begin, &end);)
                        for (int i = int(begin); i < int(end); ++i) decode(i * span, (i + 1) * span, some);
                });
            });
        ctx->pool.run(first_decode + units, [&](int i, int thread) {
            if (i < first_decode) return prefill<C>(a, tasks[i], ctx->scratch[thread].floats(0));
            const int first = first_decode + (i - first_decode) * span;
            with_decoder(thread, [&](auto&& some) { decode(first, first + ctx->pool.threads() * span, some); });
        });
    });
}

PK_RECORDABLE(pk_attention)
