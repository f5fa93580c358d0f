// What the AVX-512 and AMX instructions of the CPU kernels mean, number by number, for machines that lack them.
//
// Found before the compiler's own header of this name, it lets any CPU run the code written for those instructions:
// slowly, and to the last bit except in the order of sums that the instructions themselves leave open.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef short __m512bh __attribute__((vector_size(64), may_alias));
typedef short __m256bh __attribute__((vector_size(32), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));
typedef uint16_t __mmask16;
typedef uint64_t __mmask64;

inline void _mm_pause() {}

namespace emulated {

// The lanes of a vector as an array of T.
template <class T, class V>
struct Lanes {
    static constexpr int kCount = sizeof(V) / sizeof(T);
    T at[kCount];
    explicit Lanes(V v) { std::memcpy(at, &v, sizeof v); }
    Lanes() = default;
    operator V() const {
        V v;
        std::memcpy(&v, at, sizeof v);
        return v;
    }
};

template <class T, class V, class F>
inline V each(F&& f) {
    Lanes<T, V> out;
    for (int i = 0; i < out.kCount; ++i) out.at[i] = T(f(i));
    return out;
}

template <class V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Number i of two vectors whose numbers are halved in width with saturation, by parts of 128 bits.
template <class T, class V>
inline int packed(V v, V w, int i, int least, int most) {
    const int count = 16 / sizeof(T), part = i / (2 * count), at = i % (2 * count);
    return std::min(std::max(int(Lanes<T, V>(at < count ? v : w).at[part * count + at % count]), least), most);
}

inline float from_bf16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_half(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    float x = exponent == 31 ? (mantissa ? NAN : INFINITY)
                             : exponent ? std::ldexp(float(1024 + mantissa), exponent - 25) : std::ldexp(float(mantissa), -24);
    return h & 0x8000 ? -x : x;
}

inline uint16_t to_half(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::fabs(x);
    if (x != x) return uint16_t(sign | 0x7e00);
    if (size >= 65520.0f) return uint16_t(sign | 0x7c00);
    if (size < std::ldexp(1.0f, -14)) return uint16_t(sign | int(std::nearbyint(std::ldexp(size, 24))));
    int exponent;
    const float part = std::frexp(size, &exponent);  // in [0.5, 1)
    const int mantissa = int(std::nearbyint(std::ldexp(part, 11)));  // [1024, 2048]
    return uint16_t(sign | (((exponent + 14) << 10) + (mantissa - 1024)));
}

}  // namespace emulated

#define PK_LANES(T, v) ::emulated::Lanes<T, decltype(v)>(v).at

// ---- whole vectors ---------------------------------------------------------------------------------------

inline __m512i _mm512_loadu_si512(const void* p) { return emulated::load<__m512i>(p); }
inline __m512i _mm512_load_si512(const void* p) { return emulated::load<__m512i>(p); }
inline __m512 _mm512_load_ps(const void* p) { return emulated::load<__m512>(p); }
inline __m256i _mm256_loadu_si256(const __m256i* p) { return emulated::load<__m256i>(p); }
inline __m128i _mm_loadu_si128(const __m128i* p) { return emulated::load<__m128i>(p); }
inline void _mm512_store_si512(void* p, __m512i v) { std::memcpy(p, &v, 64); }
inline void _mm512_storeu_si512(void* p, __m512i v) { std::memcpy(p, &v, 64); }
inline void _mm512_store_ps(void* p, __m512 v) { std::memcpy(p, &v, 64); }
inline void _mm512_storeu_ps(void* p, __m512 v) { std::memcpy(p, &v, 64); }
inline void _mm256_storeu_si256(__m256i* p, __m256i v) { std::memcpy(p, &v, 32); }
inline void _mm_storeu_si128(__m128i* p, __m128i v) { std::memcpy(p, &v, 16); }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512 _mm512_set1_ps(float x) { return emulated::each<float, __m512>([&](int) { return x; }); }
inline __m512i _mm512_set1_epi32(int x) { return emulated::each<int32_t, __m512i>([&](int) { return x; }); }
inline __m512i _mm512_set1_epi16(short x) { return emulated::each<int16_t, __m512i>([&](int) { return x; }); }
inline __m512i _mm512_set1_epi8(char x) { return emulated::each<int8_t, __m512i>([&](int) { return x; }); }
inline __m256i _mm256_set1_epi16(short x) { return emulated::each<int16_t, __m256i>([&](int) { return x; }); }
template <class... T>
inline __m512i _mm512_set_epi32(T... x) {
    const int32_t given[] = {int32_t(x)...};
    return emulated::each<int32_t, __m512i>([&](int i) { return given[15 - i]; });
}
template <class... T>
inline __m512i _mm512_set_epi16(T... x) {
    const int16_t given[] = {int16_t(x)...};
    return emulated::each<int16_t, __m512i>([&](int i) { return given[31 - i]; });
}
inline __m512 _mm512_castsi512_ps(__m512i v) { return (__m512)v; }
inline __m512i _mm512_castps_si512(__m512 v) { return (__m512i)v; }

