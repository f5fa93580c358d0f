// Norms, the residual stream they belong to, and the gate of a feed-forward.
// Invariant: each row is read once and written once.

#include "common/recorded_call.h"
#include "elementwise/gate.h"
#include "elementwise/rows.h"

using namespace pk::PK_SET;

namespace {

template <class R, class T>
PK_INLINE void add_row(R* residual, const T* x, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store(residual + i, load(residual + i) + load(x + i));
    if (int rest = int(n - i))
        store_part(residual + i, load_part(residual + i, rest) + load_part(x + i, rest), rest);
}

// residual += x * factor * weight.
template <class R, class T>
PK_INLINE void add_scaled_row(R* residual, const T* x, const float* weight, int64_t n, float factor) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        store(residual + i, load(residual + i) + load(x + i) * splat(factor) * load(weight + i));
    if (int rest = int(n - i)) {
        vf scaled = load_part(x + i, rest) * splat(factor) * load_part(weight + i, rest);
        store_part(residual + i, load_part(residual + i, rest) + scaled, rest);
    }
}

// Without `weight`, a copy.
template <class S, class T>
PK_INLINE void norm_row(const S* row, const float* weight, T* out, int64_t n, float eps) {
    if (weight)
        scale_row(row, weight, out, n, rms_factor(square_sum(row, n), n, eps));
    else
        convert(row, out, int(n));
}

// The types of activations and of the residual stream they are added to: the same, or float32 for the stream.
template <class F>
PK_INLINE void dispatch_stream(int dtype, int wide, F&& f) {
    dispatch(dtype, [&](auto* t) {
        if (wide)
            f(t, (float*)nullptr);
        else
            f(t, t);
    });
}

}  // namespace

// Rows in float32, whatever they are stored in: how a residual stream begins.
PK_FUNCTION(void, pk_widen)(Context* ctx, const void* x, float* out, int64_t rows, int64_t n, int dtype) {
    Guard hold(ctx->busy);
    dispatch(dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(rows, grain(n), [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) convert(static_cast<const T*>(x) + r * n, out + r * n, int(n));
        });
    });
}

// Rows written to others of a table, which may be of another type: row r to row at[r], or to row r without `at`. 1: a
// row outside the table; nothing is written then.
PK_FUNCTION(int, pk_store_rows)(Context* ctx, const void* x, const int64_t* at, void* table, int64_t rows, int64_t n,
                                int64_t stride, int64_t size, int dtype, int table_dtype) {
    Guard hold(ctx->busy);
    for (int64_t r = 0; r < rows; ++r)
        if (uint64_t(at ? at[r] : r) >= uint64_t(size)) return 1;
    dispatch(dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        dispatch(table_dtype, [&](auto* o) {
            using O = elem<decltype(o)>;
            for (int64_t r = 0; r < rows; ++r)
                convert(static_cast<const T*>(x) + r * n, static_cast<O*>(table) + (at ? at[r] : r) * stride, int(n));
        });
    });
    return 0;
}

// `x` is of `dtype`, or of float32 when `wide`; the result always of `dtype`. Without `weight`, rows are only copied.
PK_FUNCTION(void, pk_rms_norm)(Context* ctx, const void* x, const void* weight, void* out, int64_t rows, int64_t n,
                               float eps, int dtype, int wide, int weight_dtype) {
    Guard hold(ctx->busy);
    const float* scale = as_floats(ctx->shared, weight, n, weight_dtype);
    dispatch_stream(dtype, wide, [&](auto* t, auto* s) {
        using T = elem<decltype(t)>;
        using S = elem<decltype(s)>;
        ctx->pool.rows(rows, grain(n), [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) {
                norm_row(static_cast<const S*>(x) + r * n, scale, static_cast<T*>(out) + r * n, n, eps);
            }
        });
    });
}

// `residual` is of `dtype`, as x and the result are, or of float32 when `wide`. With `x_weight` (of the same type as
// `weight`), x is normalized before it is added. Without `weight`, the sum is the result.
PK_FUNCTION(void, pk_add_rms_norm)(Context* ctx, const void* x, void* residual, const void* weight,
                                   const void* x_weight, void* out, int64_t rows, int64_t n, float eps, int dtype,
                                   int wide, int weight_dtype) {
    Guard hold(ctx->busy);
    const float* scale = as_floats(ctx->shared, weight, n, weight_dtype);
    const float* x_scale = as_floats(ctx->tasks, x_weight, n, weight_dtype);
    dispatch_stream(dtype, wide, [&](auto* t, auto* s) {
        using T = elem<decltype(t)>;
        using S = elem<decltype(s)>;
        ctx->pool.rows(rows, grain(n), [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) {
                S* row = static_cast<S*>(residual) + r * n;
                const T* added = static_cast<const T*>(x) + r * n;
                if (x_scale)
                    add_scaled_row(row, added, x_scale, n, rms_factor(square_sum(added, n), n, eps));
                else
                    add_row(row, added, n);
                norm_row(row, scale, static_cast<T*>(out) + r * n, n, eps);
            }
        });
    });
}

