// The steps between the matrix products of a decoder layer: norms, gate, rotary embedding with cache write.
// Invariant: each row is read once and written once; the arithmetic is float32 whatever the storage.

#include "common/context.h"
#include "elementwise/gate.h"
#include "common/kv_formats.h"
#include "common/recorded_call.h"

using namespace pk;

namespace {

constexpr int64_t kGrainElements = 8192;  // below this much work per piece, waking a thread costs more

int64_t grain(int64_t width) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(width, 1)); }

template <class T, class O>
PK_INLINE void scale_row(const T* x, const float* weight, O* out, int64_t n, float factor) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store(out + i, load(x + i) * splat(factor) * load(weight + i));
    if (int rest = int(n - i))
        store_part(out + i, load_part(x + i, rest) * splat(factor) * load_part(weight + i, rest), rest);
}

template <class T>
PK_INLINE float square_sum(const T* x, int64_t n) {
    vf a = splat(0), b = splat(0);
    int64_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        vf u = load(x + i), v = load(x + i + VL);
        a += u * u;
        b += v * v;
    }
    for (; i + VL <= n; i += VL) {
        vf u = load(x + i);
        a += u * u;
    }
    if (int rest = int(n - i)) {
        vf u = load_part(x + i, rest);
        b += u * u;
    }
    return hsum(a + b);
}

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

PK_INLINE float rms_factor(float squares, int64_t n, float eps) {
    return 1.0f / std::sqrt(squares / float(n) + eps);
}

template <class T, class O>
PK_INLINE void convert(const T* x, O* out, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) store(out + i, load(x + i));
    if (int rest = n - i) store_part(out + i, load_part(x + i, rest), rest);
}

// Rotates dimension i with i + half, in float32, from `head` to `out` (which may be the same memory); what lies
// behind 2 * half, up to `dim`, goes over as it is.
template <class T, class O>
PK_INLINE void rotate(const T* head, O* out, const float* cos, const float* sin, int half, int dim) {
    int i = 0;
    for (; i + VL <= half; i += VL) {
        vf low = load(head + i), high = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, low * c - high * s);
        store(out + half + i, high * c + low * s);
    }
    if (int rest = half - i) {
        vf low = load_part(head + i, rest), high = load_part(head + half + i, rest);
        vf c = load_part(cos + i, rest), s = load_part(sin + i, rest);
        store_part(out + i, low * c - high * s, rest);
        store_part(out + half + i, high * c + low * s, rest);
    }
    if (2 * half < dim) convert(head + 2 * half, out + 2 * half, dim - 2 * half);
}

}  // namespace

struct RopeArgs {
    void* qkv;
    const float* cos_sin;
    const int64_t *positions, *slots;
    void *k_cache, *v_cache, *k_scales, *v_scales;
    const void *q_norm, *k_norm;
    const float *centre, *stretch;  // [kv_heads, head_dim], or null: how keys lie in the cache (`KeyFrame`)
    int64_t tokens, max_positions, num_slots;
    int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;
    int32_t heads, kv_heads, head_dim, block_size;
    int32_t rotary;  // dimensions that are rotated: the width of `cos_sin`
    int32_t dtype, cache_dtype, norm_dtype;
    float eps;
};

namespace {

// Norm weights arrive in their checkpoint's type; one float32 copy keeps the kernels to one type of weight.
const float* as_floats(Buffer& buffer, const void* weight, int64_t n, int dtype) {
    if (dtype == 0 || weight == nullptr) return static_cast<const float*>(weight);
    float* out = buffer.floats(n);
    dispatch(dtype, [&](auto* w) {
        using W = elem<decltype(w)>;
        convert(static_cast<const W*>(weight), out, int(n));
    });
    return out;
}

}  // namespace

namespace {

// Numbers of a head, times `stretch` or, moved by `centre`, divided by it.
template <class T>
PK_INLINE void stretch_query(T* head, const float* stretch, int dim) {
    int i = 0;
    for (; i + VL <= dim; i += VL) store(head + i, load(head + i) * load(stretch + i));
    if (int rest = dim - i) store_part(head + i, load_part(head + i, rest) * load_part(stretch + i, rest), rest);
}

PK_INLINE void frame_key(float* key, const float* centre, const float* stretch, int dim) {
    int i = 0;
    for (; i + VL <= dim; i += VL) store(key + i, quotient(load(key + i) - load(centre + i), load(stretch + i)));
    for (; i < dim; ++i) key[i] = (key[i] - centre[i]) / stretch[i];
}

template <class T, class C>
void rope_tokens(const RopeArgs& a, const float* q_norm, const float* k_norm, float* framed, int64_t begin,
                 int64_t end) {
    const int dim = a.head_dim, half = a.rotary / 2, group = a.heads / a.kv_heads;
    const int64_t width = int64_t(a.heads + 2 * a.kv_heads) * dim;
    const Scales key_scales{a.k_scales, a.kv_heads, a.block_size}, value_scales{a.v_scales, a.kv_heads, a.block_size};
    for (int64_t t = begin; t < end; ++t) {
        T* row = static_cast<T*>(a.qkv) + t * width;
        const float *cos = a.cos_sin + a.positions[t] * a.rotary, *sin = cos + half;
        const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
        for (int h = 0; h < a.heads + a.kv_heads; ++h) {
            T* head = row + h * dim;
            const float* norm = h < a.heads ? q_norm : k_norm;
            if (norm) scale_row(head, norm, head, dim, rms_factor(square_sum(head, dim), dim, a.eps));
            if (h < a.heads) {
                rotate(head, head, cos, sin, half, dim);
                if (a.stretch) stretch_query(head, a.stretch + h / group * dim, dim);
            } else {
                C* key = static_cast<C*>(a.k_cache) + block * a.k_block_stride +
                         (h - a.heads) * a.k_head_stride + offset * dim;
                if (a.stretch) {
                    rotate(head, framed, cos, sin, half, dim);
                    frame_key(framed, a.centre + (h - a.heads) * dim, a.stretch + (h - a.heads) * dim, dim);
                    if constexpr (kScaled<C>)
                        store_scaled(framed, key, dim, key_scales, block, h - a.heads, offset);
                    else
                        convert(framed, key, dim);
                } else if constexpr (kScaled<C>) {
                    rotate(head, head, cos, sin, half, dim);
                    store_scaled(head, key, dim, key_scales, block, h - a.heads, offset);
                } else {
                    rotate(head, key, cos, sin, half, dim);
                }
            }
        }
        for (int h = 0; h < a.kv_heads; ++h) {
            C* value = static_cast<C*>(a.v_cache) + block * a.v_block_stride + h * a.v_head_stride + offset * dim;
            const T* head = row + (a.heads + a.kv_heads + h) * dim;
            if constexpr (kScaled<C>)
                store_scaled(head, value, dim, value_scales, block, h, offset);
            else
                convert(head, value, dim);
        }
    }
}

}  // namespace

