// The part of CUDA C++ that the kernels use, for g++: built-ins, and the functions that device.cuh writes in PTX.
#pragma once

#include "fibers.h"
#include "minifloat.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __shared__ static_assert(false, "shared memory is dynamic only: use DYNAMIC_SHARED");

#define threadIdx (::emulation::self().thread)
#define blockIdx (::emulation::self().block->index)
#define blockDim (::emulation::grid->block)
#define gridDim (::emulation::grid->grid)
#define warpSize 32
#define DYNAMIC_SHARED(name) unsigned char* const name = ::emulation::self().block->shared

#define PENSTOCK_VECTOR(type, scalar, count, bytes, members, params, values) \
    struct alignas(bytes) type {                                             \
        scalar members;                                                      \
    };                                                                       \
    inline type make_##type params { return type{values}; }
#define PENSTOCK_LIST(...) __VA_ARGS__
#define PENSTOCK_VECTORS(name, scalar)                                                                          \
    PENSTOCK_VECTOR(name##2, scalar, 2, 2 * sizeof(scalar), PENSTOCK_LIST(x, y), (scalar x, scalar y), PENSTOCK_LIST(x, y)) \
    PENSTOCK_VECTOR(name##4, scalar, 4, (4 * sizeof(scalar) > 16 ? 16 : 4 * sizeof(scalar)), PENSTOCK_LIST(x, y, z, w),     \
                    (scalar x, scalar y, scalar z, scalar w), PENSTOCK_LIST(x, y, z, w))
PENSTOCK_VECTORS(float, float)
PENSTOCK_VECTORS(int, int)
PENSTOCK_VECTORS(uint, unsigned)
PENSTOCK_VECTORS(ushort, unsigned short)
PENSTOCK_VECTORS(uchar, unsigned char)
struct float3 { float x, y, z; };
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }

// ---- bits and numbers ----------------------------------------------------------------------------------------------

