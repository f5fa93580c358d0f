// What the CUDA C++ kernels use beyond the language itself. Every line of inline PTX is here, and no CUDA header is
// included: a machine that runs the kernels has NVRTC, which knows the built-in types, and often no headers. The tests
// build the same kernels with g++ (PENSTOCK_EMULATION); cuda_shim.h then has the same functions in C++.
#pragma once

#ifdef PENSTOCK_EMULATION
#include "cuda_shim.h"
#else

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// Dynamic shared memory is the only shared memory of a kernel.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace detail {
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
}  // namespace detail

// ---- asynchronous copies -------------------------------------------------------------------------------------------

__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(detail::shared_address(shared)), "l"(global)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// ---- global memory -------------------------------------------------------------------------------------------------

// Read-only data that no other thread of the block reads.
__device__ __forceinline__ uint4 load_stream(const uint4* pointer) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer));
    return value;
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* pointer) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* pointer) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t fetch_add_acq_rel(uint32_t* pointer, uint32_t value) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(pointer), "r"(value) : "memory");
    return before;
}

// ---- programmatic dependent launch ---------------------------------------------------------------------------------

// Lets the next kernel of the stream begin; what it reads of this one it reads after wait_dependencies().
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the kernels before this one have finished and their writes are visible.
__device__ __forceinline__ void wait_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- 16-bit and 8-bit floating point, packed: the low half is the lower address ------------------------------------

__device__ __forceinline__ uint16_t float_to_bf16(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ float f16_to_float(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ uint32_t float2_to_f16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint16_t packed) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
    return halves;
}
// ---- tensor cores: d += a · b, m16n8k16, all lanes of a warp -------------------------------------------------------

__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif  // PENSTOCK_EMULATION

// ---- made of the above, the same on a device and in the emulation --------------------------------------------------

__device__ __forceinline__ float bf16_to_float(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
__device__ __forceinline__ float2 bf16x2_to_float2(uint32_t packed) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}
__device__ __forceinline__ float2 f16x2_to_float2(uint32_t packed) {
    return make_float2(f16_to_float(uint16_t(packed & 0xffffu)), f16_to_float(uint16_t(packed >> 16)));
}
__device__ __forceinline__ float4 e4m3x4_to_float4(uint32_t packed) {
    const float2 low = f16x2_to_float2(e4m3x2_to_f16x2(uint16_t(packed & 0xffffu)));
    const float2 high = f16x2_to_float2(e4m3x2_to_f16x2(uint16_t(packed >> 16)));
    return make_float4(low.x, low.y, high.x, high.y);
}

// The blocks of a grid that is resident as a whole (a cooperative launch) wait for each other. One block adds what brings
// the sum of a round to 2^31: the top bit of the counter changes when the last one arrives. So it never overflows, and a
// counter that was zeroed once serves every later launch.
constexpr uint32_t GRID_PHASE = 0x80000000u;

// What this thread's block wrote before is visible to those that wait. All threads of the block; returns the counter as it
// was to the first one, and nothing to the others.
__device__ __forceinline__ uint32_t grid_arrive(uint32_t* counter) {
    __syncthreads();
    if ((threadIdx.x | threadIdx.y | threadIdx.z) != 0) return 0;
    const uint32_t blocks = gridDim.x * gridDim.y * gridDim.z;
    const bool first = (blockIdx.x | blockIdx.y | blockIdx.z) == 0;
    __threadfence();
    return fetch_add_acq_rel(counter, first ? GRID_PHASE - (blocks - 1) : 1u);
}

// One thread, until all blocks have arrived; `phase`: the top bit of the counter before that.
__device__ __forceinline__ void grid_wait(const uint32_t* counter, uint32_t phase) {
    while (((phase ^ load_acquire(counter)) & GRID_PHASE) == 0) {
    }
    __threadfence();
}

// Both, for all threads of all blocks. What a thread wrote before is visible to all after.
__device__ __forceinline__ void grid_barrier(uint32_t* counter) {
    const uint32_t before = grid_arrive(counter);
    if ((threadIdx.x | threadIdx.y | threadIdx.z) == 0) grid_wait(counter, before);
    __syncthreads();
}
