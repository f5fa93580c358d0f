// Paged attention straight from the cache blocks: one new token per sequence (decode) and many (prefill).
//
// Decode: a task is (sequence, kv head, 128 consecutive keys). All query heads of the group share one pass
// over the keys and one over the values; softmax is local to the part, and the last task of a (sequence,
// kv head) merges the parts in order. The split depends only on the context, never on the batch or on the
// number of threads, so a sequence gets the same bits in any company.
//
// Prefill: a task is (sequence, kv head, tile of queries). Keys and values are converted 64 at a time into
// cache-resident float32 panels (keys transposed, so that lanes are keys) and both products are small
// register-blocked matrix products, with an online softmax between them.

#include "context.h"
#include "simd.h"

using namespace pk;

struct AttentionArgs {
    const void* q;
    void* out;
    const void *k_cache, *v_cache;
    const int32_t *query_starts, *context_lens, *rows, *block_tables;
    int64_t q_stride;  // elements between packed tokens of q
    int64_t table_stride;
    int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;
    int32_t sequences, heads, kv_heads, head_dim, block_size;
    int32_t window;  // 0: none
    int32_t dtype, cache_dtype;
    float scale;
};

namespace {

constexpr int kPart = 128;      // keys of a decode task
constexpr int kPanel = 64;      // keys of a prefill panel
constexpr int kTileRows = 96;   // (query, head) rows of a prefill tile, about
constexpr int kMaxGroup = 4;    // query heads per register tile

struct Task {
    int32_t sequence, kv_head;
    int32_t begin, end;  // decode: keys; prefill: queries
    int32_t group;       // decode with several parts: index of its merge group, else -1
    int32_t part;
};

struct Merge {
    std::atomic<int32_t> left;
    int32_t first, parts;  // partial results, in order
};

int padded(int n) { return (n + VL - 1) / VL * VL; }

// ---- decode ----------------------------------------------------------------------------------------------

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
// hardware prefetcher barely starts: the next run (`ahead`) and the values of this one are asked for line by line.
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

struct Span {
    const void* base;  // first element of the run of keys (or values)
    int32_t count;
};

template <int LANE, int G, int N, class C>
PK_INLINE void weigh_key(const four* weights, const C* v, vf (&acc)[G][N]) {
    vf value[N];
    PK_UNROLL for (int i = 0; i < N; ++i) value[i] = load(v + i * VL);
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

// Scaled, float32, each row padded with zeros to `width`.
void load_queries(const AttentionArgs& a, int64_t token, int head, int count, float* to, int width) {
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        const T* from = static_cast<const T*>(a.q) + token * a.q_stride + int64_t(head) * a.head_dim;
        for (int g = 0; g < count; ++g, from += a.head_dim, to += width) {
            int d = 0;
            for (; d + VL <= a.head_dim; d += VL) store(to + d, load(from + d) * splat(a.scale));
            if (int rest = a.head_dim - d) store(to + d, load_part(from + d, rest) * splat(a.scale));
        }
    });
}

void store_outputs(const AttentionArgs& a, int64_t token, int head, const float* row, float factor) {
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        T* to = static_cast<T*>(a.out) + (token * a.heads + head) * a.head_dim;
        int d = 0;
        for (; d + VL <= a.head_dim; d += VL) store(to + d, load(row + d) * splat(factor));
        if (int rest = a.head_dim - d) store_part(to + d, load(row + d) * splat(factor), rest);
    });
}

// The largest of x[0..n); fills x up to the end of its last vector with copies of x[0].
PK_INLINE float max_row(float* x, int n) {
    for (int i = n; i % VL; ++i) x[i] = x[0];
    vf m[2] = {load(x), load(x)};
    int i = VL;
    for (; i + VL < n; i += 2 * VL) {
        m[0] = vmax(m[0], load(x + i));
        m[1] = vmax(m[1], load(x + i + VL));
    }
    if (i < n) m[0] = vmax(m[0], load(x + i));
    return hmax(vmax(m[0], m[1]));
}

