// How the warps of a chain multiply: the inputs of a lane, kept in registers for a whole product, and its sums.
#pragma once
#include "chain_links.cuh"

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) value += __shfl_xor_sync(ALL, value, mask);
    return value;
}

// Sums of four values over the lanes; lanes 8 r to 8 r + 7 have that of the r-th.
__device__ __forceinline__ float sum_rows(const float (&sums)[ROWS]) {
    const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    float a = upper ? sums[2] : sums[0], b = upper ? sums[3] : sums[1];
    a += __shfl_xor_sync(ALL, upper ? sums[0] : sums[2], 16);
    b += __shfl_xor_sync(ALL, upper ? sums[1] : sums[3], 16);
    float c = (odd ? b : a) + __shfl_xor_sync(ALL, odd ? a : b, 8);
#pragma unroll
    for (int mask = 4; mask; mask >>= 1) c += __shfl_xor_sync(ALL, c, mask);
    return c;
}

__device__ __forceinline__ void words_of(uint32_t (&words)[4], uint4 from) {
    words[0] = from.x;
    words[1] = from.y;
    words[2] = from.z;
    words[3] = from.w;
}

// The inputs of a lane's columns as they are stored, and the gains of the norm before them.
template <class L>
struct Loaded {
    static constexpr int quads = L::per_lane / 8;
    uint4 inputs[L::columns][quads], gains[L::columns][quads];

    // Of the first of a lane's inputs of column c: its number within the row.
    static __device__ __forceinline__ int place(int c) {
        const int unit = int(threadIdx.x) / 32 % L::slices + c * L::slices;
        return (unit * 32 + int(threadIdx.x) % 32) * L::per_lane;
    }

    // Constants: on their way before the inputs are there.
    __device__ __forceinline__ void load_gains(const uint16_t* norm) {
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int q = 0; q < quads; ++q)
                gains[c][q] = place(c) < L::inputs ? load_stream(reinterpret_cast<const uint4*>(norm + place(c)) + q)
                                                   : make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void load_inputs(const uint16_t* x) {
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int q = 0; q < quads; ++q)
                inputs[c][q] = place(c) < L::inputs ? load_fresh(reinterpret_cast<const uint4*>(x + place(c)) + q)
                                                    : make_uint4(0, 0, 0, 0);
    }

    // The i-th pair of a unit, with its gains; `squares` grows by its squares.
    __device__ __forceinline__ float2 pair(int c, int i, float& squares) const {
        uint32_t words[4], by[4];
        words_of(words, inputs[c][i / 4]);
        float2 found = bf16x2_to_float2(words[i % 4]);
        if constexpr (L::norm) {
            squares += found.x * found.x + found.y * found.y;
            words_of(by, gains[c][i / 4]);
            const float2 gain = bf16x2_to_float2(by[i % 4]);
            found.x *= gain.x;
            found.y *= gain.y;
        }
        return found;
    }
};

#if TENSOR
// Tensor cores: a product of 16 rows by 16 columns with 8 vectors, of which a lane's weights meet its own inputs alone in
// the elements of the diagonal. So nothing moves between lanes: of the matrix, lane l has rows l / 4 and l / 4 + 8 (two
// rows of the weights), of the vectors it has a part of the (l / 4)-th. E4m3 weights are float16 there, exactly, and the
// inputs too: scaled by a power of two for each warp, so that they fit and lose nothing. Of bfloat16 inputs with gains the
// rounding errors are a second vector.
template <class L>
struct Inputs {
    static constexpr int words = L::per_lane / 2;
    static constexpr bool split = !L::fp8 && L::norm;
    uint32_t high[L::columns][words], low[split ? L::columns : 1][words];
    float unscale;

    __device__ __forceinline__ float take(const Loaded<L>& loaded) {
        float squares = 0.0f, ignored = 0.0f, scale = 1.0f;
        unscale = 1.0f;
        if constexpr (L::fp8) {
            float peak = 0.0f;
#pragma unroll
            for (int c = 0; c < L::columns; ++c)
#pragma unroll
                for (int i = 0; i < words; ++i) {
                    const float2 pair = loaded.pair(c, i, ignored);
                    peak = fmaxf(peak, fmaxf(fabsf(pair.x), fabsf(pair.y)));
                }
            const uint32_t exponent = max(15u, __reduce_max_sync(ALL, __float_as_uint(peak) >> 23));
            scale = __uint_as_float((268 - exponent) << 23);
            unscale = __uint_as_float((exponent - 14) << 23);
        }
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const float2 pair = loaded.pair(c, i, squares);
                if constexpr (L::fp8) {
                    high[c][i] = float2_to_f16x2(pair.x * scale, pair.y * scale);
                } else {
                    high[c][i] = float2_to_bf16x2(pair.x, pair.y);
                    if constexpr (split) {
                        const float2 kept = bf16x2_to_float2(high[c][i]);
                        low[c][i] = float2_to_bf16x2(pair.x - kept.x, pair.y - kept.y);
                    }
                }
            }
        return squares;
    }
};

