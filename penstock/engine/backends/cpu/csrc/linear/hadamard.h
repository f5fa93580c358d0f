// Hadamard rotation of rows before they are rounded to few bits.
//
// y = H x mixes 64 depths at a time, with H[i][j] = 1 or -1 by the parity of i & j. The product of two rotated rows is 64
// times that of the rows, since H H = 64; but a number much larger than its neighbours is spread over all of them, so that
// it no longer sets a step that is too coarse for the rest. Additions alone: six stages of sums and differences.
//
// Which depths are mixed is free, so they are chosen to suit vectors: the same lane of up to 16 vectors in a row (8 of
// AVX2, which has half the registers), where a stage is an addition and a subtraction, and neighbouring lanes for the
// stages that are left.

#pragma once

#include "common/simd.h"

#if defined(PK_AVX512) || defined(PK_AVX2)

namespace pk::PK_SET {

constexpr int kRotation = 64;  // depths that a rotation mixes

// The number of vectors over which lanes are mixed in rows of `depth`, a multiple of 64: 4, 8 or 16, with AVX2 always 8.
inline int rotated_vectors(int64_t depth) {
    if (VL < 16) return kRotation / VL;
    const int64_t vectors = depth / VL;
    return int(std::min<int64_t>(16, vectors & -vectors));
}

PK_INLINE void butterfly(vf& low, vf& high) {
    const vf difference = low - high;
    low += high;
    high = difference;
}

// One stage: x[i] with x[i + half], for `count` numbers that may be vectors of one lane each.
PK_INLINE void hadamard_stage(vf* x, int count, int half) {
    for (int at = 0; at < count; at += 2 * half)
        for (int i = at; i < at + half; ++i) butterfly(x[i], x[i + half]);
}

// Rotates every lane on its own, with depths in the order of a row of `depth`: for per-channel weights.
inline void rotate_lanes(vf* x, int64_t depth) {
    const int across = rotated_vectors(depth), count = across * VL;
    for (int64_t k = 0; k < depth; k += count) {
        for (int half = VL; half < count; half *= 2) hadamard_stage(x + k, count, half);
        for (int half = 1; half < kRotation / across; half *= 2) hadamard_stage(x + k, count, half);
    }
}

// STAGES stages within a vector: every lane plus or minus the one whose index differs in one bit.
#if defined(PK_AVX512)
template <int STAGES>
PK_INLINE vf rotate_within(vf x) {
    const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-1.0f);
    __m512 v = (__m512)x;
    v = _mm512_fmadd_ps(v, _mm512_mask_blend_ps(0xaaaa, one, minus), _mm512_permute_ps(v, 0xb1));
    v = _mm512_fmadd_ps(v, _mm512_mask_blend_ps(0xcccc, one, minus), _mm512_permute_ps(v, 0x4e));
    if (STAGES > 2) v = _mm512_fmadd_ps(v, _mm512_mask_blend_ps(0xf0f0, one, minus), _mm512_shuffle_f32x4(v, v, 0xb1));
    if (STAGES > 3) v = _mm512_fmadd_ps(v, _mm512_mask_blend_ps(0xff00, one, minus), _mm512_shuffle_f32x4(v, v, 0x4e));
    return (vf)v;
}
#else
template <int STAGES>
PK_INLINE vf rotate_within(vf x) {
    static_assert(STAGES == 3, "eight lanes");
    const __m256 one = _mm256_set1_ps(1.0f), minus = _mm256_set1_ps(-1.0f);
    __m256 v = (__m256)x;
    v = _mm256_fmadd_ps(v, _mm256_blend_ps(one, minus, 0xaa), _mm256_permute_ps(v, 0xb1));
    v = _mm256_fmadd_ps(v, _mm256_blend_ps(one, minus, 0xcc), _mm256_permute_ps(v, 0x4e));
    v = _mm256_fmadd_ps(v, _mm256_blend_ps(one, minus, 0xf0), _mm256_permute2f128_ps(v, v, 1));
    return (vf)v;
}
#endif

// Rotates a row of `depth`, read 16 depths at a time from `at(k)`, to `out`. Returns the bits of the largest magnitude:
// those of infinity or NaN if there is one, since magnitudes order as their bits do.
template <int ACROSS, class F>
PK_INLINE int32_t rotate_row(int64_t depth, float* out, F&& at) {
    vi top = vi{};
    for (int64_t k = 0; k < depth; k += ACROSS * VL) {
        vf x[ACROSS];
        PK_UNROLL for (int i = 0; i < ACROSS; ++i) x[i] = at(k + i * VL);
        PK_UNROLL for (int half = 1; half < ACROSS; half *= 2) hadamard_stage(x, ACROSS, half);
        PK_UNROLL for (int i = 0; i < ACROSS; ++i) {
            constexpr int kLanes = kRotation / ACROSS;
            const vf y = rotate_within<kLanes == 4 ? 2 : kLanes == 8 ? 3 : 4>(x[i]);
            top = max_bits(top, (vi)vabs(y));
            store(out + k + i * VL, y);
        }
    }
    return hmax_bits(top);
}

// The same for any depth; returns the largest magnitude, infinity or NaN if there is one.
template <class F>
PK_INLINE float rotate_any_row(int64_t depth, float* out, F&& at) {
    int32_t bits;
#if defined(PK_AVX512)
    const int across = rotated_vectors(depth);
    bits = across == 16  ? rotate_row<16>(depth, out, at)
           : across == 8 ? rotate_row<8>(depth, out, at)
                         : rotate_row<4>(depth, out, at);
#else
    bits = rotate_row<8>(depth, out, at);
#endif
    float most;
    std::memcpy(&most, &bits, 4);
    return most;
}

}  // namespace pk::PK_SET

#endif
