// Byte vectors of AVX2 for linear/x86_dot.h: AVX-VNNI where the CPU has it. Included by linear/dot.h.

#pragma once

namespace pk::PK_SET {

typedef __m256i vbytes;
PK_INLINE vbytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
PK_INLINE vbytes repeat4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
PK_INLINE vbytes low_nibbles(vbytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
PK_INLINE vbytes high_nibbles(vbytes v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
PK_INLINE vbytes flip_sign(vbytes v) { return _mm256_xor_si256(v, _mm256_set1_epi8(char(-128))); }
#if defined(__AVXVNNI__)
#define PK_VNNI 1
PK_INLINE vi dot_unsigned(vi acc, vbytes w, vbytes x) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, w, x); }
#else
PK_INLINE vi dot_unsigned(vi acc, vbytes w, vbytes x) {
    return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
}
// Pairs of |w| * x stay below 2 * 128 * 127 < 2^15: maddubs cannot saturate.
PK_INLINE vi dot_signed(vi acc, vbytes w, vbytes x) {
    return dot_unsigned(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
#endif

}  // namespace pk::PK_SET
