// What decode and prefill attention share: the arguments of a call, tasks, queries in, softmax, outputs.

#pragma once

#include "common/context.h"
#include "common/kv_formats.h"

namespace pk::PK_SET {

struct Task {
    int32_t sequence, kv_head;
    int32_t begin, end;  // decode: keys; prefill: queries
    int32_t group;       // decode with several parts: index of its merge group, else -1
    int32_t part;
};

inline Scales key_scales(const AttentionArgs& a) { return {a.k_scales, a.kv_heads, a.block_size}; }
inline Scales value_scales(const AttentionArgs& a) { return {a.v_scales, a.kv_heads, a.block_size}; }

// The first key that the token at `position` sees.
inline int first_visible(const AttentionArgs& a, int position) {
    if (!a.window) return 0;
    return a.chunked ? position - position % a.window : std::max(0, position - a.window + 1);
}

inline int padded(int n) { return (n + VL - 1) / VL * VL; }

// Scaled, float32, each row padded with zeros to `width`.
inline void load_queries(const AttentionArgs& a, int64_t token, int head, int count, float* to, int width) {
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        const T* from = static_cast<const T*>(a.q) + token * a.q_stride + int64_t(head) * a.head_dim;
        for (int g = 0; g < count; ++g, from += a.head_dim, to += width) {
            int d = 0;
            for (; d + VL <= a.head_dim; d += VL) store(to + d, load(from + d) * splat(a.scale));
            if (int rest = a.head_dim - d) store(to + d, load_part(from + d, rest) * splat(a.scale));
        }
    });
}

// What the sums of a head are multiplied by in the end: one over the total of its softmax, in which its sink takes part.
PK_INLINE float final_factor(const AttentionArgs& a, int head, float max, float total) {
    if (!a.sinks) return 1.0f / total;
    const float sink = a.sinks[head], top = std::max(max, sink), keep = std::exp(max - top);
    return keep / (total * keep + std::exp(sink - top));
}

inline void store_outputs(const AttentionArgs& a, int64_t token, int head, const float* row, float factor) {
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        T* to = static_cast<T*>(a.out) + (token * a.heads + head) * a.head_dim;
        int d = 0;
        for (; d + VL <= a.head_dim; d += VL) store(to + d, load(row + d) * splat(factor));
        if (int rest = a.head_dim - d) store_part(to + d, load(row + d) * splat(factor), rest);
    });
}

// In place: x[i] = cap * tanh(x[i] / cap) up to the end of the last vector (scratch rows are whole vectors).
PK_INLINE void cap_row(float* x, int n, float cap) {
    for (int i = 0; i < n; i += VL) {
        vf e = vexp(load(x + i) * splat(2 / cap));
        store(x + i, splat(cap) - splat(2 * cap) / (e + splat(1.0f)));
    }
}

// The largest of x[0..n); fills x up to the end of its last vector with copies of x[0].
PK_INLINE float max_row(float* x, int n) {
    for (int i = n; i % VL; ++i) x[i] = x[0];
    vf m[2] = {load(x), load(x)};
    int i = VL;
    for (; i + VL < n; i += 2 * VL) {
        m[0] = vmax(m[0], load(x + i));
        m[1] = vmax(m[1], load(x + i + VL));
    }
    if (i < n) m[0] = vmax(m[0], load(x + i));
    return hmax(vmax(m[0], m[1]));
}

// In place, after max_row: x[i] = exp(x[i] - max) for i < n, zeros up to the end of the last vector; the sum.
PK_INLINE float exp_row(float* x, int n, float max) {
    const vf low = splat(-87.0f);
    vf sum[2] = {splat(0), splat(0)};
    int i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {  // two at a time: the polynomial is one long dependency
        vf a = vexp_inside(vmax(load(x + i) - splat(max), low));
        vf b = vexp_inside(vmax(load(x + i + VL) - splat(max), low));
        store(x + i, a);
        store(x + i + VL, b);
        sum[0] += a;
        sum[1] += b;
    }
    for (; i < n; i += VL) {
        store(x + i, vexp_inside(vmax(load(x + i) - splat(max), low)));
        for (int j = n; j < i + VL; ++j) x[j] = 0;
        sum[0] += load(x + i);
    }
    return hsum(sum[0] + sum[1]);
}

}  // namespace pk::PK_SET
