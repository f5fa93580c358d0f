// The gate of a feed-forward: act(gate) * up of rows that hold both, one behind the other.

#pragma once

#include "common/context.h"
#include "common/simd.h"

namespace pk::PK_SET {

enum Gate : int32_t { kNoGate, kSilu, kGelu };

// x / (1 + exp(y)), as exactly as a T can show it.
template <class T>
PK_INLINE vf over_one_and_exp(vf x, vf y) {
#if defined(PK_AVX512)
    if constexpr (std::is_same<T, bf16>::value) {
        const __m512 bits = (__m512)(vmin(vmax(y, splat(-88.0f)), splat(88.0f)) * splat(1.44269504f));
        const __m512 whole = _mm512_roundscale_ps(bits, 0);
        const vf r = (vf)bits - (vf)whole;  // 2^r: minimax on [-1/2, 1/2], a relative error below 3e-6
        vf p = splat(9.57011e-3f) * r + splat(5.591789e-2f);
        p = p * r + splat(2.4024745e-1f);
        p = p * r + splat(6.9312181e-1f);
        p = p * r + splat(9.9999926e-1f);
        return x * (vf)_mm512_rcp14_ps((__m512)(splat(1.0f) + (vf)_mm512_scalef_ps((__m512)p, whole)));
    }
#endif
    return quotient(x, splat(1.0f) + vexp(y));
}

template <class T>
PK_INLINE vf silu(vf x) {
    return over_one_and_exp<T>(x, -x);
}

// The tanh form: x / 2 * (1 + tanh(u)) = x / (1 + exp(-2u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
template <class T>
PK_INLINE vf gelu(vf x) {
    const vf twice = splat(-1.5957691216057308f) * x * (splat(1.0f) + splat(0.044715f) * x * x);
    return over_one_and_exp<T>(x, twice);
}

// act(gate) * up, of numbers that were and will be stored as T.
template <class T>
PK_INLINE vf gated(Gate gate, vf x, vf up) {
    return (gate == kGelu ? gelu<T>(x) : silu<T>(x)) * up;
}

// The gate of gpt-oss: x * sigmoid(alpha * x) * (up + 1), with x at most `limit` and `up` within +-limit.
template <class T>
PK_INLINE vf clamped_swiglu(vf x, vf up, float alpha, float limit) {
    const vf most = splat(limit);
    x = vmin(x, most);
    up = vmin(vmax(up, -most), most);
    return over_one_and_exp<T>(x, -(x * splat(alpha))) * (up + splat(1.0f));
}

// The gate of Step 3.5: silu(x), at most `limit`, times `up` within +-limit.
template <class T>
PK_INLINE vf bounded_silu(vf x, vf up, float limit) {
    const vf most = splat(limit);
    return vmin(silu<T>(x), most) * vmin(vmax(up, -most), most);
}

// out = act(gate, up) of rows that hold both.
template <class T, class F>
void gate_rows(const T* x, T* out, int64_t begin, int64_t end, int64_t ffn, F&& act) {
    for (int64_t r = begin; r < end; ++r) {
        const T *gate = x + r * 2 * ffn, *up = gate + ffn;
        T* y = out + r * ffn;
        int64_t i = 0;
        for (; i + VL <= ffn; i += VL) store(y + i, act(load(gate + i), load(up + i)));
        if (int rest = int(ffn - i))
            store_part(y + i, act(load_part(gate + i, rest), load_part(up + i, rest)), rest);
    }
}

// Calls f(from, to, begin, end) for the rows of each thread.
template <class F>
void for_gated_rows(Context* ctx, const void* x, void* out, int64_t rows, int64_t ffn, int dtype, F&& f) {
    dispatch(dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(rows, std::max<int64_t>(1, 2048 / ffn), [&](int64_t begin, int64_t end, int) {
            f(static_cast<const T*>(x), static_cast<T*>(out), begin, end);
        });
    });
}

inline void gate_all(Context* ctx, Gate gate, const void* x, void* out, int64_t rows, int64_t ffn, int dtype) {
    for_gated_rows(ctx, x, out, rows, ffn, dtype, [&](auto* from, auto* to, int64_t begin, int64_t end) {
        using T = elem<decltype(to)>;
        if (gate == kGelu)
            gate_rows(from, to, begin, end, ffn, [](vf v, vf up) { return gelu<T>(v) * up; });
        else
            gate_rows(from, to, begin, end, ffn, [](vf v, vf up) { return silu<T>(v) * up; });
    });
}

}  // namespace pk::PK_SET