// ---- lane by lane ----------------------------------------------------------------------------------------

#define PK_BINARY(NAME, TYPE, T, EXPRESSION)                                      \
    inline TYPE NAME(TYPE v, TYPE w) {                                            \
        const emulated::Lanes<T, TYPE> a(v), b(w);                                \
        return emulated::each<T, TYPE>([&](int i) { return EXPRESSION; });        \
    }
PK_BINARY(_mm512_mul_ps, __m512, float, a.at[i] * b.at[i])
PK_BINARY(_mm512_sub_ps, __m512, float, a.at[i] - b.at[i])
PK_BINARY(_mm512_max_ps, __m512, float, a.at[i] > b.at[i] ? a.at[i] : b.at[i])
PK_BINARY(_mm512_min_ps, __m512, float, a.at[i] < b.at[i] ? a.at[i] : b.at[i])
PK_BINARY(_mm512_max_epi32, __m512i, int32_t, std::max(a.at[i], b.at[i]))
PK_BINARY(_mm512_add_epi32, __m512i, uint32_t, a.at[i] + b.at[i])
PK_BINARY(_mm512_add_epi16, __m512i, uint16_t, a.at[i] + b.at[i])
PK_BINARY(_mm512_sub_epi32, __m512i, uint32_t, a.at[i] - b.at[i])
PK_BINARY(_mm512_and_si512, __m512i, uint32_t, a.at[i] & b.at[i])
PK_BINARY(_mm512_xor_si512, __m512i, uint32_t, a.at[i] ^ b.at[i])
PK_BINARY(_mm256_and_si256, __m256i, uint16_t, a.at[i] & b.at[i])
PK_BINARY(_mm512_packus_epi32, __m512i, uint16_t, emulated::packed<int32_t>(v, w, i, 0, 65535))
PK_BINARY(_mm512_packus_epi16, __m512i, uint8_t, emulated::packed<int16_t>(v, w, i, 0, 255))
PK_BINARY(_mm512_packs_epi32, __m512i, int16_t, emulated::packed<int32_t>(v, w, i, -32768, 32767))
PK_BINARY(_mm512_packs_epi16, __m512i, int8_t, emulated::packed<int16_t>(v, w, i, -128, 127))
PK_BINARY(_mm512_unpacklo_epi8, __m512i, uint8_t, (i % 2 ? b : a).at[i / 16 * 16 + i % 16 / 2])
PK_BINARY(_mm512_unpackhi_epi8, __m512i, uint8_t, (i % 2 ? b : a).at[i / 16 * 16 + i % 16 / 2 + 8])
PK_BINARY(_mm512_unpacklo_epi16, __m512i, uint16_t, (i % 2 ? b : a).at[i / 8 * 8 + i % 8 / 2])
PK_BINARY(_mm512_unpackhi_epi16, __m512i, uint16_t, (i % 2 ? b : a).at[i / 8 * 8 + i % 8 / 2 + 4])
PK_BINARY(_mm512_unpacklo_epi32, __m512i, uint32_t, (i % 2 ? b : a).at[i / 4 * 4 + i % 4 / 2])
PK_BINARY(_mm512_unpackhi_epi32, __m512i, uint32_t, (i % 2 ? b : a).at[i / 4 * 4 + i % 4 / 2 + 2])
PK_BINARY(_mm512_unpacklo_epi64, __m512i, uint64_t, (i % 2 ? b : a).at[i / 2 * 2])
PK_BINARY(_mm512_unpackhi_epi64, __m512i, uint64_t, (i % 2 ? b : a).at[i / 2 * 2 + 1])
#undef PK_BINARY

