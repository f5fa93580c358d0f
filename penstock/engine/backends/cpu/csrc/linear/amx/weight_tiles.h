// Weights as AMX tiles: bfloat16 stored so, or widened from few bits inside the core's cache, and products with them.
//
// The right-hand tile of a product covers 32 depths x 16 columns; its row r holds depths 2r and 2r + 1 of every column,
// side by side. Weights of few bits are widened to that form for 32 columns and a few hundred depths at a time, into a
// buffer that stays in the core's first-level cache, and reused by every group of rows: the bytes read from memory are
// those of the few-bit form. Sums are float32. Dense weights are stored in that form at load.

#pragma once

#include "common/amx/tiles.h"
#include "linear/dot.h"

#if defined(PK_AMX)

namespace pk::PK_SET {

constexpr int kPair = 2 * kColumns;  // columns of a task

// Rounds to O and back.
template <class O>
PK_INLINE void as_stored(vf& x, vf& y) {
    if constexpr (std::is_same<O, bf16>::value) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
        const auto widened = [](__m256i v) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16); };
        x = widened(_mm512_castsi512_si256(both));
        y = widened(_mm512_extracti64x4_epi64(both, 1));
    }
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

// Prefetches weight tiles of later products: near ones into the first-level cache, far ones into the second.
PK_INLINE void prefetch_tile(const uint8_t* tile) {
    for (int i = 0; i < kTileBytes; i += 64) {
        __builtin_prefetch(tile + kTilesAhead * kTileBytes + i);
        __builtin_prefetch(tile + kTilesFarAhead * kTileBytes + i, 0, 2);
    }
}

// Up to 16 rows of activations: the tile of block b begins at `at` + b * `step`.
struct RowTiles {
    const uint8_t* at;
    int64_t step, stride;
    RowTiles from(int64_t block) const { return {at + block * step, step, stride}; }
};

// Adds rows x times two column tiles to registers 0 and 1 (even blocks), 2 and 3 (odd): a single one would wait for its own result.
// AHEAD: the weights come from memory, so prefetch the next ones.
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

// Prefetches the weights that a thread reads later, a few lines at a time: a core with too many outstanding reads stalls.
struct Prefetcher {
    const uint8_t *at, *last;
    PK_INLINE void lines(int n) {
        if (at >= last) return;
        for (int i = 0; i < n; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
        at += 64 * n;
    }
};

}  // namespace pk::PK_SET

#endif
