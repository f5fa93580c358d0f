// Writing out a finished tile of 16 output columns, the last of which may not exist.

#pragma once

#include "common/simd.h"

namespace pk::PK_SET {

constexpr int kTile = 16;

// Rows of y [rows, 16] to columns [column, column + 16) of out [.., columns], which begins at the first row; bias added.
template <class O>
PK_INLINE void write_tile(const float* y, int rows, O* out, int64_t columns, int64_t column, const float* bias) {
    const int width = int(std::min<int64_t>(kTile, columns - column));
    for (int m = 0; m < rows; ++m, out += columns)
        for (int i = 0; i < width; i += VL) {
            const int n = std::min(VL, width - i);
            vf v = load(y + m * kTile + i);
            if (bias) v += load_part(bias + column + i, n);
            store_part(out + column + i, v, n);
        }
}

}  // namespace pk::PK_SET
