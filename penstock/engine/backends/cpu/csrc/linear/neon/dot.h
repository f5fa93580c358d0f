// Integer dot products in NEON: `sdot` where the CPU has it, widening products elsewhere. Included by linear/dot.h.

#pragma once

namespace pk::PK_SET {

#if defined(__ARM_FEATURE_DOTPROD)
template <int LANE>
PK_INLINE int32x4_t dot_lane(int32x4_t acc, int8x16_t w, int8x16_t x) {
    return vdotq_laneq_s32(acc, w, x, LANE);
}
#else
template <int LANE>
PK_INLINE int32x4_t dot_lane(int32x4_t acc, int8x16_t w, int8x16_t x) {
    int8x16_t four = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), LANE));
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(four)), high = vmull_high_s8(w, four);
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
#endif

// An integer of less than 23 bits added to the bits of 1.5 * 2^23 is the float 1.5 * 2^23 + integer: starting
// the sums there turns the conversion (half a result per cycle on many cores) into a subtraction (two).
constexpr int32_t kMagic = 0x4b400000;

PK_INLINE void set_starts(Record& r, int m, int32_t, int32_t high) {
    r.start8[m] = kMagic;
    r.start4[m] = kMagic + 8 * high;
}

PK_INLINE vf from_magic(int32x4_t v) { return vsubq_f32(vreinterpretq_f32_s32(v), vdupq_n_f32(12582912.0f)); }

template <int MR, int NC, int LANE>
PK_INLINE void step(const int8x16_t (&w)[NC], const int8x16_t (&x)[MR], int32x4_t (&acc)[MR][NC]) {
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) acc[m][c] = dot_lane<LANE>(acc[m][c], w[c], x[m]);
}

template <int MR, int NC, int LANE>
PK_INLINE void step_q8(const int8_t* from, const int8x16_t (&x)[MR], int32x4_t (&acc)[MR][NC]) {
    int8x16_t w[NC];
    for (int c = 0; c < NC; ++c) w[c] = vld1q_s8(from + LANE * 4 * kColumns + c * 16);
    step<MR, NC, LANE>(w, x, acc);
}

template <int MR, int NC>
PK_INLINE void dot_block(Q8, const uint8_t* weights, const Record& r, vf (&out)[MR][NC]) {
    int32x4_t acc[MR][NC];
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) acc[m][c] = vdupq_n_s32(kMagic);
    for (int half = 0; half < 2; ++half) {
        const int8_t* w = reinterpret_cast<const int8_t*>(weights) + half * Q8::kBytes / 2;
        int8x16_t x[MR];
        for (int m = 0; m < MR; ++m) x[m] = vld1q_s8(r.q[m] + half * 16);
        step_q8<MR, NC, 0>(w, x, acc);
        step_q8<MR, NC, 1>(w, x, acc);
        step_q8<MR, NC, 2>(w, x, acc);
        step_q8<MR, NC, 3>(w, x, acc);
    }
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) out[m][c] = from_magic(acc[m][c]);
}

template <int MR, int NC, int LANE>
PK_INLINE void step_q4(const uint8_t* from, uint8_t mask, const int8x16_t (&x)[MR], int32x4_t (&acc)[MR][NC]) {
    int8x16_t w[NC];
    for (int c = 0; c < NC; ++c)
        w[c] = vreinterpretq_s8_u8(vandq_u8(vld1q_u8(from + LANE * 4 * kColumns + c * 16), vdupq_n_u8(mask)));
    step<MR, NC, LANE>(w, x, acc);
}

template <int MR, int NC>
PK_INLINE void half_q4(const uint8_t* from, uint8_t mask, const Record& r, int at, int32x4_t (&acc)[MR][NC]) {
    int8x16_t x[MR];
    for (int m = 0; m < MR; ++m) x[m] = vld1q_s8(r.q[m] + at);
    step_q4<MR, NC, 0>(from, mask, x, acc);
    step_q4<MR, NC, 1>(from, mask, x, acc);
    step_q4<MR, NC, 2>(from, mask, x, acc);
    step_q4<MR, NC, 3>(from, mask, x, acc);
}

#if defined(__ARM_FEATURE_DOTPROD)

