// Which instruction set this file is compiled for, and its vector types.
//
// The same sources are compiled once per instruction set. `PK_SET` names the set (build.py): everything lies in its
// namespace, so that the linker never mixes code of two sets.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if !defined(PK_SET)
#error "compile with -DPK_SET=<instruction set>, see build.py"
#endif

#if !defined(PENSTOCK_GENERIC)
#if defined(__aarch64__) && defined(__ARM_NEON)
#define PK_NEON 1
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PK_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PK_AVX2 1
#endif
#endif

#define PK_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define PK_UNROLL _Pragma("unroll")
#else
#define PK_UNROLL _Pragma("GCC unroll 16")
#endif

namespace pk::PK_SET {

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

PK_INLINE vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

PK_INLINE vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }

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

PK_INLINE void store(float* p, vf v) { std::memcpy(p, &v, VB); }

// The bits of bfloat16 in the upper half of every lane, rounded to nearest even.
PK_INLINE vu rounded_bf16(vf v) {
    vu bits = (vu)v;
    vu rounded = bits + 0x7fff + (bits >> 16 & 1);
    vu quiet = bits | 0x400000;  // a NaN must not round up into an infinity
    vi nan = v != v;
    return ((vu)nan & quiet) | (~(vu)nan & rounded);
}

}  // namespace pk::PK_SET
