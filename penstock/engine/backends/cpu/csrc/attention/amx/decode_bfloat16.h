// Decode attention on AMX tiles: one new token against a bfloat16 cache.
//
// Keys are tiles as they lie in the cache; values are interleaved by two tokens into tiles. Softmax weights are split into
// two bfloat16 numbers, high and low, so that their rounding is below that of the values.

#pragma once

#include "attention/amx/decode.h"

#if defined(PK_AMX)

namespace pk::PK_SET {

inline bool by_half_groups(const AttentionArgs& a) { return a.cache_dtype == 2 && by_groups(a); }

constexpr int kHalfPanels = kPart / 32;  // tiles of weights

template <int LANES>
class DecodeHalves : private DecodeTask<LANES> {
  public:
    static constexpr bool kReshapes = true;

    static size_t floats(const AttentionArgs& a) {
        return size_t(kPart) * LANES + (size_t(a.head_dim) * LANES * 2 + kHalfPanels * kTileBytes) / 4;
    }

    void start(const AttentionArgs& args, const Task& task_, const TokenGroups& own, const TokenGroups* following,
               float* scratch) {
        this->open(args, task_, own, following);
        scores = scratch;                                             // [key][lane]
        weights = reinterpret_cast<uint8_t*>(scores + kPart * LANES);  // [panel][half][head][32 keys]
        queries = weights + kHalfPanels * kTileBytes;                 // [dim / 2][lane][2]
        std::memset(queries, 0, size_t(dim) * LANES * 2);
        for (int g = 0; g < group; ++g) {
            const bf16* q = this->query(g);
            for (int d = 0; d < dim; d += 2) std::memcpy(queries + (d / 2 * LANES + g) * 4, q + d, 4);
        }
    }

    // Registers 0..3: sums; 4, 5: keys; 6: queries.
    static void shape_for_keys() { shape_groups({16, LANES * 4}, {16, 64}, {16, 64}, {16, LANES * 4}); }

    void multiply_keys() {
        for (int i = 0; i < cached->count; i += 4) {
            const int left = cached->count - i;
            for (int j = 0; j < std::min(left, 4); ++j) ahead.prefetch_quarter();
            zero_sums();
            for (int s = 0; s < dim; s += 32) {
                _tile_loadd(6, queries + s / 2 * LANES * 4, LANES * 4);
                _tile_loadd(4, cached->keys[i] + s * 2, dim * 2);
                _tile_dpbf16ps(0, 4, 6);
                if (left > 1) {
                    _tile_loadd(5, cached->keys[i + 1] + s * 2, dim * 2);
                    _tile_dpbf16ps(1, 5, 6);
                }
                if (left > 2) {
                    _tile_loadd(4, cached->keys[i + 2] + s * 2, dim * 2);
                    _tile_dpbf16ps(2, 4, 6);
                }
                if (left > 3) {
                    _tile_loadd(5, cached->keys[i + 3] + s * 2, dim * 2);
                    _tile_dpbf16ps(3, 5, 6);
                }
            }
            store_tiles(scores + i * kTileGroup * LANES, std::min(left, 4), kTileGroup * LANES, LANES);
        }
    }

    void softmax(float* partial) {
        const vf top = this->keep_scores(
            scores, [&](int i, int j) { return load(scores + (i * LANES + j) * VL) * splat(score_unit(*a)); });
        // Of 64 numbers [key][lane] of two vectors: [lane][key].
        constexpr int kRun = 64 / LANES;
        alignas(64) uint16_t order[64], rows[64];
        for (int i = 0; i < 64; ++i) order[i] = uint16_t(i % kRun * LANES + i / kRun);
        const __m512i first = _mm512_load_si512(order), second = _mm512_load_si512(order + 32);
        const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
        std::memset(weights, 0, size_t((cached->count + 1) / 2) * kTileBytes);
        vf total = splat(0);
        for (int i = 0; i < cached->count; ++i) {
            uint8_t* const panel = weights + i / 2 * kTileBytes + i % 2 * 32;
            PK_UNROLL for (int part = 0; part < LANES / 4; ++part) {
                __m512 high[4], low[4];
                PK_UNROLL for (int j = 0; j < 4; ++j) {
                    const vf weight = power_below(load(scores + (i * LANES + part * 4 + j) * VL), top);
                    total += weight;
                    high[j] = _mm512_castsi512_ps(_mm512_and_si512((__m512i)weight, upper));
                    low[j] = _mm512_sub_ps((__m512)weight, high[j]);
                }
                for (int half = 0; half < 2; ++half) {
                    const __m512* w = half ? low : high;
                    const __m512i x = (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]), y = (__m512i)_mm512_cvtne2ps_pbh(w[3], w[2]);
                    _mm512_store_si512(rows, _mm512_permutex2var_epi16(x, first, y));
                    _mm512_store_si512(rows + 32, _mm512_permutex2var_epi16(x, second, y));
                    for (int g = 0; g < group; ++g)
                        std::memcpy(panel + (half * group + g) * 64 + part * kRun * 2, rows + g * kRun, kRun * 2);
                }
            }
            ahead.prefetch_quarter();
        }
        // A masked key got a weight of 2^-126: less than any sum can show.
        this->store_totals(partial, top, total);
    }

