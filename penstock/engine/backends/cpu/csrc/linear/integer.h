// Linears in integers: activations in int8 or int16, exact products, sums over blocks in float32.
//
// An int16 activation is split into two int8 parts: the remainder of the first becomes a second one with a scale 253 times
// smaller, and a row counts as two. Small models need that to keep their answers; int8 is half the arithmetic.
//
// One to four rows read the packed weights directly, once: bytes decide. More rows first expand a tile of 4-bit
// weights to int8 inside the core's cache and then reuse it for every group of rows: arithmetic decides.

#pragma once

#include "linear/linear.h"

namespace pk::PK_SET {

// 16 integers as bytes.
PK_INLINE void store_bytes(int8_t* to, const vi* q) {
#if defined(PK_NEON)
    int16x8_t low = vcombine_s16(vmovn_s32((int32x4_t)q[0]), vmovn_s32((int32x4_t)q[1]));
    int16x8_t high = vcombine_s16(vmovn_s32((int32x4_t)q[2]), vmovn_s32((int32x4_t)q[3]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
#elif defined(PK_AVX512)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8((__m512i)q[0]));
#else
    for (int i = 0; i < 16; ++i) to[i] = int8_t(q[i / VL][i % VL]);
#endif
}

PK_INLINE int32_t total(vi v) {
#if defined(PK_NEON)
    return vaddvq_s32((int32x4_t)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < VL; ++i) sum += v[i];
    return sum;
#endif
}

// Rounds v / scale to int8, row `m` of a record; v keeps the remainder.
PK_INLINE void quantize_part(vf (&v)[kDepth / VL], float scale, float inverse, Record& r, int m) {
    constexpr int N = kDepth / VL;
    const vf magic = splat(12582912.0f);
    vi q[N], sum[2] = {vi{}, vi{}};
    for (int i = 0; i < N; ++i) {
        const vf rounded = v[i] * splat(inverse) + magic;  // rounds to nearest even
        q[i] = (vi)rounded - 0x4b400000;
        sum[i * 2 / N] += q[i];
        v[i] -= (rounded - magic) * splat(scale);
    }
    store_bytes(r.q[m], q);
    store_bytes(r.q[m] + 16, q + N / 2);
    const int32_t low = total(sum[0]), high = total(sum[1]);
    r.scale[m] = scale;
    r.sum[m] = scale * float(low + high);
    set_starts(r, m, low, high);
}

// A block of one row. A value that is not finite makes the block's scale NaN, so that it is seen in the result.
template <class T>
PK_INLINE void quantize_block(const T* x, Record& r, int m, int parts) {
    constexpr int N = kDepth / VL;
    vf v[N];
    vi top = vi{};  // magnitudes order as their bits do, with infinities and NaNs on top
    for (int i = 0; i < N; ++i) {
        v[i] = load(x + i * VL);
        top = max_bits(top, (vi)vabs(v[i]));
    }
    const int32_t bits = hmax_bits(top);
    float max;
    std::memcpy(&max, &bits, 4);
    const bool finite = bits < 0x7f800000, nonzero = max > 1e-30f;
    const float inverse = nonzero && finite ? 127.0f / max : 0.0f;
    const float scale = !finite ? NAN : nonzero ? max * (1.0f / 127.0f) : 0.0f;
    quantize_part(v, scale, inverse, r, m);
    // The remainder is at most half a step, and a little more by rounding: 253 instead of 254 keeps it inside int8.
    if (parts == 2) quantize_part(v, scale * (1.0f / 253.0f), finite ? inverse * 253.0f : 0.0f, r, m + 1);
}

// `rows` rows into one group of records, where each takes `parts` of the kRows places.
template <class T>
void quantize_rows(const T* x, Record* records, int64_t rows, int64_t blocks, int parts) {
    for (int64_t b = 0; b < blocks; ++b) {
        if (rows * parts < kRows) std::memset((void*)&records[b], 0, sizeof(Record));
        for (int64_t i = 0; i < rows; ++i)
            quantize_block(x + (i * blocks + b) * kDepth, records[b], int(i) * parts, parts);
    }
}

// y[MR][NC vectors] over the whole depth. S: type of scales and minima (float16 as stored, or expanded float32).
template <class Q, int MR, int NC, bool MIN, class S>
PK_INLINE void tile_rows(const uint8_t* q, const S* scale, const S* minimum, const Record* r, int64_t blocks,
                         float* y) {
    constexpr int64_t kShare = Q::kBytes + (MIN ? 4 : 2) * kColumns;  // a block's part of the tile, scales included
    const uint8_t* ahead = q + kAhead;
    vf acc[MR][NC];
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) acc[m][c] = splat(0);
    for (int64_t b = 0; b < blocks; ++b, q += Q::kBytes, scale += kColumns) {
        vf dots[MR][NC];
        if (std::is_same<S, f16>::value) {
            prefetch(ahead, kShare);
            prefetch_far(ahead - kAhead, kShare);
            ahead += kShare;
        }
        dot_block<MR, NC>(Q(), q, r[b], dots);
        for (int c = 0; c < NC; ++c) {
            vf d = load(scale + c * VL);
            for (int m = 0; m < MR; ++m)
                acc[m][c] += dots[m][c] * (d * splat(r[b].scale[m]));
        }
        if (MIN) {
            for (int c = 0; c < NC; ++c) {
                vf low = load(minimum + c * VL);
                for (int m = 0; m < MR; ++m) acc[m][c] += low * splat(r[b].sum[m]);
            }
            minimum += kColumns;
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) store(y + m * kColumns + c * VL, acc[m][c]);
}

// All 16 columns for the first `rows` rows of a record group.
template <class Q, bool MIN, class S>
void tile_product(const uint8_t* q, const S* scale, const S* minimum, const Record* r, int64_t blocks, int rows,
                  float* y) {
    if (rows == 1) return tile_rows<Q, 1, kVectors, MIN>(q, scale, minimum, r, blocks, y);
    if (rows == 2) return tile_rows<Q, 2, kVectors, MIN>(q, scale, minimum, r, blocks, y);
    constexpr int N = kGemmVectors;
    for (int c = 0; c < kVectors; c += N) {
        const uint8_t* part = q + c * VL * 4;
        const S *s = scale + c * VL, *low = minimum + c * VL;
        float* to = y + c * VL;
        if (kRows > 4 && rows <= 4)
            tile_rows<Q, 4, N, MIN>(part, s, low, r, blocks, to);
        else
            tile_rows<Q, kRows, N, MIN>(part, s, low, r, blocks, to);
    }
}

// Expands a 4-bit tile to int8 (the same values) and its scales and minima to float32.
inline void expand_q4(const Tile& tile, int64_t blocks, uint8_t* __restrict q) {
    const uint8_t* __restrict from = tile.q;
    for (int64_t b = 0; b < blocks; ++b, q += Q8::kBytes, from += Q4::kBytes) {
        for (int i = 0; i < Q4::kBytes; ++i) {
            q[i] = from[i] & 15;
            q[i + Q4::kBytes] = uint8_t(from[i] ^ kStoredFlip) >> 4;
        }
    }
}

inline void expand_floats(const f16* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i += VL) store(to + i, load(from + i));
}

template <class O>
void linear_tiles(const LinearArgs& a, const Record* records, int64_t blocks, int64_t begin, int64_t end,
                  void* scratch) {
    float y[kRows * kColumns];
    float *scale = static_cast<float*>(scratch), *minimum = scale + blocks * kColumns;
    uint8_t* wide = reinterpret_cast<uint8_t*>(minimum + blocks * kColumns);
    const int64_t group = kRows / a.activation_parts;  // rows of one group of records
    const bool direct = a.rows <= group;
    for (int64_t t = begin; t < end; ++t) {
        const Tile tile = tile_at(a.weights, blocks, a.bits, t);
        if (!direct) {
            expand_floats(tile.scale, scale, blocks * kColumns);
            if (a.bits == 4) {
                expand_floats(tile.minimum, minimum, blocks * kColumns);
                expand_q4(tile, blocks, wide);
            }
        }
        const int64_t bytes = tile_bytes(blocks, a.bits), share = round_up(bytes * group / a.rows, 64);
        const bool ahead = a.rows > 2 * group && t + 1 < end;  // prefetch the next tile in small portions
        for (int64_t row = 0; row < a.rows; row += group) {
            const Record* r = records + row / group * blocks;
            if (ahead) prefetch(tile.q + bytes + row / group * share, share);
            const int taken = int(std::min<int64_t>(group, a.rows - row)), rows = taken * a.activation_parts;
            if (direct && a.bits == 4)
                tile_product<Q4, true>(tile.q, tile.scale, tile.minimum, r, blocks, rows, y);
            else if (direct)
                tile_product<Q8, false>(tile.q, tile.scale, tile.scale, r, blocks, rows, y);
            else if (a.bits == 4)
                tile_product<Q8, true>(wide, scale, minimum, r, blocks, rows, y);
            else
                tile_product<Q8, false>(tile.q, scale, scale, r, blocks, rows, y);
            write_columns<O>(a, row, taken, t * kColumns, kColumns, [&](int m, int i) {
                const float* from = y + m * a.activation_parts * kColumns + i;
                return a.activation_parts == 2 ? load(from) + load(from + kColumns) : load(from);
            });
        }
    }
}

inline void linear_integer(Context* ctx, const LinearArgs& a) {
    const int64_t group = kRows / a.activation_parts, blocks = a.depth / kDepth, groups = round_up(a.rows, group) / group;
    Record* records = static_cast<Record*>(ctx->shared.reserve(size_t(groups * blocks) * sizeof(Record)));
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(groups, std::max<int64_t>(1, 32768 / (a.depth * kRows)), [&](int64_t begin, int64_t end, int) {
            for (int64_t g = begin; g < end; ++g)
                quantize_rows(static_cast<const T*>(a.x) + g * group * a.depth, records + g * blocks,
                              std::min<int64_t>(group, a.rows - g * group), blocks, a.activation_parts);
        });
    });
    const size_t scratch = size_t(blocks) * (2 * kColumns * sizeof(float) + Q8::kBytes);
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].reserve(scratch);
    const int64_t tiles = round_up(a.columns, kColumns) / kColumns;
    const int64_t work = std::max<int64_t>(1, tile_bytes(blocks, a.bits) * a.rows);
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        ctx->pool.rows(tiles, std::max<int64_t>(1, 32768 / work), [&](int64_t begin, int64_t end, int thread) {
            linear_tiles<O>(a, records, blocks, begin, end, ctx->scratch[thread].reserve(0));
        });
    });
}

}  // namespace pk::PK_SET
