// Linears on AMX tiles for many rows: weights are bfloat16, stored so or widened chunk by chunk inside the cache.

#pragma once

#include "linear/amx/weight_tiles.h"
#include "linear/linear.h"
#include "linear/amx/bfloat16_stored.h"

#if defined(PK_AMX)

namespace pk::PK_SET {

constexpr int64_t kMostChunk = 12;  // blocks whose weights for 32 columns stay in the first-level cache: 24 KB

// One product: the rows in groups of 32, the weights in pairs of column tiles, the depth in chunks. Sums wait in `sums`
// between chunks where there are several groups; a single one keeps them in registers.
class MatrixProduct {
  public:
    MatrixProduct(const LinearArgs& args, uint8_t* packed) : a(args), packed_(packed) {
        const int64_t chunks = (blocks() + kMostChunk - 1) / kMostChunk;
        chunk_ = (blocks() + chunks - 1) / chunks;
        groups_ = (a.rows + 31) / 32;
    }

    // Many rows are copied first, tile after tile, the last group filled up with zeros.
    static bool packs(const LinearArgs& a) { return a.rows > 32; }
    static size_t packed_bytes(const LinearArgs& a) { return packs(a) ? size_t(round_up(a.rows, 32) * a.depth * 2) : 0; }
    size_t scratch_bytes() const { return size_t(2 * chunk_ * kTileBytes + groups_ * kGroupBytes); }

    void pack(int64_t begin, int64_t end) const {
        for (int64_t group = begin; group < end; ++group) {
            uint8_t* to = packed_ + group * 16 * a.depth * 2;
            for (int64_t b = 0; b < blocks(); ++b)
                for (int64_t row = group * 16; row < group * 16 + 16; ++row, to += 64) {
                    const uint8_t* from = static_cast<const uint8_t*>(a.x) + row * a.depth * 2 + b * 64;
                    _mm512_store_si512(to, row < a.rows ? _mm512_loadu_si512(from) : _mm512_setzero_si512());
                }
        }
    }

    template <class O>
    void pairs(int64_t begin, int64_t end, uint8_t* scratch) const {
        uint8_t* wide[2] = {scratch, scratch + chunk_ * kTileBytes};
        float* sums = reinterpret_cast<float*>(scratch + 2 * chunk_ * kTileBytes);
        const int rows = int(std::min<int64_t>(a.rows, 32));
        const bool one = a.rows <= 16;
        if (packs(a))
            shape_tiles(16, 16);
        else
            shape_tiles(std::min(rows, 16), one ? rows : rows - 16);
        for (int64_t pair = begin; pair < end; ++pair) {
            for (int64_t from = 0; from < blocks(); from += chunk_) {
                const int64_t count = std::min(chunk_, blocks() - from);
                const uint8_t* side[2];
                for (int i = 0; i < 2; ++i) side[i] = weights(2 * pair + i, from, count, wide[i]);
                before_tiles();
                for (int64_t group = 0; group < groups_; ++group) {
                    float* y = sums + group * (kGroupBytes / 4);
                    if (from == 0)
                        zero_sums();
                    else if (groups_ > 1)
                        load_sums(y);
                    const RowTiles x = tiles(2 * group).from(from), lower = tiles(2 * group + 1).from(from);
                    if (a.bits == 16 && group == 0)
                        one ? add_products<true>(x, side[0], side[1], count)
                            : add_products<true>(x, lower, side[0], side[1], count);
                    else
                        one ? add_products<false>(x, side[0], side[1], count)
                            : add_products<false>(x, lower, side[0], side[1], count);
                    if (groups_ > 1 || from + count == blocks()) store_sums(y);
                }
            }
            if (one)
                for (int i = 0; i < rows * kPair; i += VL) store(sums + i, load(sums + i) + load(sums + 16 * kPair + i));
            for (int64_t group = 0; group < groups_; ++group)
                write_columns<O>(a, group * 32, int(std::min<int64_t>(32, a.rows - group * 32)), pair * kPair, kPair,
                                 [&](int m, int i) { return load(sums + group * (kGroupBytes / 4) + m * kPair + i); });
        }
        _tile_release();
    }

  private:
    static constexpr int64_t kGroupBytes = 32 * kPair * 4;

    int64_t blocks() const { return a.depth / kDepth; }

    RowTiles tiles(int64_t half) const {
        if (packs(a)) return {packed_ + half * 16 * a.depth * 2, kTileBytes, 64};
        return {static_cast<const uint8_t*>(a.x) + half * 16 * a.depth * 2, 64, a.depth * 2};
    }

    // Tiles of `count` blocks of 16 columns; the last pair may consist of one column tile twice.
    const uint8_t* weights(int64_t tile, int64_t from, int64_t count, uint8_t* wide) const {
        tile = std::min(tile, round_up(a.columns, kColumns) / kColumns - 1);
        if (a.bits == 16) return a.weights + (tile * blocks() + from) * kTileBytes;
        const Tile few = tile_at(a.weights, blocks(), a.bits, tile);
        const f16 *scale = few.scale + from * kColumns, *minimum = few.minimum + from * kColumns;
        if (a.bits == 4)
            widen4(few.q + from * Q4::kBytes, scale, minimum, count, wide);
        else
            widen8(few.q + from * Q8::kBytes, scale, count, wide);
        return wide;
    }

    const LinearArgs& a;
    uint8_t* packed_;
    int64_t chunk_, groups_;
};

inline void linear_bfloat16(Context* ctx, const LinearArgs& a) {
    if (a.bits == 16 && a.rows > 32) return linear_bfloat16_stored(ctx, a);
    const MatrixProduct product(a, static_cast<uint8_t*>(ctx->shared.reserve(MatrixProduct::packed_bytes(a))));
    if (MatrixProduct::packs(a))
        ctx->pool.rows(round_up(a.rows, 32) / 16, 4, [&](int64_t begin, int64_t end, int) { product.pack(begin, end); });
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].reserve(product.scratch_bytes());
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        ctx->pool.rows(round_up(a.columns, kPair) / kPair, 1, [&](int64_t begin, int64_t end, int thread) {
            product.pairs<O>(begin, end, static_cast<uint8_t*>(ctx->scratch[thread].reserve(0)));
        });
    });
}

}  // namespace pk::PK_SET

#endif
