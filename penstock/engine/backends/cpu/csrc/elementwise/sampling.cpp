// Operations on rows of float32 logits: masks, argmax, log-sum-exp, and sampling (gumbel.h).

#include <limits>

#include "elementwise/gumbel.h"
#include "common/recorded_call.h"

using namespace pk::PK_SET;

namespace {

float logsumexp_row(const float* x, int64_t n) {
    const float max = x[argmax_row(x, n)];
    if (!std::isfinite(max)) return max;
    double total = 0;  // vocabularies are long: float32 partial sums per piece, float64 across
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

PK_FUNCTION(void, pk_mask_logits)(Context* ctx, float* logits, const int64_t* at, const uint32_t* bits, int64_t count,
                                  int64_t n) {
    Guard hold(ctx->busy);
    const int64_t words = (n + 31) / 32;
    ctx->pool.rows(count, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) mask_row(logits + at[i] * n, bits + i * words, n);
    });
}

PK_FUNCTION(void, pk_argmax)(Context* ctx, const float* logits, int64_t* out, int64_t rows, int64_t n) {
    Guard hold(ctx->busy);
    ctx->pool.rows(rows, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) out[r] = argmax_row(logits + r * n, n);
    });
}

PK_FUNCTION(void, pk_logsumexp)(Context* ctx, const float* logits, float* out, int64_t rows, int64_t n) {
    Guard hold(ctx->busy);
    ctx->pool.rows(rows, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) out[r] = logsumexp_row(logits + r * n, n);
    });
}

PK_FUNCTION(void, pk_gumbel_argmax)(Context* ctx, const float* logits, const float* temperatures,
                                    const uint64_t* keys, int64_t* out, int64_t rows, int64_t n) {
    Guard hold(ctx->busy);
    sample_rows(ctx, logits, temperatures, keys, out, rows, n);
}
PK_RECORDABLE(pk_gumbel_argmax)
