// Attention over cached latents (MLA) of one new token per sequence, absorbed: queries are taken into the space of the
// latents, where all heads share one key per token, and what they see is taken out of it again.
//
// Tasks are (token, 256 consecutive keys, 4 heads): a cached vector is widened once for four heads. The split depends
// on the sequence alone, and every sum has one order: results are batch-invariant.

#include "attention/attention.h"
#include "elementwise/rows.h"

using namespace pk::PK_SET;

namespace {

constexpr int kKeys = 256;   // of a part
constexpr int kHeads = 4;    // of a task
constexpr int kTokens = 4;   // that share a pass over a head's matrix
constexpr int kNear = 32;    // keys that stay in the first cache while values are summed
constexpr int kAtOnce = VB == 32 ? 2 : 4;
constexpr int64_t kPartialFloats = 1 << 24;  // of the tokens that are computed together

struct Sizes {
    int cached, width, seen, stride;  // width: of a padded query; seen: of a padded latent; stride: of a partial result
};

inline Sizes sizes_of(const LatentArgs& a) {
    const int cached = a.latent + a.rotary;
    return {cached, padded(cached), padded(a.latent), padded(a.latent) + VL};
}

inline Scales scales_of(const LatentArgs& a) { return {a.scales, 1, a.block_size}; }

// Rotated pairs, their first numbers before their second ones.
template <class T>
PK_INLINE void rotate(const T* x, float* out, const float* cos, const float* sin, int half, bool interleaved) {
    for (int i = 0; i < half; ++i) {
        const float low = to_float(x[interleaved ? 2 * i : i]), high = to_float(x[interleaved ? 2 * i + 1 : half + i]);
        out[i] = low * cos[i] - high * sin[i];
        out[half + i] = high * cos[i] + low * sin[i];
    }
}

// Normalizes the latent and rotates the key of one token, and stores both.
template <class T, class C>
void store_token(const LatentArgs& a, const float* norm, int64_t token, float* line) {
    const T* kv = static_cast<const T*>(a.kv) + token * a.kv_stride;
    const float *cos = a.cos_sin + a.positions[token] * a.rotary, *sin = cos + a.rotary / 2;
    T* rounded = reinterpret_cast<T*>(line + padded(a.latent + a.rotary));
    scale_row(kv, norm, line, a.latent, rms_factor(square_sum(kv, a.latent), a.latent, a.eps));
    rotate(kv + a.latent, line + a.latent, cos, sin, a.rotary / 2, a.interleaved);
    const int cached = a.latent + a.rotary;
    const int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
    C* to = static_cast<C*>(a.cache) + a.slots[token] * cached;
    if constexpr (kScaled<C>) {
        convert(line, rounded, cached);
        store_scaled(rounded, to, cached, scales_of(a), block, 0, offset);
    } else {
        convert(line, to, cached);
    }
}

// Queries of `N` tokens in the space of what is cached, times the scale of scores: [token][width] from `out` on, a
// token's queries `step` apart.
template <class T, int N>
void absorb(const LatentArgs& a, const Sizes& s, int64_t token, int head, float* out, int64_t step) {
    constexpr int V = N == 1 ? 8 : 4;
    const int query = a.plain + a.rotary;
    const T* up = static_cast<const T*>(a.up) + int64_t(head) * (a.plain + a.value) * a.latent;
    const T* x = static_cast<const T*>(a.q) + token * a.q_stride + int64_t(head) * query;
    const vf scale = splat(a.scale);
    int r = 0;
    for (; r + V * VL <= a.latent; r += V * VL) {
        vf acc[N][V];
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v) acc[n][v] = splat(0);
        for (int d = 0; d < a.plain; ++d) {
            vf w[V];
            PK_UNROLL for (int v = 0; v < V; ++v) w[v] = load(up + int64_t(d) * a.latent + r + v * VL);
            PK_UNROLL for (int n = 0; n < N; ++n) {
                const vf factor = splat(to_float(x[n * a.q_stride + d]));
                PK_UNROLL for (int v = 0; v < V; ++v) acc[n][v] += factor * w[v];
            }
        }
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v) store(out + n * step + r + v * VL, acc[n][v] * scale);
    }
    for (; r < a.latent; r += VL) {
        const int rest = std::min(VL, a.latent - r);
        for (int n = 0; n < N; ++n) {
            vf acc = splat(0);
            for (int d = 0; d < a.plain; ++d)
                acc += splat(to_float(x[n * a.q_stride + d])) * load_part(up + int64_t(d) * a.latent + r, rest);
            store_part(out + n * step + r, acc * scale, rest);
        }
    }
    for (int n = 0; n < N; ++n) {
        const float *cos = a.cos_sin + a.positions[token + n] * a.rotary, *sin = cos + a.rotary / 2;
        float* turned = out + n * step + a.latent;
        rotate(x + n * a.q_stride + a.plain, turned, cos, sin, a.rotary / 2, a.interleaved);
        for (int i = 0; i < a.rotary; ++i) turned[i] *= a.scale;
        for (int i = s.cached; i < s.width; ++i) out[n * step + i] = 0;
    }
}

