// NEON: 4 floats in a vector; part of every aarch64 CPU. See common/simd.h.

#pragma once

#include <arm_neon.h>

#include "common/vectors.h"

namespace pk::PK_SET {

PK_INLINE vf splat(float x) { return vdupq_n_f32(x); }

PK_INLINE vf vmax(vf a, vf b) { return vmaxq_f32(a, b); }

PK_INLINE vf vmin(vf a, vf b) { return vminq_f32(a, b); }

PK_INLINE float hmax(vf a) { return vmaxvq_f32(a); }

PK_INLINE float hsum(vf a) { return vaddvq_f32(a); }

PK_INLINE vi max_bits(vi a, vi b) { return (vi)vmaxq_s32((int32x4_t)a, (int32x4_t)b); }

PK_INLINE int32_t hmax_bits(vi a) { return vmaxvq_s32((int32x4_t)a); }

PK_INLINE vf load(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }

PK_INLINE vf load(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }

PK_INLINE void store(f16* p, vf v) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v))); }

PK_INLINE void store(bf16* p, vf v) { vst1_u16(&p->bits, vshrn_n_u32((uint32x4_t)rounded_bf16(v), 16)); }

// Four consecutive floats, each to be multiplied with a whole vector: one load, then products by lane.
typedef float32x4_t four;
PK_INLINE four load_four(const float* p) { return vld1q_f32(p); }
template <int LANE>
PK_INLINE vf add_product(vf acc, vf x, four a) { return vfmaq_laneq_f32(acc, x, a, LANE); }

}  // namespace pk::PK_SET
