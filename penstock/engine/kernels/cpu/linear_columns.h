// Linears on AMX tiles in int8: weights with one scale per output column, activations with one per row.
//
// With scales that hold for the whole depth, a sum stays in a tile register from the first product to the last: no
// scaling, no widening on the way, and one byte per weight from memory. Activations are 16-bit integers in two int8
// digits, v = 256 high + low, so a product is two instructions for 64 depths. Sums are exact integers: a row gets the
// same bits in any company. Rounding few-bit weights to this form adds an error of about 1% (see
// `penstock bench perplexity`). Depths that matter more than others may be stretched before they are rounded; rows are
// shrunk by as much when they are packed.

#pragma once

#include "amx.h"
#include "linear.h"

#if defined(PK_AMX)

namespace pk {

constexpr int64_t kStep = 64;  // depths of a tile of bytes

inline bool by_columns(const LinearArgs& a) {
    return a.dtype == 2 && a.column_form && a.column_rows > 0 && a.rows >= a.column_rows && amx_granted();
}

inline int64_t column_steps(int64_t depth) { return (depth + kStep - 1) / kStep; }

// A tile of 16 columns: its steps, then the columns' scales.
inline int64_t column_tile_bytes(int64_t depth) { return column_steps(depth) * kTileBytes + kColumns * 4; }

// Calls f(k, values) for depths k .. k + 3 of a tile of the few-bit form, a column per lane; times `stretch`, if any.
template <class F>
inline void each_four(const Tile& tile, int bits, int64_t blocks, const float* stretch, F&& f) {
    const auto give = [&](int64_t k, vf (&values)[4]) {
        if (stretch)
            PK_UNROLL for (int j = 0; j < 4; ++j) values[j] *= splat(stretch[k + j]);
        f(k, values);
    };
    const auto load_row = [](const uint8_t* from) {
        vi row;
        std::memcpy(&row, from, 64);
        return row;
    };
    for (int64_t b = 0; b < blocks; ++b) {
        const vf scale = load(tile.scale + b * kColumns);
        if (bits == 4) {
            const vf minimum = load(tile.minimum + b * kColumns);
            for (int row = 0; row < 4; ++row) {
                const vi pairs = load_row(tile.q + b * Q4::kBytes + row * 64) ^ (0x01010101 * kStoredFlip);
                PK_UNROLL for (int half = 0; half < 2; ++half) {
                    vf values[4];
                    PK_UNROLL for (int j = 0; j < 4; ++j)
                        values[j] = scale * __builtin_convertvector(pairs >> (8 * j + 4 * half) & 15, vf) + minimum;
                    give(b * kDepth + half * 16 + row * 4, values);
                }
            }
        } else {
            for (int row = 0; row < 8; ++row) {
                const vi bytes = load_row(tile.q + b * Q8::kBytes + row * 64);
                vf values[4];
                PK_UNROLL for (int j = 0; j < 4; ++j)
                    values[j] = scale * __builtin_convertvector((bytes << (24 - 8 * j)) >> 24, vf);
                give(b * kDepth + row * 4, values);
            }
        }
    }
}

// One tile of the column form from one of the few-bit form.
inline void pack_column_tile(const Tile& tile, int bits, int64_t blocks, const float* stretch, uint8_t* to) {
    vf most = splat(0);
    each_four(tile, bits, blocks, stretch, [&](int64_t, const vf (&values)[4]) {
        PK_UNROLL for (int j = 0; j < 4; ++j) most = vmax(most, vabs(values[j]));
    });
    store(reinterpret_cast<float*>(to + column_steps(blocks * kDepth) * kTileBytes), most * splat(1 / 127.0f));
    vf inverse;
    for (int n = 0; n < kColumns; ++n) inverse[n] = most[n] > 0 ? 127.0f / most[n] : 0.0f;
    each_four(tile, bits, blocks, stretch, [&](int64_t k, const vf (&values)[4]) {
        vi bytes = vi{};
        PK_UNROLL for (int j = 0; j < 4; ++j)
            bytes |= (((vi)(values[j] * inverse + splat(12582912.0f)) - 0x4b400000) & 255) << 8 * j;
        std::memcpy(to + k / kStep * kTileBytes + k % kStep / 4 * 64, &bytes, 64);
    });
}

class ColumnProduct {
  public:
    ColumnProduct(const LinearArgs& args, void* packed)
        : a(args),
          steps_(column_steps(a.depth)),
          groups_((a.rows + 15) / 16),
          digits_(static_cast<uint8_t*>(packed)),
          scales_(reinterpret_cast<float*>(digits_ + groups_ * steps_ * 2 * kTileBytes)) {}

