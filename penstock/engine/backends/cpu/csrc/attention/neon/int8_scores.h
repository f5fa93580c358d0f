// Scores of queries with the keys of an int8 cache in integers, on `sdot`. Included by attention/decode.h.

#pragma once

#if defined(PK_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define PK_INT8_SCORES 1

namespace pk::PK_SET {

constexpr int kMostSplitHeads = 32;  // query heads of a group, and
constexpr int kWidestHead = 1024;    // numbers of a head, for which this is used

// A query row in int16 split into two int8, q = unit * (128 * high + low): 15 bits beside keys that have 8.
struct SplitQuery {
    const int8_t *high, *low;
    float unit;
};

inline SplitQuery split_query(const float* q, int dim, int8_t* to) {
    const float top = largest(q, dim), unit = top > 0 ? top / 16256.0f : 1.0f;
    for (int d = 0; d < dim; ++d) {
        const int value = int(std::lrintf(q[d] / unit)), high = (value + 64) >> 7;
        to[d] = int8_t(high);
        to[dim + d] = int8_t(value - 128 * high);
    }
    return {to, to + dim, unit};
}

// As score_keys, for int8 keys and `dim` a multiple of 16: exact integer products instead of widening every key.
template <int G>
void score_int8_keys(const SplitQuery* q, const s8* k, const s8* ahead, const s8* values, int dim, int count,
                     float* scores) {
    for (int j = 0; j < count; j += 2) {
        const bool pair = j + 1 < count;
        const int8_t* k0 = &k[int64_t(j) * dim].bits;
        const int8_t* k1 = pair ? k0 + dim : k0;
        int32x4_t high[G][2], low[G][2];
        PK_UNROLL for (int g = 0; g < G; ++g)
            PK_UNROLL for (int i = 0; i < 2; ++i) high[g][i] = low[g][i] = vdupq_n_s32(0);
        __builtin_prefetch(ahead + int64_t(j) * dim);
        __builtin_prefetch(values + int64_t(j) * dim);
        __builtin_prefetch(ahead + int64_t(j) * dim + dim);
        __builtin_prefetch(values + int64_t(j) * dim + dim);
        for (int d = 0; d < dim; d += 16) {
            const int8x16_t key[2] = {vld1q_s8(k0 + d), vld1q_s8(k1 + d)};
            PK_UNROLL for (int g = 0; g < G; ++g) {
                const int8x16_t a = vld1q_s8(q[g].high + d), b = vld1q_s8(q[g].low + d);
                PK_UNROLL for (int i = 0; i < 2; ++i) {
                    high[g][i] = vdotq_s32(high[g][i], a, key[i]);
                    low[g][i] = vdotq_s32(low[g][i], b, key[i]);
                }
            }
        }
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < 1 + pair; ++i)
                scores[g * kPart + j + i] =
                    q[g].unit * float(vaddvq_s32(vaddq_s32(vshlq_n_s32(high[g][i], 7), low[g][i])));
    }
}
}  // namespace pk::PK_SET

#endif
