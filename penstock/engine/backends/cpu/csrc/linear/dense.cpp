// Dense float32 linears, batch-invariant: every sum runs over the input in one order.
//
// W is cut into tiles of 16 output columns, stored input by input, so a row's sums advance together through the depth:
// the number of rows computed together only decides how often a loaded weight is used.

#include "common/context.h"
#include "common/simd.h"
#include "common/recorded_call.h"
#include "linear/output_tile.h"

using namespace pk::PK_SET;

namespace {

constexpr int kVectors = kTile / VL;

template <class T, int MR>
void tile_rows(const T* x, int64_t depth, const float* w, float* y) {
    vf acc[MR][kVectors];
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < kVectors; ++c) acc[m][c] = splat(0.0f);
    for (int64_t k = 0; k < depth; ++k, w += kTile) {
        vf column[kVectors];
        for (int c = 0; c < kVectors; ++c) column[c] = load(w + c * VL);
        for (int m = 0; m < MR; ++m) {
            const vf value = splat(to_float(x[m * depth + k]));
            for (int c = 0; c < kVectors; ++c) acc[m][c] += value * column[c];
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < kVectors; ++c) store(y + m * kTile + c * VL, acc[m][c]);
}

template <class T, class O>
void dense_tiles(const DenseArgs& a, int64_t begin, int64_t end) {
    float y[4 * kTile];
    for (int64_t t = begin; t < end; ++t) {
        const float* w = a.weights + t * a.depth * kTile;
        for (int64_t row = 0; row < a.rows;) {
            const T* x = static_cast<const T*>(a.x) + row * a.depth;
            const int taken = a.rows - row >= 4 ? 4 : 1;
            if (taken == 4)
                tile_rows<T, 4>(x, a.depth, w, y);
            else
                tile_rows<T, 1>(x, a.depth, w, y);
            write_tile(y, taken, static_cast<O*>(a.out) + row * a.columns, a.columns, t * kTile, a.bias);
            row += taken;
        }
    }
}

}  // namespace

PK_FUNCTION(void, pk_dense)(Context* ctx, const DenseArgs* args) {
    Guard hold(ctx->busy);
    const DenseArgs& a = *args;
    dispatch(a.dtype, [&](auto* t) {
        dispatch(a.out_dtype, [&](auto* o) {
            ctx->pool.rows((a.columns + kTile - 1) / kTile, 1, [&](int64_t begin, int64_t end, int) {
                dense_tiles<elem<decltype(t)>, elem<decltype(o)>>(a, begin, end);
            });
        });
    });
}

PK_RECORDABLE(pk_dense)
