// Cached keys and values in one byte: int8 with a scale per token and head, FP8 (e4m3) with a scale per head.
//
// Reading gives numbers that still have to be multiplied by `cached_scale`; the kernels do that once per key
// where they can. Writing divides by the same scale, or multiplies by its inverse (int8), and rounds to nearest even.

#pragma once

#include "common/simd.h"

namespace pk::PK_SET {

struct s8 {
    int8_t bits;
};
struct f8 {
    uint8_t bits;
};

template <class C>
constexpr bool kScaled = std::is_same<C, s8>::value || std::is_same<C, f8>::value;

typedef int8_t vb __attribute__((vector_size(VL)));

PK_INLINE vf load(const s8* p) {
#if defined(PK_NEON)
    int8x8_t bytes = vreinterpret_s8_s32(vld1_dup_s32(reinterpret_cast<const int32_t*>(p)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
#elif defined(PK_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(PK_AVX2)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vb bytes;
    std::memcpy(&bytes, p, VL);
    return __builtin_convertvector(bytes, vf);
#endif
}

// N vectors that lie one after another.
template <int N, class C>
PK_INLINE void load_many(const C* p, vf (&out)[N]) {
    PK_UNROLL for (int i = 0; i < N; ++i) out[i] = load(p + i * VL);
}

#if defined(PK_NEON)
// A byte looked up into the low end of 0x4b000000 is the float 2^23 + byte: one lookup and one subtraction, where
// extending and converting takes three instructions, one of them slow.
PK_INLINE void load_many(const s8* p, vf (&out)[4]) {
    const uint8x16x2_t table = {{veorq_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p)), vdupq_n_u8(0x80)),
                                 vreinterpretq_u8_u32(vdupq_n_u32(0x4b000000))}};
    const uint32x4_t first = {0x13111100, 0x13111101, 0x13111102, 0x13111103};
    PK_UNROLL for (int i = 0; i < 4; ++i) {
        const uint8x16_t at = vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(4 * i)));
        out[i] = vsubq_f32(vreinterpretq_f32_u8(vqtbl2q_u8(table, at)), vdupq_n_f32(8388736.0f));
    }
}
#endif

// The seven bits below the sign are, seven places up, a float16 256 times too small. Extending the sign on the way
// sets one bit too many.
constexpr float kF8Unit = 256.0f;

PK_INLINE vf load(const f8* p) {
#if defined(PK_NEON)
    int8x8_t bytes = vreinterpret_s8_s32(vld1_dup_s32(reinterpret_cast<const int32_t*>(p)));
    uint16x4_t halves = vand_u16(vget_low_u16(vreinterpretq_u16_s16(vshll_n_s8(bytes, 7))), vdup_n_u16(0xbfff));
    return vcvt_f32_f16(vreinterpret_f16_u16(halves));
#elif defined(PK_AVX512)
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(short(0xbfff))));
#elif defined(PK_AVX2)
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(short(0xbfff))));
#else
    vf out;
    for (int i = 0; i < VL; ++i)
        out[i] = half_to_float(uint16_t((p[i].bits & 0x80) << 8 | (p[i].bits & 0x7f) << 7));
    return out;
#endif
}

// Where the scales of a layer are: per token in bfloat16 for int8, per head in float32 for FP8.
struct Scales {
    const void* base;
    int32_t kv_heads, block_size;
};

PK_INLINE int64_t scale_index(const Scales& s, int64_t block, int head, int64_t offset) {
    return (block * s.kv_heads + head) * s.block_size + offset;
}

template <class C>
PK_INLINE float cached_scale(const Scales& s, int64_t block, int head, int64_t offset) {
    if constexpr (std::is_same<C, s8>::value)
        return to_float(static_cast<const bf16*>(s.base)[scale_index(s, block, head, offset)]);
    else
        return static_cast<const float*>(s.base)[head] * kF8Unit;
}

template <class T>
PK_INLINE float largest(const T* x, int n) {
    vf top = splat(0);
    int i = 0;
    for (; i + VL <= n; i += VL) top = vmax(top, vabs(load(x + i)));
    if (int rest = n - i) top = vmax(top, vabs(load_part(x + i, rest)));
    return hmax(top);
}

// Integers within 2^22 as int8: adding 1.5 * 2^23 rounds and leaves the integer in the low bits.
PK_INLINE void store(s8* p, vf v) {
    vi rounded = (vi)(v + splat(12582912.0f));
#if defined(PK_AVX512)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)rounded));
#else
    for (int i = 0; i < VL; ++i) p[i].bits = int8_t(rounded[i]);
#endif
}

PK_INLINE void store(f8* p, vf v) {
    vu bits = (vu)vmin(vabs(v), splat(448.0f)), sign = (vu)v >> 24 & 0x80;
    vu normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    vu small = (vu)((vf)bits + splat(16384.0f)) - 0x46800000;  // below 2^-6 the adder rounds, to steps of 2^-9
    vu tiny = (vu)((vi)bits < 0x3c800000);
    vu packed = sign | (tiny & small) | (~tiny & normal);
    for (int i = 0; i < VL; ++i) p[i].bits = uint8_t(packed[i]);
}

template <class T, class C>
PK_INLINE void store_divided(const T* x, C* to, int n, float scale) {
    const vf divisor = splat(scale);
    int i = 0;
    for (; i + VL <= n; i += VL) store(to + i, load(x + i) / divisor);
    if (int rest = n - i) store_part(to + i, load_part(x + i, rest) / divisor, rest);
}

template <class T>
PK_INLINE void store_multiplied(const T* x, s8* to, int n, float factor) {
    int i = 0;
    for (; i + VL <= n; i += VL) store(to + i, load(x + i) * splat(factor));
    if (int rest = n - i) store_part(to + i, load_part(x + i, rest) * splat(factor), rest);
}

// One head of one token into the cache; an int8 cache gets its scale too.
template <class T, class C>
PK_INLINE void store_scaled(const T* x, C* to, int n, const Scales& s, int64_t block, int head, int64_t offset) {
    if constexpr (std::is_same<C, s8>::value) {
        // Divided by the scale as stored, the largest number comes to at most 127.25.
        vf wide = splat(largest(x, n) / 127.0f);
        bf16 rounded[VL];
        store(rounded, wide);
        static_cast<bf16*>(const_cast<void*>(s.base))[scale_index(s, block, head, offset)] = rounded[0];
        const float scale = to_float(rounded[0]);
        const float least = std::numeric_limits<float>::min();  // below it, an inverse may be infinite
        store_multiplied(x, to, n, scale >= least ? 1.0f / scale : 0.0f);
    } else {
        store_divided(x, to, n, static_cast<const float*>(s.base)[head]);
    }
}

// As `dispatch`, over everything a cache can hold: 3 int8, 4 FP8.
template <class F>
PK_INLINE void dispatch_cache(int dtype, F&& f) {
    if (dtype == 3)
        f((s8*)nullptr);
    else if (dtype == 4)
        f((f8*)nullptr);
    else
        dispatch(dtype, f);
}

}  // namespace pk::PK_SET
