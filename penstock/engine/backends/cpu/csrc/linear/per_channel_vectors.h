// Linears in int8 on vectors: per-channel weights, activations with one scale per row. What amx/per_channel.h computes,
// for CPUs without matrix tiles.
//
// Scales hold for the whole depth, so a sum stays in its register from the first product to the last: a group of rows
// against a few vectors of outputs fills the registers with sums, and the loop over the depth is loads and dot products.
// Sums are exact integers, so results are batch-invariant.

#pragma once

#include "linear/per_channel_weights.h"

#if defined(PK_PER_CHANNEL) && !defined(PK_AMX)

namespace pk::PK_SET {

#if defined(PK_AVX512)
constexpr int kGroupRows = 8, kTilesAcross = 3;  // 24 sums, 3 vectors of weights and one of activations in 32 registers
#else
constexpr int kGroupRows = 4, kTilesAcross = 1;  // 8 sums, 2 vectors of weights
#endif

#if defined(PK_VNNI)
PK_INLINE vi dot_bytes(vi sum, vbytes weights, vbytes x) { return dot_unsigned(sum, weights, x); }
#else
PK_INLINE vi dot_bytes(vi sum, vbytes weights, vbytes x) { return dot_signed(sum, weights, x); }
#endif

class VectorProduct {
  public:
    VectorProduct(const LinearArgs& args, void* packed)
        : a(args),
          depth_(per_channel_steps(a.depth) * kStep),
          groups_((a.rows + kGroupRows - 1) / kGroupRows),
          bytes_(static_cast<int8_t*>(packed)),
          scales_(reinterpret_cast<float*>(bytes_ + groups_ * kGroupRows * depth_)),
          starts_(reinterpret_cast<int32_t*>(scales_ + groups_ * kGroupRows)) {}

    static size_t packed_bytes(const LinearArgs& a) {
        const int64_t rows = (a.rows + kGroupRows - 1) / kGroupRows * kGroupRows;
        return size_t(rows * (per_channel_steps(a.depth) * kStep + 8));
    }
    int64_t groups() const { return groups_; }
    int64_t depth() const { return depth_; }

    // What `multiply` counts: tiles of outputs; with a gate, pairs of a tile of either half.
    int64_t units() const { return a.gate ? tiles() / 2 : tiles(); }

    // Rotates and rounds groups of rows. Four depths of all rows of a group lie side by side. `rotated`: memory for a row.
    template <class T>
    void pack(int64_t begin, int64_t end, float* rotated) const {
        for (int64_t row = begin * kGroupRows; row < end * kGroupRows; ++row) {
            int8_t* to = bytes_ + row / kGroupRows * kGroupRows * depth_ + row % kGroupRows * 4;
            const float most = row < a.rows ? rotate(static_cast<const T*>(a.x) + row * a.depth, rotated) : 0.0f;
            scales_[row] = most < INFINITY ? most / 127.0f : NAN;
            const float inverse = most > 0 && most < INFINITY ? 127.0f / most : 0.0f;
            vi sum = vi{};
            for (int64_t k = 0; k < depth_; k += VL) {
                const vf scaled = inverse > 0 ? load(rotated + k) * splat(inverse) : splat(0);
                const vi rounded = (vi)(scaled + splat(12582912.0f)) - 0x4b400000;
                sum += rounded;
                int8_t made[VL];
                narrow(rounded, made);
                PK_UNROLL for (int i = 0; i < VL; i += 4, to += 4 * kGroupRows) std::memcpy(to, made + i, 4);
            }
            starts_[row] = -kPerChannelFlip * total(sum);
        }
    }

    template <class O>
    void multiply(int64_t begin, int64_t end) const {
        if (a.gate) {
            for (int64_t unit = begin; unit < end; ++unit) multiply_tiles<O, 2>({tile(unit), tile(unit + tiles() / 2)}, unit);
            return;
        }
        int64_t unit = begin;
        for (; unit + kTilesAcross <= end; unit += kTilesAcross) multiply_neighbours<O, kTilesAcross>(unit);
        for (; unit < end; ++unit) multiply_neighbours<O, 1>(unit);
    }

  private:
    template <int N>
    struct Tiles {
        const uint8_t* at[N];
    };

    int64_t tiles() const { return round_up(a.columns, kColumns) / kColumns; }
    const uint8_t* tile(int64_t index) const { return a.per_channel + index * per_channel_tile_bytes(a.depth); }

    PK_INLINE static void narrow(vi rounded, int8_t* to) {
#if defined(PK_AVX512)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8((__m512i)rounded));
#else
        for (int i = 0; i < VL; ++i) to[i] = int8_t(rounded[i]);
#endif
    }

    template <class T>
    float rotate(const T* x, float* rotated) const {
        return rotate_any_row(depth_, rotated, [&](int64_t k) {
            if (k >= a.depth) return splat(0);
            return a.per_channel_inputs ? load(x + k) * load(a.per_channel_inputs + k) : load(x + k);
        });
    }

