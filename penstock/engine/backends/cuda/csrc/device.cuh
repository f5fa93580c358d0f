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

// ---- barriers of a block -------------------------------------------------------------------------------------------

__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(detail::shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(detail::shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(detail::shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(detail::shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(detail::shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------

__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

namespace detail {
__device__ __forceinline__ void bulk_load_hint(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                               uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
}  // namespace detail

// Starts at multiples of 16 bytes, and multiples of 16 long; `barrier` counts the bytes that have arrived.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(detail::shared_address(shared)), "l"(global), "r"(bytes), "r"(detail::shared_address(barrier))
        : "memory");
}
// Of what is read once: the first to leave the L2 cache.
__device__ __forceinline__ void bulk_load_once(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    detail::bulk_load_hint(shared, global, bytes, barrier, policy);
}
// Of what every token reads: the last to leave it.
__device__ __forceinline__ void bulk_load_keep(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    detail::bulk_load_hint(shared, global, bytes, barrier, policy);
}
__device__ __forceinline__ void bulk_prefetch(const void* global, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

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
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* pointer) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* pointer) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* pointer) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(uint32_t* pointer, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release(uint64_t* pointer, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(pointer), "l"(value) : "memory");
}
__device__ __forceinline__ void add_release(uint32_t* pointer, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
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

__device__ __forceinline__ uint32_t float2_to_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
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
__device__ __forceinline__ uint16_t float_to_f16(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
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
// Beyond ±448 becomes ±448.
__device__ __forceinline__ uint16_t float2_to_e4m3x2(float low, float high) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

#define PENSTOCK_PACKED(name, instruction)                                                       \
    __device__ __forceinline__ uint32_t name(uint32_t a, uint32_t b) {                            \
        uint32_t result;                                                                          \
        asm(instruction " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));                          \
        return result;                                                                            \
    }
#define PENSTOCK_PACKED_FMA(name, instruction)                                                   \
    __device__ __forceinline__ uint32_t name(uint32_t a, uint32_t b, uint32_t c) {                \
        uint32_t result;                                                                          \
        asm(instruction " %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));              \
        return result;                                                                            \
    }
PENSTOCK_PACKED(add_f16x2, "add.rn.f16x2")
PENSTOCK_PACKED(mul_f16x2, "mul.rn.f16x2")
PENSTOCK_PACKED(add_bf16x2, "add.rn.bf16x2")
PENSTOCK_PACKED(mul_bf16x2, "mul.rn.bf16x2")
PENSTOCK_PACKED_FMA(fma_f16x2, "fma.rn.f16x2")
PENSTOCK_PACKED_FMA(fma_bf16x2, "fma.rn.bf16x2")
#undef PENSTOCK_PACKED
#undef PENSTOCK_PACKED_FMA

// ---- tensor cores: d += a · b, m16n8k16, all lanes of a warp -------------------------------------------------------

#define PENSTOCK_MMA(name, type)                                                                                  \
    __device__ __forceinline__ void name(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {         \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                       \
                     ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                 \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                         \
    }
PENSTOCK_MMA(mma_bf16, "bf16")
PENSTOCK_MMA(mma_f16, "f16")
#undef PENSTOCK_MMA

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

__device__ __forceinline__ bool elect_one() { return (threadIdx.x & 31) == 0; }

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
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
