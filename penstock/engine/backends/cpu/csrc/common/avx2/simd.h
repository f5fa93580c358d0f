// AVX2 with FMA and F16C: 8 floats in a vector. See common/simd.h.

#pragma once

#include <immintrin.h>

#include "common/vectors.h"

namespace pk::PK_SET {

PK_INLINE vf splat(float x) { return _mm256_set1_ps(x); }

PK_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }

PK_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }

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

PK_INLINE vi max_bits(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }

PK_INLINE int32_t hmax_bits(vi a) {
    int32_t m = a[0];
    for (int i = 1; i < VL; ++i) m = a[i] > m ? a[i] : m;
    return m;
}

PK_INLINE vf load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

PK_INLINE vf load(const bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

PK_INLINE void store(f16* p, vf v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

PK_INLINE void store(bf16* p, vf v) {
    __m256i high = _mm256_srli_epi32((__m256i)rounded_bf16(v), 16);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i*)p, packed);
}

}  // namespace pk::PK_SET
