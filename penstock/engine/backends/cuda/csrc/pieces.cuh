// Single instructions of kernels whose lanes copy and read pieces of 16 bytes; see device.cuh.
#pragma once
#include "device.cuh"

#ifdef PENSTOCK_EMULATION

// Zeros where there is nothing to copy: the address is not read then.
inline void cp_async_16_or_zero(void* shared, const void* global, bool there) {
    alignas(16) static const unsigned char zeros[16] = {};
    cp_async_16(shared, there ? global : zeros);
}
// Of what another block of the same launch may have written.
template <class T>
inline T load_fresh(const T* pointer) {
    return *pointer;
}
// Four e4m3 values as float16, two in each word.
inline uint2 e4m3x4_to_f16x4(uint32_t packed) {
    return make_uint2(e4m3x2_to_f16x2(uint16_t(packed)), e4m3x2_to_f16x2(uint16_t(packed >> 16)));
}

#else

__device__ __forceinline__ void cp_async_16_or_zero(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(detail::shared_address(shared)), "l"(global),
                 "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ uint4 load_fresh(const uint4* pointer) {
    uint4 value;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer)
                 : "memory");
    return value;
}
__device__ __forceinline__ uint16_t load_fresh(const uint16_t* pointer) {
    uint16_t value;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(value) : "l"(pointer) : "memory");
    return value;
}
// In one block of instructions, or the assembler shifts the upper half down first.
__device__ __forceinline__ uint2 e4m3x4_to_f16x4(uint32_t packed) {
    uint2 halves;
    asm("{\n.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(packed));
    return halves;
}

#endif
