// Prefill attention over an int8 cache in products of 16-bit integers, where the CPU adds two of them at once (VNNI).
//
// Queries keep 15 bits, int8 keys and values are exact, and the softmax weights of a panel of keys keep 15 bits beside
// the largest of them: panels are summed up in float32, so that small weights of other panels lose nothing.
// A row of queries is quantized by itself, so its result does not depend on the other rows of its tile.
// Only tiles far into a context are computed so: with few keys there is little to gain, and float32 is closer. With
// `fixed`, where results may not depend on how prompts are cut into tiles, none are.

#pragma once

#include "attention/attention.h"
#include "attention/prefill.h"
#if defined(PK_AVX512)
#include "common/avx512/transpose.h"
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define PK_PAIR_PRODUCTS 1

namespace pk::PK_SET {

constexpr int kRowBlock = VB == 64 ? 6 : 3;    // rows of queries whose sums are in registers,
constexpr int kSumVectors = VB == 64 ? 4 : 2;  // and vectors of them a row
constexpr int kWidestPairs = 512;              // numbers of a head whose products cannot overflow: 2^15 * 2^7 * 2^9
constexpr int kPairsFrom = 512;                // position of the first token of a tile
constexpr float kWeightUnits = 32767;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

#if defined(PK_AVX512)
// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1], of int16 in the halves of every lane.
PK_INLINE vi add_pairs(vi acc, vi a, vi b) { return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b); }
PK_INLINE vi load_bytes_as_pairs(const s8* p) {
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PK_INLINE vi load_bytes_as_lanes(const s8* p) {
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Integers within int16, one after another.
PK_INLINE void store_halves(int16_t* p, vi v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)v));
}
// Numbers [first, first + 2 * VL) of up to VL rows, `count` of which exist, as columns of `to`, whose rows are panels of keys.
PK_INLINE void turn_pairs(const s8* const* row, int count, int first, int32_t* to) {
    __m512i x[VL];
    for (int i = 0; i < VL; ++i)
        x[i] = i < count ? (__m512i)load_bytes_as_pairs(row[i] + first) : _mm512_setzero_si512();
    transpose16(x);
    for (int i = 0; i < VL; ++i) _mm512_storeu_si512(to + i * kPanel, x[i]);
}
#else
PK_INLINE vi add_pairs(vi acc, vi a, vi b) {
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
}
PK_INLINE vi load_bytes_as_pairs(const s8* p) {
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PK_INLINE vi load_bytes_as_lanes(const s8* p) {
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
PK_INLINE void store_halves(int16_t* p, vi v) {
    const __m256i packed = _mm256_packs_epi32((__m256i)v, (__m256i)v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x88)));
}
PK_INLINE void turn_pairs(const s8* const* row, int count, int first, int32_t* to) {
    for (int i = 0; i < VL; ++i) {
        const vi pairs = i < count ? load_bytes_as_pairs(row[i] + first) : vi{};
        for (int p = 0; p < VL; ++p) to[p * kPanel + i] = pairs[p];
    }
}
#endif

PK_INLINE vi load_lanes(const int32_t* p) {
    vi v;
    std::memcpy(&v, p, VB);
    return v;
}
PK_INLINE void store_lanes(int32_t* p, vi v) { std::memcpy(p, &v, VB); }

// Two neighbours in every lane.
PK_INLINE vi repeat_pair(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return vi{} + pair;
}

// Integers within 2^22, rounded to nearest even: adding 1.5 * 2^23 leaves them in the low bits.
PK_INLINE vi rounded(vf v) { return (vi)(v + splat(12582912.0f)) - 0x4b400000; }

// sum[M rows x N vectors] = rows of `a` (pairs `as` int16 apart) x `pairs` rows of b, `bs` lanes apart.
template <int M, int N>
PK_INLINE void pair_products(const int16_t* a, int as, const int32_t* b, int bs, int pairs, vi (&sum)[M][N]) {
    PK_UNROLL for (int m = 0; m < M; ++m)
        PK_UNROLL for (int n = 0; n < N; ++n) sum[m][n] = vi{};
    for (int k = 0; k < pairs; ++k, a += 2, b += bs) {
        vi right[N];
        PK_UNROLL for (int n = 0; n < N; ++n) right[n] = load_lanes(b + n * VL);
        PK_UNROLL for (int m = 0; m < M; ++m) {
            const vi left = repeat_pair(a + m * as);
            PK_UNROLL for (int n = 0; n < N; ++n) sum[m][n] = add_pairs(sum[m][n], left, right[n]);
        }
    }
}

inline bool by_pairs(const AttentionArgs& a) {
    return !a.fixed && a.cache_dtype == 3 && a.head_dim % (2 * VL) == 0 && a.head_dim <= kWidestPairs;
}

inline bool by_pairs(const AttentionArgs& a, const Task& task) {
    const int fresh = a.query_starts[task.sequence + 1] - a.query_starts[task.sequence];
    return by_pairs(a) && a.context_lens[task.sequence] - fresh + task.begin >= kPairsFrom;
}

