// Linears in int8 on AMX tiles: per-channel weights (one scale per output), activations with one scale per row.
//
// With scales that hold for the whole depth, a sum stays in a tile register from the first product to the last: no
// scaling and no widening in between, one byte per weight from memory, and one instruction for 64 depths of 16 rows and 16
// columns. Sums are exact integers, so results are batch-invariant. Two things make a byte enough for either side: weights
// and rows get the same Hadamard rotation (hadamard.h), which removes outliers, and activation-aware scaling may multiply
// the weights of important inputs before it; rows are divided by the same factors. `penstock bench perplexity` shows what
// the rounding costs.

#pragma once

#include <utility>

#include "linear/amx/weight_tiles.h"
#include "elementwise/gumbel.h"
#include "linear/linear.h"
#include "linear/per_channel_weights.h"

#if defined(PK_AMX)

namespace pk::PK_SET {

static_assert(kStepBytes == kTileBytes, "a step of the per-channel weights is a tile");

class PerChannelProduct {
  public:
    // `last`: where the weights end that will be read later, if that is not the end of these columns.
    PerChannelProduct(const LinearArgs& args, void* packed, const uint8_t* last = nullptr)
        : a(args),
          last_(last),
          steps_(per_channel_steps(a.depth)),
          groups_((a.rows + 31) / 32),
          bytes_(static_cast<uint8_t*>(packed)),
          scales_(reinterpret_cast<float*>(bytes_ + halves() * steps_ * kTileBytes)) {}

    static size_t packed_bytes(const LinearArgs& a) {
        return size_t((a.rows + 15) / 16 * (per_channel_steps(a.depth) * kTileBytes + 16 * 4));
    }
    int64_t halves() const { return (a.rows + 15) / 16; }
    int64_t depth() const { return steps_ * kStep; }
    int64_t pairs() const { return a.gate ? tiles() / 2 : (tiles() + 1) / 2; }

    // Rows as tiles of bytes: [16 rows][step]. Prefetches the weights from `pair` on meanwhile. `rotated`: a row.
    void pack(int64_t begin, int64_t end, int64_t pair, float* rotated) const {
        const uint8_t *left = tile_of(pair, 0), *right = a.gate ? tile_of(pair, 1) : left + kEarly / 2;
        Prefetcher ahead[2] = {{left, std::min(end_of(0), left + kEarly / 2)}, {right, std::min(end_of(1), right + kEarly / 2)}};
        for (int64_t row = begin; row < end; ++row) {
            uint8_t* to = bytes_ + row / 16 * steps_ * kTileBytes + row % 16 * 64;
            const float most = row < a.rows ? rotate(static_cast<const bf16*>(a.x) + row * a.depth, rotated) : 0.0f;
            scales_[row] = most < INFINITY ? most / 127.0f : NAN;
            const vf inverse = splat(most > 0 && most < INFINITY ? 127.0f / most : 0.0f);
            for (int64_t k = 0; k < depth(); k += kStep, to += kTileBytes) {
                ahead[0].lines(4);
                ahead[1].lines(4);
                if (inverse[0] > 0)
                    round(rotated + k, inverse, to);
                else
                    _mm512_store_si512(to, _mm512_setzero_si512());
            }
        }
    }

    template <class O, class Next>
    void multiply(Next&& next) const {
        const int rows = int(std::min<int64_t>(a.rows, 16));
        alignas(64) int32_t sums[2][32 * kPair];
        Done done;
        int64_t begin, end;
        if (!next(&begin, &end)) return;
        shape_tiles(rows, rows);
        do
            for (int64_t first = 0; first < groups_; first += kBlock) {
                const int64_t last = std::min(groups_, first + kBlock);
                for (int64_t pair = begin; pair < end; ++pair) {
                    const uint8_t *left = tile_of(pair, 0), *right = tile_of(pair, 1);
                    // Weights are prefetched into the second-level cache, from which tiles load as fast as they multiply.
                    Prefetcher ahead[2] = {{left + kFarAhead, end_of(0)}, {right + kFarAhead, end_of(1)}};
                    const int lines = first ? 0 : int((kTileBytes / 64 + last - first - 1) / (last - first));
                    for (int64_t group = first; group < last; ++group) {
                        zero_sums();
                        int32_t* const to = sums[done.sums == sums[0]];
                        if (a.rows - group * 32 > 16) {
                            add<O, true>(group, left, right, done, ahead, lines);
                            store_sums(to);
                        } else {
                            add<O, false>(group, left, right, done, ahead, lines);
                            store_upper_sums(to);
                        }
                        done = {to, group, pair, left + steps_ * kTileBytes, right + steps_ * kTileBytes};
                    }
                }
            }
        while (next(&begin, &end));
        write<O>(done, 0, 32);
        _tile_release();
    }

