// Per-group linears on AMX tiles for few rows: a block's integers go to the tiles as they are, its scales follow the product.
//
// The integers of a block are exact in bfloat16, and a 4-bit one gets there by a table look-up: a third of the work of
// multiplying it out. One instruction then gives the sums of a block, 16 rows x 32 depths x 16 columns; they are
// multiplied by the columns' scales and added in float32, and so is minimum x (sum of the activations). Nothing but
// the activations is rounded, and results are batch-invariant.

#pragma once

#include "linear/amx/weight_tiles.h"
#include "linear/linear.h"

#if defined(PK_AMX)

namespace pk::PK_SET {

// A block as a tile. Which depths a tile row pairs is free as long as the activations are paired alike: `order`.
struct Blocks4 {
    using Stored = Q4;
    static constexpr bool kMinimum = true;
    const __m512i table;

    Blocks4() : table(bf16_of_low_bits()) {}

    // Look-ups take the low five bits of a word; the fifth belongs to the next number, so the table repeats itself.
    static __m512i bf16_of_low_bits() {
        alignas(64) uint16_t entries[32];
        for (int i = 0; i < 32; ++i) {
            const float number = float(i & 15);
            uint32_t bits;
            std::memcpy(&bits, &number, 4);
            entries[i] = uint16_t(bits >> 16);
        }
        return _mm512_load_si512(entries);
    }

    // Word 2n + j of 64 bytes holds, from the low bits on, depths 0, 16, 1 and 17 of column n, all plus 2j.
    static __m512i order() {
        alignas(64) uint16_t depths[32];
        constexpr int at[4] = {0, 16, 1, 17};
        for (int i = 0; i < 32; ++i) depths[i] = uint16_t(4 * (i / 8) + at[i / 2 % 4] + 2 * (i % 2));
        return _mm512_load_si512(depths);
    }

    PK_INLINE void widen(const uint8_t* q, uint8_t* to) const {
        static_assert(kStoredFlip == 0, "numbers are taken as they are");
        PK_UNROLL for (int g = 0; g < 4; ++g, q += 64, to += 256) {
            const __m512i v = _mm512_loadu_si512(q);
            _mm512_store_si512(to, _mm512_permutexvar_epi16(v, table));
            _mm512_store_si512(to + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table));
            _mm512_store_si512(to + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table));
            _mm512_store_si512(to + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table));
        }
    }
};

struct Blocks8 {
    using Stored = Q8;
    static constexpr bool kMinimum = false;

    static __m512i order() {
        alignas(64) uint16_t depths[32];
        for (int i = 0; i < 32; ++i) depths[i] = uint16_t(i);
        return _mm512_load_si512(depths);
    }

    // Both fit the upper half of a float exactly.
    PK_INLINE static __m512i pair(__m512 low, __m512 high) {
        return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high),
                                         _mm512_set1_epi32(int(0xffff0000)), 0xf8);  // low | (high & mask)
    }

    PK_INLINE void widen(const uint8_t* q, uint8_t* to) const {
        PK_UNROLL for (int g = 0; g < 8; ++g, q += 64, to += 128) {
            const __m512i v = _mm512_loadu_si512(q);
            _mm512_store_si512(to, pair(signed_byte<0>(v), signed_byte<1>(v)));
            _mm512_store_si512(to + 64, pair(signed_byte<2>(v), signed_byte<3>(v)));
        }
    }
};

class BlockProduct {
  public:
    BlockProduct(const LinearArgs& args, void* packed)
        : a(args),
          groups_((a.rows + 15) / 16),
          tiles_(static_cast<uint8_t*>(packed)),
          totals_(reinterpret_cast<float*>(tiles_ + groups_ * blocks() * kTileBytes)) {}

    static size_t packed_bytes(const LinearArgs& a) {
        return size_t((a.rows + 15) / 16 * (a.depth / kDepth)) * (kTileBytes + 16 * sizeof(float));
    }
    size_t scratch_bytes() const { return size_t((groups_ == 1 ? 2 * kChunk : blocks()) * kTileBytes + 2 * kSumBytes); }
    int64_t groups() const { return groups_; }

