// Decode attention on AMX tiles: one new token against an int8 cache, at half the bytes of bfloat16 and without widening.
//
// Keys are AMX tiles as they lie in the cache, 16 tokens of 64 bytes. Queries and softmax weights are int16, split into two
// int8 halves: products and their sums are exact, so that the only rounding beyond the cache's own is to one part in 65,535
// of the largest. Values, interleaved by four tokens, are multiplied by vectors: the few weights of a group of heads would
// leave most of a tile empty, and sums stay where they are needed.

#pragma once

#include "attention/amx/decode.h"

#if defined(PK_AMX) && defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#define PK_BYTE_TILES 1

namespace pk::PK_SET {

constexpr int kByteDepth = 64;  // numbers of a tile's row

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
    static constexpr bool kReshapes = false;

    static size_t floats(const AttentionArgs& a) {
        return size_t(kPart) * LANES * 2 + (size_t(kPart) + size_t(a.head_dim)) * LANES * 2 / 4;
    }

    void start(const AttentionArgs& args, const Task& task_, const TokenGroups& own, const TokenGroups* following,
               float* scratch) {
        this->open(args, task_, own, following);
        sums = reinterpret_cast<int32_t*>(scratch);                      // [key][half][lane]
        scores = scratch;                                                // [key][lane], written behind what is read
        weights = reinterpret_cast<uint8_t*>(sums + kPart * LANES * 2);  // [64 / LANES keys][half][keys / 4][lane][4]
        queries = weights + kPart * LANES * 2;                           // [dim / 4][half][lane][4]
        split_queries();
    }

    // Registers 0..3: sums; 4, 5: keys; 6: queries.
    static void shape_for_keys() { shape_groups({16, LANES * 8}, {16, 64}, {16, 64}, {16, LANES * 8}); }