inline __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) {
    const emulated::Lanes<float, __m512> a(x), b(y), c(z);
    return emulated::each<float, __m512>([&](int i) { return std::fma(a.at[i], b.at[i], c.at[i]); });
}
inline __m512i _mm512_slli_epi32(__m512i v, unsigned n) {
    const emulated::Lanes<uint32_t, __m512i> a(v);
    return emulated::each<uint32_t, __m512i>([&](int i) { return n > 31 ? 0 : a.at[i] << n; });
}
inline __m512i _mm512_srli_epi32(__m512i v, unsigned n) {
    const emulated::Lanes<uint32_t, __m512i> a(v);
    return emulated::each<uint32_t, __m512i>([&](int i) { return n > 31 ? 0 : a.at[i] >> n; });
}
inline __m512i _mm512_srai_epi32(__m512i v, unsigned n) {
    const emulated::Lanes<int32_t, __m512i> a(v);
    return emulated::each<int32_t, __m512i>([&](int i) { return a.at[i] >> std::min(n, 31u); });
}
inline __m512i _mm512_srai_epi16(__m512i v, unsigned n) {
    const emulated::Lanes<int16_t, __m512i> a(v);
    return emulated::each<int16_t, __m512i>([&](int i) { return a.at[i] >> std::min(n, 15u); });
}
inline __m512i _mm512_srli_epi16(__m512i v, unsigned n) {
    const emulated::Lanes<uint16_t, __m512i> a(v);
    return emulated::each<uint16_t, __m512i>([&](int i) { return n > 15 ? 0 : a.at[i] >> n; });
}
inline __m512i _mm512_slli_epi16(__m512i v, unsigned n) {
    const emulated::Lanes<uint16_t, __m512i> a(v);
    return emulated::each<uint16_t, __m512i>([&](int i) { return n > 15 ? 0 : a.at[i] << n; });
}
inline __m512i _mm512_mask_blend_epi16(uint32_t mask, __m512i v, __m512i w) {
    const emulated::Lanes<uint16_t, __m512i> a(v), b(w);
    return emulated::each<uint16_t, __m512i>([&](int i) { return (mask >> i & 1 ? b : a).at[i]; });
}
inline __m256i _mm256_slli_epi16(__m256i v, int n) {
    const emulated::Lanes<uint16_t, __m256i> a(v);
    return emulated::each<uint16_t, __m256i>([&](int i) { return a.at[i] << n; });
}
inline __m512i _mm512_abs_epi8(__m512i v) {
    const emulated::Lanes<int8_t, __m512i> a(v);
    return emulated::each<int8_t, __m512i>([&](int i) { return a.at[i] < 0 ? -a.at[i] : a.at[i]; });
}
inline __m512i _mm512_ternarylogic_epi32(__m512i x, __m512i y, __m512i z, int table) {
    const emulated::Lanes<uint32_t, __m512i> a(x), b(y), c(z);
    return emulated::each<uint32_t, __m512i>([&](int i) {
        uint32_t out = 0;
        for (int bit = 0; bit < 32; ++bit) {
            const int index = (a.at[i] >> bit & 1) << 2 | (b.at[i] >> bit & 1) << 1 | (c.at[i] >> bit & 1);
            out |= uint32_t(table >> index & 1) << bit;
        }
        return out;
    });
}

// ---- masks -----------------------------------------------------------------------------------------------