    static size_t packed_bytes(const LinearArgs& a) {
        const int64_t groups = (a.rows + 15) / 16;
        return size_t(groups * (column_steps(a.depth) * 2 * kTileBytes + 16 * 4));
    }
    int64_t groups() const { return groups_; }
    int64_t form_bytes() const { return round_up(a.columns, kColumns) / kColumns * column_tile_bytes(a.depth); }

    // Rows as tiles of digits: [group][step][high, low][16 rows]. The weights from `pair` on are asked for meanwhile.
    void pack(int64_t begin, int64_t end, int64_t pair) const {
        const uint8_t* weights = a.column_form + 2 * pair * column_tile_bytes(a.depth);
        const uint8_t* const last = std::min(weights + kEarly, a.column_form + form_bytes());
        for (int64_t row = begin; row < end; ++row) {
            uint8_t* to = digits_ + row / 16 * steps_ * 2 * kTileBytes + row % 16 * 64;
            const bf16* x = row < a.rows ? static_cast<const bf16*>(a.x) + row * a.depth : nullptr;
            const float most = x ? largest_of(x) : 0.0f;
            const float* const shrink = a.column_shrink;
            const bool finite = most < INFINITY;
            scales_[row] = finite ? most / 32512.0f : NAN;
            const vf inverse = splat(finite && most > 0 ? 32512.0f / most : 0.0f);
            for (int64_t k = 0; k < steps_ * kStep; k += VL) {
                uint8_t* at = to + k / kStep * 2 * kTileBytes + k % kStep;
                vi v = vi{};
                if (x && finite && k < a.depth) {
                    const vf value = shrink ? load(x + k) * load(shrink + k) : load(x + k);
                    v = (vi)(value * inverse + splat(12582912.0f)) - 0x4b400000;
                }
                const vi low = ((v + 128) & 255) - 128;
                store_bytes16(at, (v - low) >> 8);
                store_bytes16(at + kTileBytes, low);
                if (weights < last) {
                    __builtin_prefetch(weights, 0, 2);
                    __builtin_prefetch(weights + 64, 0, 2);
                    weights += 128;
                }
            }
        }
    }

    template <class O, class Next>
    void pairs(Next&& next) const {
        const int64_t tiles = round_up(a.columns, kColumns) / kColumns, stride = column_tile_bytes(a.depth);
        const int rows = int(std::min<int64_t>(a.rows, 16));
        int64_t begin, end;
        if (!next(&begin, &end)) return;
        shape_tiles(rows, rows);
        do
            for (int64_t first = 0; first < groups_; first += kBlock)
                for (int64_t pair = begin; pair < end; ++pair) {
                    const uint8_t* left = a.column_form + 2 * pair * stride;
                    const uint8_t* right = 2 * pair + 1 < tiles ? left + stride : left;
                    for (int64_t group = first; group < std::min(groups_, first + kBlock); ++group) {
                        zero_sums();
                        group == first ? add<true>(group, left, right) : add<false>(group, left, right);
                        write<O>(group, pair, left + steps_ * kTileBytes, right + steps_ * kTileBytes);
                    }
                }
        while (next(&begin, &end));
        _tile_release();
    }

