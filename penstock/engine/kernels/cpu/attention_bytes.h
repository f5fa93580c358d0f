// One new token against an int8 cache on AMX tiles: half the bytes of bfloat16, and no key or value is widened.
//
// Keys are tiles as they lie in the cache, 16 tokens of 64 bytes. Queries, and the weights that softmax makes of the
// scores, are 16-bit integers in two int8 digits: products and their sums are exact, so that the only rounding beyond
// the cache's own is to one part in 65,535 of the largest. Values are interleaved by four tokens on their way to a tile.

#pragma once

#include "attention_groups.h"

#if defined(PK_AMX) && defined(__AVX512VBMI__)
#define PK_BYTE_TILES 1

namespace pk {

constexpr int kByteDepth = 64;  // numbers of a tile's row
constexpr int kBytePanels = kPart / 64;  // tiles of weights

inline bool by_byte_groups(const AttentionArgs& a) { return a.cache_dtype == 3 && by_groups(a); }

struct Bytes64 {
    alignas(64) uint8_t at[64] = {};
    template <class F>
    constexpr explicit Bytes64(F&& f) {
        for (int i = 0; i < 64; ++i) at[i] = uint8_t(f(i));
    }
};

template <int LANES>
class DecodeBytes : private DecodeTask<LANES> {
  public:
    static size_t floats(const AttentionArgs& a) {
        return size_t(kPart) * LANES * 3 + (size_t(a.head_dim) * LANES * 2 + kBytePanels * kTileBytes) / 4;
    }

    void start(const AttentionArgs& args, const Task& task_, float* scratch, const TokenGroups* following) {
        this->open(args, task_, following);
        scores = scratch;                                                // [key][lane]
        sums = reinterpret_cast<int32_t*>(scores + kPart * LANES);       // [key][digit][lane]
        weights = reinterpret_cast<uint8_t*>(sums + kPart * LANES * 2);  // [panel][digit][head][64 keys]
        queries = weights + kBytePanels * kTileBytes;                    // [dim / 4][digit][lane][4]
        split_queries();
    }

    // Registers 0..3: sums; 4, 5: keys; 6: queries.
    static void shape_for_keys() { shape_groups({16, LANES * 8}, {16, 64}, {16, 64}, {16, LANES * 8}); }

    void multiply_keys() {
        for (int i = 0; i < cached.count; i += 4) {
            const int left = cached.count - i;
            ahead.ask(ahead_keys * std::min(left, 4));
            zero_sums();
            for (int s = 0; s < dim; s += kByteDepth) {
                _tile_loadd(6, queries + s / 4 * LANES * 8, LANES * 8);
                _tile_loadd(4, cached.keys[i] + s, dim);
                _tile_dpbssd(0, 4, 6);
                if (left > 1) {
                    _tile_loadd(5, cached.keys[i + 1] + s, dim);
                    _tile_dpbssd(1, 5, 6);
                }
                if (left > 2) {
                    _tile_loadd(4, cached.keys[i + 2] + s, dim);
                    _tile_dpbssd(2, 4, 6);
                }
                if (left > 3) {
                    _tile_loadd(5, cached.keys[i + 3] + s, dim);
                    _tile_dpbssd(3, 5, 6);
                }
            }
            constexpr int kStride = kTileGroup * LANES * 2;
            int32_t* to = sums + i * kStride;
            _tile_stored(0, to, LANES * 8);
            if (left > 1) _tile_stored(1, to + kStride, LANES * 8);
            if (left > 2) _tile_stored(2, to + 2 * kStride, LANES * 8);
            if (left > 3) _tile_stored(3, to + 3 * kStride, LANES * 8);
        }
    }

    // Sums to scores, scores to the digits of weights.
    void soften(float* partial) {
        const vf top = finish_scores();
        this->note(partial, top, weigh(top));
    }

    // Registers 0..3: sums of both digits by 16 numbers each; 4: weights; 5, 6: values.
    void shape_for_values() const { shape_groups({2 * group, 64}, {2 * group, 64}, {16, 64}, {16, 64}); }

    // The panel that comes next is filled before this one is used: stores have time to arrive before tiles load them.
    void add_values(uint8_t* panels, float* partial) {
        for (int d = 0; d < dim; d += kByteDepth) {
            zero_sums();
            fill(0, d, panels);
            for (int i = 0; i < cached.count; i += 4) {
                const uint8_t* const panel = panels + i / 4 % 2 * 4 * kTileBytes;
                fill(i + 4, d, panels + (i / 4 + 1) % 2 * 4 * kTileBytes);
                before_tiles();
                _tile_loadd(4, weights + i / 4 * kTileBytes, 64);
                _tile_loadd(5, panel, 64);
                _tile_dpbusd(0, 4, 5);
                _tile_loadd(6, panel + kTileBytes, 64);
                _tile_dpbusd(1, 4, 6);
                _tile_loadd(5, panel + 2 * kTileBytes, 64);
                _tile_dpbusd(2, 4, 5);
                _tile_loadd(6, panel + 3 * kTileBytes, 64);
                _tile_dpbusd(3, 4, 6);
            }
            write(partial + d);
        }
    }

