// One new token of a sequence against a part of its keys.
//
// All query heads of a group share one pass over the keys and one over the values; softmax is local to the part,
// and `merge_parts` joins the parts of a (sequence, kv head) in order.

#pragma once

#include "attention/attention.h"

namespace pk::PK_SET {

constexpr int kPart = 256;    // keys of a task, at most
constexpr int kMaxGroup = 4;  // query heads per register tile

struct Merge {
    std::atomic<int32_t> left;
    int32_t first, parts;  // partial results, in order
};

PK_INLINE void reduce4(vf a, vf b, vf c, vf d, float* out) {
#if defined(PK_NEON)
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#elif defined(PK_AVX2)
    __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
#else
    out[0] = hsum(a);
    out[1] = hsum(b);
    out[2] = hsum(c);
    out[3] = hsum(d);
#endif
}

// scores[g * kPart + j] = q[g] . k[j] for `count` consecutive keys. A block's keys are a short run, on which the
// hardware prefetcher barely starts: the next run (`ahead`) and the values of this one are prefetched line by line.
template <int G, class C>
void score_keys(const float* q, int qs, const C* k, const C* ahead, const C* values, int dim, int count,
                float* scores) {
    const int whole = dim / VL * VL, rest = dim - whole;
    int j = 0;
    for (; j + 4 <= count; j += 4) {
        vf acc[G][4];
        PK_UNROLL for (int g = 0; g < G; ++g)
            PK_UNROLL for (int i = 0; i < 4; ++i) acc[g][i] = splat(0);
        const C *k0 = k + int64_t(j) * dim, *k1 = k0 + dim, *k2 = k1 + dim, *k3 = k2 + dim;
        for (int d = 0; d < whole; d += VL) {
            vf key[4] = {load(k0 + d), load(k1 + d), load(k2 + d), load(k3 + d)};
            __builtin_prefetch(ahead + int64_t(j) * dim + 4 * d);
            __builtin_prefetch(values + int64_t(j) * dim + 4 * d);
            PK_UNROLL for (int g = 0; g < G; ++g) {
                vf x = load(q + g * qs + d);
                PK_UNROLL for (int i = 0; i < 4; ++i) acc[g][i] += x * key[i];
            }
        }
        if (rest) {
            vf key[4] = {load_part(k0 + whole, rest), load_part(k1 + whole, rest), load_part(k2 + whole, rest),
                         load_part(k3 + whole, rest)};
            PK_UNROLL for (int g = 0; g < G; ++g) {
                vf x = load(q + g * qs + whole);
                PK_UNROLL for (int i = 0; i < 4; ++i) acc[g][i] += x * key[i];
            }
        }
        for (int g = 0; g < G; ++g) reduce4(acc[g][0], acc[g][1], acc[g][2], acc[g][3], scores + g * kPart + j);
    }
    for (; j < count; ++j) {
        vf acc[G];
        for (int g = 0; g < G; ++g) acc[g] = splat(0);
        const C* key = k + int64_t(j) * dim;
        for (int d = 0; d < whole; d += VL)
            for (int g = 0; g < G; ++g) acc[g] += load(q + g * qs + d) * load(key + d);
        if (rest)
            for (int g = 0; g < G; ++g) acc[g] += load(q + g * qs + whole) * load_part(key + whole, rest);
        for (int g = 0; g < G; ++g) scores[g * kPart + j] = hsum(acc[g]);
    }
}

}  // namespace pk::PK_SET

#include "attention/neon/int8_scores.h"