// Of the scratch of `Int8PrefillTile`, which is whole vectors from beginning to end.
inline size_t prefill_int8_floats(const AttentionArgs& a, int rows) {
    return size_t(rows) * (a.head_dim + a.head_dim / 2) + 3 * size_t(padded(rows)) +
           size_t(kPanel) * (a.head_dim + 2 + kRowBlock + kRowBlock / 2 + 1) + kRowBlock * VL;
}

class Int8PrefillTile {
public:
    Int8PrefillTile(const AttentionArgs& a, const Task& task, float* scratch)
        : a(a), task(task), dim(a.head_dim), group(a.heads / a.kv_heads),
          rows((task.end - task.begin) * group) {
        const auto take = [&](size_t floats) {
            float* taken = scratch;
            scratch += floats;
            return taken;
        };
        acc = take(size_t(rows) * dim);
        q = reinterpret_cast<int16_t*>(take(size_t(rows) * dim / 2));
        unit = take(padded(rows));
        max = take(padded(rows));
        total = take(padded(rows));
        keys = reinterpret_cast<int32_t*>(take(size_t(kPanel) * dim / 2));
        values = reinterpret_cast<int32_t*>(take(size_t(kPanel) * dim / 2));
        key_scale = take(kPanel);
        value_scale = take(kPanel);
        scores = take(size_t(kRowBlock) * kPanel);
        weights = reinterpret_cast<int16_t*>(take(size_t(kRowBlock) * kPanel / 2));
    }

    void run() {
        const int fresh = a.query_starts[task.sequence + 1] - a.query_starts[task.sequence];
        base = a.context_lens[task.sequence] - fresh;
        const int64_t first_token = a.query_starts[task.sequence] + task.begin;
        for (int t = 0; t < task.end - task.begin; ++t) quantize_queries(first_token + t, t * group);
        std::fill(acc, acc + size_t(rows) * dim, 0.0f);
        std::fill(max, max + rows, -INFINITY);
        std::fill(total, total + rows, 0.0f);

        const int limit = base + task.end;  // keys at or beyond are in the future of every query here
        for (int key = first_visible(a, base + task.begin); key < limit; key += kPanel) {
            const int stop = std::min(key + kPanel, limit);
            fill_panels(key, stop);
            int r = 0;
            for (; r + kRowBlock <= rows; r += kRowBlock) add_panel<kRowBlock>(r, key, stop);
            for (; r < rows; ++r) add_panel<1>(r, key, stop);
        }
        for (int r = 0; r < rows; ++r) {
            const int head = task.kv_head * group + r % group;
            store_outputs(a, first_token + r / group, head, acc + size_t(r) * dim,
                          final_factor(a, head, max[r], total[r]));
        }
    }

private:
    const AttentionArgs& a;
    const Task& task;
    const int dim, group, rows;
    int base = 0;  // position of the first new token of the sequence
    float *acc, *unit, *max, *total, *key_scale, *value_scale, *scores;
    int16_t *q, *weights;
    int32_t* keys;    // [pair of dimensions][key]
    int32_t* values;  // [pair of keys][dimension]

    // The heads of a token as rows of int16, from row `r` on.
    void quantize_queries(int64_t token, int r) {
        float row[kWidestPairs];
        for (int head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head, ++r) {
            load_queries(a, token, head, 1, row, dim);
            const float top = largest(row, dim), inverse = top > 0 ? kWeightUnits / top : 0.0f;
            unit[r] = top / kWeightUnits;
            for (int d = 0; d < dim; d += VL)
                store_halves(q + size_t(r) * dim + d, rounded(load(row + d) * splat(inverse)));
        }
    }

    // Keys [begin, end) and their values in pairs; zeros up to the end of the panel.
    void fill_panels(int begin, int end) {
        const int32_t* table = a.block_tables + a.rows[task.sequence] * a.table_stride;
        const s8 *k_row[kPanel], *v_row[kPanel];
        int at = 0;
        for (int key = begin; key < end;) {
            const int offset = key % a.block_size, run = std::min(a.block_size - offset, end - key);
            const int64_t block = table[key / a.block_size];
            const s8* k = static_cast<const s8*>(a.k_cache) + block * a.k_block_stride +
                          task.kv_head * a.k_head_stride + int64_t(offset) * dim;
            const s8* v = static_cast<const s8*>(a.v_cache) + block * a.v_block_stride +
                          task.kv_head * a.v_head_stride + int64_t(offset) * dim;
            for (int j = 0; j < run; ++j, ++at, k += dim, v += dim) {
                key_scale[at] = cached_scale<s8>(key_scales(a), block, task.kv_head, offset + j);
                value_scale[at] = cached_scale<s8>(value_scales(a), block, task.kv_head, offset + j);
                k_row[at] = k;
                v_row[at] = v;
            }
            key += run;
        }
        std::fill(key_scale + at, key_scale + kPanel, 0.0f);
        std::fill(value_scale + at, value_scale + kPanel, 0.0f);
        for (int j = 0; j < kPanel; j += VL)
            for (int p = 0; p < dim / 2; p += VL)
                turn_pairs(k_row + j, at - j, 2 * p, keys + p * kPanel + j);
        for (int j = 0; j < at; j += 2)
            for (int d = 0; d < dim; d += VL) {
                const vi odd = j + 1 < at ? load_bytes_as_lanes(v_row[j + 1] + d) : vi{};
                store_lanes(values + j / 2 * dim + d, (load_bytes_as_lanes(v_row[j] + d) & 0xffff) | odd << 16);
            }
    }

