// AVX-512 (F, BW, VL, DQ): 16 floats in a vector. See common/simd.h.

#pragma once

#include <immintrin.h>

#include "common/vectors.h"

namespace pk::PK_SET {

PK_INLINE vf splat(float x) { return _mm512_set1_ps(x); }

PK_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }

PK_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }

PK_INLINE float hmax(vf a) { return _mm512_reduce_max_ps((__m512)a); }

PK_INLINE float hsum(vf a) { return _mm512_reduce_add_ps(a); }

PK_INLINE vi max_bits(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }

PK_INLINE int32_t hmax_bits(vi a) { return _mm512_reduce_max_epi32((__m512i)a); }

PK_INLINE vf load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

PK_INLINE vf load(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

PK_INLINE void store(f16* p, vf v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

PK_INLINE void store(bf16* p, vf v) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &rounded, 32);
#else
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded_bf16(v), 16)));
#endif
}

// x / y for positive y within the range of floats' reciprocals, with a relative error below 2e-7.
PK_INLINE vf quotient(vf x, vf y) {
    const vf guess = (vf)_mm512_rcp14_ps((__m512)y);
    return x * (guess * (splat(2.0f) - y * guess));
}

}  // namespace pk::PK_SET