// Scores of K keys for H heads: [head][kKeys].
template <class C, int H, int K>
PK_INLINE void score(const float* q, const Sizes& s, const C* const* keys, const float* factors, float* scores) {
    vf acc[H][K];
    for (int h = 0; h < H; ++h)
        for (int k = 0; k < K; ++k) acc[h][k] = splat(0);
    int d = 0;
    for (; d + VL <= s.cached; d += VL) {
        vf key[K];
        PK_UNROLL for (int k = 0; k < K; ++k) key[k] = load(keys[k] + d);
        PK_UNROLL for (int h = 0; h < H; ++h) {
            const vf x = load(q + h * s.width + d);
            PK_UNROLL for (int k = 0; k < K; ++k) acc[h][k] += x * key[k];
        }
    }
    if (const int rest = s.cached - d)
        for (int k = 0; k < K; ++k) {
            const vf key = load_part(keys[k] + d, rest);
            for (int h = 0; h < H; ++h) acc[h][k] += load(q + h * s.width + d) * key;
        }
    for (int h = 0; h < H; ++h)
        for (int k = 0; k < K; ++k) scores[h * kKeys + k] = hsum(acc[h][k]) * factors[k];
}

// Adds `count` weighted latents to what H heads have seen, from dimension `d` on.
template <class C, int H, int V>
PK_INLINE void add_latents(const float* weights, const C* const* keys, int count, float* seen, int stride, int d) {
    vf acc[H][V];
    for (int h = 0; h < H; ++h)
        for (int v = 0; v < V; ++v) acc[h][v] = load(seen + h * stride + d + v * VL);
    for (int k = 0; k < count; ++k) {
        vf value[V];
        PK_UNROLL for (int v = 0; v < V; ++v) value[v] = load(keys[k] + d + v * VL);
        PK_UNROLL for (int h = 0; h < H; ++h) {
            const vf weight = splat(weights[h * kKeys + k]);
            PK_UNROLL for (int v = 0; v < V; ++v) acc[h][v] += weight * value[v];
        }
    }
    for (int h = 0; h < H; ++h)
        for (int v = 0; v < V; ++v) store(seen + h * stride + d + v * VL, acc[h][v]);
}

// One part of a token's keys for H heads: sums of latents, then the largest score and the total, `stride` apart.
template <class C, int H>
void attend(const LatentArgs& a, const Sizes& s, const float* q, const C* const* keys, const float* factors, int count,
            float* scores, float* seen) {
    int k = 0;
    for (; k + kAtOnce <= count; k += kAtOnce) score<C, H, kAtOnce>(q, s, keys + k, factors + k, scores + k);
    for (; k < count; ++k) score<C, H, 1>(q, s, keys + k, factors + k, scores + k);
    for (int h = 0; h < H; ++h) {
        float *row = scores + h * kKeys, *to = seen + h * s.stride;
        const float max = max_row(row, count);
        const float total = exp_row(row, count, max);
        if constexpr (kScaled<C>)
            for (int i = 0; i < count; ++i) row[i] *= factors[i];
        for (int d = 0; d < s.seen; d += VL) store(to + d, splat(0));
        to[s.seen] = max;
        to[s.seen + 1] = total;
    }
    for (int first = 0; first < count; first += kNear) {
        const int near = std::min(kNear, count - first);
        int d = 0;
        for (; d + 4 * VL <= a.latent; d += 4 * VL)
            add_latents<C, H, 4>(scores + first, keys + first, near, seen, s.stride, d);
        for (; d + VL <= a.latent; d += VL)
            add_latents<C, H, 1>(scores + first, keys + first, near, seen, s.stride, d);
        if (const int rest = a.latent - d)
            for (int h = 0; h < H; ++h) {
                vf acc = load(seen + h * s.stride + d);
                for (int i = 0; i < near; ++i)
                    acc += splat(scores[h * kKeys + first + i]) * load_part(keys[first + i] + d, rest);
                store(seen + h * s.stride + d, acc);
            }
    }
}