  private:
    static constexpr int64_t kEarly = 65536;  // bytes of weights asked for while rows are packed
    static constexpr int64_t kBlock = 8;  // groups of rows that stay in the second-level cache while weights go by

    // The sums in the tiles as outputs; `left` and `right`: the columns' scales.
    template <class O>
    void write(int64_t group, int64_t pair, const uint8_t* left, const uint8_t* right) const {
        alignas(64) int32_t sums[4][16 * kColumns];
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        const vf scale[2] = {load(reinterpret_cast<const float*>(left)), load(reinterpret_cast<const float*>(right))};
        const int rows = int(std::min<int64_t>(16, a.rows - group * 16));
        const float* const units = scales_ + group * 16;
        const auto value = [&](int m, int side) {
            const vf high = float_of(sums[side] + m * kColumns), low = float_of(sums[2 + side] + m * kColumns);
            return (high * splat(256.0f) + low) * (scale[side] * splat(units[m]));
        };
        if constexpr (std::is_same<O, bf16>::value) {
            if (!a.bias && (pair + 1) * kPair <= a.columns) {  // a row of both tiles is a cache line
                bf16* out = static_cast<bf16*>(a.out) + group * 16 * a.columns + pair * kPair;
                for (int m = 0; m < rows; ++m, out += a.columns)
                    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)value(m, 1), (__m512)value(m, 0)));
                return;
            }
        }
        write_columns<O>(a, group * 16, rows, pair * kPair, kPair, [&](int m, int i) { return value(m, i / kColumns); });
    }

    // The largest magnitude; infinity or NaN if there is one.
    float largest_of(const bf16* x) const {
        vi top = vi{};  // magnitudes order as their bits do, with infinities and NaNs on top
        for (int64_t k = 0; k < a.depth; k += VL) {
            const vf value = a.column_shrink ? load(x + k) * load(a.column_shrink + k) : load(x + k);
            top = max_bits(top, (vi)vabs(value));
        }
        const int32_t bits = hmax_bits(top);
        float most;
        std::memcpy(&most, &bits, 4);
        return most;
    }

    PK_INLINE static void store_bytes16(uint8_t* to, vi v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8((__m512i)v));
    }

    PK_INLINE static vf float_of(const int32_t* v) { return (vf)_mm512_cvtepi32_ps(_mm512_load_si512(v)); }

    // Registers 0, 1: high digits by left and right columns; 2, 3: low digits.
    template <bool AHEAD>
    PK_INLINE void add(int64_t group, const uint8_t* left, const uint8_t* right) const {
        const uint8_t* x = digits_ + group * steps_ * 2 * kTileBytes;
        for (int64_t s = 0; s < steps_; ++s, x += 2 * kTileBytes, left += kTileBytes, right += kTileBytes) {
            if (AHEAD) {  // into the second-level cache, from which tiles load as fast as they multiply
                prefetch_far(left, kTileBytes);
                prefetch_far(right, kTileBytes);
            }
            _tile_loadd(4, x, 64);
            _tile_loadd(6, left, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, right, 64);
            _tile_dpbssd(1, 4, 7);
            _tile_loadd(5, x + kTileBytes, 64);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }

    const LinearArgs& a;
    const int64_t steps_, groups_;
    uint8_t* const digits_;
    float* const scales_;
};

inline void linear_by_columns(Context* ctx, const LinearArgs& a) {
    const ColumnProduct product(a, ctx->shared.reserve(ColumnProduct::packed_bytes(a)));
    const int64_t pairs = round_up(a.columns, kPair) / kPair;
    ctx->pool.rows(product.groups() * 16, std::max<int64_t>(1, 4096 / a.depth), [&](int64_t begin, int64_t end, int t) {
        product.pack(begin, end, ctx->pool.share(pairs, t));
    });
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        ctx->pool.spread(pairs, [&](auto& next, int) { product.pairs<O>(next); });
    });
}

}  // namespace pk

#endif