// The same for the shape that carries every batch, four rows by two vectors, written out: compilers copy
// accumulators between registers here, on the very units that do the products. 64 products, 24 loads, and the
// starts come from memory because the load units have time.
template <>
PK_INLINE void dot_block<4, 2>(Q8, const uint8_t* weights, const Record& r, vf (&out)[4][2]) {
    static const int32_t starts[8] = {kMagic, kMagic, kMagic, kMagic, kMagic, kMagic, kMagic, kMagic};
    int32x4_t a0, a1, b0, b1, c0, c1, d0, d1;
    int8x16_t xa, xb, xc, xd, w0, w1, w2, w3;
#define PK_ROW(acc0, acc1, x, v0, v1, lane)              \
    "sdot %[" acc0 "].4s, %[" v0 "].16b, %[" x "].4b[" lane "]\n" \
    "sdot %[" acc1 "].4s, %[" v1 "].16b, %[" x "].4b[" lane "]\n"
#define PK_STEP(v0, v1, lane)                                                             \
    PK_ROW("a0", "a1", "xa", v0, v1, lane) PK_ROW("b0", "b1", "xb", v0, v1, lane) \
    PK_ROW("c0", "c1", "xc", v0, v1, lane) PK_ROW("d0", "d1", "xd", v0, v1, lane)
#define PK_W(v0, v1, at) "ldp %q[" v0 "], %q[" v1 "], [%[w], #" at "]\n"
#define PK_X(at0, at1, at2, at3)                                          \
    "ldr %q[xa], [%[x], #" at0 "]\n"                                      \
    "ldr %q[xb], [%[x], #" at1 "]\n"                                      \
    "ldr %q[xc], [%[x], #" at2 "]\n"                                      \
    "ldr %q[xd], [%[x], #" at3 "]\n"
    asm("ldp %q[a0], %q[a1], [%[s]]\n"
        "ldp %q[b0], %q[b1], [%[s]]\n"
        "ldp %q[c0], %q[c1], [%[s]]\n"
        "ldp %q[d0], %q[d1], [%[s]]\n" PK_X("0", "32", "64", "96") PK_W("w0", "w1", "0") PK_W("w2", "w3", "64")
        PK_STEP("w0", "w1", "0") PK_W("w0", "w1", "128") PK_STEP("w2", "w3", "1") PK_W("w2", "w3", "192")
        PK_STEP("w0", "w1", "2") PK_W("w0", "w1", "256") PK_STEP("w2", "w3", "3") PK_W("w2", "w3", "320")
        PK_X("16", "48", "80", "112")
        PK_STEP("w0", "w1", "0") PK_W("w0", "w1", "384") PK_STEP("w2", "w3", "1") PK_W("w2", "w3", "448")
        PK_STEP("w0", "w1", "2") PK_STEP("w2", "w3", "3")
        : [a0] "=&w"(a0), [a1] "=&w"(a1), [b0] "=&w"(b0), [b1] "=&w"(b1), [c0] "=&w"(c0), [c1] "=&w"(c1),
          [d0] "=&w"(d0), [d1] "=&w"(d1), [xa] "=&w"(xa), [xb] "=&w"(xb), [xc] "=&w"(xc), [xd] "=&w"(xd),
          [w0] "=&w"(w0), [w1] "=&w"(w1), [w2] "=&w"(w2), [w3] "=&w"(w3)
        : [w] "r"(weights), [x] "r"(r.q), [s] "r"(starts), "m"(*reinterpret_cast<const uint8_t(*)[Q8::kBytes]>(weights)),
          "m"(r.q), "m"(starts));
#undef PK_ROW
#undef PK_STEP
#undef PK_W
#undef PK_X
    out[0][0] = from_magic(a0), out[0][1] = from_magic(a1);
    out[1][0] = from_magic(b0), out[1][1] = from_magic(b1);
    out[2][0] = from_magic(c0), out[2][1] = from_magic(c1);
    out[3][0] = from_magic(d0), out[3][1] = from_magic(d1);
}

#endif

// High nibbles are stored with their top bit flipped: in place they read as int8 16 * (q - 8), which spares a
// shift per weight vector. The 16 leaves with one shift per sum, the 8 is in the start.
template <int MR, int NC>
PK_INLINE void dot_block(Q4, const uint8_t* weights, const Record& r, vf (&out)[MR][NC]) {
    int32x4_t acc[MR][NC];
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) acc[m][c] = vdupq_n_s32(0);
    half_q4<MR, NC>(weights, 0xf0, r, 16, acc);
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) acc[m][c] = vsraq_n_s32(vdupq_n_s32(r.start4[m]), acc[m][c], 4);
    half_q4<MR, NC>(weights, 0x0f, r, 0, acc);
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) out[m][c] = from_magic(acc[m][c]);
}

constexpr uint8_t kStoredFlip = 0x80;  // see dot_block

}  // namespace pk::PK_SET