template <class C>
void attend_part(const LatentArgs& a, const Sizes& s, int64_t token, int begin, int end, int heads, const float* q,
                 float* scratch, float* seen) {
    const int32_t* table = a.block_tables + int64_t(a.rows[token]) * a.table_stride;
    float *scores = scratch, *factors = scratch + kHeads * kKeys;
    const C** keys = reinterpret_cast<const C**>(factors + kKeys);
    for (int i = begin; i < end; ++i) {
        const int64_t block = table[i / a.block_size], offset = i % a.block_size;
        keys[i - begin] = static_cast<const C*>(a.cache) + (block * a.block_size + offset) * s.cached;
        factors[i - begin] = 1;
        if constexpr (kScaled<C>) factors[i - begin] = cached_scale<C>(scales_of(a), block, 0, offset);
    }
    if (heads == kHeads) return attend<C, kHeads>(a, s, q, keys, factors, end - begin, scores, seen);
    for (int h = 0; h < heads; ++h)
        attend<C, 1>(a, s, q + h * s.width, keys, factors, end - begin, scores, seen + h * s.stride);
}

// What the parts of a token found for one head, brought together in `to`.
void merge(const Sizes& s, const float* parts, int count, int64_t step, float* to) {
    float max = -INFINITY, total = 0;
    for (int p = 0; p < count; ++p) max = std::max(max, parts[p * step + s.seen]);
    for (int d = 0; d < s.seen; d += VL) store(to + d, splat(0));
    for (int p = 0; p < count; ++p) {
        const float* part = parts + p * step;
        const float factor = std::exp(part[s.seen] - max);
        total += factor * part[s.seen + 1];
        for (int d = 0; d < s.seen; d += VL) store(to + d, load(to + d) + load(part + d) * splat(factor));
    }
    const float factor = total > 0 ? 1 / total : 0;
    for (int d = 0; d < s.seen; d += VL) store(to + d, load(to + d) * splat(factor));
}

// R values of N tokens: the latents that a head saw, [token][seen], times rows of its value matrix.
template <class T, int N, int R>
PK_INLINE void make_values(const LatentArgs& a, const Sizes& s, const T* rows, const float* seen, T* out) {
    vf acc[N][R];
    for (int n = 0; n < N; ++n)
        for (int r = 0; r < R; ++r) acc[n][r] = splat(0);
    int d = 0;
    for (; d + VL <= a.latent; d += VL) {
        vf w[R];
        PK_UNROLL for (int r = 0; r < R; ++r) w[r] = load(rows + int64_t(r) * a.latent + d);
        PK_UNROLL for (int n = 0; n < N; ++n) {
            const vf x = load(seen + n * s.seen + d);
            PK_UNROLL for (int r = 0; r < R; ++r) acc[n][r] += x * w[r];
        }
    }
    if (const int rest = a.latent - d)
        for (int r = 0; r < R; ++r) {
            const vf w = load_part(rows + int64_t(r) * a.latent + d, rest);
            for (int n = 0; n < N; ++n) acc[n][r] += load(seen + n * s.seen + d) * w;
        }
    for (int n = 0; n < N; ++n) {
        T* to = out + int64_t(n) * a.heads * a.value;
        for (int r = 0; r < R; ++r) store_part(to + r, splat(hsum(acc[n][r])), 1);
    }
}

template <class T, int N>
void take_out(const LatentArgs& a, const Sizes& s, int64_t token, int head, const float* seen) {
    const T* rows = static_cast<const T*>(a.up) + (int64_t(head) * (a.plain + a.value) + a.plain) * a.latent;
    T* out = static_cast<T*>(a.out) + (token * a.heads + head) * a.value;
    int v = 0;
    for (; v + 4 <= a.value; v += 4) make_values<T, N, 4>(a, s, rows + int64_t(v) * a.latent, seen, out + v);
    for (; v < a.value; ++v) make_values<T, N, 1>(a, s, rows + int64_t(v) * a.latent, seen, out + v);
}

// Calls f with the first of up to `kTokens` tokens and how many there are as a constant.
template <class F>
PK_INLINE void by_tokens(int64_t begin, int64_t end, F&& f) {
    if (end - begin == kTokens) return f(begin, std::integral_constant<int, kTokens>());
    for (int64_t t = begin; t < end; ++t) f(t, std::integral_constant<int, 1>());
}

int parts_of(int context) { return (context + kKeys - 1) / kKeys; }

struct LatentTask {
    int32_t token, part, head;
};

