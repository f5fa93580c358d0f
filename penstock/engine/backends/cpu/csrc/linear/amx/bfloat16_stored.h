// Linears on AMX tiles for many rows and weights that are stored in bfloat16 (weight_tiles.h): nothing is widened, so a sum stays
// in its register from the first depth to the last, for 32 rows x 32 columns at a time.

#pragma once

#include "linear/amx/weight_tiles.h"
#include "linear/linear.h"

#if defined(PK_AMX)

namespace pk::PK_SET {

class WideProduct {
  public:
    WideProduct(const LinearArgs& args, void* packed)
        : a(args),
          blocks_(a.depth / kDepth),
          groups_((a.rows + 31) / 32),
          packed_(static_cast<uint8_t*>(packed)) {}

    static size_t packed_bytes(const LinearArgs& a) { return size_t(round_up(a.rows, 32) * a.depth * 2); }

    // Rows as tiles, [16 rows][block], the last filled up with zeros.
    void pack(int64_t begin, int64_t end) const {
        for (int64_t row = begin; row < end; ++row) {
            uint8_t* to = packed_ + row / 16 * 16 * a.depth * 2 + row % 16 * 64;
            const uint8_t* from = static_cast<const uint8_t*>(a.x) + row * a.depth * 2;
            for (int64_t b = 0; b < blocks_; ++b, to += kTileBytes, from += 64)
                _mm512_store_si512(to, row < a.rows ? _mm512_loadu_si512(from) : _mm512_setzero_si512());
        }
    }

    template <class O, class Next>
    void pairs(Next&& next) const {
        const int64_t tiles = round_up(a.columns, kColumns) / kColumns, stride = blocks_ * kTileBytes;
        alignas(64) float sums[2][32 * kPair];
        Done done;
        int64_t begin, end;
        if (!next(&begin, &end)) return;
        shape_tiles(16, 16);
        do
            for (int64_t first = 0; first < groups_; first += kBlock) {
                const int64_t last = std::min(groups_, first + kBlock);
                for (int64_t pair = begin; pair < end; ++pair) {
                    const uint8_t* left = a.weights + 2 * pair * stride;
                    const uint8_t* right = 2 * pair + 1 < tiles ? left + stride : left;
                    Prefetcher ahead{left + kFarAhead, first ? left : a.weights + tiles * stride};
                    const int lines = int((2 * kTileBytes / 64 + last - first - 1) / (last - first));
                    for (int64_t group = first; group < last; ++group) {
                        zero_sums();
                        add<O>(group, left, right, done, ahead, lines);
                        float* const to = sums[done.sums == sums[0]];
                        store_sums(to);
                        done = {to, group, pair};
                    }
                }
            }
        while (next(&begin, &end));
        write<O>(done, 0, 32);
        _tile_release();
    }

  private:
    static constexpr int64_t kBlock = 8;  // groups of rows that stay in the second-level cache while weights go by

    struct Done {
        const float* sums = nullptr;  // [32 rows][kPair]
        int64_t group = 0, pair = 0;
    };

    // Registers 0, 1: the upper 16 rows by left and right columns; 2, 3: the lower. Finished sums (`done`) are written meanwhile.
    template <class O>
    PK_INLINE void add(int64_t group, const uint8_t* left, const uint8_t* right, const Done& done, Prefetcher& ahead,
                       int lines) const {
        const uint8_t *x = packed_ + group * 32 * a.depth * 2, *lower = x + 16 * a.depth * 2;
        const int share = int((32 + blocks_ - 1) / blocks_);
        for (int64_t b = 0; b < blocks_; ++b) {
            ahead.lines(lines);
            _tile_stream_loadd(4, x + b * kTileBytes, 64);
            _tile_loadd(6, left + b * kTileBytes, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right + b * kTileBytes, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_stream_loadd(5, lower + b * kTileBytes, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            if (done.sums) write<O>(done, int(b) * share, int(b + 1) * share);
        }
    }

    template <class O>
    PK_INLINE void write(const Done& done, int from, int to) const {
        to = int(std::min<int64_t>(std::min(to, 32), a.rows - done.group * 32));
        if (from >= to) return;
        const float* const y = done.sums + from * kPair;
        write_columns<O>(a, done.group * 32 + from, to - from, done.pair * kPair, kPair,
                         [&](int m, int i) { return load(y + m * kPair + i); });
    }

    const LinearArgs& a;
    const int64_t blocks_, groups_;
    uint8_t* const packed_;
};

inline void linear_bfloat16_stored(Context* ctx, const LinearArgs& a) {
    const WideProduct product(a, ctx->shared.reserve(WideProduct::packed_bytes(a)));
    ctx->pool.rows(round_up(a.rows, 32), std::max<int64_t>(1, 16384 / a.depth),
                   [&](int64_t begin, int64_t end, int) { product.pack(begin, end); });
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        ctx->pool.spread(round_up(a.columns, kPair) / kPair, [&](auto& next, int) { product.pairs<O>(next); });
    });
}

}  // namespace pk::PK_SET

#endif
