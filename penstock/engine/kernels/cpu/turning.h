// Turning rows by a Hadamard matrix before they are rounded to few bits.
//
// Depths are mixed in stretches of a power of two: y = H x, with H[i][j] = 1 or -1 by the parity of i & j. Products of
// two rows turned alike are those of the rows times the stretch, since H H = length; but a number much larger than its
// neighbours is spread over all of them, so it no longer sets a step that is too coarse for the rest. Additions alone:
// one stage per bit of the length.

#pragma once

#include "simd.h"

#if defined(PK_AVX512)

namespace pk {

constexpr int64_t kTurnAtOnce = 64;  // depths that are turned in registers: the stages of a longer turn follow in memory
constexpr int64_t kLongestTurn = 512;

// The stretch in which `depth`, a multiple of 64, is turned.
inline int64_t turn_length(int64_t depth) { return std::min(kLongestTurn, depth & -depth); }

// Sums and differences of numbers `length` / 2 apart, and so on up: depths are vectors of one lane each.
inline void turn_lanes(vf* x, int64_t length) {
    for (int64_t half = 1; half < length; half *= 2)
        for (int64_t at = 0; at < length; at += 2 * half)
            for (int64_t i = at; i < at + half; ++i) {
                const vf low = x[i], high = x[i + half];
                x[i] = low + high;
                x[i + half] = low - high;
            }
}

PK_INLINE void butterfly(vf& low, vf& high) {
    const vf difference = low - high;
    low += high;
    high = difference;
}

// The stages within a vector: every lane plus or minus the one whose number differs in a bit.
PK_INLINE vf turn_within(vf x) {
    const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-1.0f);
    __m512 v = (__m512)x;
    v = _mm512_fmadd_ps(v, _mm512_mask_blend_ps(0xaaaa, one, minus), _mm512_permute_ps(v, 0xb1));
    v = _mm512_fmadd_ps(v, _mm512_mask_blend_ps(0xcccc, one, minus), _mm512_permute_ps(v, 0x4e));
    v = _mm512_fmadd_ps(v, _mm512_mask_blend_ps(0xf0f0, one, minus), _mm512_shuffle_f32x4(v, v, 0xb1));
    v = _mm512_fmadd_ps(v, _mm512_mask_blend_ps(0xff00, one, minus), _mm512_shuffle_f32x4(v, v, 0x4e));
    return (vf)v;
}

// 64 depths.
PK_INLINE void turn_64(vf (&x)[4]) {
    butterfly(x[0], x[1]);
    butterfly(x[2], x[3]);
    butterfly(x[0], x[2]);
    butterfly(x[1], x[3]);
    PK_UNROLL for (int i = 0; i < 4; ++i) x[i] = turn_within(x[i]);
}

// The stages that are left when stretches of 64 have been turned.
inline void turn_further(float* x, int64_t depth, int64_t length) {
    for (int64_t half = kTurnAtOnce; half < length; half *= 2)
        for (int64_t at = 0; at < depth; at += 2 * half)
            for (int64_t i = at; i < at + half; i += VL) {
                vf low = load(x + i), high = load(x + i + half);
                butterfly(low, high);
                store(x + i, low);
                store(x + i + half, high);
            }
}

}  // namespace pk

#endif
