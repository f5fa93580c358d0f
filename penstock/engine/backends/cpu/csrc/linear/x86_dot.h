// Integer dot products on the byte vectors of AVX2 or AVX-512. Included by linear/dot.h.

#pragma once

namespace pk::PK_SET {

// VNNI multiplies unsigned by signed: signed weights are shifted by 128, and the sums start where that cancels.
PK_INLINE void set_starts(Record& r, int m, int32_t low, int32_t high) {
#if defined(PK_VNNI)
    r.start8[m] = -128 * (low + high);
#else
    r.start8[m] = 0;
    (void)low, (void)high;
#endif
    r.start4[m] = 0;
}

template <int MR, int NC>
PK_INLINE void dot_block(Q8, const uint8_t* w, const Record& r, vf (&out)[MR][NC]) {
    // A lone row would wait for its own latency: two chains, added at the end.
    vi even[MR][NC], odd[MR][NC];
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) {
            even[m][c] = vi{} + r.start8[m];
            odd[m][c] = vi{};
        }
    for (int k = 0; k < kDepth / 4; ++k)
        for (int c = 0; c < NC; ++c) {
            vbytes weight = load_bytes(w + k * 4 * kColumns + c * VB);
#if defined(PK_VNNI)
            weight = flip_sign(weight);
#endif
            for (int m = 0; m < MR; ++m) {
                vi& acc = MR == 1 && k % 2 ? odd[m][c] : even[m][c];
#if defined(PK_VNNI)
                acc = dot_unsigned(acc, weight, repeat4(r.q[m] + k * 4));
#else
                acc = dot_signed(acc, weight, repeat4(r.q[m] + k * 4));
#endif
            }
        }
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c)
            out[m][c] = __builtin_convertvector(MR == 1 ? even[m][c] + odd[m][c] : even[m][c], vf);
}

template <int MR, int NC>
PK_INLINE void dot_block(Q4, const uint8_t* w, const Record& r, vf (&out)[MR][NC]) {
    vi lower[MR][NC], upper[MR][NC];
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) lower[m][c] = upper[m][c] = vi{};
    for (int k = 0; k < kDepth / 8; ++k)
        for (int c = 0; c < NC; ++c) {
            vbytes pair = load_bytes(w + k * 4 * kColumns + c * VB);
            vbytes low = low_nibbles(pair), high = high_nibbles(pair);
            for (int m = 0; m < MR; ++m) {
                lower[m][c] = dot_unsigned(lower[m][c], low, repeat4(r.q[m] + k * 4));
                upper[m][c] = dot_unsigned(upper[m][c], high, repeat4(r.q[m] + 16 + k * 4));
            }
        }
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) out[m][c] = __builtin_convertvector(lower[m][c] + upper[m][c], vf);
}

constexpr uint8_t kStoredFlip = 0;

}  // namespace pk::PK_SET