    // Rows as tiles in the order of the weights' depths, and the sum of each of their blocks.
    void pack(int64_t begin, int64_t end) const {
        const __m512i order = a.bits == 4 ? Blocks4::order() : Blocks8::order();
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        for (int64_t group = begin; group < end; ++group)
            for (int64_t b = 0; b < blocks(); ++b) {
                uint8_t* to = tiles_ + (group * blocks() + b) * kTileBytes;
                float* total = totals_ + (group * blocks() + b) * 16;
                for (int r = 0; r < 16; ++r) {
                    const int64_t row = group * 16 + r;
                    __m512i x = _mm512_setzero_si512();
                    if (row < a.rows)
                        x = _mm512_loadu_si512(static_cast<const uint8_t*>(a.x) + row * a.depth * 2 + b * 64);
                    _mm512_store_si512(to + r * 64, _mm512_permutexvar_epi16(order, x));
                    total[r] = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)x, ones));
                }
            }
    }

    template <class O>
    void columns(int64_t begin, int64_t end, uint8_t* scratch) const {
        a.bits == 4 ? columns_of<O>(Blocks4(), begin, end, scratch) : columns_of<O>(Blocks8(), begin, end, scratch);
    }

  private:
    static constexpr int64_t kChunk = 4;  // blocks under way together
    static constexpr int64_t kSumBytes = kChunk * kTileBytes;

    int64_t blocks() const { return a.depth / kDepth; }

    template <class O, class B>
    void columns_of(const B& form, int64_t begin, int64_t end, uint8_t* scratch) const {
        const int rows = a.rows <= 4 ? 4 : a.rows <= 8 ? 8 : 16;
        shape_tiles(rows, rows);
        for (int64_t t = begin; t < end; ++t) {
            const Tile tile = tile_at(a.weights, blocks(), a.bits, t);
            for (int64_t group = 0; group < groups_; ++group) {
                alignas(64) float y[16 * kColumns];
                if (rows == 4)
                    sum<4>(form, tile, group, scratch, y);
                else if (rows == 8)
                    sum<8>(form, tile, group, scratch, y);
                else
                    sum<16>(form, tile, group, scratch, y);
                write_columns<O>(a, group * 16, int(std::min<int64_t>(16, a.rows - group * 16)), t * kColumns, kColumns,
                                 [&](int m, int i) { return load(y + m * kColumns + i); });
            }
        }
        _tile_release();
    }

    // y [R][16 columns] of one group of rows. The stages of a chunk of blocks (widen, multiply, scale) are spread over
    // three rounds, so that none waits for the one before it. Later groups find the tiles widened by the first.
    template <int R, class B>
    void sum(const B& form, const Tile& tile, int64_t group, uint8_t* scratch, float* y) const {
        const int64_t n = blocks(), chunks = (n + kChunk - 1) / kChunk;
        float* const sums = reinterpret_cast<float*>(scratch);
        uint8_t* const wide = scratch + 2 * kSumBytes;
        const uint8_t* const x = tiles_ + group * n * kTileBytes;
        const float* const totals = totals_ + group * n * 16;
        __m512 acc[R];
        PK_UNROLL for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();

        constexpr int64_t kShare = B::Stored::kBytes + (B::kMinimum ? 4 : 2) * kColumns;
        const auto place = [&](int64_t b) { return wide + (groups_ == 1 ? b % (2 * kChunk) : b) * kTileBytes; };
        const auto widen = [&](int64_t chunk) {
            if (group > 0) return;
            for (int64_t b = chunk * kChunk; b < std::min(n, (chunk + 1) * kChunk); ++b) {
                prefetch(tile.q + kAhead + b * kShare, kShare);
                prefetch_far(tile.q + b * kShare, kShare);
                form.widen(tile.q + b * B::Stored::kBytes, place(b));
            }
        };
        const auto scale = [&](int64_t chunk) {
            const float* from = sums + chunk % 2 * (kSumBytes / 4);
            for (int64_t b = chunk * kChunk; b < std::min(n, (chunk + 1) * kChunk); ++b, from += kTileBytes / 4) {
                const __m512 factor = (__m512)load(tile.scale + b * kColumns);
                PK_UNROLL for (int r = 0; r < R; ++r)
                    acc[r] = _mm512_fmadd_ps(_mm512_load_ps(from + r * kColumns), factor, acc[r]);
                if constexpr (B::kMinimum) {
                    const __m512 low = (__m512)load(tile.minimum + b * kColumns);
                    PK_UNROLL for (int r = 0; r < R; ++r)
                        acc[r] = _mm512_fmadd_ps(low, _mm512_set1_ps(totals[b * 16 + r]), acc[r]);
                }
            }
        };
        widen(0);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t b = chunk * kChunk;
            multiply(x + b * kTileBytes, place(b), sums + chunk % 2 * (kSumBytes / 4), std::min(kChunk, n - b));
            if (chunk + 1 < chunks) widen(chunk + 1);
            if (chunk > 0) scale(chunk - 1);
        }
        scale(chunks - 1);
        PK_UNROLL for (int r = 0; r < R; ++r) _mm512_store_ps(y + r * kColumns, acc[r]);
    }

    // Up to four blocks, each on its own: sums [block][row][column].
    PK_INLINE static void multiply(const uint8_t* x, const uint8_t* w, float* sums, int64_t blocks) {
        zero_sums();
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (blocks > 1) {
            _tile_loadd(5, x + kTileBytes, 64);
            _tile_loadd(7, w + kTileBytes, 64);
            _tile_dpbf16ps(1, 5, 7);
        }
        if (blocks > 2) {
            _tile_loadd(4, x + 2 * kTileBytes, 64);
            _tile_loadd(6, w + 2 * kTileBytes, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (blocks > 3) {
            _tile_loadd(5, x + 3 * kTileBytes, 64);
            _tile_loadd(7, w + 3 * kTileBytes, 64);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, 64);
        if (blocks > 1) _tile_stored(1, sums + kTileBytes / 4, 64);
        if (blocks > 2) _tile_stored(2, sums + 2 * kTileBytes / 4, 64);
        if (blocks > 3) _tile_stored(3, sums + 3 * kTileBytes / 4, 64);
    }

    const LinearArgs& a;
    const int64_t groups_;
    uint8_t* const tiles_;
    float* const totals_;
};

inline void linear_per_group(Context* ctx, const LinearArgs& a) {
    const BlockProduct product(a, ctx->shared.reserve(BlockProduct::packed_bytes(a)));
    ctx->pool.rows(product.groups(), std::max<int64_t>(1, 65536 / (16 * a.depth)),
                   [&](int64_t begin, int64_t end, int) { product.pack(begin, end); });
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].reserve(product.scratch_bytes());
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        ctx->pool.rows(round_up(a.columns, kColumns) / kColumns, 1, [&](int64_t begin, int64_t end, int thread) {
            product.columns<O>(begin, end, static_cast<uint8_t*>(ctx->scratch[thread].reserve(0)));
        });
    });
}

}  // namespace pk::PK_SET

#endif
