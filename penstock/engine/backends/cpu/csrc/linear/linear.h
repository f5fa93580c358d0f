// What the forms of a linear share: the layout of the packed weights, prefetching, writing outputs.
//
// W is cut into tiles of 16 output columns. A tile is its quantized blocks (layout in dot.h), then the blocks'
// float16 scales, then, for 4 bits, their float16 minima: w = scale * q + minimum.

#pragma once

#include "common/context.h"
#include "elementwise/gate.h"
#include "linear/dot.h"

namespace pk::PK_SET {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Tile {
    const uint8_t* q;
    const f16* scale;
    const f16* minimum;
};

inline int64_t tile_bytes(int64_t blocks, int bits) {
    if (bits == 16) return blocks * kDepth * kColumns * 2;
    return round_up(blocks * (bits == 4 ? Q4::kBytes + 4 * kColumns : Q8::kBytes + 2 * kColumns), 64);
}

inline Tile tile_at(const uint8_t* base, int64_t blocks, int bits, int64_t index) {
    const uint8_t* q = base + index * tile_bytes(blocks, bits);
    const f16* scale = reinterpret_cast<const f16*>(q + blocks * (bits == 4 ? Q4::kBytes : Q8::kBytes));
    return {q, scale, scale + blocks * kColumns};
}

constexpr int64_t kFarAhead = 32768;
constexpr int64_t kAhead = 4096;  // bytes; weights come from memory once per step and the hardware looks less far

PK_INLINE void prefetch(const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Further ahead and into the second-level cache, which has several times as many reads under way.
PK_INLINE void prefetch_far(const uint8_t* from, int64_t bytes) {
#if defined(PK_AVX512)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + kFarAhead + i, 0, 2);
#else
    (void)from, (void)bytes;
#endif
}

// Outputs [row, row + rows) x [column, column + width), bias added: value(m, i) is the vector at column i of row m.
template <class O, class F>
PK_INLINE void write_columns(const LinearArgs& a, int64_t row, int rows, int64_t column, int width, F&& value) {
    width = int(std::min<int64_t>(width, a.columns - column));
    for (int m = 0; m < rows; ++m) {
        O* out = static_cast<O*>(a.out) + (row + m) * a.columns + column;
        for (int i = 0; i < width; i += VL) {
            const int n = std::min(VL, width - i);
            vf v = value(m, i);
            if (a.bias) v += n == VL ? load(a.bias + column + i) : load_part(a.bias + column + i, n);
            if (n == VL)
                store(out + i, v);
            else
                store_part(out + i, v, n);
        }
    }
}

}  // namespace pk::PK_SET
