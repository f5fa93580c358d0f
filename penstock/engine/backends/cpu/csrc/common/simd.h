// Vectors of floats for whatever machine this is compiled on: one vocabulary over GCC/Clang vector
// extensions, with intrinsics only where the extensions have no word for the instruction.
//
// Invariant: everything computes in float32; float16 and bfloat16 exist only in loads and stores, and
// stores round to nearest even.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if !defined(PENSTOCK_GENERIC)
#if defined(__aarch64__) && defined(__ARM_NEON)
#define PK_NEON 1
#include <arm_neon.h>
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PK_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PK_AVX2 1
#include <immintrin.h>
#endif
#endif

namespace pk {

#if defined(PK_AVX512)
constexpr int VB = 64;
#elif defined(PK_AVX2)
constexpr int VB = 32;
#else
constexpr int VB = 16;
#endif
constexpr int VL = VB / 4;  // floats in a vector

typedef float vf __attribute__((vector_size(VB)));
typedef int32_t vi __attribute__((vector_size(VB)));
typedef uint32_t vu __attribute__((vector_size(VB)));
typedef uint16_t vh __attribute__((vector_size(VB / 2)));

struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};

#define PK_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define PK_UNROLL _Pragma("unroll")
#else
#define PK_UNROLL _Pragma("GCC unroll 16")
#endif

PK_INLINE vf splat(float x) {
#if defined(PK_NEON)
    return vdupq_n_f32(x);
#elif defined(PK_AVX512)
    return _mm512_set1_ps(x);
#elif defined(PK_AVX2)
    return _mm256_set1_ps(x);
#else
    return vf{x, x, x, x};
#endif
}

PK_INLINE vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

PK_INLINE vf vmax(vf a, vf b) {
#if defined(PK_NEON)
    return vmaxq_f32(a, b);
#elif defined(PK_AVX512)
    return _mm512_max_ps(a, b);
#elif defined(PK_AVX2)
    return _mm256_max_ps(a, b);
#else
    return select(a > b, a, b);
#endif
}

PK_INLINE vf vmin(vf a, vf b) {
#if defined(PK_NEON)
    return vminq_f32(a, b);
#elif defined(PK_AVX512)
    return _mm512_min_ps(a, b);
#elif defined(PK_AVX2)
    return _mm256_min_ps(a, b);
#else
    return select(a < b, a, b);
#endif
}

PK_INLINE vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }

PK_INLINE float hmax(vf a) {
#if defined(PK_NEON)
    return vmaxvq_f32(a);
#elif defined(PK_AVX512)
    return _mm512_reduce_max_ps((__m512)a);
#else
    float m = a[0];
    for (int i = 1; i < VL; ++i) m = a[i] > m ? a[i] : m;
    return m;
#endif
}

PK_INLINE float hsum(vf a) {
#if defined(PK_NEON)
    return vaddvq_f32(a);
#elif defined(PK_AVX512)
    return _mm512_reduce_add_ps(a);
#else
    float s[VL];
    std::memcpy(s, &a, VB);
    for (int w = VL / 2; w; w /= 2)
        for (int i = 0; i < w; ++i) s[i] += s[i + w];
    return s[0];
#endif
}

PK_INLINE vi max_bits(vi a, vi b) {
#if defined(PK_NEON)
    return (vi)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
#elif defined(PK_AVX512)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(PK_AVX2)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vi mask = a > b;
    return (mask & a) | (~mask & b);
#endif
}

PK_INLINE int32_t hmax_bits(vi a) {
#if defined(PK_NEON)
    return vmaxvq_s32((int32x4_t)a);
#elif defined(PK_AVX512)
    return _mm512_reduce_max_epi32((__m512i)a);
#else
    int32_t m = a[0];
    for (int i = 1; i < VL; ++i) m = a[i] > m ? a[i] : m;
    return m;
#endif
}

// float16 <-> float32 by bit arithmetic, for machines without the instructions.
PK_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else {
        float scaled;  // shift the exponent into place, then multiply: subnormals come out right
        uint32_t shifted = rest << 13;
        std::memcpy(&scaled, &shifted, 4);
        scaled *= 5.192296858534828e33f;  // 2^112
        std::memcpy(&bits, &scaled, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

PK_INLINE uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (bits >= 0x47800000) return uint16_t(sign | 0x7c00);  // 2^16 and above
    if (bits < 0x38800000) {                                  // below 2^-14: the adder does the rounding
        float magnitude, anchor = 0.5f;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += anchor;
        uint32_t sum;
        std::memcpy(&sum, &magnitude, 4);
        return uint16_t(sign | (sum - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return uint16_t(sign | ((bits - 0x38000000) >> 13));
}

PK_INLINE float to_float(float x) { return x; }
PK_INLINE float to_float(f16 x) { return half_to_float(x.bits); }
PK_INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

PK_INLINE vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, VB);
    return v;
}

PK_INLINE vf load(const f16* p) {
#if defined(PK_NEON)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#elif defined(PK_AVX512)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(PK_AVX2)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return vf{half_to_float(p[0].bits), half_to_float(p[1].bits), half_to_float(p[2].bits),
              half_to_float(p[3].bits)};
#endif
}

PK_INLINE vf load(const bf16* p) {
#if defined(PK_NEON)
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
#elif defined(PK_AVX512)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(PK_AVX2)
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
    vh h;
    std::memcpy(&h, p, VB / 2);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

PK_INLINE void store(float* p, vf v) { std::memcpy(p, &v, VB); }

PK_INLINE void store(f16* p, vf v) {
#if defined(PK_NEON)
    vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v)));