inline __m512 _mm512_mask_mov_ps(__m512 other, __mmask16 mask, __m512 v) {
    const emulated::Lanes<float, __m512> a(v), b(other);
    return emulated::each<float, __m512>([&](int i) { return mask >> i & 1 ? a.at[i] : b.at[i]; });
}
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 v, __m512 w) { return _mm512_mask_mov_ps(v, mask, w); }
inline __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 v) { return _mm512_mask_mov_ps(_mm512_setzero_ps(), mask, v); }
inline __m512i _mm512_mask_sub_epi8(__m512i other, __mmask64 mask, __m512i v, __m512i w) {
    const emulated::Lanes<int8_t, __m512i> a(v), b(w), c(other);
    return emulated::each<int8_t, __m512i>([&](int i) { return mask >> i & 1 ? a.at[i] - b.at[i] : c.at[i]; });
}
inline __mmask64 _mm512_movepi8_mask(__m512i v) {
    __mmask64 mask = 0;
    for (int i = 0; i < 64; ++i) mask |= __mmask64(PK_LANES(int8_t, v)[i] < 0) << i;
    return mask;
}
#define PK_COMPARE(NAME, TYPE, T, OPERATOR)                                                   \
    inline __mmask16 NAME(TYPE v, TYPE w) {                                                   \
        const emulated::Lanes<T, TYPE> a(v), b(w);                                            \
        __mmask16 mask = 0;                                                                   \
        for (int i = 0; i < 16; ++i) mask = __mmask16(mask | (a.at[i] OPERATOR b.at[i]) << i); \
        return mask;                                                                          \
    }
PK_COMPARE(_mm512_cmple_epi32_mask, __m512i, int32_t, <=)
PK_COMPARE(_mm512_cmpge_epi32_mask, __m512i, int32_t, >=)
PK_COMPARE(_mm512_cmpneq_ps_mask, __m512, float, !=)
#undef PK_COMPARE

// ---- order -----------------------------------------------------------------------------------------------

inline __m128i _mm512_extracti32x4_epi32(__m512i v, int part) {
    const emulated::Lanes<uint32_t, __m512i> a(v);
    return emulated::each<uint32_t, __m128i>([&](int i) { return a.at[part * 4 + i]; });
}
inline __m256i _mm512_extracti64x4_epi64(__m512i v, int part) {
    const emulated::Lanes<uint64_t, __m512i> a(v);
    return emulated::each<uint64_t, __m256i>([&](int i) { return a.at[part * 4 + i]; });
}
inline __m256i _mm512_castsi512_si256(__m512i v) { return _mm512_extracti64x4_epi64(v, 0); }
inline __m512i _mm512_permutexvar_epi16(__m512i index, __m512i v) {
    const emulated::Lanes<uint16_t, __m512i> at(index), a(v);
    return emulated::each<uint16_t, __m512i>([&](int i) { return a.at[at.at[i] & 31]; });
}
inline __m512i _mm512_permutexvar_epi8(__m512i index, __m512i v) {
    const emulated::Lanes<uint8_t, __m512i> at(index), a(v);
    return emulated::each<uint8_t, __m512i>([&](int i) { return a.at[at.at[i] & 63]; });
}
inline __m512i _mm512_permutexvar_epi32(__m512i index, __m512i v) {
    const emulated::Lanes<uint32_t, __m512i> at(index), a(v);
    return emulated::each<uint32_t, __m512i>([&](int i) { return a.at[at.at[i] & 15]; });
}
inline __m512 _mm512_permute_ps(__m512 v, int order) {
    const emulated::Lanes<float, __m512> a(v);
    return emulated::each<float, __m512>([&](int i) { return a.at[i / 4 * 4 + (order >> (i % 4 * 2) & 3)]; });
}
inline __m512 _mm512_permutexvar_ps(__m512i index, __m512 v) {
    const emulated::Lanes<uint32_t, __m512i> at(index);
    const emulated::Lanes<float, __m512> a(v);
    return emulated::each<float, __m512>([&](int i) { return a.at[at.at[i] & 15]; });
}
inline __m512 _mm512_permutex2var_ps(__m512 v, __m512i index, __m512 w) {
    const emulated::Lanes<float, __m512> a(v), b(w);
    const emulated::Lanes<uint32_t, __m512i> at(index);
    return emulated::each<float, __m512>([&](int i) { return (at.at[i] & 16 ? b : a).at[at.at[i] & 15]; });
}
inline __m512i _mm512_permutex2var_epi16(__m512i v, __m512i index, __m512i w) {
    const emulated::Lanes<uint16_t, __m512i> at(index), a(v), b(w);
    return emulated::each<uint16_t, __m512i>([&](int i) { return (at.at[i] & 32 ? b : a).at[at.at[i] & 31]; });
}
inline __m512i _mm512_permutex2var_epi32(__m512i v, __m512i index, __m512i w) {
    return (__m512i)_mm512_permutex2var_ps((__m512)v, index, (__m512)w);
}
inline __m512i _mm512_shuffle_i32x4(__m512i v, __m512i w, int order) {
    const emulated::Lanes<uint32_t, __m512i> a(v), b(w);
    return emulated::each<uint32_t, __m512i>(
        [&](int i) { return (i < 8 ? a : b).at[(order >> (i / 4 * 2) & 3) * 4 + i % 4]; });
}
inline __m512 _mm512_shuffle_f32x4(__m512 v, __m512 w, int order) {
    return (__m512)_mm512_shuffle_i32x4((__m512i)v, (__m512i)w, order);
}

