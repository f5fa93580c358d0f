// Products in float16 vectors, for CPUs that have them and no matrix tiles: half the width of float32, twice the speed.
//
// Weights of few bits are widened to float16 for 16 columns at a time, into a buffer that stays in the core's cache, and
// reused by every group of rows. Activations are divided by the largest of their row, so that sums stay in range. A
// sum runs in float16 over 64 depths and is then added to a float32 one. That rounds each addition to 11 bits: about a
// quarter of the noise that int8 activations bring.

#pragma once

#include "linear/dot.h"

#if defined(PK_NEON) && defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define PK_HALF 1

namespace pk::PK_SET {

constexpr int kHalfRows = 8;    // activation rows of a packed group
constexpr int kHalfDepth = 64;  // depths of a float16 sum
constexpr float kHalfLimit = 512.0f;  // largest weight: 64 products with activations up to 1 stay below 2^15

// ---- weights: [depth][16 columns] ----------------------------------------------------------------------------

// Bytes as float16: as the low bits of 1024.0, whose step is 1.
PK_INLINE float16x8_t low_halves(uint8x16_t q, float16x8_t offset) {
    return vsubq_f16(vreinterpretq_f16_u8(vzip1q_u8(q, vdupq_n_u8(0x64))), offset);
}
PK_INLINE float16x8_t high_halves(uint8x16_t q, float16x8_t offset) {
    return vsubq_f16(vreinterpretq_f16_u8(vzip2q_u8(q, vdupq_n_u8(0x64))), offset);
}

PK_INLINE float16x8_t load_halves(const f16* p) { return vreinterpretq_f16_u16(vld1q_u16(&p->bits)); }
PK_INLINE void store_halves(f16* p, float16x8_t v) { vst1q_u16(&p->bits, vreinterpretq_u16_f16(v)); }

// A copy made by the load units: a move would take the vector units' time.
PK_INLINE float16x8_t copy_halves(const f16* p) {
    float16x8_t v;
    asm("ldr %q0, [%1]" : "=w"(v) : "r"(p), "m"(*reinterpret_cast<const f16(*)[8]>(p)));
    return v;
}

// q - 8 of a nibble is a float16 whose low byte is zero: a table gives the high byte, zip adds the low one.
alignas(16) constexpr uint8_t kNibbles[16] = {0xc8, 0xc7, 0xc6, 0xc5, 0xc4, 0xc2, 0xc0, 0xbc,
                                              0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47};
alignas(16) constexpr uint8_t kFlippedNibbles[16] = {0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47,
                                                     0xc8, 0xc7, 0xc6, 0xc5, 0xc4, 0xc2, 0xc0, 0xbc};

// to[16] = scale * (q - 8) + middle.
PK_INLINE void widen_row(uint8x16_t nibbles, uint8x16_t table, const float16x8_t (&scale)[2], const f16* middle, f16* to) {
    const uint8x16_t bytes = vqtbl1q_u8(table, nibbles), none = vdupq_n_u8(0);
    store_halves(to, vfmaq_f16(copy_halves(middle), vreinterpretq_f16_u8(vzip1q_u8(none, bytes)), scale[0]));
    store_halves(to + 8, vfmaq_f16(copy_halves(middle + 8), vreinterpretq_f16_u8(vzip2q_u8(none, bytes)), scale[1]));
}

inline void widen_half4(const uint8_t* q, const f16* scale, const f16* minimum, int64_t blocks, f16* to) {
    static_assert(kStoredFlip == 0x80, "high nibbles are stored with their top bit flipped");
    const uint8x16_t low = vld1q_u8(kNibbles), high = vld1q_u8(kFlippedNibbles);
    for (int64_t b = 0; b < blocks; ++b, q += Q4::kBytes, scale += kColumns, minimum += kColumns) {
        const float16x8_t s[2] = {load_halves(scale), load_halves(scale + 8)};
        f16 middle[kColumns];  // minimum + 8 * scale
        for (int i = 0; i < 2; ++i) store_halves(middle + 8 * i, vfmaq_n_f16(load_halves(minimum + 8 * i), s[i], 8.0f));
        for (int g = 0; g < 4; ++g) {
            const uint8x16x4_t four = vld4q_u8(q + g * 64);  // one vector per depth
            PK_UNROLL for (int j = 0; j < 4; ++j) {
                f16* at = to + (b * kDepth + g * 4 + j) * kColumns;
                widen_row(vandq_u8(four.val[j], vdupq_n_u8(15)), low, s, middle, at);
                widen_row(vshrq_n_u8(four.val[j], 4), high, s, middle, at + 16 * kColumns);
            }
        }
    }
}

inline void widen_half8(const uint8_t* q, const f16* scale, int64_t blocks, f16* to) {
    const float16x8_t offset = vdupq_n_f16(1024.0f + 128.0f);
    for (int64_t b = 0; b < blocks; ++b, q += Q8::kBytes, scale += kColumns) {
        const float16x8_t s0 = load_halves(scale), s1 = load_halves(scale + 8);
        for (int g = 0; g < 8; ++g) {
            const uint8x16x4_t four = vld4q_u8(q + g * 64);
            PK_UNROLL for (int j = 0; j < 4; ++j) {
                const uint8x16_t bytes = veorq_u8(four.val[j], vdupq_n_u8(0x80));
                f16* at = to + (b * kDepth + g * 4 + j) * kColumns;
                store_halves(at, vmulq_f16(low_halves(bytes, offset), s0));
                store_halves(at + 8, vmulq_f16(high_halves(bytes, offset), s1));
            }
        }
    }
}

// ---- activations: groups of 8 rows, [depth / 8][row][8], and what each row was divided by --------------------

template <class T>
void pack_half_rows(const T* x, int64_t rows, int64_t depth, f16* to, float* scales) {
    for (int r = 0; r < kHalfRows; ++r) {
        if (r >= rows) {
            for (int64_t k = 0; k < depth; k += 8) store_halves(to + k * kHalfRows + r * 8, vdupq_n_f16(0));
            continue;
        }
        const T* row = x + r * depth;
        vi top = vi{};  // magnitudes order as their bits do, with infinities and NaNs on top
        for (int64_t k = 0; k < depth; k += VL) top = max_bits(top, (vi)vabs(load(row + k)));
        const int32_t bits = hmax_bits(top);
        float max;
        std::memcpy(&max, &bits, 4);
        const bool finite = bits < 0x7f800000;
        scales[r] = finite ? max : NAN;
        const vf inverse = splat(finite && max > 1e-30f ? 1.0f / max : 0.0f);
        for (int64_t k = 0; k < depth; k += 8) {
            const float16x4_t low = vcvt_f16_f32(load(row + k) * inverse);
            store_halves(to + k * kHalfRows + r * 8, vcvt_high_f16_f32(low, load(row + k + 4) * inverse));
        }
    }
}

// ---- products ------------------------------------------------------------------------------------------------

// y[MR][16] += a float16 sum over `steps` times eight depths. Written out, because compilers run out of registers here and
// copy sums around on the very units that do the products: rows in v0 to v7 (a lane of v16 and above cannot be named),
// weights in v8 to v15, sums in v16 to v31.
#define PK_ROW(acc0, acc1, w0, w1, x, lane) \
    "fmla v" acc0 ".8h, v" w0 ".8h, v" x ".h[" lane "]\n" \
    "fmla v" acc1 ".8h, v" w1 ".8h, v" x ".h[" lane "]\n"
#define PK_FOUR(w0, w1, lane) \
    PK_ROW("16", "17", w0, w1, "0", lane) PK_ROW("18", "19", w0, w1, "1", lane) \
    PK_ROW("20", "21", w0, w1, "2", lane) PK_ROW("22", "23", w0, w1, "3", lane)
#define PK_EIGHT(w0, w1, lane) \
    PK_FOUR(w0, w1, lane) \
    PK_ROW("24", "25", w0, w1, "4", lane) PK_ROW("26", "27", w0, w1, "5", lane) \
    PK_ROW("28", "29", w0, w1, "6", lane) PK_ROW("30", "31", w0, w1, "7", lane)
#define PK_W(w0, w1, at) "ldp q" w0 ", q" w1 ", [%[w], #" at "]\n"
#define PK_DEPTHS(ROWS) \
    PK_W("8", "9", "0") PK_W("10", "11", "32") PK_W("12", "13", "64") PK_W("14", "15", "96") \
    ROWS("8", "9", "0") PK_W("8", "9", "128") ROWS("10", "11", "1") PK_W("10", "11", "160") \
    ROWS("12", "13", "2") PK_W("12", "13", "192") ROWS("14", "15", "3") PK_W("14", "15", "224") \
    ROWS("8", "9", "4") ROWS("10", "11", "5") ROWS("12", "13", "6") ROWS("14", "15", "7")
#define PK_CLOBBERED                                                                                               \
    "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", \
        "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29",   \
        "v30", "v31"
#define PK_ZERO(a, b) "movi v" a ".16b, #0\nmovi v" b ".16b, #0\n"
#define PK_ADD(sum, at) \
    "ldp q2, q3, [%[y], #" at "]\n" \
    "fcvtl v0.4s, v" sum ".4h\n" \
    "fcvtl2 v1.4s, v" sum ".8h\n" \
    "fadd v2.4s, v2.4s, v0.4s\n" \
    "fadd v3.4s, v3.4s, v1.4s\n" \
    "stp q2, q3, [%[y], #" at "]\n"
#define PK_ADD_FOUR \
    PK_ADD("16", "0") PK_ADD("17", "32") PK_ADD("18", "64") PK_ADD("19", "96") \
    PK_ADD("20", "128") PK_ADD("21", "160") PK_ADD("22", "192") PK_ADD("23", "224")
#define PK_ADD_EIGHT \
    PK_ADD_FOUR PK_ADD("24", "256") PK_ADD("25", "288") PK_ADD("26", "320") PK_ADD("27", "352") \
    PK_ADD("28", "384") PK_ADD("29", "416") PK_ADD("30", "448") PK_ADD("31", "480")

template <int MR>
void half_sums(const f16* w, const f16* x, int64_t steps, float* y);

template <>
inline void half_sums<8>(const f16* w, const f16* x, int64_t steps, float* y) {
    asm volatile(PK_ZERO("16", "17") PK_ZERO("18", "19") PK_ZERO("20", "21") PK_ZERO("22", "23")
                 PK_ZERO("24", "25") PK_ZERO("26", "27") PK_ZERO("28", "29") PK_ZERO("30", "31")
                 "1:\n"
                 "ldp q0, q1, [%[x]]\nldp q2, q3, [%[x], #32]\nldp q4, q5, [%[x], #64]\nldp q6, q7, [%[x], #96]\n"
                 PK_DEPTHS(PK_EIGHT)
                 "add %[x], %[x], #128\nadd %[w], %[w], #256\n"
                 "subs %[n], %[n], #1\nb.ne 1b\n"
                 PK_ADD_EIGHT
                 : [w] "+r"(w), [x] "+r"(x), [n] "+r"(steps)
                 : [y] "r"(y)
                 : PK_CLOBBERED);
}

template <>
inline void half_sums<4>(const f16* w, const f16* x, int64_t steps, float* y) {
    asm volatile(PK_ZERO("16", "17") PK_ZERO("18", "19") PK_ZERO("20", "21") PK_ZERO("22", "23")
                 "1:\n"
                 "ldp q0, q1, [%[x]]\nldp q2, q3, [%[x], #32]\n"
                 PK_DEPTHS(PK_FOUR)
                 "add %[x], %[x], #128\nadd %[w], %[w], #256\n"
                 "subs %[n], %[n], #1\nb.ne 1b\n"
                 PK_ADD_FOUR
                 : [w] "+r"(w), [x] "+r"(x), [n] "+r"(steps)
                 : [y] "r"(y)
                 : PK_CLOBBERED);
}

#undef PK_ROW
#undef PK_FOUR
#undef PK_EIGHT
#undef PK_W
#undef PK_DEPTHS
#undef PK_CLOBBERED
#undef PK_ZERO
#undef PK_ADD
#undef PK_ADD_FOUR
#undef PK_ADD_EIGHT

// y[MR][16] of the first MR rows of a group.
template <int MR>
void half_rows(const f16* w, const f16* x, int64_t depth, float* y) {
    std::memset(y, 0, MR * kColumns * sizeof(float));
    for (int64_t from = 0; from < depth; from += kHalfDepth)
        half_sums<MR>(w + from * kColumns, x + from * kHalfRows, std::min<int64_t>(kHalfDepth, depth - from) / 8, y);
}

}  // namespace pk::PK_SET

#endif