    template <class O, int N>
    void multiply_neighbours(int64_t unit) const {
        Tiles<N> at;
        for (int n = 0; n < N; ++n) at.at[n] = tile(unit + n);
        multiply_tiles<O, N>(at, unit);
    }

    // All rows times N tiles. The weights come from memory with the first group of rows, then from the core's cache.
    template <class O, int N>
    void multiply_tiles(const Tiles<N>& at, int64_t unit) const {
        for (int64_t group = 0; group < groups_; ++group) {
            const int rows = int(std::min<int64_t>(kGroupRows, a.rows - group * kGroupRows));
            if (kGroupRows > 4 && rows > 4)
                rows > 6 ? multiply_group<O, kGroupRows, N>(at, unit, group, rows)
                         : multiply_group<O, kGroupRows - 2, N>(at, unit, group, rows);
            else
                rows > 2 ? multiply_group<O, 4, N>(at, unit, group, rows) : multiply_group<O, 2, N>(at, unit, group, rows);
        }
    }

    // M >= `rows` rows of a group; those that are not there are zeros and not written.
    template <class O, int M, int N>
    void multiply_group(const Tiles<N>& at, int64_t unit, int64_t group, int rows) const {
        constexpr int V = N * kVectors;
        const int8_t* x = bytes_ + group * kGroupRows * depth_;
        vi sums[M][V];
        PK_UNROLL for (int m = 0; m < M; ++m)
            PK_UNROLL for (int v = 0; v < V; ++v) sums[m][v] = vi{} + starts_[group * kGroupRows + m];
        for (int64_t k = 0; k < depth_ / 4; ++k, x += 4 * kGroupRows) {
            vbytes weights[V];
            PK_UNROLL for (int v = 0; v < V; ++v) weights[v] = load_bytes(at.at[v / kVectors] + k * 64 + v % kVectors * VB);
            if (group == 0) PK_UNROLL for (int n = 0; n < N; ++n) __builtin_prefetch(at.at[n] + k * 64 + kAhead);
            PK_UNROLL for (int m = 0; m < M; ++m) {
                const vbytes four = repeat4(x + m * 4);
                PK_UNROLL for (int v = 0; v < V; ++v) sums[m][v] = dot_bytes(sums[m][v], weights[v], four);
            }
        }
        vf scale[V];
        PK_UNROLL for (int v = 0; v < V; ++v)
            scale[v] = load(reinterpret_cast<const float*>(at.at[v / kVectors] + depth_ * kColumns) + v % kVectors * VL);
        const float* const units = scales_ + group * kGroupRows;
        const auto value = [&](int m, int v) {
            return __builtin_convertvector(sums[m][v], vf) * (scale[v] * splat(units[m]));
        };
        if (a.gate) return write_gated<O>(unit, group * kGroupRows, rows, value);
        write_columns<O>(a, group * kGroupRows, rows, unit * kColumns, N * kColumns,
                         [&](int m, int i) { return value(m, i / VL); });
    }

    // To the bit as if both halves had been written first and the gate applied then.
    template <class O, class F>
    PK_INLINE void write_gated(int64_t unit, int64_t row, int rows, F&& value) const {
        const int64_t ffn = a.columns / 2, column = unit * kColumns;
        for (int m = 0; m < rows; ++m) {
            O* const out = static_cast<O*>(a.out) + (row + m) * ffn + column;
            for (int v = 0; v < kVectors; ++v) {
                vf gate = value(m, v), up = value(m, v + kVectors);
                if (a.bias) {
                    gate += load(a.bias + column + v * VL);
                    up += load(a.bias + ffn + column + v * VL);
                }
                store(out + v * VL, gated<O>(Gate(a.gate), as_stored<O>(gate), as_stored<O>(up)));
            }
        }
    }

    const LinearArgs& a;
    const int64_t depth_, groups_;
    int8_t* const bytes_;
    float* const scales_;
    int32_t* const starts_;  // what every sum of a row begins with: takes back that weights are stored unsigned
};

inline void linear_per_channel(Context* ctx, const LinearArgs& a) {
    const VectorProduct product(a, ctx->shared.reserve(VectorProduct::packed_bytes(a)));
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].floats(size_t(product.depth()));
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(product.groups(), std::max<int64_t>(1, 4096 / (a.depth * kGroupRows)),
                       [&](int64_t begin, int64_t end, int thread) {
                           product.template pack<T>(begin, end, ctx->scratch[thread].floats(0));
                       });
    });
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        const int64_t units = product.units(), pieces = int64_t(ctx->pool.threads()) * 8 * kTilesAcross;
        const int64_t piece = std::max<int64_t>(1, units / pieces) * kTilesAcross;
        ctx->pool.spread(units, std::min(piece, units), [&](auto& next, int) {
            for (int64_t begin, end; next(&begin, &end);) product.template multiply<O>(begin, end);
        });
    });
}

}  // namespace pk::PK_SET

#endif
