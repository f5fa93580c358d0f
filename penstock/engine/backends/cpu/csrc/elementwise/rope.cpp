// Rotary embedding of queries and keys, with norms before it and the cache write behind it.
// Invariant: each row is read once and written once.

#include "common/kv_formats.h"
#include "common/recorded_call.h"
#include "elementwise/rows.h"

using namespace pk::PK_SET;

namespace {

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

// The same with neighbours as pairs: 2i and 2i + 1.
template <class T, class O>
PK_INLINE void rotate_pairs(const T* head, O* out, const float* cos, const float* sin, int half, int dim) {
    float low[VL], high[VL], line[2 * VL];
    for (int i = 0; i < half; i += VL) {
        const int count = std::min(VL, half - i);
        convert(head + 2 * i, line, 2 * count);
        for (int j = 0; j < count; ++j) {
            low[j] = line[2 * j] * cos[i + j] - line[2 * j + 1] * sin[i + j];
            high[j] = line[2 * j + 1] * cos[i + j] + line[2 * j] * sin[i + j];
        }
        for (int j = 0; j < count; ++j) {
            line[2 * j] = low[j];
            line[2 * j + 1] = high[j];
        }
        convert(line, out + 2 * i, 2 * count);
    }
    if (2 * half < dim) convert(head + 2 * half, out + 2 * half, dim - 2 * half);
}

// Key smoothing: a query head times `scale`; a key moved by `centre`, divided by `scale`.
template <class T>
PK_INLINE void scale_query(T* head, const float* scale, int dim) {
    int i = 0;
    for (; i + VL <= dim; i += VL) store(head + i, load(head + i) * load(scale + i));
    if (int rest = dim - i) store_part(head + i, load_part(head + i, rest) * load_part(scale + i, rest), rest);
}

PK_INLINE void smooth_key(float* key, const float* centre, const float* scale, int dim) {
    int i = 0;
    for (; i + VL <= dim; i += VL) store(key + i, quotient(load(key + i) - load(centre + i), load(scale + i)));
    for (; i < dim; ++i) key[i] = (key[i] - centre[i]) / scale[i];
}

// Heads of all kinds in a row.
int heads_in(const RopeArgs& a) { return a.heads + (2 - a.shared) * a.kv_heads; }

template <class T, class C>
void rope_tokens(const RopeArgs& a, const float* q_norm, const float* k_norm, const float* ones, float* line,
                 int64_t begin, int64_t end) {
    const int dim = a.head_dim, half = a.rotary / 2, group = a.heads / a.kv_heads;
    const int64_t width = int64_t(heads_in(a)) * dim;
    const int keys = a.shared == 2 ? 0 : a.kv_heads;
    const Scales key_scales{a.k_scales, a.kv_heads, a.block_size}, value_scales{a.v_scales, a.kv_heads, a.block_size};
    for (int64_t t = begin; t < end; ++t) {
        T* row = static_cast<T*>(a.qkv) + t * width;
        const float *cos = a.cos_sin + a.positions[t] * a.rotary, *sin = cos + half;
        const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
        const auto turn = [&](const T* head, auto* out) {
            if (a.interleaved)
                rotate_pairs(head, out, cos, sin, half, dim);
            else
                rotate(head, out, cos, sin, half, dim);
        };
        // Values first: where they are the keys, these are normalized in place behind them.
        for (int h = 0; h < keys; ++h) {
            C* value = static_cast<C*>(a.v_cache) + block * a.v_block_stride + h * a.v_head_stride + offset * dim;
            const T* head = row + (a.heads + (a.shared ? 0 : a.kv_heads) + h) * dim;
            if (a.normed_values) {
                scale_row(head, ones, line, dim, rms_factor(square_sum(head, dim), dim, a.eps));
                if constexpr (kScaled<C>)
                    store_scaled(line, value, dim, value_scales, block, h, offset);
                else
                    convert(line, value, dim);
            } else if constexpr (kScaled<C>) {
                store_scaled(head, value, dim, value_scales, block, h, offset);
            } else {
                convert(head, value, dim);
            }
        }
        for (int h = 0; h < a.heads + keys; ++h) {
            T* head = row + h * dim;
            const float* norm = h < a.heads ? q_norm : k_norm;
            if (norm && a.centred) {
                norm += int64_t(h < a.heads ? h : h - a.heads) * dim;
                centre_row(head, head, dim);
            }
            if (norm) scale_row(head, norm, head, dim, rms_factor(square_sum(head, dim), dim, a.eps));
            if (h < a.heads) {
                turn(head, head);
                if (a.key_scale) scale_query(head, a.key_scale + h / group * dim, dim);
            } else {
                C* key = static_cast<C*>(a.k_cache) + block * a.k_block_stride +
                         (h - a.heads) * a.k_head_stride + offset * dim;
                if (a.key_scale) {
                    turn(head, line);
                    smooth_key(line, a.key_centre + (h - a.heads) * dim, a.key_scale + (h - a.heads) * dim, dim);
                    if constexpr (kScaled<C>)
                        store_scaled(line, key, dim, key_scales, block, h - a.heads, offset);
                    else
                        convert(line, key, dim);
                } else if constexpr (kScaled<C>) {
                    turn(head, head);
                    store_scaled(head, key, dim, key_scales, block, h - a.heads, offset);
                } else {
                    turn(head, key);
                }
            }
        }
    }
}

}  // namespace

// 0: done; 1: a position outside the rotary table; 2: a slot outside the cache. Nothing is written then.
PK_FUNCTION(int, pk_rope_and_cache)(Context* ctx, const RopeArgs* args) {
    Guard hold(ctx->busy);
    const RopeArgs& a = *args;
    for (int64_t t = 0; t < a.tokens; ++t) {
        if (uint64_t(a.positions[t]) >= uint64_t(a.max_positions)) return 1;
        if (uint64_t(a.slots[t]) >= uint64_t(a.num_slots)) return 2;
    }
    const int64_t width = int64_t(heads_in(a)) * a.head_dim;
    const int64_t q_gains = int64_t(a.centred ? a.heads : 1) * a.head_dim;
    const int64_t k_gains = int64_t(a.centred ? a.kv_heads : 1) * a.head_dim;
    const float* q_norm = as_floats(ctx->shared, a.q_norm, q_gains, a.norm_dtype);
    const float* k_norm = as_floats(ctx->tasks, a.k_norm, k_gains, a.norm_dtype);
    float* ones = a.normed_values ? ctx->ungated.floats(a.head_dim) : nullptr;
    if (ones) std::fill(ones, ones + a.head_dim, 1.0f);
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        dispatch_cache(a.cache_dtype, [&](auto* c) {
            using C = elem<decltype(c)>;
            ctx->pool.rows(a.tokens, grain(2 * width), [&](int64_t begin, int64_t end, int t) {
                float* line = a.key_scale || a.normed_values ? ctx->scratch[t].floats(a.head_dim) : nullptr;
                rope_tokens<T, C>(a, q_norm, k_norm, ones, line, begin, end);
            });
        });
    });
    return 0;
}

PK_RECORDABLE(pk_rope_and_cache)
