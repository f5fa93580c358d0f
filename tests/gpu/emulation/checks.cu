// What the emulation has to do as a device does it: conversions and tensor cores. What it has to find: mistakes.
#include "device.cuh"

// One thread per code of 16 bits, and per value.
extern "C" __global__ void __launch_bounds__(256) conversions(const float* values, float* from_f16, float* from_bf16,
                                                              float* from_e4m3, uint16_t* to_f16, uint16_t* to_bf16) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    from_f16[i] = f16_to_float(uint16_t(i));
    from_bf16[i] = bf16x2_to_float2(i << 16 | 1).y;
    from_e4m3[i] = e4m3x4_to_float4(i << 16).w;  // the upper byte of the code
    to_f16[i] = uint16_t(float2_to_f16x2(1.0f, values[i]) >> 16);
    to_bf16[i] = float_to_bf16(values[i]);
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
    mma_f16(sum, left, right);
    for (uint32_t i = 0; i < 4; i++) d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = sum[i];
}

// 32 threads, 256 bytes of shared memory, and one mistake. Never on a device.
extern "C" __global__ void fault(float* out, int32_t which) {
    DYNAMIC_SHARED(smem);
    float* values = reinterpret_cast<float*>(smem);
    const int32_t i = int32_t(threadIdx.x);
    if (which == 1 && i != 7) __syncthreads();                         // a barrier that one thread does not reach
    if (which == 2) values[64 + i * 4] = 1.0f;                         // behind shared memory
    if (which == 3 && i < 16) out[i] = __shfl_xor_sync(~0u, 1.0f, 1);  // half a warp with the mask of a whole one
    if (which == 4 && i == 0) *reinterpret_cast<uint4*>(smem + 8) = make_uint4(0, 0, 0, 0);  // not aligned
    if (which == 5) out[32 + i] = 1.0f;                                // behind global memory
    if (which == 6 && blockIdx.x == 0) grid_barrier(reinterpret_cast<uint32_t*>(out));       // one block of two
    if (which == 7) {                                                 // a missing __syncthreads
        values[i] = float(i);
        out[i] = values[31 - i];
    }
}
