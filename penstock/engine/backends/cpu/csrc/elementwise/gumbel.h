// Sampling a token from float32 logits, of a whole row or piece by piece.
//
// Gumbel-max samples from softmax(logit / temperature) as argmax(logit / temperature + g), where the noise of
// entry i is a function of (row key, i) alone: g = -log(-log(u)), u = (k | 1) / 2^24, k the top 24 bits of
// splitmix64's output function applied to key + i * 0x9E3779B97F4A7C15. Because -log(u) >= 1 - u, entry i can
// only win when 1 - u < exp(value_i - best); that test needs no logarithm and rejects nearly every entry.
// The pieces of a row may come in any order: the winner is the same.

#pragma once

#include <algorithm>
#include <cmath>

#include "common/context.h"
#include "common/noise.h"
#include "common/simd.h"

namespace pk::PK_SET {

PK_INLINE float uniform(uint64_t key, int64_t i) {
    return float(uint32_t(mix(key + uint64_t(i) * kGolden) >> 40) | 1) * 5.9604644775390625e-8f;
}

inline int64_t argmax_row(const float* x, int64_t n) {
    int64_t best = 0;
    float top = -INFINITY;
    constexpr int64_t kStride = 1024;  // compare whole pieces first; look inside only where one wins
    for (int64_t begin = 0; begin < n; begin += kStride) {
        const int64_t end = std::min(n, begin + kStride);
        vf m = splat(-INFINITY);
        int64_t i = begin;
        for (; i + VL <= end; i += VL) m = vmax(m, load(x + i));
        float most = hmax(m);
        for (; i < end; ++i) most = x[i] > most ? x[i] : most;
        if (!(most > top)) continue;
        top = most;
        for (i = begin; i < end && x[i] != most; ++i) {
        }
        best = i;
    }
    return best;
}

// The best entry so far; of equal ones the first.
struct GumbelMax {
    float top = -INFINITY;
    int64_t token = 0;

    PK_INLINE void offer(float value, int64_t i) {
        if (value > top || (value == top && i < token)) {
            top = value;
            token = i;
        }
    }

    // Takes in the entries x [n] of the row with this key, of which the first has index `first`. Temperature 0: the largest.
    void include(const float* x, int64_t n, int64_t first, float temperature, uint64_t key) {
        const int64_t likely = argmax_row(x, n);
        if (!(temperature > 0)) return offer(x[likely], first + likely);
        const float inverse = 1.0f / temperature;
        auto noisy = [&](int64_t i) { return x[i] / temperature - std::log(-std::log(uniform(key, first + i))); };
        offer(noisy(likely), first + likely);
        constexpr float kLeast = 5.9e-8f;  // just below the smallest 1 - u there is
        auto consider = [&](int64_t i, float room) {
            if (room < kLeast || !(1.0f - uniform(key, first + i) < room * 1.0001f)) return;
            offer(noisy(i), first + i);
        };
        int64_t i = 0;
        for (; i + VL <= n; i += VL) {
            vf gap = load(x + i) * splat(inverse) - splat(top);
            if (hmax(gap) < -16.65f) continue;  // log(kLeast): no noise closes such a gap
            vf room = vexp(vmin(gap, splat(1.0f)));
            for (int j = 0; j < VL; ++j) consider(i + j, room[j]);
        }
        for (; i < n; ++i) consider(i, std::exp(std::min(x[i] * inverse - top, 1.0f)));
    }
};

// A token for every row of logits [rows, n].
inline void sample_rows(Context* ctx, const float* logits, const float* temperatures, const uint64_t* keys, int64_t* out,
                      int64_t rows, int64_t n) {
    ctx->pool.rows(rows, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) {
            GumbelMax best;
            best.include(logits + r * n, n, 0, temperatures[r], keys[r]);
            out[r] = best.token;
        }
    });
}

}  // namespace pk::PK_SET