namespace pk::PK_SET {

struct Span {
    const void* base;  // first element of the run of keys (or values)
    int32_t count;
};

template <int LANE, int G, int N, class C>
PK_INLINE void weigh_key(const four* weights, const C* v, vf (&acc)[G][N]) {
    vf value[N];
    load_many(v, value);
    PK_UNROLL for (int g = 0; g < G; ++g)
        PK_UNROLL for (int i = 0; i < N; ++i) acc[g][i] = add_product<LANE>(acc[g][i], value[i], weights[g]);
}

// out[g][d] = sum over keys of p[g][key] * v[key][d], for N vectors of dimensions starting at d.
template <int G, int N, class C>
PK_INLINE void weigh_tile(const float* p, const Span* spans, int nspans, int dim, int d, int rest, float* out,
                          int os) {
    vf acc[G][N];
    PK_UNROLL for (int g = 0; g < G; ++g)
        PK_UNROLL for (int i = 0; i < N; ++i) acc[g][i] = splat(0);
    for (int s = 0, at = 0; s < nspans; at += spans[s++].count) {
        const C* v = static_cast<const C*>(spans[s].base) + d;
        int j = 0;
        if (!rest)
            for (; j + 4 <= spans[s].count; j += 4, v += 4 * dim) {
                four weights[G];
                PK_UNROLL for (int g = 0; g < G; ++g) weights[g] = load_four(p + g * kPart + at + j);
                weigh_key<0>(weights, v, acc);
                weigh_key<1>(weights, v + dim, acc);
                weigh_key<2>(weights, v + 2 * dim, acc);
                weigh_key<3>(weights, v + 3 * dim, acc);
            }
        for (; j < spans[s].count; ++j, v += dim) {
            PK_UNROLL for (int i = 0; i < N; ++i) {
                vf value = rest ? load_part(v, rest) : load(v + i * VL);
                PK_UNROLL for (int g = 0; g < G; ++g) acc[g][i] += splat(p[g * kPart + at + j]) * value;
            }
        }
    }
    PK_UNROLL for (int g = 0; g < G; ++g)
        PK_UNROLL for (int i = 0; i < N; ++i) store(out + g * os + d + i * VL, acc[g][i]);
}

template <int G, class C>
void weigh_values(const float* p, const Span* spans, int nspans, int dim, float* out, int os) {
    constexpr int N = (VB == 32) ? 2 : 4;
    int d = 0;
    for (; d + N * VL <= dim; d += N * VL) weigh_tile<G, N, C>(p, spans, nspans, dim, d, 0, out, os);
    for (; d + VL <= dim; d += VL) weigh_tile<G, 1, C>(p, spans, nspans, dim, d, 0, out, os);
    if (dim - d) weigh_tile<G, 1, C>(p, spans, nspans, dim, d, dim - d, out, os);
}

template <class F>
PK_INLINE void by_group(int left, F&& f) {
    switch (std::min(left, kMaxGroup)) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case 3: return f(std::integral_constant<int, 3>());
        default: return f(std::integral_constant<int, 4>());
    }
}

PK_INLINE void multiply_row(float* x, const float* factors, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) store(x + i, load(x + i) * load(factors + i));
    for (; i < n; ++i) x[i] *= factors[i];
}