// ---- conversions and sums --------------------------------------------------------------------------------

inline float _mm512_reduce_max_ps(__m512 v) {
    const emulated::Lanes<float, __m512> a(v);
    return *std::max_element(a.at, a.at + 16);
}
inline int _mm512_reduce_max_epi32(__m512i v) {
    const emulated::Lanes<int32_t, __m512i> a(v);
    return *std::max_element(a.at, a.at + 16);
}
inline float _mm512_reduce_add_ps(__m512 v) {
    emulated::Lanes<float, __m512> a(v);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; ++i) a.at[i] += a.at[i + n];
    return a.at[0];
}
inline __m512 _mm512_rcp14_ps(__m512 v) {
    const emulated::Lanes<float, __m512> a(v);
    return emulated::each<float, __m512>([&](int i) { return 1.0f / a.at[i]; });
}
inline __m512 _mm512_roundscale_ps(__m512 v, int) {
    const emulated::Lanes<float, __m512> a(v);
    return emulated::each<float, __m512>([&](int i) { return std::nearbyint(a.at[i]); });
}
inline __m512 _mm512_scalef_ps(__m512 v, __m512 w) {
    const emulated::Lanes<float, __m512> a(v), b(w);
    return emulated::each<float, __m512>([&](int i) { return std::ldexp(a.at[i], int(std::floor(b.at[i]))); });
}
inline __m512i _mm512_cvtps_epi32(__m512 v) {
    const emulated::Lanes<float, __m512> a(v);
    return emulated::each<int32_t, __m512i>([&](int i) {
        const float x = std::nearbyint(a.at[i]);
        return x >= -2147483648.0f && x < 2147483648.0f ? int32_t(x) : INT32_MIN;
    });
}
inline __m512 _mm512_cvtepi32_ps(__m512i v) {
    const emulated::Lanes<int32_t, __m512i> a(v);
    return emulated::each<float, __m512>([&](int i) { return a.at[i]; });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i v) {
    const emulated::Lanes<uint16_t, __m256i> a(v);
    return emulated::each<uint32_t, __m512i>([&](int i) { return a.at[i]; });
}
inline __m512i _mm512_cvtepi8_epi32(__m128i v) {
    const emulated::Lanes<int8_t, __m128i> a(v);
    return emulated::each<int32_t, __m512i>([&](int i) { return a.at[i]; });
}
inline __m512i _mm512_cvtepu8_epi32(__m128i v) {
    const emulated::Lanes<uint8_t, __m128i> a(v);
    return emulated::each<int32_t, __m512i>([&](int i) { return a.at[i]; });
}
inline __m512i _mm512_cvtepi8_epi16(__m256i v) {
    const emulated::Lanes<int8_t, __m256i> a(v);
    return emulated::each<int16_t, __m512i>([&](int i) { return a.at[i]; });
}
inline __m256i _mm256_cvtepi8_epi16(__m128i v) {
    const emulated::Lanes<int8_t, __m128i> a(v);
    return emulated::each<int16_t, __m256i>([&](int i) { return a.at[i]; });
}
inline __m256i _mm512_cvtepi32_epi16(__m512i v) {
    const emulated::Lanes<int32_t, __m512i> a(v);
    return emulated::each<int16_t, __m256i>([&](int i) { return a.at[i]; });
}
inline __m128i _mm512_cvtepi32_epi8(__m512i v) {
    const emulated::Lanes<uint32_t, __m512i> a(v);
    return emulated::each<uint8_t, __m128i>([&](int i) { return uint8_t(a.at[i]); });
}
inline __m128i _mm512_cvtsepi32_epi8(__m512i v) {
    const emulated::Lanes<int32_t, __m512i> a(v);
    return emulated::each<int8_t, __m128i>([&](int i) { return std::min(127, std::max(-128, a.at[i])); });
}
inline __m512 _mm512_cvtph_ps(__m256i v) {
    const emulated::Lanes<uint16_t, __m256i> a(v);
    return emulated::each<float, __m512>([&](int i) { return emulated::from_half(a.at[i]); });
}
inline __m256i _mm512_cvtps_ph(__m512 v, int) {
    const emulated::Lanes<float, __m512> a(v);
    return emulated::each<uint16_t, __m256i>([&](int i) { return emulated::to_half(a.at[i]); });
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    const emulated::Lanes<float, __m512> a(low), b(high);
    return emulated::each<uint16_t, __m512bh>([&](int i) { return emulated::to_bf16((i < 16 ? a : b).at[i % 16]); });
}
inline __m256bh _mm512_cvtneps_pbh(__m512 v) {
    const emulated::Lanes<float, __m512> a(v);
    return emulated::each<uint16_t, __m256bh>([&](int i) { return emulated::to_bf16(a.at[i]); });
}
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh v, __m512bh w) {
    const emulated::Lanes<float, __m512> c(sum);
    const emulated::Lanes<uint16_t, __m512bh> a(v), b(w);
    return emulated::each<float, __m512>([&](int i) {
        float out = c.at[i];
        for (int j = 1; j >= 0; --j) out += emulated::from_bf16(a.at[2 * i + j]) * emulated::from_bf16(b.at[2 * i + j]);
        return out;
    });
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i v, __m512i w) {
    const emulated::Lanes<int32_t, __m512i> c(sum);
    const emulated::Lanes<uint8_t, __m512i> a(v);
    const emulated::Lanes<int8_t, __m512i> b(w);
    return emulated::each<int32_t, __m512i>([&](int i) {
        int32_t out = c.at[i];
        for (int j = 0; j < 4; ++j) out += int32_t(a.at[4 * i + j]) * b.at[4 * i + j];
        return out;
    });
}
inline __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i v, __m512i w) {
    const emulated::Lanes<int32_t, __m512i> c(sum);
    const emulated::Lanes<int16_t, __m512i> a(v), b(w);
    return emulated::each<int32_t, __m512i>([&](int i) {
        return c.at[i] + a.at[2 * i] * b.at[2 * i] + a.at[2 * i + 1] * b.at[2 * i + 1];
    });
}
inline __m512i _mm512_maddubs_epi16(__m512i v, __m512i w) {
    const emulated::Lanes<uint8_t, __m512i> a(v);
    const emulated::Lanes<int8_t, __m512i> b(w);
    return emulated::each<int16_t, __m512i>([&](int i) {
        const int both = a.at[2 * i] * b.at[2 * i] + a.at[2 * i + 1] * b.at[2 * i + 1];
        return std::min(32767, std::max(-32768, both));
    });
}
inline __m512i _mm512_madd_epi16(__m512i v, __m512i w) {
    const emulated::Lanes<int16_t, __m512i> a(v), b(w);
    return emulated::each<int32_t, __m512i>(
        [&](int i) { return int32_t(a.at[2 * i]) * b.at[2 * i] + int32_t(a.at[2 * i + 1]) * b.at[2 * i + 1]; });
}