// Rows in float32, whatever they are stored in: how a residual stream begins.
PK_API void pk_widen(Context* ctx, const void* x, float* out, int64_t rows, int64_t n, int dtype) {
    Guard hold(ctx->busy);
    dispatch(dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(rows, grain(n), [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) convert(static_cast<const T*>(x) + r * n, out + r * n, int(n));
        });
    });
}

// `x` is of `dtype`, or of float32 when `wide`; the result always of `dtype`.
PK_API void pk_rms_norm(Context* ctx, const void* x, const void* weight, void* out, int64_t rows, int64_t n,
                        float eps, int dtype, int wide, int weight_dtype) {
    Guard hold(ctx->busy);
    const float* scale = as_floats(ctx->shared, weight, n, weight_dtype);
    dispatch_stream(dtype, wide, [&](auto* t, auto* s) {
        using T = elem<decltype(t)>;
        using S = elem<decltype(s)>;
        ctx->pool.rows(rows, grain(n), [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) {
                const S* row = static_cast<const S*>(x) + r * n;
                float factor = rms_factor(square_sum(row, n), n, eps);
                scale_row(row, scale, static_cast<T*>(out) + r * n, n, factor);
            }
        });
    });
}

// `residual` is of `dtype`, as x and the result are, or of float32 when `wide`. With `x_weight` (of the same type as
// `weight`), x is normalized before it is added.
PK_API void pk_add_rms_norm(Context* ctx, const void* x, void* residual, const void* weight, const void* x_weight,
                            void* out, int64_t rows, int64_t n, float eps, int dtype, int wide, int weight_dtype) {
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
                float factor = rms_factor(square_sum(row, n), n, eps);
                scale_row(row, scale, static_cast<T*>(out) + r * n, n, factor);
            }
        });
    });
}

PK_API void pk_silu_mul(Context* ctx, const void* x, void* out, int64_t rows, int64_t ffn, int dtype) {
    Guard hold(ctx->busy);
    gate_all(ctx, kSilu, x, out, rows, ffn, dtype);
}

PK_API void pk_gelu_mul(Context* ctx, const void* x, void* out, int64_t rows, int64_t ffn, int dtype) {
    Guard hold(ctx->busy);
    gate_all(ctx, kGelu, x, out, rows, ffn, dtype);
}

// 0: done; 1: a position outside the rotary table; 2: a slot outside the cache. Nothing is written then.
PK_API int pk_rope_and_cache(Context* ctx, const RopeArgs* args) {
    Guard hold(ctx->busy);
    const RopeArgs& a = *args;
    for (int64_t t = 0; t < a.tokens; ++t) {
        if (uint64_t(a.positions[t]) >= uint64_t(a.max_positions)) return 1;
        if (uint64_t(a.slots[t]) >= uint64_t(a.num_slots)) return 2;
    }
    const int64_t width = int64_t(a.heads + 2 * a.kv_heads) * a.head_dim;
    const float* q_norm = as_floats(ctx->shared, a.q_norm, a.head_dim, a.norm_dtype);
    const float* k_norm = as_floats(ctx->tasks, a.k_norm, a.head_dim, a.norm_dtype);
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        dispatch_cache(a.cache_dtype, [&](auto* c) {
            using C = elem<decltype(c)>;
            ctx->pool.rows(a.tokens, grain(2 * width), [&](int64_t begin, int64_t end, int t) {
                float* framed = a.stretch ? ctx->scratch[t].floats(a.head_dim) : nullptr;
                rope_tokens<T, C>(a, q_norm, k_norm, framed, begin, end);
            });
        });
    });
    return 0;
}

PK_TAPED(pk_widen)
PK_TAPED(pk_rms_norm)
PK_TAPED(pk_add_rms_norm)
PK_TAPED(pk_silu_mul)
PK_TAPED(pk_gelu_mul)
PK_TAPED(pk_rope_and_cache)
