// Byte vectors of AVX-512 for linear/x86_dot.h: VNNI where the CPU has it. Included by linear/dot.h.

#pragma once

namespace pk::PK_SET {

typedef __m512i vbytes;
PK_INLINE vbytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
PK_INLINE vbytes repeat4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
PK_INLINE vbytes low_nibbles(vbytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
PK_INLINE vbytes high_nibbles(vbytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
PK_INLINE vbytes flip_sign(vbytes v) { return _mm512_xor_si512(v, _mm512_set1_epi8(char(-128))); }
#if defined(__AVX512VNNI__)
#define PK_VNNI 1
PK_INLINE vi dot_unsigned(vi acc, vbytes w, vbytes x) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, w, x); }
#else
PK_INLINE vi dot_unsigned(vi acc, vbytes w, vbytes x) {
    return acc + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
}
PK_INLINE vi dot_signed(vi acc, vbytes w, vbytes x) {
    vbytes signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return dot_unsigned(acc, _mm512_abs_epi8(w), signed_x);
}
#endif

}  // namespace pk::PK_SET
