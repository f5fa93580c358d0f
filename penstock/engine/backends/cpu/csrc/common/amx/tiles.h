// Matrix products on AMX tiles: bfloat16 activations against weights widened to bfloat16.
//
// A tile register holds 16 rows of 64 bytes. The right-hand tile of a product covers 32 depths x 16 columns; its row r
// holds depths 2r and 2r + 1 of every column, side by side. Weights of few bits are widened to that form for 32 columns
// and a few hundred depths at a time, into a buffer that stays in the core's first-level cache, and reused by every
// group of rows: the bytes read from memory are those of the few-bit form. Sums are float32. Dense weights are stored in
// that form at load.

#pragma once

#include "linear/dot.h"

#if defined(PK_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512BF16__)
#define PK_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

namespace pk {

constexpr int kTileBytes = 1024;
constexpr int kPair = 2 * kColumns;  // columns of a task

// The kernel grants tile registers per process, on request.
inline bool amx_granted() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return granted;
}

struct alignas(64) TileShape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Registers 0..3: sums; 4, 5: activations of the first and second 16 rows; 6, 7: weights.
// Loading the shape also zeroes them.
PK_INLINE void shape_tiles(int first, int second) {
    TileShape shape;
    const int rows[8] = {first, first, second, second, first, second, 16, 16};
    for (int i = 0; i < 8; ++i) {
        shape.bytes[i] = 64;
        shape.rows[i] = uint8_t(rows[i]);
    }
    _tile_loadconfig(&shape);
}

// Loading a tile does not tell the compiler that memory is read: what was stored for it must be in its place by now.
PK_INLINE void before_tiles() { asm volatile("" ::: "memory"); }

// One row of a weight tile: depths 2r (low) and 2r + 1 (high) of 16 columns.
PK_INLINE void store_pairs(uint8_t* to, __m512 low, __m512 high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_store_si512(to, _mm512_permutexvar_epi16(order, both));
}

// What comes back of numbers that are written as O.
template <class O>
PK_INLINE void as_stored(vf& x, vf& y) {
    if constexpr (std::is_same<O, bf16>::value) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
        const auto widened = [](__m256i v) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16); };
        x = widened(_mm512_castsi512_si256(both));
        y = widened(_mm512_extracti64x4_epi64(both, 1));
    }
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

// 64 numbers of 16 bits in two int8 digits each, n = 256 high + low.
PK_INLINE void digits_of(const __m512i (&numbers)[4], __m512i* high, __m512i* low) {
    const __m512i near = _mm512_packs_epi32(numbers[0], numbers[1]), far = _mm512_packs_epi32(numbers[2], numbers[3]);
    const __m512i half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
    *high = in_order(_mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(near, half), 8),
                                        _mm512_srai_epi16(_mm512_add_epi16(far, half), 8)));
    *low = in_order(_mm512_packus_epi16(_mm512_and_si512(near, byte), _mm512_and_si512(far, byte)));
}

// 1 + q / 16 of the 4-bit number that starts at bit AT of every lane.
template <int AT>
PK_INLINE __m512 one_and_sixteenths(__m512i v) {
    const __m512i moved = AT <= 19 ? _mm512_slli_epi32(v, AT <= 19 ? 19 - AT : 0) : _mm512_srli_epi32(v, AT - 19);
    const __m512i bits = _mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(0x00780000), _mm512_set1_epi32(0x3f800000),
                                                   0xea);  // (moved & mask) | one
    return _mm512_castsi512_ps(bits);
}

template <int AT>
PK_INLINE void widen_pair4(__m512i v, __m512 factor, __m512 base, uint8_t* to) {
    store_pairs(to, _mm512_fmadd_ps(one_and_sixteenths<AT>(v), factor, base),
                _mm512_fmadd_ps(one_and_sixteenths<AT + 8>(v), factor, base));
}

// A tile of 4-bit blocks (see dot.h) as bfloat16 tiles: w = scale * q + minimum.
inline void widen4(const uint8_t* q, const f16* scale, const f16* minimum, int64_t blocks, uint8_t* to) {
    static_assert(kStoredFlip == 0, "nibbles are taken as they are");
    for (int64_t b = 0; b < blocks; ++b, q += Q4::kBytes, to += kTileBytes) {
        const __m512 factor = _mm512_mul_ps((__m512)load(scale + b * kColumns), _mm512_set1_ps(16.0f));
        const __m512 base = _mm512_sub_ps((__m512)load(minimum + b * kColumns), factor);
        for (int g = 0; g < 4; ++g) {
            const __m512i v = _mm512_loadu_si512(q + g * 64);
            _mm_prefetch(reinterpret_cast<const char*>(q + 4096 + g * 64), _MM_HINT_T0);
            widen_pair4<0>(v, factor, base, to + (2 * g) * 64);
            widen_pair4<16>(v, factor, base, to + (2 * g + 1) * 64);
            widen_pair4<4>(v, factor, base, to + (8 + 2 * g) * 64);
            widen_pair4<20>(v, factor, base, to + (9 + 2 * g) * 64);
        }
    }
}

