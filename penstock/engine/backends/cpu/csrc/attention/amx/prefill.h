// Prefill attention on AMX tiles: many new tokens against a cache of bfloat16, or of int8 that is widened when read. Keys
// are tiles as they lie in the cache: rows of 32 numbers. Decode is in decode_bfloat16.h and decode_int8.h.
//
// Scores are computed transposed, keys x queries, so that a lane is a query row and softmax needs no sums across lanes;
// weights come out of it in the order in which tiles need them. Scores are to base 2.
// Products take bfloat16 and add in float32; softmax and the sum of its weights are float32.

#pragma once

#include "common/amx/tiles.h"
#include "common/avx512/transpose.h"
#include "attention/decode.h"
#include "attention/prefill.h"

#if defined(PK_AMX)

namespace pk::PK_SET {

constexpr int kTileGroup = 16;  // keys of a tile
constexpr int kTilePanel = 64;  // keys of a panel: four tiles
constexpr float kMasked = -1e30f;
constexpr float kLog2 = 1.44269504f;  // of e

inline bool by_tiles(const AttentionArgs& a) {
    return a.dtype == 2 && (a.cache_dtype == 2 || a.cache_dtype == 3) && a.head_dim % 32 == 0 &&
           a.heads / a.kv_heads <= 16;
}

// 32 numbers of a cache as bfloat16; int8 without its scale.
PK_INLINE __m512i load32(const bf16* p) { return _mm512_loadu_si512(p); }
PK_INLINE __m512i load32(const s8* p) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)load(p + 16), (__m512)load(p)); }

// Keys or values of one sequence and head: those in [from, limit) exist.
template <class C>
struct CachedRows {
    const C* base;
    int64_t block_stride;
    const int32_t* table;
    int block_size, dim, from, limit;

    bool has(int key) const { return key >= from && key < limit; }
    const C* at(int key) const {
        return base + table[key / block_size] * block_stride + int64_t(key % block_size) * dim;
    }
    // Tokens key, key + 1, ... one by one; null for those that do not exist.
    template <int COUNT>
    void rows(int key, const C* (&row)[COUNT]) const {
        for (int j = 0; j < COUNT;) {
            const int run = std::min(block_size - (key + j) % block_size, COUNT - j);
            const C* first = key + j < limit && key + j + run > from ? at(key + j) : nullptr;
            for (int i = 0; i < run; ++i, ++j) row[j] = has(key + j) ? first + i * dim : nullptr;
        }
    }
    // 16 rows: in place if they are contiguous (rows at or beyond `limit` are stale then), else copied.
    const uint8_t* group(int key, uint8_t* copy) const {
        if (std::is_same<C, bf16>::value && has(key) && key % block_size + kTileGroup <= block_size)
            return reinterpret_cast<const uint8_t*>(at(key));
        const C* row[kTileGroup];
        rows(key, row);
        for (int i = 0; i < kTileGroup; ++i)
            for (int d = 0; d < dim; d += 32)
                _mm512_store_si512(copy + (i * dim + d) * 2, row[i] ? load32(row[i] + d) : _mm512_setzero_si512());
        return copy;
    }
};

template <class C = bf16>
CachedRows<C> cached_keys(const AttentionArgs& a, const Task& task, int from, int limit) {
    const C* base = static_cast<const C*>(a.k_cache) + task.kv_head * a.k_head_stride;
    const int32_t* table = a.block_tables + a.rows[task.sequence] * a.table_stride;
    return {base, a.k_block_stride, table, a.block_size, a.head_dim, from, limit};
}

template <class C = bf16>
CachedRows<C> cached_values(const AttentionArgs& a, const Task& task, int from, int limit) {
    const C* base = static_cast<const C*>(a.v_cache) + task.kv_head * a.v_head_stride;
    const int32_t* table = a.block_tables + a.rows[task.sequence] * a.table_stride;
    return {base, a.v_block_stride, table, a.block_size, a.head_dim, from, limit};
}

