// Plain C++ on compiler vectors of 4 floats: any CPU, and what the other sets are compared with. See common/simd.h.

#pragma once

#include "common/vectors.h"

namespace pk::PK_SET {

PK_INLINE vf splat(float x) { return vf{x, x, x, x}; }

PK_INLINE vf vmax(vf a, vf b) { return select(a > b, a, b); }

PK_INLINE vf vmin(vf a, vf b) { return select(a < b, a, b); }

PK_INLINE float hmax(vf a) {
    float m = a[0];
    for (int i = 1; i < VL; ++i) m = a[i] > m ? a[i] : m;
    return m;
}

PK_INLINE float hsum(vf a) {
    float s[VL];
    std::memcpy(s, &a, VB);
    for (int w = VL / 2; w; w /= 2)
        for (int i = 0; i < w; ++i) s[i] += s[i + w];
    return s[0];
}

PK_INLINE vi max_bits(vi a, vi b) {
    vi mask = a > b;
    return (mask & a) | (~mask & b);
}

PK_INLINE int32_t hmax_bits(vi a) {
    int32_t m = a[0];
    for (int i = 1; i < VL; ++i) m = a[i] > m ? a[i] : m;
    return m;
}

PK_INLINE vf load(const f16* p) {
    return vf{half_to_float(p[0].bits), half_to_float(p[1].bits), half_to_float(p[2].bits),
              half_to_float(p[3].bits)};
}

PK_INLINE vf load(const bf16* p) {
    vh h;
    std::memcpy(&h, p, VB / 2);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

PK_INLINE void store(f16* p, vf v) {
    for (int i = 0; i < VL; ++i) p[i].bits = float_to_half(v[i]);
}

PK_INLINE void store(bf16* p, vf v) {
    vh h = __builtin_convertvector(rounded_bf16(v) >> 16, vh);
    std::memcpy(p, &h, VB / 2);
}

}  // namespace pk::PK_SET
