// Linears on FP8 (e4m3) weights as a checkpoint stores them: a byte per weight in memory, widened in registers.
//
// W is cut into tiles of 16 outputs, stored input by input; a scale belongs to an output and a group of inputs (one group
// per row, or one per 128). Products and sums are float32, in one order whatever the number of rows: results are
// batch-invariant. Decoding is exact, so the only rounding is that of float32 sums.

#include "common/context.h"
#include "common/kv_formats.h"
#include "common/recorded_call.h"
#include "linear/output_tile.h"

using namespace pk::PK_SET;

namespace {

constexpr int kVectors = kTile / VL;
constexpr int kMost = 4;        // rows that share a decoded weight
constexpr int64_t kAhead = 2048;  // bytes

// 16 weights, each divided by kWeightUnit; inputs are multiplied by kInputUnit first.
#if defined(PK_NEON)
// The upper half of a float32 is the sign, four zeros and the four bits of the exponent, the three of the mantissa, four
// zeros: two bytes that a nibble of the weight each decides, for 16 weights at once, and zipping puts them in place.
// What comes out is 2^120 too small, also where the weight is subnormal. Inputs 2^100 too large keep the products normal.
constexpr float kWeightUnit = 0x1p120f, kInputUnit = 0x1p100f;

PK_INLINE void load_tile(const uint8_t* from, vf (&out)[kVectors]) {
    const uint8x16_t bytes = vld1q_u8(from);
    const uint8x16_t high = vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(bytes), 4));
    const uint8x16_t upper = vandq_u8(high, vdupq_n_u8(0x87)), lower = vshlq_n_u8(bytes, 4);
    const uint16x8_t zero = vdupq_n_u16(0), first = vreinterpretq_u16_u8(vzip1q_u8(lower, upper)),
                     second = vreinterpretq_u16_u8(vzip2q_u8(lower, upper));
    out[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, first));
    out[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, first));
    out[2] = vreinterpretq_f32_u16(vzip1q_u16(zero, second));
    out[3] = vreinterpretq_f32_u16(vzip2q_u16(zero, second));
}
#else
constexpr float kWeightUnit = kF8Unit, kInputUnit = 1.0f;

PK_INLINE void load_tile(const uint8_t* from, vf (&out)[kVectors]) {
    PK_UNROLL for (int c = 0; c < kVectors; ++c) out[c] = load(reinterpret_cast<const f8*>(from) + c * VL);
}
#endif

template <int MR, int LANE>
PK_INLINE void step(const uint8_t* w, const four (&x)[MR], vf (&acc)[MR][kVectors]) {
    vf weight[kVectors];
    load_tile(w + LANE * kTile, weight);
    PK_UNROLL for (int m = 0; m < MR; ++m)
        PK_UNROLL for (int c = 0; c < kVectors; ++c) acc[m][c] = add_product<LANE>(acc[m][c], weight[c], x[m]);
}

// y[MR][16] of a tile. `x`: float32 rows, multiplied by kInputUnit.
template <int MR>
void tile_rows(const float* x, int64_t depth, int64_t groups, const uint8_t* w, const float* scale, float* y) {
    const int64_t group = depth / groups;
    std::memset(y, 0, sizeof(float) * MR * kTile);
    for (int64_t g = 0; g < groups; ++g, scale += kTile) {
        vf acc[MR][kVectors];
        for (int m = 0; m < MR; ++m)
            for (int c = 0; c < kVectors; ++c) acc[m][c] = splat(0.0f);
        for (int64_t k = g * group; k < (g + 1) * group; k += 4, w += 4 * kTile) {
            __builtin_prefetch(w + kAhead);
            four part[MR];
            PK_UNROLL for (int m = 0; m < MR; ++m) part[m] = load_four(x + m * depth + k);
            step<MR, 0>(w, part, acc);
            step<MR, 1>(w, part, acc);
            step<MR, 2>(w, part, acc);
            step<MR, 3>(w, part, acc);
        }
        for (int m = 0; m < MR; ++m)
            for (int c = 0; c < kVectors; ++c) {
                float* to = y + m * kTile + c * VL;
                store(to, load(to) + acc[m][c] * (load(scale + c * VL) * splat(kWeightUnit / kInputUnit)));
            }
    }
}

