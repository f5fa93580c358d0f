// Passes over a row that norms and the rotary embedding share.
// Invariant: the arithmetic is float32 whatever the storage.

#pragma once

#include "common/context.h"
#include "common/simd.h"

namespace pk::PK_SET {

constexpr int64_t kGrainElements = 8192;  // below this much work per piece, waking a thread costs more

inline int64_t grain(int64_t width) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(width, 1)); }

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

// x minus its mean, into `out`, which may be the same memory.
template <class T>
PK_INLINE void centre_row(const T* x, T* out, int64_t n) {
    vf sum = splat(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) sum += load(x + i);
    if (int rest = int(n - i)) sum += load_part(x + i, rest);
    const vf mean = splat(hsum(sum) / float(n));
    for (i = 0; i + VL <= n; i += VL) store(out + i, load(x + i) - mean);
    if (int rest = int(n - i)) store_part(out + i, load_part(x + i, rest) - mean, rest);
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

// Norm weights arrive in their checkpoint's type; one float32 copy keeps the kernels to one type of weight.
inline const float* as_floats(Buffer& buffer, const void* weight, int64_t n, int dtype) {
    if (dtype == 0 || weight == nullptr) return static_cast<const float*>(weight);
    float* out = buffer.floats(n);
    dispatch(dtype, [&](auto* w) {
        using W = elem<decltype(w)>;
        convert(static_cast<const W*>(weight), out, int(n));
    });
    return out;
}

}  // namespace pk::PK_SET