// sums[4 tiles] += four groups of left-hand rows (`stride` bytes apart) x one right-hand tile per 32 of the depth.
// Left tile i of step s begins at left[i] + s * 64; right tile s at right + s * 1024.
PK_INLINE void add_tiles(const uint8_t* const (&left)[4], int count, int64_t stride, const uint8_t* right, int steps) {
    for (int s = 0; s < steps; ++s) {
        _tile_loadd(6, right + s * kTileBytes, 64);
        _tile_loadd(4, left[0] + s * 64, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (count > 1) {
            _tile_loadd(5, left[1] + s * 64, stride);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (count > 2) {
            _tile_loadd(4, left[2] + s * 64, stride);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (count > 3) {
            _tile_loadd(5, left[3] + s * 64, stride);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
}

// Tile i at `to` + i * `step` floats.
PK_INLINE void store_tiles(float* to, int count, int64_t step, int lanes) {
    _tile_stored(0, to, lanes * 4);
    if (count > 1) _tile_stored(1, to + step, lanes * 4);
    if (count > 2) _tile_stored(2, to + 2 * step, lanes * 4);
    if (count > 3) _tile_stored(3, to + 3 * step, lanes * 4);
}

PK_INLINE void load_tiles(const float* from, int count) {
    before_tiles();
    _tile_loadd(0, from, 64);
    if (count > 1) _tile_loadd(1, from + 256, 64);
    if (count > 2) _tile_loadd(2, from + 512, 64);
    if (count > 3) _tile_loadd(3, from + 768, 64);
}

PK_INLINE vf capped(vf score, float cap) {
    const vf e = vexp(score * splat(2 / cap));
    return splat(cap) - splat(2 * cap) / (e + splat(1.0f));
}

// The factor of products before `finished`: scores to base 2, or to base e where they are capped first.
PK_INLINE float score_unit(const AttentionArgs& a) { return a.softcap > 0 ? a.scale : a.scale * kLog2; }

PK_INLINE vf finished(vf score, const AttentionArgs& a) {
    return a.softcap > 0 ? capped(score, a.softcap) * splat(kLog2) : score;
}

// 2^(x - top) for x <= top with a relative error below 3e-6, and no less than 2^-126.
PK_INLINE vf power_below(vf x, vf top) {
    const vf magic = splat(12582912.0f), y = vmax(x - top, splat(-126.0f));
    const vf shifted = y + magic, r = y - (shifted - magic);
    vf p = splat(9.57010197e-3f);  // minimax in relative error on [-1/2, 1/2]
    p = p * r + splat(5.59178608e-2f);
    p = p * r + splat(2.40247448e-1f);
    p = p * r + splat(6.93121815e-1f);
    p = p * r + splat(9.99999261e-1f);
    return (vf)((vi)p + ((vi)shifted << 23));
}

// Every lane's largest (or total) over the keys a vector holds: lanes repeat after `lanes`.
template <class F>
PK_INLINE vf across_keys(vf x, int lanes, F&& join) {
    if (lanes <= 8) x = join(x, (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e));
    if (lanes <= 4) x = join(x, (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xb1));
    return x;
}

// ---- prefill ---------------------------------------------------------------------------------------------

inline size_t prefill_tile_floats(const AttentionArgs& a, int rows) {
    const size_t tiles = (rows + 15) / 16, dim = a.head_dim;
    return tiles * (dim * 24 + 48) + kTilePanel * 18 + 2 * (kTileBytes / 4) + dim * 32 + 4 * kTileGroup * dim / 2;
}

// One tile of new tokens of a sequence against everything they see, 16 (query, head) rows at a time.
// An int8 cache's numbers are exact in bfloat16; its scales go to the scores and to the weights.
template <class C>
class PrefillTile {
  public:
    PrefillTile(const AttentionArgs& args, const Task& task_, float* scratch)
        : a(args),
          task(task_),
          group(a.heads / a.kv_heads),
          dim(a.head_dim),
          rows((task.end - task.begin) * group),
          tiles((rows + 15) / 16),
          first_token(a.query_starts[task.sequence]),
          base(a.context_lens[task.sequence] - (a.query_starts[task.sequence + 1] - a.query_starts[task.sequence])),
          limit(base + task.end),
          from(first_visible(a, base + task.begin)),
          keys(cached_keys<C>(a, task, from, limit)),
          values(cached_values<C>(a, task, from, limit)) {
        sums = scratch;                          // [tile][dim][row]
        queries = sums + tiles * dim * 16;       // [tile][dim / 32] as right-hand tiles
        tops = queries + tiles * dim * 8;        // [tile][row]
        totals = tops + tiles * 16;              // [tile][row]
        positions = reinterpret_cast<int32_t*>(totals + tiles * 16);
        scores = reinterpret_cast<float*>(positions + tiles * 16);   // [key][row]
        key_scale = scores + kTilePanel * 16;    // of a panel, in `score_unit`
        value_scale = key_scale + kTilePanel;
        weights = reinterpret_cast<uint8_t*>(value_scale + kTilePanel);
        transposed = weights + 2 * kTileBytes;       // values of a panel, [dim][key]
        copies = transposed + dim * kTilePanel * 2;
    }

    void run() {
        start();
        shape_tiles(16, 16);
        for (int key = from / kTilePanel * kTilePanel; key < limit; key += kTilePanel) {
            const int count = std::min(4, (limit - key + kTileGroup - 1) / kTileGroup);
            const uint8_t* left[4] = {};
            for (int i = 0; i < count; ++i)
                left[i] = keys.group(key + i * kTileGroup, copies + i * kTileGroup * dim * 2);
            transpose_values(key);
            if (kBytes) load_scales(key);
            for (int t = 0; t < tiles; ++t) {
                const int first = positions[t * 16], last = positions[std::min(t * 16 + 15, rows - 1)];
                if (last < key || key + kTilePanel <= first_visible(a, first)) continue;
                const int seen = std::min(count, (last - key) / kTileGroup + 1);  // groups that the latest row sees
                zero_sums();
                add_tiles(left, seen, dim * 2, reinterpret_cast<const uint8_t*>(queries + t * dim * 8), dim / 32);
                store_tiles(scores, seen, 256, 16);
                const bool all = t * 16 + 16 <= rows && key + kTilePanel - 1 <= first && !a.window;
                all ? weigh<false>(t, key, kTilePanel) : weigh<true>(t, key, seen * kTileGroup);
                add_values(sums + t * dim * 16, (seen + 1) / 2);
            }
        }
        _tile_release();
        finish();
    }

  private:
    static constexpr bool kBytes = std::is_same<C, s8>::value;

    void load_scales(int key) {
        const Scales of_keys = key_scales(a), of_values = value_scales(a);
        const float unit = score_unit(a);
        for (int j = 0; j < kTilePanel;) {
            const int first = (key + j) / a.block_size, offset = key + j - first * a.block_size;
            const int run = std::min(a.block_size - offset, kTilePanel - j);
            const int64_t block = key + j < limit && key + j + run > from ? keys.table[first] : 0;
            for (int i = 0; i < run; ++i, ++j) {
                const bool has = keys.has(key + j);
                key_scale[j] = has ? cached_scale<C>(of_keys, block, task.kv_head, offset + i) * unit : 0.0f;
                value_scale[j] = has ? cached_scale<C>(of_values, block, task.kv_head, offset + i) : 0.0f;
            }
        }
    }

    void start() {
        std::fill(sums, sums + tiles * dim * 16, 0.0f);
        std::fill(tops, tops + tiles * 16, kMasked);
        std::fill(totals, totals + tiles * 16, 0.0f);
        std::fill(positions + rows, positions + tiles * 16, -1);
        for (int token = 0, r = 0; token < task.end - task.begin; ++token)
            for (int g = 0; g < group; ++g, ++r) {
                positions[r] = base + task.begin + token;
                query_at[r] = token * a.q_stride + g * dim;
                out_at[r] = (int64_t(token) * a.heads + g) * dim;
            }
        for (int t = 0; t < tiles; ++t)
            for (int step = 0; step < dim / 32; ++step) {
                __m512i x[16];
                for (int i = 0; i < 16; ++i) x[i] = query(t * 16 + i, step);
                transpose16(x);
                for (int i = 0; i < 16; ++i) _mm512_store_si512(queries + (t * (dim / 32) + step) * 256 + i * 16, x[i]);
            }
    }

    __m512i query(int row, int step) const {
        if (row >= rows) return _mm512_setzero_si512();
        const bf16* q = static_cast<const bf16*>(a.q) + (first_token + task.begin) * a.q_stride;
        return _mm512_loadu_si512(q + int64_t(task.kv_head * group) * dim + query_at[row] + step * 32);
    }

    // Interleaving two tokens puts numbers 8k..8k+3 of each four-lane part k into one vector and the rest in another.
    void transpose_values(int key) {
        const C* row[kTilePanel];
        values.rows(key, row);
        const auto load_row = [&](int j, int at) {
            return row[j] ? load32(row[j] + at) : _mm512_setzero_si512();
        };
        for (int half = 0; half < kTilePanel; half += 32)
            for (int at = 0; at < dim; at += 32) {
                __m512i low[16], high[16];
                for (int i = 0; i < 16; ++i) {
                    const __m512i x = load_row(half + 2 * i, at), y = load_row(half + 2 * i + 1, at);
                    low[i] = _mm512_unpacklo_epi16(x, y);
                    high[i] = _mm512_unpackhi_epi16(x, y);
                }
                transpose16(low);
                transpose16(high);
                for (int i = 0; i < 16; ++i) {
                    uint8_t* to = transposed + ((at + i / 4 * 8 + i % 4) * kTilePanel + half) * 2;
                    _mm512_store_si512(to, low[i]);
                    _mm512_store_si512(to + 4 * kTilePanel * 2, high[i]);
                }
            }
    }

    // Turns the scores of a panel into weights, as right-hand tiles; sums so far are rescaled to the new maximum.
    template <bool MASKED>
    void weigh(int t, int key, int count) {
        const __m512i position = _mm512_loadu_si512(positions + t * 16);
        __m512i oldest = _mm512_sub_epi32(position, _mm512_set1_epi32(a.window ? a.window - 1 : 1 << 30));
        if (MASKED && a.chunked) {
            alignas(64) int32_t starts[16];
            for (int i = 0; i < 16; ++i) starts[i] = first_visible(a, std::max(0, positions[t * 16 + i]));
            oldest = _mm512_load_si512(starts);
        }
        const auto seen = [&](int j) {
            const __m512i at = _mm512_set1_epi32(key + j);
            return __mmask16(_mm512_cmple_epi32_mask(at, position) & _mm512_cmpge_epi32_mask(at, oldest));
        };
        const vf old = load(tops + t * 16);
        const float unit = score_unit(a);
        vf top = old;
        for (int j = 0; j < count; ++j) {
            vf x = finished(load(scores + j * 16) * splat(kBytes ? key_scale[j] : unit), a);
            if (MASKED) x = (vf)_mm512_mask_mov_ps(_mm512_set1_ps(kMasked), seen(j), (__m512)x);
            store(scores + j * 16, x);
            top = vmax(top, x);
        }
        vf mass = splat(0);
        for (int j = 0; j < count; j += 2) {
            vf p = power_below(load(scores + j * 16), top), q = power_below(load(scores + j * 16 + 16), top);
            if (MASKED) {
                p = (vf)_mm512_maskz_mov_ps(seen(j), (__m512)p);
                q = (vf)_mm512_maskz_mov_ps(seen(j + 1), (__m512)q);
            }
            mass += p + q;
            if (kBytes) {
                p *= splat(value_scale[j]);
                q *= splat(value_scale[j + 1]);
            }
            store_pairs(weights + j / 2 * 64, (__m512)p, (__m512)q);
        }
        for (int j = count; j < kTilePanel; j += 2) _mm512_store_si512(weights + j / 2 * 64, _mm512_setzero_si512());
        const vf keep = power_below(old, top);
        store(totals + t * 16, load(totals + t * 16) * keep + mass);
        store(tops + t * 16, top);
        if (_mm512_cmpneq_ps_mask((__m512)old, (__m512)top)) {
            float* sum = sums + t * dim * 16;
            for (int d = 0; d < dim; ++d, sum += 16) store(sum, load(sum) * keep);
        }
    }

    // The first `steps` times 32 keys.
    void add_values(float* sum, int steps) {
        for (int d = 0; d < dim; d += 64) {
            const int count = std::min(4, (dim - d) / 16);
            const uint8_t* left[4] = {};
            for (int i = 0; i < count; ++i) left[i] = transposed + (d + i * 16) * kTilePanel * 2;
            load_tiles(sum + d * 16, count);
            add_tiles(left, count, kTilePanel * 2, weights, steps);
            store_tiles(sum + d * 16, count, 256, 16);
        }
    }

    // As `final_factor`, of 16 rows, with maxima in units of log 2.
    vf final_factors(int t) const {
        const vf total = load(totals + t * 16), max = load(tops + t * 16);
        if (!a.sinks) return splat(1.0f) / total;
        float of_rows[16];
        for (int i = 0; i < 16; ++i) of_rows[i] = a.sinks[task.kv_head * group + (t * 16 + i) % group] * kLog2;
        const vf sink = load(of_rows), top = vmax(max, sink), keep = power_below(max, top);
        return keep / (total * keep + power_below(sink, top));
    }

    void finish() {
        bf16* const out = static_cast<bf16*>(a.out) +
                          ((first_token + task.begin) * a.heads + int64_t(task.kv_head) * group) * dim;
        for (int t = 0; t < tiles; ++t) {
            const vf factor = final_factors(t);
            for (int d = 0; d < dim; d += 16) {
                __m512i x[16];
                for (int i = 0; i < 16; ++i) x[i] = (__m512i)(load(sums + (t * dim + d + i) * 16) * factor);
                transpose16(x);
                for (int i = 0; i < std::min(16, rows - t * 16); ++i) store(out + out_at[t * 16 + i] + d, (vf)x[i]);
            }
        }
    }

    const AttentionArgs& a;
    const Task& task;
    const int group, dim, rows, tiles;
    const int64_t first_token;
    const int base, limit, from;  // position of the first new token; keys [from, limit) are seen by some row
    const CachedRows<C> keys, values;
    float *sums, *queries, *tops, *totals, *scores, *key_scale, *value_scale;
    int32_t* positions;
    uint8_t *weights, *transposed, *copies;
    int64_t query_at[kTileRows], out_at[kTileRows];  // of every row, from the task's first
};

}  // namespace pk::PK_SET

#endif