  private:
    static constexpr int64_t kEarly = 65536;  // bytes of weights prefetched while rows are packed
    static constexpr int64_t kBlock = 8;  // groups of rows that stay in the second-level cache while weights go by

    // Sums out of the tiles, not yet written; left and right: the columns' scales.
    struct Done {
        const int32_t* sums = nullptr;  // [32 rows][kPair]
        int64_t group = 0, pair = 0;
        const uint8_t *left = nullptr, *right = nullptr;
    };

    int64_t tiles() const { return round_up(a.columns, kColumns) / kColumns; }

    // A pair is two neighbours, the last perhaps the same one twice; or, with a gate, a tile of either half.
    const uint8_t* tile_of(int64_t pair, int side) const {
        const int64_t tile = a.gate ? pair + side * (tiles() / 2) : std::min(2 * pair + side, tiles() - 1);
        return a.per_channel + tile * per_channel_tile_bytes(a.depth);
    }
    const uint8_t* end_of(int side) const {
        if (last_) return last_;
        return a.per_channel + (a.gate && side == 0 ? tiles() / 2 : tiles()) * per_channel_tile_bytes(a.depth);
    }

    // Rows [from, to) of finished sums as outputs.
    template <class O>
    PK_INLINE void write(const Done& done, int from, int to) const {
        to = int(std::min<int64_t>(std::min(to, 32), a.rows - done.group * 32));
        const vf scale[2] = {load(reinterpret_cast<const float*>(done.left)), load(reinterpret_cast<const float*>(done.right))};
        const float* const units = scales_ + done.group * 32;
        const auto value = [&](int m, int side) {
            const __m512i sum = _mm512_load_si512(done.sums + m * kPair + side * kColumns);
            return (vf)_mm512_cvtepi32_ps(sum) * (scale[side] * splat(units[m]));
        };
        if (a.gate) return write_gated<O>(done, from, to, value);
        if constexpr (std::is_same<O, bf16>::value) {
            if (!a.bias && (done.pair + 1) * kPair <= a.columns) {  // a row of both tiles is a cache line
                bf16* out = static_cast<bf16*>(a.out) + (done.group * 32 + from) * a.columns + done.pair * kPair;
                for (int m = from; m < to; ++m, out += a.columns)
                    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)value(m, 1), (__m512)value(m, 0)));
                return;
            }
        }
        if (from < to)
            write_columns<O>(a, done.group * 32 + from, to - from, done.pair * kPair, kPair,
                             [&](int m, int i) { return value(from + m, i / kColumns); });
    }

    // To the bit as if both halves had been written first and the gate applied then.
    template <class O, class F>
    PK_INLINE void write_gated(const Done& done, int from, int to, F&& value) const {
        const int64_t ffn = a.columns / 2, column = done.pair * kColumns;
        O* out = static_cast<O*>(a.out) + (done.group * 32 + from) * ffn + column;
        for (int m = from; m < to; ++m, out += ffn) {
            vf gate = value(m, 0), up = value(m, 1);
            if (a.bias) {
                gate += load(a.bias + column);
                up += load(a.bias + ffn + column);
            }
            as_stored<O>(gate, up);
            store(out, gated<O>(Gate(a.gate), gate, up));
        }
    }

    PK_INLINE vf scaled_input(const bf16* x, int64_t k) const {
        return a.per_channel_inputs ? load(x + k) * load(a.per_channel_inputs + k) : load(x + k);
    }

    // Rotates a row; returns its largest magnitude, infinity or NaN if there is one.
    float rotate(const bf16* x, float* rotated) const {
        return rotate_any_row(depth(), rotated, [&](int64_t k) { return k < a.depth ? scaled_input(x, k) : splat(0); });
    }

    // 64 depths to a row of a tile.
    PK_INLINE static void round(const float* x, vf inverse, uint8_t* to) {
        __m512i v[4];
        PK_UNROLL for (int i = 0; i < 4; ++i) v[i] = _mm512_cvtps_epi32((__m512)(load(x + i * VL) * inverse));
        _mm512_store_si512(to, bytes_of(v));
    }

    // Registers 0, 1: the upper 16 rows by left and right columns; 2, 3: the lower, if there are BOTH. The two tiles of
    // weights stay in the first-level cache from one group to the next, rows pass through it. Finished sums (`done`) are
    // written meanwhile: the vector units have nothing else to do while tiles are multiplied.
    template <class O, bool BOTH>
    PK_INLINE void add(int64_t group, const uint8_t* left, const uint8_t* right, const Done& done, Prefetcher (&ahead)[2],
                       int lines) const {
        const uint8_t *x = bytes_ + group * 2 * steps_ * kTileBytes, *lower = x + steps_ * kTileBytes;
        const int share = int((32 + steps_ - 1) / steps_);
        for (int64_t s = 0; s < steps_; ++s, left += kTileBytes, right += kTileBytes) {
            ahead[0].lines(lines);
            ahead[1].lines(lines);
            _tile_stream_loadd(4, x + s * kTileBytes, 64);
            _tile_loadd(6, left, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, right, 64);
            _tile_dpbssd(1, 4, 7);
            if (BOTH) {
                _tile_stream_loadd(5, lower + s * kTileBytes, 64);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
            if (done.sums) write<O>(done, int(s) * share, int(s + 1) * share);
        }
    }

    const LinearArgs& a;
    const uint8_t* const last_;
    const int64_t steps_, groups_;
    uint8_t* const bytes_;
    float* const scales_;
};

