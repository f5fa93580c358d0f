// Linears in float16 vectors, for CPUs that have them: many rows at twice the lanes of float32.

#pragma once

#include "linear/neon/float16_kernel.h"
#include "linear/linear.h"

#if defined(PK_HALF)

namespace pk::PK_SET {

template <class O>
void linear_half(const LinearArgs& a, const f16* x, const float* scales, int64_t begin, int64_t end, f16* wide) {
    float y[kHalfRows * kColumns];
    const int64_t blocks = a.depth / kDepth;
    for (int64_t t = begin; t < end; ++t) {
        const Tile tile = tile_at(a.weights, blocks, a.bits, t);
        if (a.bits == 4)
            widen_half4(tile.q, tile.scale, tile.minimum, blocks, wide);
        else
            widen_half8(tile.q, tile.scale, blocks, wide);
        const int64_t bytes = tile_bytes(blocks, a.bits), share = round_up(bytes * kHalfRows / a.rows, 64);
        for (int64_t row = 0; row < a.rows; row += kHalfRows) {
            const int rows = int(std::min<int64_t>(kHalfRows, a.rows - row));
            if (t + 1 < end) prefetch(tile.q + bytes + row / kHalfRows * share, share);
            if (rows > 4)
                half_rows<8>(wide, x + row * a.depth, a.depth, y);
            else
                half_rows<4>(wide, x + row * a.depth, a.depth, y);
            write_columns<O>(a, row, rows, t * kColumns, kColumns, [&](int m, int i) {
                return load(y + m * kColumns + i) * splat(scales[row + m]);
            });
        }
    }
}

inline void linear_float16(Context* ctx, const LinearArgs& a) {
    const int64_t rows = round_up(a.rows, kHalfRows), groups = rows / kHalfRows;
    f16* x = static_cast<f16*>(ctx->shared.reserve(size_t(rows) * (a.depth * sizeof(f16) + sizeof(float))));
    float* scales = reinterpret_cast<float*>(x + rows * a.depth);
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(groups, std::max<int64_t>(1, 32768 / (a.depth * kHalfRows)), [&](int64_t begin, int64_t end, int) {
            for (int64_t g = begin; g < end; ++g)
                pack_half_rows(static_cast<const T*>(a.x) + g * kHalfRows * a.depth, a.rows - g * kHalfRows, a.depth,
                               x + g * kHalfRows * a.depth, scales + g * kHalfRows);
        });
    });
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].reserve(size_t(a.depth) * kColumns * sizeof(f16));
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        ctx->pool.rows(round_up(a.columns, kColumns) / kColumns, 1, [&](int64_t begin, int64_t end, int thread) {
            linear_half<O>(a, x, scales, begin, end, static_cast<f16*>(ctx->scratch[thread].reserve(0)));
        });
    });
}

}  // namespace pk::PK_SET

#endif
