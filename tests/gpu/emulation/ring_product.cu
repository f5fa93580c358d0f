// y = W x of fp8 weights with a scale per row, then z = y / |y| in bfloat16: one cooperative launch. Every lane streams its
// part of its warp's rows through a ring of its own; a grid barrier separates the two phases.
#include "device.cuh"

#ifndef STAGES
#define STAGES 3
#endif
#ifndef CHUNK
#define CHUNK 512  // bytes of a row that a warp copies at once: 16 of every lane
#endif

struct Shape {
    int32_t rows, columns;
};

extern "C" __global__ void __launch_bounds__(128) ring_product(const uint8_t* weights, const float* scales,
                                                               const float* x, float* y, uint16_t* z,
                                                               uint32_t* counter, Shape shape) {
    DYNAMIC_SHARED(smem);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    unsigned char* ring = smem + warp * STAGES * CHUNK + lane * 16;
    wait_dependencies();

    const int32_t chunks = shape.columns / CHUNK, stride = int32_t(gridDim.x * warps);
    const int32_t first = int32_t(blockIdx.x * warps + warp);
    const int32_t mine = shape.rows > first ? (shape.rows - first + stride - 1) / stride * chunks : 0;
    const auto load = [&](int32_t step) {
        if (step < mine) {
            const int64_t row = first + int64_t(step / chunks) * stride;
            cp_async_16(ring + step % STAGES * CHUNK, weights + row * shape.columns + step % chunks * CHUNK + lane * 16);
        }
        cp_async_commit();  // behind the last one too: waits count groups
    };
    for (int32_t step = 0; step < STAGES; step++) load(step);

    float sum = 0;
    for (int32_t step = 0; step < mine; step++) {
        cp_async_wait<STAGES - 1>();
        const uint4 packed = *reinterpret_cast<const uint4*>(ring + step % STAGES * CHUNK);
        load(step + STAGES);
        const float* at = x + step % chunks * CHUNK + lane * 16;
        const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
        for (int i = 0; i < 4; i++) {
            const float4 w = e4m3x4_to_float4(words[i]);
            sum = fmaf(w.x, at[4 * i], fmaf(w.y, at[4 * i + 1], fmaf(w.z, at[4 * i + 2], fmaf(w.w, at[4 * i + 3], sum))));
        }
        if (step % chunks == chunks - 1) {
            for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            const int32_t row = first + step / chunks * stride;
            if (lane == 0) y[row] = sum * scales[row];
            sum = 0;
        }
    }
    grid_barrier(counter);

    float squares = 0;
    for (int32_t row = int32_t(lane); row < shape.rows; row += 32) squares = fmaf(y[row], y[row], squares);
    for (int lanes = 16; lanes; lanes /= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
    const float factor = rsqrtf(squares);
    for (int32_t row = int32_t(blockIdx.x * blockDim.x + threadIdx.x); row < shape.rows; row += int32_t(gridDim.x * blockDim.x))
        z[row] = float_to_bf16(y[row] * factor);
}
