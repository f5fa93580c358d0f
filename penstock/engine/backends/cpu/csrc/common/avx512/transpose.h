// Tiles of numbers of 32 bits, turned in registers.

#pragma once

#include <immintrin.h>

#include "common/vectors.h"

namespace pk::PK_SET {

// Rows become columns: 16 x 16 numbers of 32 bits.
PK_INLINE void transpose16(__m512i (&x)[16]) {
    __m512i t[16];
    PK_UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    PK_UNROLL for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    PK_UNROLL for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    PK_UNROLL for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

}  // namespace pk::PK_SET