template <class O>
void float8_tiles(const Float8Args& a, const float* x, int64_t begin, int64_t end) {
    float y[kMost * kTile];
    for (int64_t t = begin; t < end; ++t) {
        const uint8_t* w = a.weights + t * a.depth * kTile;
        const float* scale = a.scales + t * a.groups * kTile;
        for (int64_t row = 0; row < a.rows;) {
            const int64_t left = a.rows - row;
            const int taken = left >= kMost ? kMost : left >= 2 ? 2 : 1;
            const float* from = x + row * a.depth;
            if (taken == kMost)
                tile_rows<kMost>(from, a.depth, a.groups, w, scale, y);
            else if (taken == 2)
                tile_rows<2>(from, a.depth, a.groups, w, scale, y);
            else
                tile_rows<1>(from, a.depth, a.groups, w, scale, y);
            write_tile(y, taken, static_cast<O*>(a.out) + row * a.columns, a.columns, t * kTile, a.bias);
            row += taken;
        }
    }
}

// A tile as rows of [columns, depth].
template <class O>
void widen_tile(const uint8_t* w, const float* scales, int64_t t, int64_t columns, int64_t depth, int64_t groups, O* out) {
    const int width = int(std::min<int64_t>(kTile, columns - t * kTile));
    const int64_t group = depth / groups;
    O lines[VL][kTile];  // some inputs of all outputs, to be written output by output
    for (int64_t k = 0; k < depth; k += VL) {
        for (int i = 0; i < VL; ++i) {
            const float* scale = scales + (t * groups + (k + i) / group) * kTile;
            vf weight[kVectors];
            load_tile(w + (t * depth + k + i) * kTile, weight);
            for (int c = 0; c < kVectors; ++c)
                store(lines[i] + c * VL, weight[c] * splat(kWeightUnit) * load(scale + c * VL));
        }
        for (int n = 0; n < width; ++n)
            for (int i = 0; i < VL; ++i) out[(t * kTile + n) * depth + k + i] = lines[i][n];
    }
}

}  // namespace

PK_FUNCTION(void, pk_float8)(Context* ctx, const Float8Args* args) {
    Guard hold(ctx->busy);
    const Float8Args& a = *args;
    if (a.rows == 0) return;
    float* x = ctx->shared.floats(size_t(a.rows * a.depth));
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(a.rows, std::max<int64_t>(1, 32768 / a.depth), [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin * a.depth; i < end * a.depth; i += VL)
                store(x + i, load(static_cast<const T*>(a.x) + i) * splat(kInputUnit));
        });
    });
    const int64_t work = std::max<int64_t>(1, a.depth * kTile * a.rows);
    dispatch(a.out_dtype, [&](auto* o) {
        ctx->pool.rows((a.columns + kTile - 1) / kTile, std::max<int64_t>(1, 32768 / work),
                       [&](int64_t begin, int64_t end, int) { float8_tiles<elem<decltype(o)>>(a, x, begin, end); });
    });
}

// The weights as [columns, depth], for a library that multiplies many rows faster than this one.
PK_FUNCTION(void, pk_float8_widen)(Context* ctx, const uint8_t* weights, const float* scales, void* out,
                                   int64_t columns, int64_t depth, int64_t groups, int dtype) {
    Guard hold(ctx->busy);
    dispatch(dtype, [&](auto* o) {
        ctx->pool.rows((columns + kTile - 1) / kTile, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t t = begin; t < end; ++t)
                widen_tile(weights, scales, t, columns, depth, groups, static_cast<decltype(o)>(out));
        });
    });
}

PK_RECORDABLE(pk_float8)