  private:
    using DecodeTask<LANES>::a;
    using DecodeTask<LANES>::ahead;
    using DecodeTask<LANES>::ahead_keys;
    using DecodeTask<LANES>::cached;
    using DecodeTask<LANES>::group;
    using DecodeTask<LANES>::dim;

    void split_queries() {
        float inverse[LANES] = {};
        for (int g = 0; g < group; ++g) {
            const bf16* q = this->query(g);
            vf top = splat(0);
            for (int d = 0; d < dim; d += VL) top = vmax(top, vabs(load(q + d)));
            const float most = hmax(top);
            unit[g] = most / 32512.0f;
            inverse[g] = most > 0 ? 32512.0f / most : 0.0f;
        }
        for (int d = 0; d < dim; d += kByteDepth)
            PK_UNROLL for (int lane = 0; lane < LANES; lane += 4) {
                __m512i digits[2][4];
                PK_UNROLL for (int i = 0; i < 4; ++i) {
                    digits[0][i] = digits[1][i] = _mm512_setzero_si512();
                    if (lane + i >= group) continue;
                    const bf16* q = this->query(lane + i) + d;
                    __m512i v[4];
                    PK_UNROLL for (int j = 0; j < 4; ++j)
                        v[j] = _mm512_cvtps_epi32((__m512)(load(q + j * VL) * splat(inverse[lane + i])));
                    digits_of(v, &digits[0][i], &digits[1][i]);
                }
                uint8_t* const to = queries + d / 4 * LANES * 8 + lane * 4;
                PK_UNROLL for (int digit = 0; digit < 2; ++digit) put_fours(digits[digit], to + digit * LANES * 4);
            }
    }