// All threads pack rows. A thread whose first pair is `first(thread)` prefetches the weights of that pair meanwhile.
template <class F>
inline void pack_rows(Context* ctx, const LinearArgs& a, const PerChannelProduct& product, F&& first) {
    ctx->pool.rows(product.halves() * 16, std::max<int64_t>(1, 4096 / a.depth), [&](int64_t begin, int64_t end, int t) {
        product.pack(begin, end, first(t), ctx->scratch[t].floats(product.depth()));
    });
}

inline void linear_per_channel(Context* ctx, const LinearArgs& a) {
    const PerChannelProduct product(a, ctx->shared.reserve(PerChannelProduct::packed_bytes(a)));
    const int64_t pairs = product.pairs();
    pack_rows(ctx, a, product, [&](int thread) { return ctx->pool.share(pairs, thread); });
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        ctx->pool.spread(pairs, [&](auto& next, int) { product.multiply<O>(next); });
    });
}

// Sampling fused into the product: the float32 outputs exist only in a core's cache, a few columns at a time.
inline void sample_per_channel(Context* ctx, const LinearArgs& a, const float* temperatures, const uint64_t* keys,
                            int64_t* out) {
    constexpr int64_t kPairs = 8;  // 64 rows of so many are 64 KiB
    uint8_t* const packed = static_cast<uint8_t*>(ctx->shared.reserve(PerChannelProduct::packed_bytes(a)));
    const PerChannelProduct product(a, packed);
    const int64_t pieces = (product.pairs() + kPairs - 1) / kPairs, threads = ctx->pool.threads();
    pack_rows(ctx, a, product, [&](int thread) { return ctx->pool.share(pieces, thread) * kPairs; });
    GumbelMax* const found = static_cast<GumbelMax*>(ctx->tasks.reserve(size_t(threads * a.rows) * sizeof(GumbelMax)));
    std::fill_n(found, threads * a.rows, GumbelMax());
    const uint8_t* const last = a.per_channel + round_up(a.columns, kColumns) / kColumns * per_channel_tile_bytes(a.depth);
    ctx->pool.spread(pieces, [&](auto& next, int thread) {
        LinearArgs part = a;
        part.out = ctx->scratch[thread].floats(size_t(a.rows * kPairs * kPair));
        GumbelMax* const mine = found + thread * a.rows;
        for (int64_t begin, end; next(&begin, &end);)
            for (int64_t piece = begin; piece < end; ++piece) {
                const int64_t first = piece * kPairs * kPair;
                part.columns = std::min(kPairs * kPair, a.columns - first);
                part.per_channel = a.per_channel + first / kColumns * per_channel_tile_bytes(a.depth);
                part.bias = a.bias ? a.bias + first : nullptr;
                const PerChannelProduct some(part, packed, last);
                bool given = false;
                some.multiply<float>([&](int64_t* from, int64_t* to) {
                    *from = 0, *to = some.pairs();
                    return !std::exchange(given, true);
                });
                for (int64_t r = 0; r < a.rows; ++r)
                    mine[r].include(static_cast<float*>(part.out) + r * part.columns, part.columns, first,
                                    temperatures[r], keys[r]);
            }
    });
    for (int64_t r = 0; r < a.rows; ++r) {
        GumbelMax best;
        for (int64_t t = 0; t < threads; ++t) best.offer(found[t * a.rows + r].top, found[t * a.rows + r].token);
        out[r] = best.token;
    }
}

}  // namespace pk::PK_SET

#endif