template <class L>
struct Sums {
    float tiles[ROWS / 2][4] = {};

    // Rows r and r + 1 of a stage.
    __device__ __forceinline__ void add(uint4 first, uint4 second, int r, const Inputs<L>& inputs, int c) {
        uint32_t even[4], odd[4];
        words_of(even, first);
        words_of(odd, second);
        if constexpr (L::fp8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint2 upper = e4m3x4_to_f16x4(even[i]), lower = e4m3x4_to_f16x4(odd[i]);
                const uint32_t a[4] = {upper.x, lower.x, upper.y, lower.y};
                const uint32_t b[2] = {inputs.high[c][2 * i], inputs.high[c][2 * i + 1]};
                mma_f16(tiles[r / 2], a, b);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const uint32_t a[4] = {even[i], odd[i], even[i + 1], odd[i + 1]};
                const uint32_t b[2] = {inputs.high[c][i], inputs.high[c][i + 1]};
                mma_bf16(tiles[r / 2], a, b);
                if constexpr (Inputs<L>::split) {
                    const uint32_t rest[2] = {inputs.low[c][i], inputs.low[c][i + 1]};
                    mma_bf16(tiles[r / 2], a, rest);
                }
            }
        }
    }

    // This lane's part of the sum of each row.
    __device__ __forceinline__ void get(float (&found)[ROWS], const Inputs<L>& inputs) const {
        const int vector = threadIdx.x % 32 / 4;
        const bool diagonal = int(threadIdx.x) % 4 == vector / 2;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float value = vector % 2 ? tiles[r / 2][r % 2 * 2 + 1] : tiles[r / 2][r % 2 * 2];
            found[r] = diagonal ? value * inputs.unscale : 0.0f;
        }
    }
};
#else
// Ordinary arithmetic in float32. Many inputs are kept in bfloat16.
template <class L>
struct Inputs {
    static constexpr bool wide = L::columns * L::per_lane <= 32;
    float values[wide ? L::columns : 1][L::per_lane];
    uint32_t pairs[wide ? 1 : L::columns][L::per_lane / 2];

    __device__ __forceinline__ float take(const Loaded<L>& loaded) {
        float squares = 0.0f;
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int i = 0; i < L::per_lane / 2; ++i) {
                const float2 pair = loaded.pair(c, i, squares);
                if constexpr (wide) {
                    values[c][2 * i] = pair.x;
                    values[c][2 * i + 1] = pair.y;
                } else {
                    pairs[c][i] = float2_to_bf16x2(pair.x, pair.y);
                }
            }
        return squares;
    }
};

template <class L>
struct Sums {
    float rows[ROWS] = {};

    __device__ __forceinline__ void add(uint4 first, uint4 second, int r, const Inputs<L>& inputs, int c) {
        float x[L::per_lane];
#pragma unroll
        for (int i = 0; i < L::per_lane / 2; ++i) {
            if constexpr (Inputs<L>::wide) {
                x[2 * i] = inputs.values[c][2 * i];
                x[2 * i + 1] = inputs.values[c][2 * i + 1];
            } else {
                const float2 pair = bf16x2_to_float2(inputs.pairs[c][i]);
                x[2 * i] = pair.x;
                x[2 * i + 1] = pair.y;
            }
        }
        rows[r] = multiply(rows[r], first, x);
        rows[r + 1] = multiply(rows[r + 1], second, x);
    }

    static __device__ __forceinline__ float multiply(float sum, uint4 weights, const float (&x)[L::per_lane]) {
        uint32_t words[4];
        words_of(words, weights);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (L::fp8) {
                const uint2 halves = e4m3x4_to_f16x4(words[i]);
                const float2 low = f16x2_to_float2(halves.x), high = f16x2_to_float2(halves.y);
                sum = fmaf(low.x, x[4 * i], sum);
                sum = fmaf(low.y, x[4 * i + 1], sum);
                sum = fmaf(high.x, x[4 * i + 2], sum);
                sum = fmaf(high.y, x[4 * i + 3], sum);
            } else {
                const float2 w = bf16x2_to_float2(words[i]);
                sum = fmaf(w.x, x[2 * i], sum);
                sum = fmaf(w.y, x[2 * i + 1], sum);
            }
        }
        return sum;
    }

    __device__ __forceinline__ void get(float (&found)[ROWS], const Inputs<L>&) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) found[r] = rows[r];
    }
};
#endif