// In place, after max_row: x[i] = exp(x[i] - max) for i < n, zeros up to the end of the last vector; the sum.
PK_INLINE float exp_row(float* x, int n, float max) {
    const vf low = splat(-87.0f);
    vf sum[2] = {splat(0), splat(0)};
    int i = 0;
    for (; i + VL < n; i += 2 * VL) {  // two at a time: the polynomial is one long dependency
        vf a = vexp_inside(vmax(load(x + i) - splat(max), low));
        vf b = vexp_inside(vmax(load(x + i + VL) - splat(max), low));
        store(x + i, a);
        store(x + i + VL, b);
        sum[0] += a;
        sum[1] += b;
    }
    if (i < n) {
        vf a = vexp_inside(vmax(load(x + i) - splat(max), low));
        store(x + i, a);
        sum[0] += a;
    }
    float total = hsum(sum[0] + sum[1]);
    for (int j = n; j % VL; ++j) {
        total -= x[j];
        x[j] = 0;
    }
    return total;
}

// Partial result of one decode task: per head of the group, `width` sums, then maximum and total.
template <class C>
void decode_part(const AttentionArgs& a, const Task& task, float* scratch, float* partial) {
    const int group = a.heads / a.kv_heads, dim = a.head_dim, width = padded(dim), stride = width + VL;
    float *q = scratch, *scores = q + group * width;
    Span* spans = reinterpret_cast<Span*>(scores + group * kPart);
    const int32_t* table = a.block_tables + a.rows[task.sequence] * a.table_stride;
    load_queries(a, a.query_starts[task.sequence], task.kv_head * group, group, q, width);

    const int keys = task.end - task.begin;
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
                score_keys<decltype(n)::value>(q + g * width, width, k, ahead, v, dim, run, scores + g * kPart + at);
            });
        spans[nspans++] = {v, run};
        at += run;
        key += run;
    }
    for (int g = 0; g < group; ++g) {
        float* row = scores + g * kPart;
        const float max = max_row(row, keys);
        partial[g * stride + width] = max;
        partial[g * stride + width + 1] = exp_row(row, keys, max);
    }
    for (int g = 0; g < group; g += kMaxGroup)
        by_group(group - g, [&](auto n) {
            weigh_values<decltype(n)::value, C>(scores + g * kPart, spans, nspans, dim, partial + g * stride,
                                                stride);
        });
}

// Weights each part by exp(its maximum - the overall maximum); `parts` partial results lie one after another.
void merge_parts(const AttentionArgs& a, const Task& task, float* partials, int parts) {
    const int group = a.heads / a.kv_heads, width = padded(a.head_dim), stride = width + VL;
    const int64_t token = a.query_starts[task.sequence];
    for (int g = 0; g < group; ++g) {
        float* first = partials + g * stride;
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
        store_outputs(a, token, task.kv_head * group + g, first, 1.0f / total);
    }
}

// ---- prefill ---------------------------------------------------------------------------------------------

template <int LANE, int M, int N>
PK_INLINE void product_step(const four* left, const float* b, vf (&acc)[M][N]) {
    vf right[N];
    PK_UNROLL for (int n = 0; n < N; ++n) right[n] = load(b + n * VL);
    PK_UNROLL for (int m = 0; m < M; ++m)
        PK_UNROLL for (int n = 0; n < N; ++n) acc[m][n] = add_product<LANE>(acc[m][n], right[n], left[m]);
}

