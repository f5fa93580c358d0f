// What the emulation has to do as a device does it: conversions and tensor cores. What it has to find: mistakes.
#include "device.cuh"

// One thread per code of 16 bits, and per value.
extern "C" __global__ void __launch_bounds__(256) conversions(const float* values, float* from_f16, float* from_bf16,
                                                              float* from_e4m3, uint16_t* to_f16, uint16_t* to_bf16,
                                                              uint8_t* to_e4m3, uint32_t* packed) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    from_f16[i] = f16_to_float(uint16_t(i));
    from_bf16[i] = bf16x2_to_float2(i << 16 | 1).y;
    from_e4m3[i] = e4m3x4_to_float4(i << 16).w;  // the upper byte of the code
    to_f16[i] = float_to_f16(values[i]);
    to_bf16[i] = uint16_t(float2_to_bf16x2(1.0f, values[i]) >> 16);
    to_e4m3[i] = uint8_t(float2_to_e4m3x2(values[i], 1.0f));
    const float other = __shfl_down_sync(~0u, values[i], 1);
    packed[2 * i] = fma_f16x2(float2_to_f16x2(values[i], other), float2_to_f16x2(other, 0.5f), float2_to_f16x2(1.0f, other));
    packed[2 * i + 1] = fma_bf16x2(float2_to_bf16x2(values[i], other), float2_to_bf16x2(other, 0.5f), float2_to_bf16x2(1.0f, other));
}

// d (16 x 8) += a (16 x 16) · b (16 x 8), all stored by rows.
extern "C" __global__ void __launch_bounds__(32) tensor_cores(const uint16_t* a, const uint16_t* b, float* d) {
    const uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4;
    const auto pair = [](uint16_t low, uint16_t high) { return uint32_t(low) | uint32_t(high) << 16; };
    uint32_t left[4], right[2];
    for (uint32_t i = 0; i < 4; i++) {
        const uint16_t* at = a + (g + 8 * (i & 1)) * 16 + 2 * t + 8 * (i >> 1);
        left[i] = pair(at[0], at[1]);
    }
    for (uint32_t i = 0; i < 2; i++) right[i] = pair(b[(2 * t + 8 * i) * 8 + g], b[(2 * t + 1 + 8 * i) * 8 + g]);
    float sum[4];
    for (uint32_t i = 0; i < 4; i++) sum[i] = d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)];
    mma_bf16(sum, left, right);
    for (uint32_t i = 0; i < 4; i++) d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = sum[i];
}

// 32 threads, 256 bytes of shared memory, and one mistake. Never on a device.
extern "C" __global__ void fault(float* out, int32_t which) {
    DYNAMIC_SHARED(smem);
    float* values = reinterpret_cast<float*>(smem);
    uint64_t* barrier = reinterpret_cast<uint64_t*>(smem + 128);
    const int32_t i = int32_t(threadIdx.x);
    if (i == 0) mbarrier_init(barrier, 1);
    __syncthreads();
    if (which == 1 && i != 7) __syncthreads();                         // a barrier that one thread does not reach
    if (which == 2) values[64 + i * 4] = 1.0f;                         // behind shared memory
    if (which == 3 && i < 16) out[i] = __shfl_xor_sync(~0u, 1.0f, 1);  // half a warp with the mask of a whole one
    if (which == 4) mbarrier_wait(barrier, 0);                         // nobody arrives
    if (which == 5 && i == 0) {                                        // counts twice what it copies
        mbarrier_arrive_expect(barrier, 128);
        bulk_load(smem, out, 64, barrier);
    }
    if (which == 5) mbarrier_wait(barrier, 0);
    if (which == 6 && i == 0) mbarrier_arrive(barrier), mbarrier_arrive_expect(barrier, 16), mbarrier_arrive(barrier);
    if (which == 7 && i == 0) *reinterpret_cast<uint4*>(smem + 8) = make_uint4(0, 0, 0, 0);  // not aligned
    if (which == 8) out[32 + i] = 1.0f;                                // behind global memory
    if (which == 9 && blockIdx.x == 0) grid_barrier(reinterpret_cast<uint32_t*>(out));       // one block of two
    if (which == 10) {                                                 // a missing __syncthreads
        values[i] = float(i);
        out[i] = values[31 - i];
    }
}