#elif defined(PK_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(PK_AVX2)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < VL; ++i) p[i].bits = float_to_half(v[i]);
#endif
}

PK_INLINE void store(bf16* p, vf v) {
#if defined(PK_AVX512) && defined(__AVX512BF16__)
    const __m256bh rounded16 = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &rounded16, 32);
#else
    vu bits = (vu)v;
    vu rounded = bits + 0x7fff + (bits >> 16 & 1);
    vu quiet = bits | 0x400000;  // a NaN must not round up into an infinity
    vi nan = v != v;
    vu picked = ((vu)nan & quiet) | (~(vu)nan & rounded);
#if defined(PK_NEON)
    vst1_u16(&p->bits, vshrn_n_u32((uint32x4_t)picked, 16));
#elif defined(PK_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)picked, 16)));
#elif defined(PK_AVX2)
    __m256i high = _mm256_srli_epi32((__m256i)picked, 16);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i*)p, packed);
#else
    vh h = __builtin_convertvector(picked >> 16, vh);
    std::memcpy(p, &h, VB / 2);
#endif
#endif
}

// The first n (< VL) elements; the rest reads as zero.
template <class T>
PK_INLINE vf load_part(const T* p, int n) {
    T pad[VL];
    std::memset(pad, 0, sizeof pad);
    std::memcpy(pad, p, n * sizeof(T));
    return load(pad);
}

template <class T>
PK_INLINE void store_part(T* p, vf v, int n) {
    T pad[VL];
    store(pad, v);
    std::memcpy(p, pad, n * sizeof(T));
}

// Four consecutive floats, each to be multiplied with a whole vector: one load and products by lane where the
// machine has them, broadcasts from memory where those are free.
#if defined(PK_NEON)
typedef float32x4_t four;
PK_INLINE four load_four(const float* p) { return vld1q_f32(p); }
template <int LANE>
PK_INLINE vf add_product(vf acc, vf x, four a) {
    return vfmaq_laneq_f32(acc, x, a, LANE);
}
#else
typedef const float* four;
PK_INLINE four load_four(const float* p) { return p; }
template <int LANE>
PK_INLINE vf add_product(vf acc, vf x, four a) {
    return acc + x * splat(a[LANE]);
}
#endif

// exp with a relative error below 2e-6, for -87 <= x <= 88. As 2^n * 2^r: adding the magic number rounds to n
// and leaves n in the low bits, where one shift makes an exponent of it.
PK_INLINE vf vexp_inside(vf x) {
    const vf magic = splat(12582912.0f), log2e = splat(1.44269504f);
    vf shifted = x * log2e + magic;
    vf r = x * log2e - (shifted - magic);
    vf p = splat(1.32764725e-3f);  // minimax in relative error on [-1/2, 1/2]
    p = p * r + splat(9.67554189e-3f);
    p = p * r + splat(5.55071309e-2f);
    p = p * r + splat(2.40221202e-1f);
    p = p * r + splat(6.93146944e-1f);
    p = p * r + splat(1.00000012f);
    return (vf)((vi)p + ((vi)shifted << 23));
}

// Below -87 exactly zero, above 88 the value at 88.
PK_INLINE vf vexp(vf x) {
    vi nonzero = x > splat(-87.0f);
    return (vf)(nonzero & (vi)vexp_inside(vmin(vmax(x, splat(-87.0f)), splat(88.0f))));
}

// x / y for positive y within the range of floats' reciprocals, with a relative error below 2e-7.
PK_INLINE vf quotient(vf x, vf y) {
#if defined(PK_AVX512)
    const vf guess = (vf)_mm512_rcp14_ps((__m512)y);
    return x * (guess * (splat(2.0f) - y * guess));
#else
    return x / y;
#endif
}

// Calls f with a null pointer of the element type numbered `dtype` (0 float32, 1 float16, 2 bfloat16).
template <class F>
PK_INLINE void dispatch(int dtype, F&& f) {
    if (dtype == 0)
        f((float*)nullptr);
    else if (dtype == 1)
        f((f16*)nullptr);
    else
        f((bf16*)nullptr);
}

template <class P>
using elem = std::remove_pointer_t<P>;

}  // namespace pk
