// Handles, and the name of the instruction set.

#include "common/context.h"
#include "common/simd.h"

using namespace pk::PK_SET;

PK_FUNCTION(Context*, pk_create)(int threads, int spin_us) {
    try {
        return new Context(threads, spin_us);
    } catch (...) {  // no memory or no threads: the caller sees a null handle and reports it
        return nullptr;
    }
}

PK_FUNCTION(void, pk_destroy)(Context* ctx) { delete ctx; }

PK_FUNCTION(const char*, pk_isa)() {
#if defined(PK_NEON)
#if defined(__ARM_FEATURE_DOTPROD)
    return "neon+dotprod";
#else
    return "neon";
#endif
#elif defined(PK_AVX512)
#if defined(__AMX_TILE__)
    return "avx512+vnni+bf16+amx";
#elif defined(__AVX512BF16__)
    return "avx512+vnni+bf16";
#elif defined(__AVX512VNNI__)
    return "avx512+vnni";
#else
    return "avx512";
#endif
#elif defined(PK_AVX2)
#if defined(__AVXVNNI__)
    return "avx2+vnni";
#else
    return "avx2";
#endif
#else
    return "generic";
#endif
}
