// AMX tile registers: their shapes, and what is packed for them. The process must have been granted the registers, which
// it is before this instruction set is chosen (common/library.cpp).
//
// A register holds 16 rows of 64 bytes. A product adds rows of the left tile times columns of the right one to a tile of
// float32 or int32 sums; row r of a right-hand tile holds two (bfloat16) or four (int8) depths of every column.

#pragma once

#include "common/simd.h"

#if defined(PK_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512BF16__)
#define PK_AMX 1

namespace pk::PK_SET {

constexpr int kTileBytes = 1024;

struct alignas(64) TileShape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// The intrinsic of GCC 12 tells the compiler of the first eight bytes alone, which could then leave out what is stored to
// the others: registers without a shape, and an illegal instruction where one is used. The empty statement reads them all.
PK_INLINE void load_shape(const TileShape& shape) {
    asm volatile("" ::"m"(shape));
    _tile_loadconfig(&shape);
}

// Registers 0..3: sums; 4, 5: activations of the first and second 16 rows; 6, 7: weights.
// Loading the shape also zeroes them.
PK_INLINE void shape_tiles(int first, int second) {
    TileShape shape;
    const int rows[8] = {first, first, second, second, first, second, 16, 16};
    for (int i = 0; i < 8; ++i) {
        shape.bytes[i] = 64;
        shape.rows[i] = uint8_t(rows[i]);
    }
    load_shape(shape);
}

// The compiler does not know that loading a tile reads memory: keeps earlier stores before it.
PK_INLINE void before_tiles() { asm volatile("" ::: "memory"); }

// One row of a weight tile: depths 2r (low) and 2r + 1 (high) of 16 columns.
PK_INLINE void store_pairs(uint8_t* to, __m512 low, __m512 high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_store_si512(to, _mm512_permutexvar_epi16(order, both));
}

// Packing four vectors to bytes takes four numbers of each in turn: here they are put back in their places.
PK_INLINE __m512i in_order(__m512i packed) {
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_permutexvar_epi32(order, packed);
}

// 64 numbers, in range, as bytes.
PK_INLINE __m512i bytes_of(const __m512i (&numbers)[4]) {
    return in_order(_mm512_packs_epi16(_mm512_packs_epi32(numbers[0], numbers[1]),
                                       _mm512_packs_epi32(numbers[2], numbers[3])));
}

// 64 numbers of 16 bits, each split into two bytes: n = 256 high + low.
PK_INLINE void split_int16(const __m512i (&numbers)[4], __m512i* high, __m512i* low) {
    const __m512i near = _mm512_packs_epi32(numbers[0], numbers[1]), far = _mm512_packs_epi32(numbers[2], numbers[3]);
    const __m512i half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
    *high = in_order(_mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(near, half), 8),
                                        _mm512_srai_epi16(_mm512_add_epi16(far, half), 8)));
    *low = in_order(_mm512_packus_epi16(_mm512_and_si512(near, byte), _mm512_and_si512(far, byte)));
}

PK_INLINE void zero_sums() {
    before_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

}  // namespace pk::PK_SET

#endif