    void multiply_keys() {
        for (int i = 0; i < cached->count; i += 4) {
            const int left = cached->count - i;
            for (int j = 0; j < std::min(left, 4); ++j) ahead.prefetch_quarter();
            zero_sums();
            for (int s = 0; s < dim; s += kByteDepth) {
                _tile_loadd(6, queries + s / 4 * LANES * 8, LANES * 8);
                _tile_loadd(4, cached->keys[i] + s, dim);
                _tile_dpbssd(0, 4, 6);
                if (left > 1) {
                    _tile_loadd(5, cached->keys[i + 1] + s, dim);
                    _tile_dpbssd(1, 5, 6);
                }
                if (left > 2) {
                    _tile_loadd(4, cached->keys[i + 2] + s, dim);
                    _tile_dpbssd(2, 4, 6);
                }
                if (left > 3) {
                    _tile_loadd(5, cached->keys[i + 3] + s, dim);
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

    // Sums to scores, scores to weights.
    void softmax(float* partial) {
        const vf top = finish_scores();
        this->store_totals(partial, top, weigh(top));
    }

    void add_values(float* partial) {
        for (int d = 0; d < dim; d += kByteDepth)
            for (int head = 0; head < group; head += kMaxGroup)
                by_group(group - head, [&](auto heads) {
                    float* const out = partial + head * (padded(dim) + VL) + d;
                    add_heads<decltype(heads)::value, false>(head, d, out);
                    add_heads<decltype(heads)::value, true>(head, d, out);
                });
    }

  private:
    using DecodeTask<LANES>::a;
    using DecodeTask<LANES>::ahead;
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
            step[g] = most / 32512.0f;
            inverse[g] = most > 0 ? 32512.0f / most : 0.0f;
        }
        for (int d = 0; d < dim; d += kByteDepth)
            PK_UNROLL for (int lane = 0; lane < LANES; lane += 4) {
                __m512i halves[2][4];
                PK_UNROLL for (int i = 0; i < 4; ++i) {
                    halves[0][i] = halves[1][i] = _mm512_setzero_si512();
                    if (lane + i >= group) continue;
                    const bf16* q = this->query(lane + i) + d;
                    __m512i v[4];
                    PK_UNROLL for (int j = 0; j < 4; ++j)
                        v[j] = _mm512_cvtps_epi32((__m512)(load(q + j * VL) * splat(inverse[lane + i])));
                    split_int16(v, &halves[0][i], &halves[1][i]);
                }
                uint8_t* const to = queries + d / 4 * LANES * 8 + lane * 4;
                PK_UNROLL for (int half = 0; half < 2; ++half) put_fours(halves[half], to + half * LANES * 4);
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
            pick[j] = j / LANES * 2 * LANES + j % LANES;  // of two vectors of sums: the high halves
            units[j] = j % LANES < group ? step[j % LANES] * score_unit(*a) : 0.0f;
        }
        const __m512i high = _mm512_load_si512(pick), low = _mm512_add_epi32(high, _mm512_set1_epi32(LANES));
        const vf factor = load(units);
        return this->keep_scores(scores, [&](int i, int j) {
            const int32_t* from = sums + (i * LANES + j) * 2 * VL;
            const __m512i x = _mm512_load_si512(from), y = _mm512_load_si512(from + VL);
            const vf h = (vf)_mm512_cvtepi32_ps(_mm512_permutex2var_epi32(x, high, y));
            const vf l = (vf)_mm512_cvtepi32_ps(_mm512_permutex2var_epi32(x, low, y));
            return (h * splat(256.0f) + l) * (factor * this->by_key(load(cached->key_scales[i]), j));
        });
    }

    // Scores to split weights times the values' scales; returns the sums of the weights, lane by lane.
    vf weigh(vf top) {
        vf scale[kGroups], most = splat(0);
        for (int i = 0; i < cached->count; ++i) {
            scale[i] = (vf)_mm512_maskz_mov_ps(this->there(i), (__m512)load(cached->value_scales[i]));
            most = vmax(most, scale[i]);
        }
        const float largest = hmax(most);
        value_unit = largest / 65535.0f;
        const vf inverse = splat(largest > 0 ? 65535.0f / largest : 0.0f);
        // What follows leaves numbers 0..15, 32.., 16.., 48.. of 64 in the bytes of a lane.
        static constexpr Bytes64 kOrder([](int i) {
            const int number = (i / (LANES * 4) * 4 + i % 4) * LANES + i / 4 % LANES, of = number / 16;
            return number % 16 * 4 + (of == 1 ? 2 : of == 2 ? 1 : of);
        });
        const __m512i order = _mm512_load_si512(kOrder.at);
        const __m512i upper = _mm512_set1_epi16(short(0xff00)), lower = _mm512_set1_epi16(0xff);
        vf total = splat(0);
        for (int i = 0; i < cached->count; ++i) {
            const vf factor = scale[i] * inverse;
            PK_UNROLL for (int part = 0; part < LANES / 4; ++part) {
                const int first = i * LANES + part * 4;
                __m512i whole[4];  // in the lower half of every lane
                PK_UNROLL for (int j = 0; j < 4; ++j) {
                    const vf weight = power_below(load(scores + (first + j) * VL), top);
                    total += weight;
                    whole[j] = (__m512i)(weight * this->by_key(factor, part * 4 + j) + splat(12582912.0f));
                }
                const auto both = [&](int j) {
                    return _mm512_mask_blend_epi16(0xaaaaaaaa, whole[j], _mm512_slli_epi32(whole[j + 1], 16));
                };
                const __m512i x = both(0), y = both(2);
                const __m512i halves[2] = {  // first | (second & third)
                    _mm512_ternarylogic_epi32(_mm512_srli_epi16(x, 8), y, upper, 0xf8),
                    _mm512_ternarylogic_epi32(_mm512_slli_epi16(y, 8), x, lower, 0xf8)};
                uint8_t* const to = weights + first / 4 * 128;
                _mm512_store_si512(to, _mm512_permutexvar_epi8(order, halves[0]));
                _mm512_store_si512(to + 64, _mm512_permutexvar_epi8(order, halves[1]));
            }
            ahead.prefetch_quarter();
        }
        // A masked key got a weight of 2^-126: less than any sum can show.
        return total;
    }

    // Values weighed for heads [head, head + G): of 64 numbers the first eight of every 16, or the last. All sums at once
    // would not fit in the registers.
    template <int G, bool LAST>
    __attribute__((noinline)) void add_heads(int head, int d, float* out) {
        __m512i sum[G][2][2];
        PK_UNROLL for (int g = 0; g < G; ++g)
            PK_UNROLL for (int half = 0; half < 2; ++half)
                PK_UNROLL for (int t = 0; t < 2; ++t) sum[g][half][t] = _mm512_setzero_si512();
        const auto interleaved = [](__m512i x, __m512i y) {
            return LAST ? _mm512_unpackhi_epi8(x, y) : _mm512_unpacklo_epi8(x, y);
        };
        for (int i = 0; i < cached->count; ++i) {
            const uint8_t* row = cached->values[i] + d;
            if (LAST && head == 0) ahead.prefetch();
            PK_UNROLL for (int quad = 0; quad < 4; ++quad, row += 4 * dim) {
                const uint8_t* const of = weights + weights_of(i, quad) + head * 4;
                const __m512i x = interleaved(_mm512_loadu_si512(row), _mm512_loadu_si512(row + dim));
                const __m512i y = interleaved(_mm512_loadu_si512(row + 2 * dim), _mm512_loadu_si512(row + 3 * dim));
                const __m512i value[2] = {_mm512_unpacklo_epi16(x, y), _mm512_unpackhi_epi16(x, y)};
                PK_UNROLL for (int g = 0; g < G; ++g)
                    PK_UNROLL for (int half = 0; half < 2; ++half) {
                        int32_t four;
                        std::memcpy(&four, of + half * 64 + g * 4, 4);
                        const __m512i weight = _mm512_set1_epi32(four);
                        PK_UNROLL for (int t = 0; t < 2; ++t)
                            sum[g][half][t] = _mm512_dpbusd_epi32(sum[g][half][t], weight, value[t]);
                    }
            }
        }
        PK_UNROLL for (int g = 0; g < G; ++g) write(sum[g], out + g * (padded(dim) + VL) + (LAST ? 8 : 0));
    }

    // Where the high halves of four keys of a group begin; the low ones are 64 bytes behind.
    static int weights_of(int i, int quad) {
        constexpr int kQuads = 16 / LANES;  // of a vector
        return (i * (LANES / 4) + quad / kQuads) * 128 + quad % kQuads * LANES * 4;
    }

    // Interleaving left numbers 16 k + 4 t + j in lane 4 k + j of vector t.
    PK_INLINE void write(const __m512i (&sum)[2][2], float* out) const {
        __m512 x[2];
        PK_UNROLL for (int t = 0; t < 2; ++t) {
            const vf high = (vf)_mm512_cvtepi32_ps(sum[0][t]), low = (vf)_mm512_cvtepi32_ps(sum[1][t]);
            x[t] = (__m512)((high * splat(256.0f) + low) * splat(value_unit));
        }
        const __m512i near = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i far = _mm512_add_epi32(near, _mm512_set1_epi32(8));
        const __m512 eights[2] = {_mm512_permutex2var_ps(x[0], near, x[1]), _mm512_permutex2var_ps(x[0], far, x[1])};
        PK_UNROLL for (int k = 0; k < 2; ++k) {
            std::memcpy(out + k * 32, &eights[k], 32);
            std::memcpy(out + k * 32 + 16, reinterpret_cast<const char*>(&eights[k]) + 32, 32);
        }
    }

    float* scores;
    int32_t* sums;
    uint8_t *weights, *queries;
    float step[kSharing], value_unit;  // of queries' integers, and of the sums of values
};

}  // namespace pk::PK_SET

#endif