template <int BYTE>
PK_INLINE __m512 signed_byte(__m512i v) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * BYTE), 24));
}

inline void widen8(const uint8_t* q, const f16* scale, int64_t blocks, uint8_t* to) {
    for (int64_t b = 0; b < blocks; ++b, q += Q8::kBytes, to += kTileBytes) {
        const __m512 factor = (__m512)load(scale + b * kColumns);
        for (int g = 0; g < 8; ++g) {
            const __m512i v = _mm512_loadu_si512(q + g * 64);
            _mm_prefetch(reinterpret_cast<const char*>(q + 4096 + g * 64), _MM_HINT_T0);
            store_pairs(to + (2 * g) * 64, _mm512_mul_ps(signed_byte<0>(v), factor),
                        _mm512_mul_ps(signed_byte<1>(v), factor));
            store_pairs(to + (2 * g + 1) * 64, _mm512_mul_ps(signed_byte<2>(v), factor),
                        _mm512_mul_ps(signed_byte<3>(v), factor));
        }
    }
}

constexpr int64_t kTilesAhead = 4, kTilesFarAhead = 24;

// Asks for weight tiles that later products of this pass will read: near ones closely, far ones into the second level.
PK_INLINE void prefetch_tile(const uint8_t* tile) {
    for (int i = 0; i < kTileBytes; i += 64) {
        __builtin_prefetch(tile + kTilesAhead * kTileBytes + i);
        __builtin_prefetch(tile + kTilesFarAhead * kTileBytes + i, 0, 2);
    }
}

// Weights a thread will come to, a few lines at a time: one that asks for more than a core has under way stands still.
struct Ask {
    const uint8_t *at, *last;
    PK_INLINE void lines(int n) {
        if (at >= last) return;
        for (int i = 0; i < n; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
        at += 64 * n;
    }
};

// Up to 16 rows of activations: the tile of block b begins at `at` + b * `step`.
struct RowTiles {
    const uint8_t* at;
    int64_t step, stride;
    RowTiles from(int64_t block) const { return {at + block * step, step, stride}; }
};

PK_INLINE void zero_sums() {
    before_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Adds rows x times two column tiles to registers 0 and 1 (even blocks), 2 and 3 (odd): one alone would wait for itself.
// AHEAD: the weights come from memory, so ask for what follows.
template <bool AHEAD>
PK_INLINE void add_products(const RowTiles& x, const uint8_t* left, const uint8_t* right, int64_t blocks) {
    int64_t b = 0;
    for (; b + 2 <= blocks; b += 2) {
        if (AHEAD) {
            prefetch_tile(left + b * kTileBytes);
            prefetch_tile(left + (b + 1) * kTileBytes);
            prefetch_tile(right + b * kTileBytes);
            prefetch_tile(right + (b + 1) * kTileBytes);
        }
        _tile_loadd(4, x.at + b * x.step, x.stride);
        _tile_loadd(6, left + b * kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + b * kTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x.at + (b + 1) * x.step, x.stride);
        _tile_loadd(6, left + (b + 1) * kTileBytes, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, right + (b + 1) * kTileBytes, 64);
        _tile_dpbf16ps(3, 5, 7);
    }
    if (b < blocks) {
        _tile_loadd(4, x.at + b * x.step, x.stride);
        _tile_loadd(6, left + b * kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + b * kTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
}

// The same for two groups of rows: the upper in registers 0 and 1, the lower in 2 and 3.
template <bool AHEAD>
PK_INLINE void add_products(const RowTiles& x, const RowTiles& lower, const uint8_t* left, const uint8_t* right,
                            int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b) {
        if (AHEAD) {
            prefetch_tile(left + b * kTileBytes);
            prefetch_tile(right + b * kTileBytes);
        }
        _tile_loadd(4, x.at + b * x.step, x.stride);
        _tile_loadd(6, left + b * kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + b * kTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower.at + b * lower.step, lower.stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// y [32][kPair]: rows of the upper group, then of the lower.
PK_INLINE void load_sums(const float* y) {
    before_tiles();
    _tile_loadd(0, y, kPair * 4);
    _tile_loadd(1, y + kColumns, kPair * 4);
    _tile_loadd(2, y + 16 * kPair, kPair * 4);
    _tile_loadd(3, y + 16 * kPair + kColumns, kPair * 4);
}

// The same the other way, of floats or of integers.
template <class T>
PK_INLINE void store_upper_sums(T* y) {
    static_assert(sizeof(T) == 4, "a tile's sums have four bytes");
    _tile_stored(0, y, kPair * 4);
    _tile_stored(1, y + kColumns, kPair * 4);
}

template <class T>
PK_INLINE void store_sums(T* y) {
    store_upper_sums(y);
    _tile_stored(2, y + 16 * kPair, kPair * 4);
    _tile_stored(3, y + 16 * kPair + kColumns, kPair * 4);
}

}  // namespace pk

#endif