    // Number n of each of four vectors, side by side, to row n.
    PK_INLINE static void put_fours(const __m512i (&x)[4], uint8_t* to) {
        const __m512i a0 = _mm512_unpacklo_epi32(x[0], x[1]), a1 = _mm512_unpackhi_epi32(x[0], x[1]);
        const __m512i b0 = _mm512_unpacklo_epi32(x[2], x[3]), b1 = _mm512_unpackhi_epi32(x[2], x[3]);
        const __m512i fours[4] = {_mm512_unpacklo_epi64(a0, b0), _mm512_unpackhi_epi64(a0, b0),
                                  _mm512_unpacklo_epi64(a1, b1), _mm512_unpackhi_epi64(a1, b1)};
        const auto put = [&](int n, __m128i four) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + n * LANES * 8), four);
        };
        PK_UNROLL for (int j = 0; j < 4; ++j) {
            put(j, _mm512_extracti32x4_epi32(fours[j], 0));
            put(4 + j, _mm512_extracti32x4_epi32(fours[j], 1));
            put(8 + j, _mm512_extracti32x4_epi32(fours[j], 2));
            put(12 + j, _mm512_extracti32x4_epi32(fours[j], 3));
        }
    }

    vf finish_scores() {
        alignas(64) int32_t pick[VL];
        alignas(64) float units[VL];
        for (int j = 0; j < VL; ++j) {
            pick[j] = j / LANES * 2 * LANES + j % LANES;  // of two vectors of sums: the high digits
            units[j] = j % LANES < group ? unit[j % LANES] * a->scale : 0.0f;
        }
        const __m512i high = _mm512_load_si512(pick), low = _mm512_add_epi32(high, _mm512_set1_epi32(LANES));
        const vf factor = load(units);
        return this->keep_scores(scores, [&](int i, int j) {
            const int32_t* from = sums + (i * LANES + j) * 2 * VL;
            const __m512i x = _mm512_load_si512(from), y = _mm512_load_si512(from + VL);
            const vf h = (vf)_mm512_cvtepi32_ps(_mm512_permutex2var_epi32(x, high, y));
            const vf l = (vf)_mm512_cvtepi32_ps(_mm512_permutex2var_epi32(x, low, y));
            return (h * splat(256.0f) + l) * (factor * this->by_key(load(cached.key_scales[i]), j));
        });
    }

    // Scores to the digits of weights times the values' scales; the weights' sums, lane by lane.
    vf weigh(vf top) {
        vf scale[kGroups], most = splat(0);
        for (int i = 0; i < cached.count; ++i) {
            scale[i] = (vf)_mm512_maskz_mov_ps(this->there(i), (__m512)load(cached.value_scales[i]));
            most = vmax(most, scale[i]);
        }
        const float largest = hmax(most);
        value_unit = largest / 65535.0f;
        const vf inverse = splat(largest > 0 ? 65535.0f / largest : 0.0f);
        // Packing four vectors of integers to bytes leaves number 4 k + j of vector v in byte 16 k + 4 v + j.
        constexpr int kRun = 64 / LANES;  // keys of a vector of bytes
        static constexpr Bytes64 kTurn([](int i) {
            const int number = i % kRun * LANES + i / kRun;
            return number % 16 / 4 * 16 + number / 16 * 4 + number % 4;
        });
        alignas(64) uint8_t rows[64];
        const __m512i turned = _mm512_load_si512(kTurn.at), byte = _mm512_set1_epi16(255);
        std::memset(weights, 0, size_t((cached.count + 3) / 4) * kTileBytes);
        vf total = splat(0);
        for (int i = 0; i < cached.count; ++i) {
            const vf factor = scale[i] * inverse;
            const float* from = scores + i * kTileGroup * LANES;
            __m512i whole[LANES];
            PK_UNROLL for (int j = 0; j < LANES; ++j) {
                const vf weight = exp_below(load(from + j * VL), top);
                total += weight;
                whole[j] = (__m512i)((vi)(weight * this->by_key(factor, j) + splat(12582912.0f)) - 0x4b400000);
            }
            uint8_t* const panel = weights + i / 4 * kTileBytes + i % 4 * kTileGroup;
            PK_UNROLL for (int part = 0; part < LANES / 4; ++part) {
                const __m512i* w = whole + part * 4;
                const __m512i x = _mm512_packus_epi32(w[0], w[1]), y = _mm512_packus_epi32(w[2], w[3]);
                const __m512i digits[2] = {_mm512_packus_epi16(_mm512_srli_epi16(x, 8), _mm512_srli_epi16(y, 8)),
                                           _mm512_packus_epi16(_mm512_and_si512(x, byte), _mm512_and_si512(y, byte))};
                for (int digit = 0; digit < 2; ++digit) {
                    _mm512_store_si512(rows, _mm512_permutexvar_epi8(turned, digits[digit]));
                    for (int g = 0; g < group; ++g)
                        std::memcpy(panel + (digit * group + g) * 64 + part * kRun, rows + g * kRun, size_t(kRun));
                }
            }
        }
        // A key that is not there weighed exp(-87): less than any sum can show.
        return total;
    }

    // Values of up to four groups.
    void fill(int i, int d, uint8_t* panel) {
        for (int j = i; j < std::min(cached.count, i + 4); ++j) interleave(j, d, panel + j % 4 * 256);
    }

    // 64 numbers of 16 values as rows of four right-hand tiles, by fours of tokens.
    void interleave(int i, int d, uint8_t* to) {
        const uint8_t* row = cached.values[i] + d;
        const int lines = d == 0 ? ahead.share(13, 4) : 0;
        PK_UNROLL for (int quad = 0; quad < 4; ++quad, row += 4 * dim, to += 64) {
            const __m512i r0 = _mm512_loadu_si512(row), r1 = _mm512_loadu_si512(row + dim);
            const __m512i r2 = _mm512_loadu_si512(row + 2 * dim), r3 = _mm512_loadu_si512(row + 3 * dim);
            const __m512i x = _mm512_unpacklo_epi8(r0, r1), y = _mm512_unpackhi_epi8(r0, r1);
            const __m512i z = _mm512_unpacklo_epi8(r2, r3), w = _mm512_unpackhi_epi8(r2, r3);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(x, z));
            _mm512_store_si512(to + kTileBytes, _mm512_unpackhi_epi16(x, z));
            _mm512_store_si512(to + 2 * kTileBytes, _mm512_unpacklo_epi16(y, w));
            _mm512_store_si512(to + 3 * kTileBytes, _mm512_unpackhi_epi16(y, w));
            ahead.ask(lines);
        }
    }

    // Interleaving left numbers 16 k + 4 t + j in lane 4 k + j of tile t.
    void write(float* out) const {
        alignas(64) int32_t got[4][2 * kSharing * 16];
        _tile_stored(0, got[0], 64);
        _tile_stored(1, got[1], 64);
        _tile_stored(2, got[2], 64);
        _tile_stored(3, got[3], 64);
        const int stride = padded(dim) + VL;
        for (int g = 0; g < group; ++g, out += stride) {
            __m512 x[4];
            PK_UNROLL for (int t = 0; t < 4; ++t) {
                const vf high = (vf)_mm512_cvtepi32_ps(_mm512_load_si512(got[t] + g * 16));
                const vf low = (vf)_mm512_cvtepi32_ps(_mm512_load_si512(got[t] + (group + g) * 16));
                x[t] = (__m512)((high * splat(256.0f) + low) * splat(value_unit));
            }
            const __m512 a0 = _mm512_shuffle_f32x4(x[0], x[1], 0x44), a1 = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
            const __m512 b0 = _mm512_shuffle_f32x4(x[0], x[1], 0xee), b1 = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
            _mm512_storeu_ps(out, _mm512_shuffle_f32x4(a0, a1, 0x88));
            _mm512_storeu_ps(out + 16, _mm512_shuffle_f32x4(a0, a1, 0xdd));
            _mm512_storeu_ps(out + 32, _mm512_shuffle_f32x4(b0, b1, 0x88));
            _mm512_storeu_ps(out + 48, _mm512_shuffle_f32x4(b0, b1, 0xdd));
        }
    }

    float* scores;
    int32_t* sums;
    uint8_t *weights, *queries;
    float unit[kSharing], value_unit;
};

}  // namespace pk

#endif