// c[M x N vectors] (+)= a[M x depth] * b[depth x N vectors].
template <int M, int N>
PK_INLINE void product_tile(const float* a, int as, const float* b, int bs, float* c, int cs, int depth,
                            bool add) {
    vf acc[M][N];
    PK_UNROLL for (int m = 0; m < M; ++m)
        PK_UNROLL for (int n = 0; n < N; ++n) acc[m][n] = add ? load(c + m * cs + n * VL) : splat(0);
    int k = 0;
    for (; k + 4 <= depth; k += 4, b += 4 * bs) {
        four left[M];
        PK_UNROLL for (int m = 0; m < M; ++m) left[m] = load_four(a + m * as + k);
        product_step<0>(left, b, acc);
        product_step<1>(left, b + bs, acc);
        product_step<2>(left, b + 2 * bs, acc);
        product_step<3>(left, b + 3 * bs, acc);
    }
    for (; k < depth; ++k, b += bs)
        PK_UNROLL for (int n = 0; n < N; ++n) {
            vf right = load(b + n * VL);
            PK_UNROLL for (int m = 0; m < M; ++m) acc[m][n] += splat(a[m * as + k]) * right;
        }
    PK_UNROLL for (int m = 0; m < M; ++m)
        PK_UNROLL for (int n = 0; n < N; ++n) store(c + m * cs + n * VL, acc[m][n]);
}

template <int M>
void product_rows(const float* a, int as, const float* b, int bs, float* c, int cs, int columns, int depth,
                  bool add) {
    constexpr int N = (VB == 16) ? 4 : 2;
    int j = 0;
    for (; j + N * VL <= columns; j += N * VL) product_tile<M, N>(a, as, b + j, bs, c + j, cs, depth, add);
    for (; j < columns; j += VL) product_tile<M, 1>(a, as, b + j, bs, c + j, cs, depth, add);
}

void product(const float* a, int as, const float* b, int bs, float* c, int cs, int rows, int columns, int depth,
             bool add) {
    constexpr int M = (VB == 64) ? 8 : 4;
    int i = 0;
    for (; i + M <= rows; i += M) product_rows<M>(a + i * as, as, b, bs, c + i * cs, cs, columns, depth, add);
    for (; i < rows; ++i) product_rows<1>(a + i * as, as, b, bs, c + i * cs, cs, columns, depth, add);
}

// Keys [begin, end) as columns of `keys` [dim][kPanel] and values as rows of `values` [kPanel][width].
template <class C>
void fill_panels(const AttentionArgs& a, const int32_t* table, int kv_head, int begin, int end, float* keys,
                 float* values, int width) {
    const int dim = a.head_dim;
    float line[VL];
    int at = 0;
    for (int key = begin; key < end;) {
        const int offset = key % a.block_size, run = std::min(a.block_size - offset, end - key);
        const int64_t block = table[key / a.block_size];
        const C* k = static_cast<const C*>(a.k_cache) + block * a.k_block_stride + kv_head * a.k_head_stride +
                     int64_t(offset) * dim;
        const C* v = static_cast<const C*>(a.v_cache) + block * a.v_block_stride + kv_head * a.v_head_stride +
                     int64_t(offset) * dim;
        for (int j = 0; j < run; ++j, k += dim, v += dim) {
            int d = 0;
            for (; d + VL <= dim; d += VL) {
                store(line, load(k + d));
                for (int i = 0; i < VL; ++i) keys[(d + i) * kPanel + at + j] = line[i];
                store(values + (at + j) * width + d, load(v + d));
            }
            if (int rest = dim - d) {
                store(line, load_part(k + d, rest));
                for (int i = 0; i < rest; ++i) keys[(d + i) * kPanel + at + j] = line[i];
                store(values + (at + j) * width + d, load_part(v + d, rest));
            }
        }
        at += run;
        key += run;
    }
    // What follows the last key takes part in the products with weight zero: it must be finite.
    for (int j = at; j < kPanel && j < (at + VL - 1) / VL * VL; ++j)
        for (int d = 0; d < dim; ++d) keys[d * kPanel + j] = 0;
}

