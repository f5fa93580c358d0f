// One token of each of many sequences through the states of a gated delta net.

#include "common/recorded_call.h"
#include "common/simd.h"

using namespace pk::PK_SET;

namespace {

constexpr int64_t WIDE = 4 * VL;

// S <- decay S + k (x) ((v - k decay S) beta), o = q S, for some columns from `at`: S [keys, values] in rows, of which
// each has its own decay, or all have one.
template <bool VECTORS, bool BY_CHANNEL>
void columns(const float* source, float* target, const float* q, const float* k, const float* v, const float* decay,
             float beta, float* out, int64_t keys, int64_t values, int64_t at) {
    const auto of_row = [&](int64_t i) { return decay[BY_CHANNEL ? i : 0]; };
    const float whole = BY_CHANNEL ? 1.0f : decay[0];
    if constexpr (VECTORS) {
        vf sum[4] = {splat(0), splat(0), splat(0), splat(0)};
        if (source) {
            for (int64_t i = 0; i < keys; ++i) {
                const vf each = splat(BY_CHANNEL ? k[i] * of_row(i) : k[i]);
                for (int j = 0; j < 4; ++j) sum[j] += each * load(source + i * values + at + j * VL);
            }
        }
        vf change[4], o[4];
        for (int j = 0; j < 4; ++j) {
            change[j] = (load(v + at + j * VL) - splat(whole) * sum[j]) * splat(beta);
            o[j] = splat(0);
        }
        for (int64_t i = 0; i < keys; ++i) {
            const vf key = splat(k[i]), query = splat(q[i]);
            for (int j = 0; j < 4; ++j) {
                vf s = key * change[j];
                if (source) s += splat(of_row(i)) * load(source + i * values + at + j * VL);
                if (target) store(target + i * values + at + j * VL, s);
                o[j] += query * s;
            }
        }
        for (int j = 0; j < 4; ++j) store(out + at + j * VL, o[j]);
    } else {
        float sum = 0, o = 0;
        for (int64_t i = 0; source && i < keys; ++i)
            sum += (BY_CHANNEL ? k[i] * of_row(i) : k[i]) * source[i * values + at];
        const float change = (v[at] - whole * sum) * beta;
        for (int64_t i = 0; i < keys; ++i) {
            float s = k[i] * change;
            if (source) s += of_row(i) * source[i * values + at];
            if (target) target[i * values + at] = s;
            o += q[i] * s;
        }
        out[at] = o;
    }
}

template <bool BY_CHANNEL>
void all_columns(const float* source, float* target, const float* q, const float* k, const float* v, const float* decay,
          float beta, float* out, int64_t keys, int64_t values) {
    int64_t at = 0;
    for (; at + WIDE <= values; at += WIDE)
        columns<true, BY_CHANNEL>(source, target, q, k, v, decay, beta, out, keys, values, at);
    for (; at < values; ++at)
        columns<false, BY_CHANNEL>(source, target, q, k, v, decay, beta, out, keys, values, at);
}

}  // namespace

// q, k [rows, heads, keys], v and out [rows, heads, values], beta [rows, heads], decay [rows, heads, decays], one or
// `keys` of them; states [slots, heads, keys, values], of which slot 0 stands for none.
PK_FUNCTION(void, pk_delta_step)(Context* ctx, const float* q, const float* k, const float* v, const float* decay,
                                 const float* beta, float* states, const int64_t* reads, const int64_t* writes,
                                 float* out, int64_t rows, int64_t heads, int64_t keys, int64_t values,
                                 int64_t decays) {
    Guard hold(ctx->busy);
    ctx->pool.rows(rows * heads, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t n = begin; n < end; ++n) {
            const int64_t row = n / heads, head = n % heads, size = keys * values;
            const float* source = reads[row] ? states + (reads[row] * heads + head) * size : nullptr;
            float* target = writes[row] ? states + (writes[row] * heads + head) * size : nullptr;
            const auto through = decays > 1 ? all_columns<true> : all_columns<false>;
            through(source, target, q + n * keys, k + n * keys, v + n * values, decay + n * decays, beta[n],
                    out + n * values, keys, values);
        }
    });
}