// The first `queries` elements of each row normalized together, and the `keys` behind them; in place. `means`: mean
// squares [rows][2] of the two, where more than what is here counts; null: of what is here.
PK_FUNCTION(void, pk_norm_rows)(Context* ctx, void* x, const void* q_norm, const void* k_norm, const float* means,
                                int64_t rows, int64_t width, int64_t queries, int64_t keys, float eps, int dtype,
                                int norm_dtype) {
    Guard hold(ctx->busy);
    const float* q_scale = as_floats(ctx->shared, q_norm, queries, norm_dtype);
    const float* k_scale = as_floats(ctx->tasks, k_norm, keys, norm_dtype);
    dispatch(dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(rows, grain(queries + keys), [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) {
                T *q = static_cast<T*>(x) + r * width, *k = q + queries;
                float q_mean = means ? means[2 * r] : square_sum(q, queries) / float(queries);
                float k_mean = means ? means[2 * r + 1] : square_sum(k, keys) / float(keys);
                scale_row(q, q_scale, q, queries, 1.0f / std::sqrt(q_mean + eps));
                scale_row(k, k_scale, k, keys, 1.0f / std::sqrt(k_mean + eps));
            }
        });
    });
}

// residual += x + y (either may be null), then minus the mean of its row.
PK_FUNCTION(void, pk_centre)(Context* ctx, void* residual, const void* x, const void* y, int64_t rows, int64_t n,
                             int dtype, int wide) {
    Guard hold(ctx->busy);
    dispatch_stream(dtype, wide, [&](auto* t, auto* s) {
        using T = elem<decltype(t)>;
        using S = elem<decltype(s)>;
        ctx->pool.rows(rows, grain(n), [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) {
                S* row = static_cast<S*>(residual) + r * n;
                if (x) add_row(row, static_cast<const T*>(x) + r * n, n);
                if (y) add_row(row, static_cast<const T*>(y) + r * n, n);
                centre_row(row, row, n);
            }
        });
    });
}

PK_FUNCTION(void, pk_silu_mul)(Context* ctx, const void* x, void* out, int64_t rows, int64_t ffn, int dtype) {
    Guard hold(ctx->busy);
    gate_all(ctx, kSilu, x, out, rows, ffn, dtype);
}

PK_FUNCTION(void, pk_gelu_mul)(Context* ctx, const void* x, void* out, int64_t rows, int64_t ffn, int dtype) {
    Guard hold(ctx->busy);
    gate_all(ctx, kGelu, x, out, rows, ffn, dtype);
}

PK_FUNCTION(void, pk_clamped_swiglu)(Context* ctx, const void* x, void* out, int64_t rows, int64_t ffn, float alpha,
                                     float limit, int dtype) {
    Guard hold(ctx->busy);
    for_gated_rows(ctx, x, out, rows, ffn, dtype, [&](auto* from, auto* to, int64_t begin, int64_t end) {
        using T = elem<decltype(to)>;
        gate_rows(from, to, begin, end, ffn, [&](vf v, vf up) { return clamped_swiglu<T>(v, up, alpha, limit); });
    });
}

PK_FUNCTION(void, pk_bounded_silu)(Context* ctx, const void* x, void* out, int64_t rows, int64_t ffn, float limit,
                                   int dtype) {
    Guard hold(ctx->busy);
    for_gated_rows(ctx, x, out, rows, ffn, dtype, [&](auto* from, auto* to, int64_t begin, int64_t end) {
        using T = elem<decltype(to)>;
        gate_rows(from, to, begin, end, ffn, [&](vf v, vf up) { return bounded_silu<T>(v, up, limit); });
    });
}

PK_RECORDABLE(pk_widen)
PK_RECORDABLE(pk_store_rows)
PK_RECORDABLE(pk_rms_norm)
PK_RECORDABLE(pk_add_rms_norm)
PK_RECORDABLE(pk_centre)
PK_RECORDABLE(pk_norm_rows)
PK_RECORDABLE(pk_silu_mul)
PK_RECORDABLE(pk_gelu_mul)
PK_RECORDABLE(pk_clamped_swiglu)
PK_RECORDABLE(pk_bounded_silu)