template <class C>
void prefill_tile(const AttentionArgs& a, const Task& task, float* scratch) {
    const int group = a.heads / a.kv_heads, dim = a.head_dim, width = padded(dim);
    const int queries = task.end - task.begin, rows = queries * group;
    float* q = scratch;
    float* acc = q + rows * width;
    float* scores = acc + rows * width;
    float* keys = scores + rows * kPanel;
    float* values = keys + dim * kPanel;
    float* max = values + kPanel * width;
    float* total = max + rows;

    const int64_t first_token = a.query_starts[task.sequence];
    const int new_tokens = a.query_starts[task.sequence + 1] - a.query_starts[task.sequence];
    const int base = a.context_lens[task.sequence] - new_tokens;  // position of the first new token
    const int32_t* table = a.block_tables + a.rows[task.sequence] * a.table_stride;
    for (int t = 0; t < queries; ++t)
        load_queries(a, first_token + task.begin + t, task.kv_head * group, group, q + t * group * width, width);
    std::fill(acc, acc + rows * width, 0.0f);
    std::fill(max, max + rows, -INFINITY);
    std::fill(total, total + rows, 0.0f);

    const int limit = base + task.end;  // keys at or beyond are in the future of every query here
    int key = a.window ? std::max(0, base + task.begin - a.window + 1) : 0;
    for (; key < limit; key += kPanel) {
        const int stop = std::min(key + kPanel, limit), count = stop - key, columns = padded(count);
        fill_panels<C>(a, table, task.kv_head, key, stop, keys, values, width);
        product(q, width, keys, kPanel, scores, kPanel, rows, columns, dim, false);
        for (int r = 0; r < rows; ++r) {
            const int position = base + task.begin + r / group;
            float* row = scores + r * kPanel;
            // Visible columns are a run: [from, to). What is outside takes part in the product with weight zero.
            const int to = std::min(count, position + 1 - key);
            const int from = a.window ? std::max(0, position - a.window + 1 - key) : 0;
            const int start = from / VL * VL;
            if (to <= from) {
                std::fill(row, row + columns, 0.0f);
                continue;
            }
            for (int j = start; j < from; ++j) row[j] = row[from];
            const float top = std::max(max[r], max_row(row + start, to - start));
            const float keep = std::exp(max[r] - top);
            float mass = exp_row(row + start, to - start, top);
            for (int j = start; j < from; ++j) {
                mass -= row[j];
                row[j] = 0;
            }
            std::fill(row, row + start, 0.0f);
            std::fill(row + padded(to), row + columns, 0.0f);
            total[r] = total[r] * keep + mass;
            if (keep != 1.0f)
                for (int d = 0; d < width; d += VL)
                    store(acc + r * width + d, load(acc + r * width + d) * splat(keep));
            max[r] = top;
        }
        product(scores, kPanel, values, width, acc, width, rows, width, count, true);
    }
    for (int r = 0; r < rows; ++r)
        store_outputs(a, first_token + task.begin + r / group, task.kv_head * group + r % group, acc + r * width,
                      1.0f / total[r]);
}

void zero_output(const AttentionArgs& a, int64_t token) {
    const size_t row = size_t(a.heads) * a.head_dim * (a.dtype == 0 ? 4 : 2);
    std::memset(static_cast<char*>(a.out) + token * row, 0, row);
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
    const size_t scratch = first_decode ? std::max(decode_floats, prefill_floats) : decode_floats;
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].floats(scratch);

    dispatch(a.cache_dtype, [&](auto* c) {
        using C = elem<decltype(c)>;
        ctx->pool.run(n, [&](int i, int thread) {
            const Task& task = tasks[i];
            float* mine = ctx->scratch[thread].floats(0);
            if (task.group < 0) return prefill_tile<C>(a, task, mine);
            decode_part<C>(a, task, mine, partials + task.part * partial);
            Merge& merge = merges[task.group];
            if (merge.left.fetch_sub(1, std::memory_order_acq_rel) == 1)
                merge_parts(a, task, partials + merge.first * partial, merge.parts);
        });
    });
}
