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
    static constexpr int quads = PIECE / 8;
    uint4 inputs[L::columns][quads], gains[L::columns][quads];

    // Of the first of a lane's inputs of column c: its number within the row.
    static __device__ __forceinline__ int place(int c) {
        const int unit = int(threadIdx.x) / 32 % L::slices + c * L::slices;
        return (unit * 32 + int(threadIdx.x) % 32) * PIECE;
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

// Tensor cores: a product of 16 rows by 16 columns with 8 vectors, of which a lane's weights meet its own inputs alone in
// the elements of the diagonal. So nothing moves between lanes: of the matrix, lane l has rows l / 4 and l / 4 + 8 (two
// rows of the weights), of the vectors it has a part of the (l / 4)-th. Weights are float16 there, exactly, and the inputs
// too: scaled by a power of two for each warp, so that they fit and lose nothing.
template <class L>
struct Inputs {
    static constexpr int words = PIECE / 2;
    uint32_t pairs[L::columns][words];
    float unscale;

    // Returns the sum of the squares of what was loaded, before the gains.
    __device__ __forceinline__ float take(const Loaded<L>& loaded) {
        float squares = 0.0f, ignored = 0.0f, peak = 0.0f;
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const float2 pair = loaded.pair(c, i, ignored);
                peak = fmaxf(peak, fmaxf(fabsf(pair.x), fabsf(pair.y)));
            }
        const uint32_t exponent = max(15u, __reduce_max_sync(ALL, __float_as_uint(peak) >> 23));
        const float scale = __uint_as_float((268 - exponent) << 23);
        unscale = __uint_as_float((exponent - 14) << 23);
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const float2 pair = loaded.pair(c, i, squares);
                pairs[c][i] = float2_to_f16x2(pair.x * scale, pair.y * scale);
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
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint2 upper = e4m3x4_to_f16x4(even[i]), lower = e4m3x4_to_f16x4(odd[i]);
            const uint32_t a[4] = {upper.x, lower.x, upper.y, lower.y};
            const uint32_t b[2] = {inputs.pairs[c][2 * i], inputs.pairs[c][2 * i + 1]};
            mma_f16(tiles[r / 2], a, b);
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
