// Integer dot products in plain C++. Included by linear/dot.h.

#pragma once

namespace pk::PK_SET {

PK_INLINE void set_starts(Record& r, int m, int32_t, int32_t) { r.start8[m] = r.start4[m] = 0; }

template <int MR, int NC>
PK_INLINE void dot_block(Q8, const uint8_t* weights, const Record& r, vf (&out)[MR][NC]) {
    const int8_t* w = reinterpret_cast<const int8_t*>(weights);
    int32_t acc[MR][NC * VL] = {};
    for (int k = 0; k < kDepth / 4; ++k, w += 4 * kColumns)
        for (int n = 0; n < NC * VL; ++n)
            for (int i = 0; i < 4; ++i)
                for (int m = 0; m < MR; ++m) acc[m][n] += int32_t(w[n * 4 + i]) * r.q[m][k * 4 + i];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NC * VL; ++n) out[m][n / VL][n % VL] = float(acc[m][n]);
}

template <int MR, int NC>
PK_INLINE void dot_block(Q4, const uint8_t* w, const Record& r, vf (&out)[MR][NC]) {
    int32_t acc[MR][NC * VL] = {};
    for (int k = 0; k < kDepth / 8; ++k, w += 4 * kColumns)
        for (int n = 0; n < NC * VL; ++n)
            for (int i = 0; i < 4; ++i) {
                const int32_t low = w[n * 4 + i] & 15, high = w[n * 4 + i] >> 4;
                for (int m = 0; m < MR; ++m) acc[m][n] += low * r.q[m][k * 4 + i] + high * r.q[m][16 + k * 4 + i];
            }
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NC * VL; ++n) out[m][n / VL][n % VL] = float(acc[m][n]);
}

constexpr uint8_t kStoredFlip = 0;

}  // namespace pk::PK_SET
