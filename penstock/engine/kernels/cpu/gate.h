// The gate of a feed-forward: act(gate) * up of rows that hold both, one behind the other.

#pragma once

#include "context.h"
#include "simd.h"

namespace pk {

enum Gate : int32_t { kNoGate, kSilu, kGelu };

PK_INLINE vf silu(vf x) { return quotient(x, splat(1.0f) + vexp(-x)); }

// The tanh form: x / 2 * (1 + tanh(u)) = x / (1 + exp(-2u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
PK_INLINE vf gelu(vf x) {
    const vf twice = splat(-1.5957691216057308f) * x * (splat(1.0f) + splat(0.044715f) * x * x);
    return quotient(x, splat(1.0f) + vexp(twice));
}

// act(gate) * up.
PK_INLINE vf gated(Gate gate, vf x, vf up) { return (gate == kGelu ? gelu(x) : silu(x)) * up; }

template <bool GELU, class T>
void gate_rows(const T* x, T* out, int64_t begin, int64_t end, int64_t ffn) {
    auto act = [](vf v) { return GELU ? gelu(v) : silu(v); };
    for (int64_t r = begin; r < end; ++r) {
        const T *gate = x + r * 2 * ffn, *up = gate + ffn;
        T* y = out + r * ffn;
        int64_t i = 0;
        for (; i + VL <= ffn; i += VL) store(y + i, act(load(gate + i)) * load(up + i));
        if (int rest = int(ffn - i))
            store_part(y + i, act(load_part(gate + i, rest)) * load_part(up + i, rest), rest);
    }
}

inline void gate_all(Context* ctx, Gate gate, const void* x, void* out, int64_t rows, int64_t ffn, int dtype) {
    dispatch(dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(rows, std::max<int64_t>(1, 2048 / ffn), [&](int64_t begin, int64_t end, int) {
            const T* from = static_cast<const T*>(x);
            T* to = static_cast<T*>(out);
            gate == kGelu ? gate_rows<true>(from, to, begin, end, ffn) : gate_rows<false>(from, to, begin, end, ffn);
        });
    });
}

}  // namespace pk