    // Registers 0..3: sums of both halves, 16 numbers each; 4: weights; 5, 6: values.
    void shape_for_values() const { shape_groups({2 * group, 64}, {2 * group, 64}, {16, 64}, {16, 64}); }

    // The next panel is filled before this one is used, so that its stores are done before tiles load it.
    void add_values(uint8_t* panels, float* partial) {
        for (int d = 0; d < dim; d += 64) {
            zero_sums();
            fill(0, d, panels);
            for (int i = 0; i < cached->count; i += 2) {
                const uint8_t* const panel = panels + i / 2 % 2 * 4 * kTileBytes;
                if (i + 2 < cached->count) fill(i + 2, d, panels + (i / 2 + 1) % 2 * 4 * kTileBytes);
                before_tiles();
                _tile_loadd(4, weights + i / 2 * kTileBytes, 64);
                _tile_loadd(5, panel, 64);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, panel + kTileBytes, 64);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(5, panel + 2 * kTileBytes, 64);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(6, panel + 3 * kTileBytes, 64);
                _tile_dpbf16ps(3, 4, 6);
            }
            write(partial + d);
        }
    }

  private:
    using DecodeTask<LANES>::a;
    using DecodeTask<LANES>::ahead;
    using DecodeTask<LANES>::cached;
    using DecodeTask<LANES>::group;
    using DecodeTask<LANES>::dim;

    // Values of two groups.
    void fill(int i, int d, uint8_t* panel) {
        interleave(i, d, panel);
        interleave(i + 1, d, panel + 8 * 64);
    }

    // 64 numbers of 16 values as rows of four right-hand tiles, by twos of tokens. A weight of zero times NaN is
    // NaN: tokens outside the task are zeros.
    void interleave(int i, int d, uint8_t* to) {
        const __mmask16 seen = i < cached->count ? this->there(i) : __mmask16(0);
        const uint8_t* row = seen ? cached->values[i] + d * 2 : nullptr;
        const auto load_row = [&](int token, int half) {
            return seen >> token & 1 ? _mm512_loadu_si512(row + token * dim * 2 + half * 64) : _mm512_setzero_si512();
        };
        if (d == 0 && seen) ahead.prefetch_quarter();
        PK_UNROLL for (int pair = 0; pair < 8; ++pair, to += 64) {
            PK_UNROLL for (int half = 0; half < 2; ++half) {
                const __m512i x = load_row(2 * pair, half), y = load_row(2 * pair + 1, half);
                _mm512_store_si512(to + 2 * half * kTileBytes, _mm512_unpacklo_epi16(x, y));
                _mm512_store_si512(to + (2 * half + 1) * kTileBytes, _mm512_unpackhi_epi16(x, y));
            }
        }
    }

    // Interleaving left numbers 8 k + j of a half in lane 4 k + j of its first tile, 8 k + 4 + j in that of its second.
    void write(float* out) const {
        alignas(64) float got[4][2 * kSharing * 16];
        store_tiles(got[0], 4, 2 * kSharing * 16, 16);
        const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        const int stride = padded(dim) + VL;
        for (int g = 0; g < group; ++g, out += stride)
            PK_UNROLL for (int half = 0; half < 2; ++half) {
                const float *low = got[2 * half] + g * 16, *high = got[2 * half + 1] + g * 16;
                const vf x = load(low) + load(low + group * 16), y = load(high) + load(high + group * 16);
                _mm512_storeu_ps(out + half * 32, _mm512_permutex2var_ps((__m512)x, first, (__m512)y));
                _mm512_storeu_ps(out + half * 32 + 16, _mm512_permutex2var_ps((__m512)x, second, (__m512)y));
            }
    }

    float* scores;
    uint8_t *weights, *queries;
};

}  // namespace pk::PK_SET

#endif