// Partial result of one decode task: per head of the group, `width` sums, then maximum and total.
template <class C>
void decode_part(const AttentionArgs& a, const Task& task, float* scratch, float* partial) {
    const int group = a.heads / a.kv_heads, dim = a.head_dim, width = padded(dim), stride = width + VL;
    float *q = scratch, *scores = q + group * width;
    Span* spans = reinterpret_cast<Span*>(scores + group * kPart);
    const int32_t* table = a.block_tables + a.rows[task.sequence] * a.table_stride;
    load_queries(a, a.query_starts[task.sequence], task.kv_head * group, group, q, width);

#if defined(PK_INT8_SCORES)
    // Split queries take the place of the floats they were made from, row by row: half the bytes.
    const bool in_int8 = std::is_same<C, s8>::value && dim % 16 == 0 && dim <= kWidestHead && group <= kMostSplitHeads;
    SplitQuery split[kMostSplitHeads];
    if (in_int8)
        for (int g = 0; g < group; ++g) {
            int8_t made[2 * kWidestHead];
            split[g] = split_query(q + g * width, dim, made);
            int8_t* to = reinterpret_cast<int8_t*>(q + g * width);
            std::memcpy(to, made, 2 * dim);
            split[g].high = to;
            split[g].low = to + dim;
        }
#endif
    const int keys = task.end - task.begin;
    float key_factors[kPart], value_factors[kPart];  // of a cache with scales
    int nspans = 0, at = 0;
    for (int key = task.begin; key < task.end;) {
        const int offset = key % a.block_size, run = std::min(a.block_size - offset, task.end - key);
        const int64_t block = table[key / a.block_size];
        const C* k = static_cast<const C*>(a.k_cache) + block * a.k_block_stride +
                     task.kv_head * a.k_head_stride + int64_t(offset) * dim;
        const C* v = static_cast<const C*>(a.v_cache) + block * a.v_block_stride +
                     task.kv_head * a.v_head_stride + int64_t(offset) * dim;
        const C* ahead = key + run < task.end
                             ? static_cast<const C*>(a.k_cache) + table[key / a.block_size + 1] * a.k_block_stride +
                                   task.kv_head * a.k_head_stride
                             : k;
        for (int g = 0; g < group; g += kMaxGroup)
            by_group(group - g, [&](auto n) {
#if defined(PK_INT8_SCORES)
                if constexpr (std::is_same<C, s8>::value)
                    if (in_int8)
                        return score_int8_keys<decltype(n)::value>(split + g, k, ahead, v, dim, run,
                                                                   scores + g * kPart + at);
#endif
                score_keys<decltype(n)::value>(q + g * width, width, k, ahead, v, dim, run, scores + g * kPart + at);
            });
        if constexpr (kScaled<C>)
            for (int j = 0; j < run; ++j) {
                key_factors[at + j] = cached_scale<C>(key_scales(a), block, task.kv_head, offset + j);
                value_factors[at + j] = cached_scale<C>(value_scales(a), block, task.kv_head, offset + j);
            }
        spans[nspans++] = {v, run};
        at += run;
        key += run;
    }
    for (int g = 0; g < group; ++g) {
        float* row = scores + g * kPart;
        if constexpr (kScaled<C>) multiply_row(row, key_factors, keys);
        if (a.softcap > 0) cap_row(row, keys, a.softcap);
        const float max = max_row(row, keys);
        partial[g * stride + width] = max;
        partial[g * stride + width + 1] = exp_row(row, keys, max);
        if constexpr (kScaled<C>) multiply_row(row, value_factors, keys);
    }
    for (int g = 0; g < group; g += kMaxGroup)
        by_group(group - g, [&](auto n) {
            weigh_values<decltype(n)::value, C>(scores + g * kPart, spans, nspans, dim, partial + g * stride,
                                                stride);
        });
}

// Weights each part by exp(its maximum - the overall maximum); `parts` partial results lie one after another.
inline void merge_parts(const AttentionArgs& a, const Task& task, float* partials, int parts) {
    const int group = a.heads / a.kv_heads, width = padded(a.head_dim), stride = width + VL;
    const int64_t token = a.query_starts[task.sequence];
    for (int g = 0; g < group; ++g) {
        float* first = partials + g * stride;
        const int head = task.kv_head * group + g;
        if (parts == 1) {
            store_outputs(a, token, head, first, final_factor(a, head, first[width], first[width + 1]));
            continue;
        }
        const int64_t step = int64_t(group) * stride;
        float max = -INFINITY, total = 0;
        for (int p = 0; p < parts; ++p) max = std::max(max, first[p * step + width]);
        for (int p = 0; p < parts; ++p) {
            const float* part = first + p * step;
            const float factor = std::exp(part[width] - max);
            total += factor * part[width + 1];
            for (int d = 0; d < width; d += VL) {
                vf sum = load(part + d) * splat(factor);
                store(first + d, p ? load(first + d) + sum : sum);
            }
        }
        store_outputs(a, token, head, first, final_factor(a, head, max, total));
    }
}

}  // namespace pk::PK_SET
