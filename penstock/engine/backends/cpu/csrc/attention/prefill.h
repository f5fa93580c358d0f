// A tile of new tokens of one sequence against everything they see.
//
// Keys and values are converted 64 at a time into cache-resident float32 panels, row by row as they lie in the cache. A
// lane is a (query, head) row of the tile: queries are transposed once, scores are keys x rows, outputs dimensions x
// rows, and softmax between the two products goes down the lanes, with no sums across them.

#pragma once

#include "attention/attention.h"

namespace pk::PK_SET {

constexpr int kPanel = 64;        // keys of a panel
constexpr int kTileRows = 96;     // (query, head) rows of a tile, about
constexpr float kUnseen = -1e30f;  // the largest score of a row that has seen no key yet: finite, so that differences are

// Where element (m, k) of the left factor is.
enum class Left { kRows, kColumns };  // at m * stride + k; at k * stride + m

template <Left L, int LANE, int M, int N>
PK_INLINE void product_step(const four* left, const float* b, vf (&acc)[M][N]) {
    vf right[N];
    PK_UNROLL for (int n = 0; n < N; ++n) right[n] = load(b + n * VL);
    PK_UNROLL for (int m = 0; m < M; ++m)
        PK_UNROLL for (int n = 0; n < N; ++n) {
            if constexpr (L == Left::kRows) {
                acc[m][n] = add_product<LANE>(acc[m][n], right[n], left[m]);
            } else if (m % 4 == 0) {
                acc[m][n] = add_product<0>(acc[m][n], right[n], left[m / 4]);
            } else if (m % 4 == 1) {
                acc[m][n] = add_product<1>(acc[m][n], right[n], left[m / 4]);
            } else if (m % 4 == 2) {
                acc[m][n] = add_product<2>(acc[m][n], right[n], left[m / 4]);
            } else {
                acc[m][n] = add_product<3>(acc[m][n], right[n], left[m / 4]);
            }
        }
}

// c[M x N vectors] (+)= a[M x depth] * b[depth x N vectors].
template <Left L, int M, int N>
PK_INLINE void product_tile(const float* a, int as, const float* b, int bs, float* c, int cs, int depth, bool add) {
    vf acc[M][N];
    PK_UNROLL for (int m = 0; m < M; ++m)
        PK_UNROLL for (int n = 0; n < N; ++n) acc[m][n] = add ? load(c + m * cs + n * VL) : splat(0);
    int k = 0;
    if constexpr (L == Left::kRows) {
        for (; k + 4 <= depth; k += 4, b += 4 * bs) {
            four left[M];
            PK_UNROLL for (int m = 0; m < M; ++m) left[m] = load_four(a + m * as + k);
            product_step<L, 0>(left, b, acc);
            product_step<L, 1>(left, b + bs, acc);
            product_step<L, 2>(left, b + 2 * bs, acc);
            product_step<L, 3>(left, b + 3 * bs, acc);
        }
    } else if constexpr (M % 4 == 0) {
        for (; k < depth; ++k, b += bs) {
            four left[M / 4];
            PK_UNROLL for (int m = 0; m < M; m += 4) left[m / 4] = load_four(a + k * as + m);
            product_step<L, 0>(left, b, acc);
        }
    }
    for (; k < depth; ++k, b += bs)
        PK_UNROLL for (int n = 0; n < N; ++n) {
            vf right = load(b + n * VL);
            PK_UNROLL for (int m = 0; m < M; ++m)
                acc[m][n] += splat(L == Left::kRows ? a[m * as + k] : a[k * as + m]) * right;
        }
    PK_UNROLL for (int m = 0; m < M; ++m)
        PK_UNROLL for (int n = 0; n < N; ++n) store(c + m * cs + n * VL, acc[m][n]);
}

template <Left L, int N>
PK_INLINE void product_columns(const float* a, int as, const float* b, int bs, float* c, int cs, int rows, int depth,
                               bool add) {
    constexpr int M = VB == 64 ? 8 : 4;
    const int step = L == Left::kRows ? as : 1;
    int i = 0;
    for (; i + M <= rows; i += M) product_tile<L, M, N>(a + i * step, as, b, bs, c + i * cs, cs, depth, add);
    for (; i < rows; ++i) product_tile<L, 1, N>(a + i * step, as, b, bs, c + i * cs, cs, depth, add);
}

template <Left L>
void product(const float* a, int as, const float* b, int bs, float* c, int cs, int rows, int columns, int depth,
             bool add) {
    constexpr int N = VB == 16 ? 4 : 3;
    int j = 0;
    for (; j + N * VL <= columns; j += N * VL) product_columns<L, N>(a, as, b + j, bs, c + j, cs, rows, depth, add);
    for (; j < columns; j += VL) product_columns<L, 1>(a, as, b + j, bs, c + j, cs, rows, depth, add);
}

template <class C>
PK_INLINE vf scaled(vf x, vf factor) {
    return kScaled<C> ? x * factor : x;
}

template <class C>
PK_INLINE void widen_row(const C* from, float* to, int n, vf factor) {
    int d = 0;
    for (; d + VL <= n; d += VL) store(to + d, scaled<C>(load(from + d), factor));
    if (int rest = n - d) store(to + d, scaled<C>(load_part(from + d, rest), factor));
}

// Keys and values [begin, end) as rows of `width` numbers.
template <class C>
void fill_panels(const AttentionArgs& a, const int32_t* table, int kv_head, int begin, int end, float* keys,
                 float* values, int width) {
    const int dim = a.head_dim;
    for (int key = begin; key < end;) {
        const int offset = key % a.block_size, run = std::min(a.block_size - offset, end - key);
        const int64_t block = table[key / a.block_size];
        const C* k = static_cast<const C*>(a.k_cache) + block * a.k_block_stride + kv_head * a.k_head_stride +
                     int64_t(offset) * dim;
        const C* v = static_cast<const C*>(a.v_cache) + block * a.v_block_stride + kv_head * a.v_head_stride +
                     int64_t(offset) * dim;
        for (int j = 0; j < run; ++j, k += dim, v += dim, keys += width, values += width) {
            vf key_factor = splat(1), value_factor = splat(1);
            if constexpr (kScaled<C>) {
                key_factor = splat(cached_scale<C>(key_scales(a), block, kv_head, offset + j));
                value_factor = splat(cached_scale<C>(value_scales(a), block, kv_head, offset + j));
            }
            widen_row(k, keys, dim, key_factor);
            widen_row(v, values, dim, value_factor);
        }
        key += run;
    }
}

PK_INLINE vi splat_int(int32_t x) { return vi{} + x; }
PK_INLINE vi load_int(const int32_t* p) {
    vi v;
    std::memcpy(&v, p, VB);
    return v;
}

// The lanes of a tile: `lanes` is its rows in whole vectors. The last lanes may stand for no row: they see the first key
// of every panel, and nobody reads what they add up.
struct TileLanes {
    int lanes;
    float *max, *total;
    int32_t *first, *last;  // the keys that each row sees

