// One token of each of many sequences through the states of a gated delta net.

#include "common/recorded_call.h"
#include "common/simd.h"

using namespace pk::PK_SET;

namespace {

constexpr int64_t WIDE = 4 * VL;

// S <- decay S + k (x) ((v - decay k S) beta), o = q S, for `count` columns from `at`: S [keys, values] in rows.
template <bool VECTORS>
void columns(const float* source, float* target, const float* q, const float* k, const float* v, float decay,
             float beta, float* out, int64_t keys, int64_t values, int64_t at) {
    if constexpr (VECTORS) {
        vf sum[4] = {splat(0), splat(0), splat(0), splat(0)};
        if (source) {
            for (int64_t i = 0; i < keys; ++i) {
                const vf each = splat(k[i]);
                for (int j = 0; j < 4; ++j) sum[j] += each * load(source + i * values + at + j * VL);
            }
        }
        vf change[4], o[4];
        for (int j = 0; j < 4; ++j) {
            change[j] = (load(v + at + j * VL) - splat(decay) * sum[j]) * splat(beta);
            o[j] = splat(0);
        }
        for (int64_t i = 0; i < keys; ++i) {
            const vf key = splat(k[i]), query = splat(q[i]);
            for (int j = 0; j < 4; ++j) {
                vf s = key * change[j];
                if (source) s += splat(decay) * load(source + i * values + at + j * VL);
                if (target) store(target + i * values + at + j * VL, s);
                o[j] += query * s;
            }
        }
        for (int j = 0; j < 4; ++j) store(out + at + j * VL, o[j]);
    } else {
        float sum = 0, o = 0;
        for (int64_t i = 0; source && i < keys; ++i) sum += k[i] * source[i * values + at];
        const float change = (v[at] - decay * sum) * beta;
        for (int64_t i = 0; i < keys; ++i) {
            float s = k[i] * change;
            if (source) s += decay * source[i * values + at];
            if (target) target[i * values + at] = s;
            o += q[i] * s;
        }
        out[at] = o;
    }
}

}  // namespace

// q, k [rows, heads, keys], v and out [rows, heads, values], decay and beta [rows, heads]; states [slots, heads, keys,
// values], of which slot 0 stands for none.
PK_FUNCTION(void, pk_delta_step)(Context* ctx, const float* q, const float* k, const float* v, const float* decay,
                                 const float* beta, float* states, const int64_t* reads, const int64_t* writes,
                                 float* out, int64_t rows, int64_t heads, int64_t keys, int64_t values) {
    Guard hold(ctx->busy);
    ctx->pool.rows(rows * heads, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t n = begin; n < end; ++n) {
            const int64_t row = n / heads, head = n % heads, size = keys * values;
            const float* source = reads[row] ? states + (reads[row] * heads + head) * size : nullptr;
            float* target = writes[row] ? states + (writes[row] * heads + head) * size : nullptr;
            int64_t at = 0;
            for (; at + WIDE <= values; at += WIDE)
                columns<true>(source, target, q + n * keys, k + n * keys, v + n * values, decay[n], beta[n],
                              out + n * values, keys, values, at);
            for (; at < values; ++at)
                columns<false>(source, target, q + n * keys, k + n * keys, v + n * values, decay[n], beta[n],
                               out + n * values, keys, values, at);
        }
    });
}