template <class To, class From>
inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
inline uint32_t __float_as_uint(float v) { return bits_as<uint32_t>(v); }
inline int32_t __float_as_int(float v) { return bits_as<int32_t>(v); }
inline float __uint_as_float(uint32_t v) { return bits_as<float>(v); }
inline float __int_as_float(int32_t v) { return bits_as<float>(v); }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __popcll(uint64_t v) { return __builtin_popcountll(v); }
inline int __ffs(int32_t v) { return __builtin_ffs(v); }
inline int __clz(int32_t v) { return v ? __builtin_clz(static_cast<uint32_t>(v)) : 32; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t all = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t which = selector >> (4 * i) & 0xf;
        uint32_t byte = static_cast<uint32_t>(all >> (8 * (which & 7)) & 0xff);
        if (which & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
    return c;
}
inline float __expf(float v) { return expf(v); }
inline float __exp2f(float v) { return exp2f(v); }
inline float __logf(float v) { return logf(v); }
inline float __sinf(float v) { return sinf(v); }
inline float __cosf(float v) { return cosf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline float __frsqrt_rn(float v) { return rsqrtf(v); }
inline float __saturatef(float v) { return v > 0 ? (v < 1 ? v : 1.0f) : 0.0f; }
inline int __float2int_rn(float v) { return static_cast<int>(nearbyintf(v)); }
inline int __float2int_rz(float v) { return static_cast<int>(v); }
inline float __int2float_rn(int v) { return static_cast<float>(v); }
inline float __uint2float_rn(uint32_t v) { return static_cast<float>(v); }
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
inline void sincosf_(float v, float* s, float* c) { *s = sinf(v), *c = cosf(v); }

// ---- warps and blocks ----------------------------------------------------------------------------------------------

inline void __syncthreads() {
    ::emulation::block_barrier(blockDim.x * blockDim.y * blockDim.z);
}
inline void __syncwarp(uint32_t mask = ~0u) {
    ::emulation::collective(::emulation::Collective::sync, mask, 0, 0, "__syncwarp");
}

template <class T>
inline T shuffle(uint32_t mask, T value, uint32_t source, const char* what) {
    static_assert(sizeof(T) <= 8, "");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = ::emulation::collective(::emulation::Collective::shuffle, mask, bits, source, what);
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline uint32_t lane_id() { return ::emulation::self().lane; }
template <class T>
inline T __shfl_sync(uint32_t mask, T value, int lane, int width = 32) {
    const uint32_t w = static_cast<uint32_t>(width);
    return shuffle(mask, value, (lane_id() & ~(w - 1)) | (static_cast<uint32_t>(lane) & (w - 1)), "__shfl_sync");
}
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T value, int lanes, int width = 32) {
    const uint32_t source = lane_id() ^ static_cast<uint32_t>(lanes);
    const uint32_t end = (lane_id() | static_cast<uint32_t>(width - 1)) + 1;
    return shuffle(mask, value, source < end ? source : lane_id(), "__shfl_xor_sync");
}
template <class T>
inline T __shfl_down_sync(uint32_t mask, T value, unsigned lanes, int width = 32) {
    const uint32_t source = lane_id() + lanes, end = (lane_id() | static_cast<uint32_t>(width - 1)) + 1;
    return shuffle(mask, value, source < end ? source : lane_id(), "__shfl_down_sync");
}
template <class T>
inline T __shfl_up_sync(uint32_t mask, T value, unsigned lanes, int width = 32) {
    const uint32_t begin = lane_id() & ~static_cast<uint32_t>(width - 1);
    return shuffle(mask, value, lane_id() >= begin + lanes ? lane_id() - lanes : lane_id(), "__shfl_up_sync");
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
    return static_cast<uint32_t>(
        ::emulation::collective(::emulation::Collective::ballot, mask, predicate != 0, 0, "__ballot_sync"));
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <class T, class Combine>
inline T reduce_lanes(uint32_t mask, T value, Combine combine) {
    T result{};
    bool first = true;
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        const T other = __shfl_sync(mask, value, lane);
        result = first ? other : combine(result, other);
        first = false;
    }
    return result;
}
template <class T>
inline T __reduce_add_sync(uint32_t mask, T value) { return reduce_lanes(mask, value, [](T a, T b) { return a + b; }); }
template <class T>
inline T __reduce_max_sync(uint32_t mask, T value) { return reduce_lanes(mask, value, [](T a, T b) { return a < b ? b : a; }); }
template <class T>
inline T __reduce_min_sync(uint32_t mask, T value) { return reduce_lanes(mask, value, [](T a, T b) { return b < a ? b : a; }); }

// ---- memory that threads share -------------------------------------------------------------------------------------

template <class T, class Change>
inline T atomic_change(T* pointer, Change change) {
    const T before = *pointer;
    *pointer = change(before);
    ::emulation::happened();
    ::emulation::give_way();
    return before;
}
template <class T>
using Plain = std::common_type_t<T>;  // the value may be of another type, as for CUDA's overloads
template <class T>
inline T atomicAdd(T* p, Plain<T> v) { return atomic_change(p, [=](T old) { return T(old + v); }); }
template <class T>
inline T atomicSub(T* p, Plain<T> v) { return atomic_change(p, [=](T old) { return T(old - v); }); }
template <class T>
inline T atomicMax(T* p, Plain<T> v) { return atomic_change(p, [=](T old) { return old < v ? v : old; }); }
template <class T>
inline T atomicMin(T* p, Plain<T> v) { return atomic_change(p, [=](T old) { return v < old ? v : old; }); }
template <class T>
inline T atomicExch(T* p, Plain<T> v) { return atomic_change(p, [=](T) { return v; }); }
template <class T>
inline T atomicOr(T* p, Plain<T> v) { return atomic_change(p, [=](T old) { return old | v; }); }
template <class T>
inline T atomicAnd(T* p, Plain<T> v) { return atomic_change(p, [=](T old) { return old & v; }); }
template <class T>
inline T atomicCAS(T* p, Plain<T> expected, Plain<T> v) {
    return atomic_change(p, [=](T old) { return old == expected ? v : old; });
}

template <class T>
inline T __ldg(const T* pointer) { return *pointer; }
template <class T>
inline T __ldcg(const T* pointer) { return *pointer; }
template <class T>
inline T __ldcs(const T* pointer) { return *pointer; }
inline uint4 load_stream(const uint4* pointer) { return *pointer; }
template <class T>
inline T load_relaxed(const T* pointer) {
    ::emulation::give_way();
    return *const_cast<const volatile T*>(pointer);
}
template <class T>
inline T load_acquire(const T* pointer) { return load_relaxed(pointer); }
inline uint32_t fetch_add_acq_rel(uint32_t* pointer, uint32_t value) { return atomicAdd(pointer, value); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { ::emulation::give_way(); }
inline void __trap() { ::emulation::fail("__trap()"); }
inline void launch_dependents() {}
inline void wait_dependencies() {}

// ---- asynchronous copies -----------------------------------------------------------------------------------------

inline void cp_async_16(void* shared, const void* global) {
    const ::emulation::Copy copy{shared, global, 16};
    ::emulation::start_copy(copy, "cp_async_16");
    ::emulation::self().groups.back().push_back(copy);
}
inline void cp_async_commit() { ::emulation::self().groups.emplace_back(); }
template <int kGroups>
inline void cp_async_wait() {
    auto& groups = ::emulation::self().groups;
    while (groups.size() > kGroups + 1u) {
        for (const auto& copy : groups.front()) ::emulation::land(copy);
        groups.erase(groups.begin());
    }
}

// ---- 16-bit and 8-bit floating point -------------------------------------------------------------------------------

inline uint16_t float_to_bf16(float v) { return static_cast<uint16_t>(minifloat::bf16.encode(v)); }
inline float f16_to_float(uint16_t bits) { return static_cast<float>(minifloat::f16.decode(bits)); }
inline uint32_t pack_halves(uint32_t low, uint32_t high) { return low | high << 16; }
inline uint32_t float2_to_f16x2(float low, float high) {
    return pack_halves(minifloat::f16.encode(low), minifloat::f16.encode(high));
}
inline uint32_t e4m3x2_to_f16x2(uint16_t packed) {
    return pack_halves(minifloat::f16.encode(minifloat::e4m3.decode(packed & 0xff)),
                       minifloat::f16.encode(minifloat::e4m3.decode(packed >> 8)));
}

// ---- tensor cores --------------------------------------------------------------------------------------------------

// Lane 4·g + t holds rows g and g + 8 of a at columns 2t, 2t + 1 (and + 8), column g of b, and the same rows of d.
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    auto& held = ::emulation::self().warp->fragments;
    const uint32_t lane = lane_id(), g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) held[lane][i] = a[i];
    for (int i = 0; i < 2; i++) held[lane][4 + i] = b[i];
    __syncwarp();
    const auto half = [&](uint32_t packed, uint32_t k) { return static_cast<float>(minifloat::f16.decode(k & 1 ? packed >> 16 : packed & 0xffff)); };
    for (int i = 0; i < 4; i++) {
        const uint32_t column = 2 * t + (i & 1);
        for (uint32_t k = 0; k < 16; k++) {
            const uint32_t owner = k % 8 / 2, upper = k / 8;
            d[i] += half(held[4 * g + owner][2 * upper + (i >> 1)], k) * half(held[4 * column + owner][4 + upper], k);
        }
    }
    __syncwarp();
}