    // Scores of keys [key, key + count) become weights; the rows of `acc`, `dims` of them, are scaled accordingly.
    void softmax(float* scores, int key, int count, bool masked, float* acc, int dims) const {
        const vf low = splat(-87.0f);
        for (int r = 0; r < lanes; r += VL) {
            float* const column = scores + r;
            const vi from = load_int(first + r) - key, to = load_int(last + r) - key;
            if (masked)
                for (int j = 0; j < count; ++j) {
                    const vi seen = (splat_int(j) >= from) & (splat_int(j) <= to);
                    store(column + j * lanes, select(seen, load(column + j * lanes), splat(kUnseen)));
                }
            const vf before = load(max + r);
            vf top[2] = {before, before};
            int j = 0;
            for (; j + 2 <= count; j += 2) {
                top[0] = vmax(top[0], load(column + j * lanes));
                top[1] = vmax(top[1], load(column + (j + 1) * lanes));
            }
            if (j < count) top[0] = vmax(top[0], load(column + j * lanes));
            const vf now = vmax(top[0], top[1]), keep = vexp_inside(vmax(before - now, low));
            vf sum[2] = {splat(0), splat(0)};
            for (j = 0; j < count; ++j) {
                vf weight = vexp_inside(vmax(load(column + j * lanes) - now, low));
                if (masked) weight = select((splat_int(j) >= from) & (splat_int(j) <= to), weight, splat(0));
                store(column + j * lanes, weight);
                sum[j % 2] += weight;
            }
            store(total + r, load(total + r) * keep + (sum[0] + sum[1]));
            store(max + r, now);
            if (hmax(now - before) > 0)
                for (int d = 0; d < dims; ++d) store(acc + d * lanes + r, load(acc + d * lanes + r) * keep);
        }
    }
};

// The floats that a tile of so many rows needs.
inline size_t prefill_scratch(const AttentionArgs& a, int rows) {
    const size_t lanes = padded(rows), width = padded(a.head_dim), group = a.heads / a.kv_heads;
    return lanes * (2 * a.head_dim + kPanel + 4) + 2 * kPanel * width + group * width;
}

template <class C>
void prefill_tile(const AttentionArgs& a, const Task& task, float* scratch) {
    const int group = a.heads / a.kv_heads, dim = a.head_dim, width = padded(dim);
    const int queries = task.end - task.begin, rows = queries * group, lanes = padded(rows);
    float* q = scratch;
    float* acc = q + dim * lanes;
    float* scores = acc + dim * lanes;
    float* keys = scores + kPanel * lanes;
    float* values = keys + kPanel * width;
    float* line = values + kPanel * width;
    float* max = line + group * width;
    const TileLanes tile = {lanes, max, max + lanes, reinterpret_cast<int32_t*>(max + 2 * lanes),
                            reinterpret_cast<int32_t*>(max + 3 * lanes)};

    const int64_t first_token = a.query_starts[task.sequence];
    const int new_tokens = a.query_starts[task.sequence + 1] - a.query_starts[task.sequence];
    const int base = a.context_lens[task.sequence] - new_tokens;  // position of the first new token
    const int limit = base + task.end;  // keys at or beyond are in the future of every query here
    const int32_t* table = a.block_tables + a.rows[task.sequence] * a.table_stride;
    for (int t = 0; t < queries; ++t) {
        load_queries(a, first_token + task.begin + t, task.kv_head * group, group, line, width);
        const int position = base + task.begin + t;
        for (int g = 0; g < group; ++g) {
            const int r = t * group + g;
            for (int d = 0; d < dim; ++d) q[d * lanes + r] = line[g * width + d];
            tile.first[r] = first_visible(a, position);
            tile.last[r] = position;
        }
    }
    for (int r = rows; r < lanes; ++r) {
        for (int d = 0; d < dim; ++d) q[d * lanes + r] = 0;
        tile.first[r] = 0;
        tile.last[r] = limit;
    }
    std::fill(acc, acc + dim * lanes, 0.0f);
    std::fill(tile.max, tile.max + lanes, kUnseen);
    std::fill(tile.total, tile.total + lanes, 0.0f);

    const int first_position = base + task.begin;
    for (int key = first_visible(a, first_position); key < limit; key += kPanel) {
        const int count = std::min(kPanel, limit - key);
        fill_panels<C>(a, table, task.kv_head, key, key + count, keys, values, width);
        product<Left::kRows>(keys, width, q, lanes, scores, lanes, count, lanes, dim, false);
        if (a.softcap > 0) cap_row(scores, count * lanes, a.softcap);
        const bool masked = key + count - 1 > first_position || key < first_visible(a, limit - 1);
        tile.softmax(scores, key, count, masked, acc, dim);
        product<Left::kColumns>(values, width, scores, lanes, acc, lanes, dim, lanes, count, true);
    }
    for (int r = 0; r < rows; ++r) {
        const int head = task.kv_head * group + r % group;
        for (int d = 0; d < dim; ++d) line[d] = acc[d * lanes + r];
        std::fill(line + dim, line + width, 0.0f);
        store_outputs(a, first_token + task.begin + r / group, head, line,
                      final_factor(a, head, tile.max[r], tile.total[r]));
    }
}

}  // namespace pk::PK_SET