// Tokens `begin..end`, whose keys are all stored.
template <class T, class C>
void attend_tokens(Context* ctx, const LatentArgs& a, const Sizes& s, int64_t begin, int64_t end) {
    const int64_t count = end - begin, groups = (count + kTokens - 1) / kTokens;
    const int quads = (a.heads + kHeads - 1) / kHeads, threads = ctx->pool.threads();
    int64_t parts = 0;
    for (int64_t t = begin; t < end; ++t) parts += parts_of(a.context_lens[t]);
    float* queries = ctx->ungated.floats(count * a.heads * s.width);
    float* partials = ctx->shared.floats(parts * a.heads * s.stride + 1);
    LatentTask* tasks = static_cast<LatentTask*>(ctx->tasks.reserve((parts * quads + 1) * sizeof(LatentTask)));
    int64_t* firsts = static_cast<int64_t*>(ctx->counters.reserve((count + 1) * sizeof(int64_t)));
    const size_t scratch = (kHeads + 1) * kKeys + kKeys * sizeof(void*) / sizeof(float) + kTokens * s.seen;
    for (int i = 0; i < threads; ++i) ctx->scratch[i].floats(scratch);
    int n = 0;
    int64_t part = 0;
    for (int64_t t = begin; t < end; ++t) {
        firsts[t - begin] = part;
        for (int p = 0; p < parts_of(a.context_lens[t]); ++p, ++part)
            for (int h = 0; h < a.heads; h += kHeads) tasks[n++] = {int32_t(t), p, h};
    }
    const auto result = [&](int64_t t, int p, int h) {
        return partials + ((firsts[t - begin] + p) * a.heads + h) * s.stride;
    };
    ctx->pool.run(int(groups * a.heads), [&](int i, int) {
        const int64_t first = begin + i / a.heads * kTokens;
        by_tokens(first, std::min(end, first + kTokens), [&](int64_t t, auto many) {
            const int head = i % a.heads;
            absorb<T, many.value>(a, s, t, head, queries + ((t - begin) * a.heads + head) * s.width,
                                  int64_t(a.heads) * s.width);
        });
    });
    ctx->pool.run(n, [&](int i, int thread) {
        const LatentTask& task = tasks[i];
        const int from = task.part * kKeys, to = std::min(a.context_lens[task.token], from + kKeys);
        attend_part<C>(a, s, task.token, from, to, std::min(kHeads, a.heads - task.head),
                       queries + ((task.token - begin) * a.heads + task.head) * s.width,
                       ctx->scratch[thread].floats(0), result(task.token, task.part, task.head));
    });
    ctx->pool.run(int(groups * a.heads), [&](int i, int thread) {
        const int64_t first = begin + i / a.heads * kTokens;
        const int head = i % a.heads;
        by_tokens(first, std::min(end, first + kTokens), [&](int64_t t, auto many) {
            float* seen = ctx->scratch[thread].floats(0);
            for (int j = 0; j < many.value; ++j)
                merge(s, result(t + j, 0, head), parts_of(a.context_lens[t + j]), int64_t(a.heads) * s.stride,
                      seen + j * s.seen);
            take_out<T, many.value>(a, s, t, head, seen);
        });
    });
}

}  // namespace

// 0: done; 1: a position outside the rotary table; 2: a slot outside the cache. Nothing is written then.
PK_FUNCTION(int, pk_latent_attention)(Context* ctx, const LatentArgs* args) {
    Guard hold(ctx->busy);
    const LatentArgs& a = *args;
    for (int64_t t = 0; t < a.tokens; ++t) {
        if (uint64_t(a.positions[t]) >= uint64_t(a.max_positions)) return 1;
        if (uint64_t(a.slots[t]) >= uint64_t(a.num_slots)) return 2;
    }
    const Sizes s = sizes_of(a);
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        dispatch_cache(a.cache_dtype, [&](auto* c) {
            using C = elem<decltype(c)>;
            const float* norm = as_floats(ctx->shared, a.norm, a.latent, a.norm_dtype);
            if (a.kv) {
                ctx->pool.rows(a.tokens, grain(2 * s.cached), [&](int64_t begin, int64_t end, int thread) {
                    float* line = ctx->scratch[thread].floats(2 * s.width);
                    for (int64_t token = begin; token < end; ++token) store_token<T, C>(a, norm, token, line);
                });
            }
            for (int64_t begin = 0, end = 0; begin < a.tokens; begin = end) {
                int64_t floats = 0;
                do floats += parts_of(a.context_lens[end++]) * int64_t(a.heads) * s.stride;
                while (end < a.tokens && (end - begin) % 64 && floats < kPartialFloats);
                attend_tokens<T, C>(ctx, a, s, begin, end);
            }
        });
    });
    return 0;
}