#define _MM_HINT_T0 3
#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8
inline void _mm_prefetch(const char*, int) {}

// ---- tiles -----------------------------------------------------------------------------------------------

namespace emulated {

struct Tiles {
    uint16_t bytes[8] = {};
    uint8_t rows[8] = {};
    uint8_t data[8][16][64] = {};
    bool shaped = false;
};

inline Tiles& tiles() {
    static thread_local Tiles mine;
    return mine;
}

inline void need(bool holds) {
    if (!holds) __builtin_trap();  // as the CPU does: an illegal instruction
}

inline void load_shape(const void* p) {
    const uint8_t* from = static_cast<const uint8_t*>(p);
    Tiles& t = tiles() = Tiles();
    need(from[0] == 1);
    std::memcpy(t.bytes, from + 16, 16);
    std::memcpy(t.rows, from + 48, 8);
    for (int i = 0; i < 8; ++i) need(t.bytes[i] <= 64 && t.rows[i] <= 16);
    t.shaped = true;
}

inline void load_tile(int n, const void* base, int64_t stride) {
    Tiles& t = tiles();
    need(t.shaped);
    std::memset(t.data[n], 0, sizeof t.data[n]);
    for (int r = 0; r < t.rows[n]; ++r)
        std::memcpy(t.data[n][r], static_cast<const uint8_t*>(base) + r * stride, t.bytes[n]);
}

inline void store_tile(int n, void* base, int64_t stride) {
    const Tiles& t = tiles();
    need(t.shaped);
    for (int r = 0; r < t.rows[n]; ++r) std::memcpy(static_cast<uint8_t*>(base) + r * stride, t.data[n][r], t.bytes[n]);
}

inline void zero_tile(int n) { std::memset(tiles().data[n], 0, sizeof tiles().data[n]); }

inline void multiply_tiles(int c, int a, int b) {
    Tiles& t = tiles();
    need(t.shaped && t.rows[c] == t.rows[a] && t.bytes[a] == 4 * t.rows[b] && t.bytes[c] == t.bytes[b]);
    for (int m = 0; m < t.rows[c]; ++m)
        for (int n = 0; n < t.bytes[c] / 4; ++n) {
            float sum;
            std::memcpy(&sum, t.data[c][m] + 4 * n, 4);
            for (int k = 0; k < t.rows[b]; ++k)
                for (int j = 0; j < 2; ++j) {
                    uint16_t x, y;
                    std::memcpy(&x, t.data[a][m] + 4 * k + 2 * j, 2);
                    std::memcpy(&y, t.data[b][k] + 4 * n + 2 * j, 2);
                    sum += from_bf16(x) * from_bf16(y);
                }
            std::memcpy(t.data[c][m] + 4 * n, &sum, 4);
        }
}

template <class A>
inline void multiply_byte_tiles(int c, int a, int b) {
    Tiles& t = tiles();
    need(t.shaped && t.rows[c] == t.rows[a] && t.bytes[a] == 4 * t.rows[b] && t.bytes[c] == t.bytes[b]);
    for (int m = 0; m < t.rows[c]; ++m)
        for (int n = 0; n < t.bytes[c] / 4; ++n) {
            int32_t sum;
            std::memcpy(&sum, t.data[c][m] + 4 * n, 4);
            for (int k = 0; k < t.rows[b]; ++k)
                for (int j = 0; j < 4; ++j) sum += A(t.data[a][m][4 * k + j]) * int8_t(t.data[b][k][4 * n + j]);
            std::memcpy(t.data[c][m] + 4 * n, &sum, 4);
        }
}

}  // namespace emulated

#define _tile_dpbssd(c, a, b) emulated::multiply_byte_tiles<int8_t>(c, a, b)
#define _tile_dpbusd(c, a, b) emulated::multiply_byte_tiles<uint8_t>(c, a, b)
#define _tile_loadconfig(p) emulated::load_shape(p)
#define _tile_release() (emulated::tiles() = emulated::Tiles())
#define _tile_loadd(n, base, stride) emulated::load_tile(n, base, stride)
#define _tile_stream_loadd(n, base, stride) emulated::load_tile(n, base, stride)
#define _tile_stored(n, base, stride) emulated::store_tile(n, base, stride)
#define _tile_zero(n) emulated::zero_tile(n)
#define _tile_dpbf16ps(c, a, b) emulated::multiply_tiles(c, a, b)