    // M rows from row `first` on see the panel of keys [key, stop).
    template <int M>
    void add_panel(int first, int key, int stop) {
        constexpr int N = kSumVectors;
        if (base + task.begin + (first + M - 1) / group < key) return;  // all of it is in their future
        for (int j = 0; j < kPanel; j += N * VL) {
            vi sum[M][N];
            pair_products<M, N>(q + size_t(first) * dim, dim, keys + j, kPanel, dim / 2, sum);
            PK_UNROLL for (int m = 0; m < M; ++m)
                PK_UNROLL for (int n = 0; n < N; ++n)
                    store(scores + m * kPanel + j + n * VL, __builtin_convertvector(sum[m][n], vf) *
                          (splat(unit[first + m]) * load(key_scale + j + n * VL)));
        }
        float keep[M], factor[M];
        for (int m = 0; m < M; ++m) weigh(first + m, m, key, stop, keep[m], factor[m]);
        const int pairs = (stop - key + 1) / 2;
        int d = 0;
        for (; d + N * VL <= dim; d += N * VL) add_values<M, N>(first, d, pairs, keep, factor);
        if (d < dim) add_values<M, 2>(first, d, pairs, keep, factor);
    }

    // N vectors of the weighted sum of values, from dimension `d` on.
    template <int M, int N>
    PK_INLINE void add_values(int first, int d, int pairs, const float (&keep)[M], const float (&factor)[M]) {
        vi sum[M][N];
        pair_products<M, N>(weights, kPanel, values + d, dim, pairs, sum);
        PK_UNROLL for (int m = 0; m < M; ++m)
            PK_UNROLL for (int n = 0; n < N; ++n) {
                float* to = acc + size_t(first + m) * dim + d + n * VL;
                store(to, load(to) * splat(keep[m]) + __builtin_convertvector(sum[m][n], vf) * splat(factor[m]));
            }
    }

    // Keys outside of [from, end) get no weight.
    static void hide(float* row, int from, int end) {
        std::fill(row, row + from, kHidden);
        std::fill(row + end, row + kPanel, kHidden);
    }

    // Softmax weights of row `r` times the scales of values, as integers, from its scores in line `m` of the buffers.
    // What has been summed up is to be multiplied by `keep`, and what these integers give by `factor`.
    PK_INLINE void weigh(int r, int m, int key, int stop, float& keep, float& factor) {
        float* row = scores + m * kPanel;
        int16_t* to = weights + m * kPanel;
        const int position = base + task.begin + r / group;
        // Visible columns are a run: [from, end).
        const int end = std::min(stop, position + 1) - key, from = std::max(0, first_visible(a, position) - key);
        if (end <= from) {
            for (int j = 0; j < kPanel; j += VL) store_halves(to + j, vi{});
            keep = 1, factor = 0;
            return;
        }
        if (a.softcap > 0) cap_row(row, kPanel, a.softcap);
        if (from > 0 || end < kPanel) hide(row, from, end);
        constexpr int N = kPanel / VL;
        vf x[N], high = load(row);
        PK_UNROLL for (int n = 0; n < N; ++n) high = vmax(high, x[n] = load(row + n * VL));
        const float here = hmax(high);
        vf mass = splat(0);
        high = splat(0);
        PK_UNROLL for (int n = 0; n < N; ++n) {
            x[n] = vexp(x[n] - splat(here));
            mass += x[n];
            x[n] *= load(value_scale + n * VL);
            high = vmax(high, x[n]);
        }
        const float most = hmax(high);
        const vf inverse = splat(most > 0 ? kWeightUnits / most : 0.0f);
        PK_UNROLL for (int n = 0; n < N; ++n) store_halves(to + n * VL, rounded(x[n] * inverse));
        // Only one of the two has to shrink: what was summed up before, or what this panel adds.
        const float less = vexp(splat(-std::fabs(here - max[r])))[0], share = here < max[r] ? less : 1.0f;
        keep = here < max[r] ? 1.0f : less;
        factor = share * most / kWeightUnits;
        total[r] = total[r] * keep + hsum(mass) * share;
        max[r] = std::max(max[r], here);
    }
};

}  // namespace pk::PK_SET

#endif
