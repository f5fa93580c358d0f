// A tile of new tokens of one sequence against everything they see.
//
// Keys and values are converted 64 at a time into cache-resident float32 panels (keys transposed, so that lanes
// are keys), and both products are small register-blocked matrix products with an online softmax between them.

#pragma once

#include "attention/attention.h"

namespace pk::PK_SET {

constexpr int kPanel = 64;     // keys of a panel
constexpr int kTileRows = 96;  // (query, head) rows of a tile, about

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

inline void product(const float* a, int as, const float* b, int bs, float* c, int cs, int rows, int columns, int depth,
             bool add) {
    constexpr int M = (VB == 64) ? 8 : 4;
    int i = 0;
    for (; i + M <= rows; i += M) product_rows<M>(a + i * as, as, b, bs, c + i * cs, cs, columns, depth, add);
    for (; i < rows; ++i) product_rows<1>(a + i * as, as, b, bs, c + i * cs, cs, columns, depth, add);
}

template <class C>
PK_INLINE vf scaled(vf x, vf factor) {
    return kScaled<C> ? x * factor : x;
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
            vf key_factor = splat(1), value_factor = splat(1);
            if constexpr (kScaled<C>) {
                key_factor = splat(cached_scale<C>(key_scales(a), block, kv_head, offset + j));
                value_factor = splat(cached_scale<C>(value_scales(a), block, kv_head, offset + j));
            }
            int d = 0;
            for (; d + VL <= dim; d += VL) {
                store(line, scaled<C>(load(k + d), key_factor));
                for (int i = 0; i < VL; ++i) keys[(d + i) * kPanel + at + j] = line[i];
                store(values + (at + j) * width + d, scaled<C>(load(v + d), value_factor));
            }
            if (int rest = dim - d) {
                store(line, scaled<C>(load_part(k + d, rest), key_factor));
                for (int i = 0; i < rest; ++i) keys[(d + i) * kPanel + at + j] = line[i];
                store(values + (at + j) * width + d, scaled<C>(load_part(v + d, rest), value_factor));
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
    int key = first_visible(a, base + task.begin);
    for (; key < limit; key += kPanel) {
        const int stop = std::min(key + kPanel, limit), count = stop - key, columns = padded(count);
        fill_panels<C>(a, table, task.kv_head, key, stop, keys, values, width);
        product(q, width, keys, kPanel, scores, kPanel, rows, columns, dim, false);
        for (int r = 0; r < rows; ++r) {
            const int position = base + task.begin + r / group;
            float* row = scores + r * kPanel;
            // Visible columns are a run: [from, to). What is outside takes part in the product with weight zero.
            const int to = std::min(count, position + 1 - key);
            const int from = std::max(0, first_visible(a, position) - key);
            const int start = from / VL * VL;
            if (to <= from) {
                std::fill(row, row + columns, 0.0f);
                continue;
            }
            if (a.softcap > 0) cap_row(row + start, to - start, a.softcap);
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
    for (int r = 0; r < rows; ++r) {
        const int head = task.kv_head * group + r % group;
        store_outputs(a, first_token + task.begin + r / group, head, acc + r * width,
                      final_factor(a, head, max[r], total[r]));
    }
}

}  // namespace pk::PK_SET
