// Choosing a token from a row of float32 logits without leaving the row: masks, greedy, log-sum-exp, Gumbel-max.
//
// Gumbel-max draws from softmax(logit / temperature) as argmax(logit / temperature + g), where the noise of
// entry i is a function of (row key, i) alone: g = -log(-log(u)), u = (k | 1) / 2^24, k the top 24 bits of
// splitmix64's output function applied to key + i * 0x9E3779B97F4A7C15. Because -log(u) >= 1 - u, entry i can
// only win when 1 - u < exp(value_i - best); that test needs no logarithm and rejects nearly every entry.

#include <algorithm>
#include <limits>

#include "noise.h"
#include "simd.h"
#include "tape.h"

using namespace pk;

namespace {

PK_INLINE float uniform(uint64_t key, int64_t i) {
    return float(uint32_t(mix(key + uint64_t(i) * kGolden) >> 40) | 1) * 5.9604644775390625e-8f;
}

int64_t argmax_row(const float* x, int64_t n) {
    int64_t best = 0;
    float top = -INFINITY;
    constexpr int64_t kStride = 1024;  // compare whole stretches first; look inside only where one wins
    for (int64_t begin = 0; begin < n; begin += kStride) {
        const int64_t end = std::min(n, begin + kStride);
        vf m = splat(-INFINITY);
        int64_t i = begin;
        for (; i + VL <= end; i += VL) m = vmax(m, load(x + i));
        float stretch = hmax(m);
        for (; i < end; ++i) stretch = x[i] > stretch ? x[i] : stretch;
        if (!(stretch > top)) continue;
        top = stretch;
        for (i = begin; i < end && x[i] != stretch; ++i) {
        }
        best = i;
    }
    return best;
}

float logsumexp_row(const float* x, int64_t n) {
    const float max = x[argmax_row(x, n)];
    if (!std::isfinite(max)) return max;
    double total = 0;  // vocabularies are long: float32 partial sums per stretch, float64 across
    for (int64_t begin = 0; begin < n; begin += 4096) {
        const int64_t end = std::min(n, begin + 4096);
        vf sum = splat(0);
        int64_t i = begin;
        for (; i + VL <= end; i += VL) sum += vexp(load(x + i) - splat(max));
        total += hsum(sum);
        for (; i < end; ++i) total += std::exp(x[i] - max);
    }
    return max + float(std::log(total));
}

int64_t gumbel_row(const float* x, int64_t n, float temperature, uint64_t key) {
    int64_t best = argmax_row(x, n);
    if (!(temperature > 0)) return best;
    const float inverse = 1.0f / temperature;
    auto noisy = [&](int64_t i) { return x[i] / temperature - std::log(-std::log(uniform(key, i))); };
    float top = noisy(best);
    constexpr float kLeast = 5.9e-8f;  // just below the smallest 1 - u there is
    auto consider = [&](int64_t i, float room) {
        if (room < kLeast || !(1.0f - uniform(key, i) < room * 1.0001f)) return;
        const float value = noisy(i);
        if (value > top || (value == top && i < best)) {
            top = value;
            best = i;
        }
    };
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf gap = load(x + i) * splat(inverse) - splat(top);
        if (hmax(gap) < -16.65f) continue;  // log(kLeast): no noise closes such a gap
        vf room = vexp(vmin(gap, splat(1.0f)));
        for (int j = 0; j < VL; ++j) consider(i + j, room[j]);
    }
    for (; i < n; ++i) consider(i, std::exp(std::min(x[i] * inverse - top, 1.0f)));
    return best;
}

// Bit t % 32 of word t / 32 says whether token t is allowed. Most words are all zeros or all ones.
void mask_row(float* logits, const uint32_t* bits, int64_t n) {
    const float nothing = -std::numeric_limits<float>::infinity();
    for (int64_t begin = 0; begin < n; begin += 32) {
        const uint32_t word = bits[begin / 32];
        if (word == UINT32_MAX) continue;
        const int64_t count = std::min<int64_t>(32, n - begin);
        float* part = logits + begin;
        if (word == 0) {
            std::fill_n(part, count, nothing);
        } else {
            for (int64_t t = 0; t < count; ++t) part[t] = (word >> t) & 1 ? part[t] : nothing;
        }
    }
}

}  // namespace

PK_API void pk_mask_logits(Context* ctx, float* logits, const int64_t* at, const uint32_t* bits, int64_t count,
                           int64_t n) {
    Guard hold(ctx->busy);
    const int64_t words = (n + 31) / 32;
    ctx->pool.rows(count, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) mask_row(logits + at[i] * n, bits + i * words, n);
    });
}

PK_API void pk_argmax(Context* ctx, const float* logits, int64_t* out, int64_t rows, int64_t n) {
    Guard hold(ctx->busy);
    ctx->pool.rows(rows, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) out[r] = argmax_row(logits + r * n, n);
    });
}

PK_API void pk_logsumexp(Context* ctx, const float* logits, float* out, int64_t rows, int64_t n) {
    Guard hold(ctx->busy);
    ctx->pool.rows(rows, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) out[r] = logsumexp_row(logits + r * n, n);
    });
}

PK_API void pk_gumbel_argmax(Context* ctx, const float* logits, const float* temperatures, const uint64_t* keys,
                             int64_t* out, int64_t rows, int64_t n) {
    Guard hold(ctx->busy);
    ctx->pool.rows(rows, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) out[r] = gumbel_row(logits + r * n, n, temperatures[r], keys[r]);
    });
}
PK_TAPED(pk_gumbel_argmax)
