// Vectors of floats, the same functions for every instruction set: GCC/Clang vector extensions, with intrinsics only
// for instructions that the extensions cannot express (common/<set>/simd.h).
//
// Invariant: everything computes in float32; float16 and bfloat16 exist only in loads and stores, and
// stores round to nearest even.

#pragma once

#include "common/vectors.h"

#if defined(PK_NEON)
#include "common/neon/simd.h"
#elif defined(PK_AVX512)
#include "common/avx512/simd.h"
#elif defined(PK_AVX2)
#include "common/avx2/simd.h"
#else
#include "common/generic/simd.h"
#endif

namespace pk::PK_SET {

// The first n (< VL) elements; the rest reads as zero.
template <class T>
PK_INLINE vf load_part(const T* p, int n) {
    T pad[VL];
    std::memset(pad, 0, sizeof pad);
    std::memcpy(pad, p, n * sizeof(T));
    return load(pad);
}

template <class T>
PK_INLINE void store_part(T* p, vf v, int n) {
    T pad[VL];
    store(pad, v);
    std::memcpy(p, pad, n * sizeof(T));
}

// As a number that is stored as T would be read.
template <class T>
PK_INLINE vf as_stored(vf v) {
    if constexpr (std::is_same<T, float>::value) return v;
    T stored[VL];
    store(stored, v);
    return load(stored);
}

#if !defined(PK_NEON)
// Four consecutive floats, each to be multiplied with a whole vector: broadcasts from memory, which are free here.
typedef const float* four;
PK_INLINE four load_four(const float* p) { return p; }
template <int LANE>
PK_INLINE vf add_product(vf acc, vf x, four a) {
    return acc + x * splat(a[LANE]);
}
#endif

// exp with a relative error below 2e-6, for -87 <= x <= 88. As 2^n * 2^r: adding the magic number rounds to n
// and leaves n in the low bits, where one shift makes an exponent of it.
PK_INLINE vf vexp_inside(vf x) {
    const vf magic = splat(12582912.0f), log2e = splat(1.44269504f);
    vf shifted = x * log2e + magic;
    vf r = x * log2e - (shifted - magic);
    vf p = splat(1.32764725e-3f);  // minimax in relative error on [-1/2, 1/2]
    p = p * r + splat(9.67554189e-3f);
    p = p * r + splat(5.55071309e-2f);
    p = p * r + splat(2.40221202e-1f);
    p = p * r + splat(6.93146944e-1f);
    p = p * r + splat(1.00000012f);
    return (vf)((vi)p + ((vi)shifted << 23));
}

// Below -87 exactly zero, above 88 the value at 88.
PK_INLINE vf vexp(vf x) {
    vi nonzero = x > splat(-87.0f);
    return (vf)(nonzero & (vi)vexp_inside(vmin(vmax(x, splat(-87.0f)), splat(88.0f))));
}

#if !defined(PK_AVX512)
PK_INLINE vf quotient(vf x, vf y) { return x / y; }
#endif

// Calls f with a null pointer of the element type numbered `dtype` (0 float32, 1 float16, 2 bfloat16).
template <class F>
PK_INLINE void dispatch(int dtype, F&& f) {
    if (dtype == 0)
        f((float*)nullptr);
    else if (dtype == 1)
        f((f16*)nullptr);
    else
        f((bf16*)nullptr);
}

template <class P>
using elem = std::remove_pointer_t<P>;

}  // namespace pk::PK_SET
