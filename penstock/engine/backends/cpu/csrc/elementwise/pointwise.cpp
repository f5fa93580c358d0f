// What is done to every number of a row by itself: activations of feed-forwards without a gate, bounds, and rows added
// to rows (biases of norms). All of it in place.

#include <cmath>

#include "common/recorded_call.h"
#include "elementwise/gate.h"
#include "elementwise/rows.h"

using namespace pk::PK_SET;

namespace {

enum Function : int32_t { kSquaredRelu, kPlainGelu, kPlainGeluTanh, kXielu, kClip };

// x = f(x) of vectors.
template <class T, class F>
PK_INLINE void map_row(T* x, int64_t n, F&& f) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store(x + i, f(load(x + i)));
    if (int rest = int(n - i)) store_part(x + i, f(load_part(x + i, rest)), rest);
}

// The same of single numbers: what needs more digits than `vexp` has.
template <class T, class F>
PK_INLINE void map_each(T* x, int64_t n, F&& f) {
    map_row(x, n, [&](vf v) {
        float each[VL];
        store(each, v);
        for (float& one : each) one = f(one);
        return load(each);
    });
}

}  // namespace

// `a` to `d`: of xIELU positive, negative, beta, eps; `a` of a clip its limit.
PK_FUNCTION(void, pk_pointwise)(Context* ctx, void* x, int64_t rows, int64_t n, int function, float a, float b, float c,
                                float d, int dtype) {
    Guard hold(ctx->busy);
    dispatch(dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(rows, std::max<int64_t>(1, 2048 / n), [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) {
                T* row = static_cast<T*>(x) + r * n;
                if (function == kSquaredRelu) {
                    map_row(row, n, [](vf v) {
                        v = vmax(v, splat(0.0f));
                        return v * v;
                    });
                } else if (function == kPlainGeluTanh) {
                    map_row(row, n, [](vf v) { return gelu<T>(v); });
                } else if (function == kPlainGelu) {
                    map_each(row, n, [](float v) { return 0.5f * v * (1.0f + std::erf(v * 0.70710678f)); });
                } else if (function == kXielu) {
                    map_each(row, n, [&](float v) {
                        return v > 0 ? a * v * v + c * v : (std::expm1(std::min(v, d)) - v) * b + c * v;
                    });
                } else {
                    map_row(row, n, [&](vf v) { return vmin(vmax(v, splat(-a)), splat(a)); });
                }
            }
        });
    });
}

// Every row += row.
PK_FUNCTION(void, pk_add_row)(Context* ctx, void* x, const void* row, int64_t rows, int64_t n, int dtype,
                              int row_dtype) {
    Guard hold(ctx->busy);
    const float* added = as_floats(ctx->shared, row, n, row_dtype);
    dispatch(dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(rows, grain(n), [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) {
                T* to = static_cast<T*>(x) + r * n;
                int64_t i = 0;
                for (; i + VL <= n; i += VL) store(to + i, load(to + i) + load(added + i));
                if (int rest = int(n - i))
                    store_part(to + i, load_part(to + i, rest) + load_part(added + i, rest), rest);
            }
        });
    });
}

PK_RECORDABLE(pk_pointwise)
PK_RECORDABLE(pk_add_row)
