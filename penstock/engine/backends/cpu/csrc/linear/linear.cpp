// Linear layers on quantized weights: y = x W^T + b with per-group W, in blocks of 32 along the input.
//
// There are several ways to compute one (forms.def); which one is the fastest depends on the number of rows. From how many
// rows on each is used is measured at load (tuner.py) and given with every call.

#include "common/recorded_call.h"
#include "elementwise/gumbel.h"
#include "linear/amx/bfloat16.h"
#include "linear/amx/per_channel.h"
#include "linear/amx/per_group.h"
#include "linear/integer.h"
#include "linear/neon/float16.h"
#include "linear/pack.h"
#include "linear/per_channel_vectors.h"

using namespace pk::PK_SET;

// Bytes of packed weights.
PK_FUNCTION(int64_t, pk_linear_bytes)(int64_t columns, int64_t depth, int bits) {
    return round_up(columns, kColumns) / kColumns * tile_bytes(depth / kDepth, bits);
}

// Whether this instruction set has matrix tiles.
PK_FUNCTION(int, pk_linear_has_matrix)() {
#if defined(PK_AMX)
    return 1;
#else
    return 0;
#endif
}

// Whether products of these packed weights can be done in float16: the CPU has the vectors, the weights the range.
PK_FUNCTION(int, pk_linear_fits_float16)(const uint8_t* weights, int64_t columns, int64_t depth, int bits) {
#if defined(PK_HALF)
    const int64_t blocks = depth / kDepth, tiles = round_up(columns, kColumns) / kColumns;
    if (bits != 4 && bits != 8) return 0;
    float largest = 0;
    for (int64_t t = 0; t < tiles; ++t) {
        const Tile tile = tile_at(weights, blocks, bits, t);
        for (int64_t i = 0; i < blocks * kColumns; ++i) {
            const float scale = std::fabs(to_float(tile.scale[i]));
            largest = std::max(largest, bits == 4 ? 15 * scale + std::fabs(to_float(tile.minimum[i])) : 128 * scale);
        }
    }
    return largest <= kHalfLimit;
#else
    (void)weights, (void)columns, (void)depth, (void)bits;
    return 0;
#endif
}

// Quantizes float32 rows (bits 16: rounds them to bfloat16). 0: done; 1: a weight is not finite or too large for a float16 scale.
PK_FUNCTION(int, pk_linear_pack_floats)(Context* ctx, const float* w, uint8_t* out, int64_t columns, int64_t depth,
                                        int bits) {
    Guard hold(ctx->busy);
    const Packer p{out, depth / kDepth, bits};
    std::memset(out, 0, size_t(PK_OF_SET(pk_linear_bytes)(columns, depth, bits)));
    std::atomic<int> bad{0};
    ctx->pool.rows(columns, 64, [&](int64_t begin, int64_t end, int) {
        for (int64_t n = begin; n < end; ++n)
            for (int64_t b = 0; b < p.blocks; ++b) {
                const float* block = w + n * depth + b * kDepth;
                if (bits == 16)
                    p.put16(n, b, block);
                else if (!(bits == 4 ? pack_floats4(p, n, b, block) : pack_floats8(p, n, b, block))) bad.store(1);
            }
    });
    return bad.load();
}

// Repacks GGUF blocks without changing a value: 2 = Q4_0, 3 = Q4_1, 8 = Q8_0 (GGUF's own numbers).
// 0: done; 1: a scale is not finite.
PK_FUNCTION(int, pk_linear_pack_gguf)(Context* ctx, const uint8_t* raw, uint8_t* out, int64_t columns, int64_t depth,
                                      int kind) {
    Guard hold(ctx->busy);
    const int bits = kind == 8 ? 8 : 4, stride = kind == 8 ? 34 : kind == 3 ? 20 : 18;
    const Packer p{out, depth / kDepth, bits};
    std::memset(out, 0, size_t(PK_OF_SET(pk_linear_bytes)(columns, depth, bits)));
    std::atomic<int> bad{0};
    ctx->pool.rows(columns, 64, [&](int64_t begin, int64_t end, int) {
        for (int64_t n = begin; n < end; ++n)
            for (int64_t b = 0; b < p.blocks; ++b) {
                const uint8_t* block = raw + (n * p.blocks + b) * stride;
                const uint16_t scale = half_at(block);
                uint16_t minimum = 0;
                if (kind == 3) minimum = half_at(block + 2);
                if (kind == 2) minimum = float_to_half(-8.0f * half_to_float(scale));  // exact: a power of two
                if (!finite_half(scale) || !finite_half(minimum)) bad.store(1);
                if (kind == 8)
                    p.put8(n, b, reinterpret_cast<const int8_t*>(block + 2), scale);
                else
                    p.put4(n, b, block + (kind == 3 ? 4 : 2), scale, minimum);
            }
    });
    return bad.load();
}

// Bytes of the per-channel copy; 0: this instruction set does not use one.
PK_FUNCTION(int64_t, pk_linear_per_channel_bytes)(int64_t columns, int64_t depth) {
#if defined(PK_PER_CHANNEL)
    return round_up(columns, kColumns) / kColumns * per_channel_tile_bytes(depth);
#else
    (void)columns, (void)depth;
    return 0;
#endif
}

// The per-channel copy of packed few-bit weights, multiplied by `input_scale` [depth] unless that is null.
PK_FUNCTION(void, pk_linear_pack_per_channel)(Context* ctx, const uint8_t* weights, const float* input_scale,
                                              uint8_t* out, int64_t columns, int64_t depth, int bits) {
#if defined(PK_PER_CHANNEL)
    Guard hold(ctx->busy);
    const int64_t blocks = depth / kDepth, tiles = round_up(columns, kColumns) / kColumns;
    ctx->pool.rows(tiles, 1, [&](int64_t begin, int64_t end, int thread) {
        vf* rotated = reinterpret_cast<vf*>(ctx->scratch[thread].floats(per_channel_steps(depth) * kStep * VL));
        for (int64_t t = begin; t < end; ++t)
            pack_per_channel_tile(tile_at(weights, blocks, bits, t), bits, blocks, input_scale, rotated,
                             out + t * per_channel_tile_bytes(depth));
    });
#else
    (void)ctx, (void)weights, (void)input_scale, (void)out, (void)columns, (void)depth, (void)bits;
#endif
}

namespace {

enum Form : int {
#define PK_LINEAR_FORM(name, weights, activations) kForm_##name,
#include "linear/forms.def"
#undef PK_LINEAR_FORM
    kForms
};
static_assert(sizeof(LinearArgs::first_rows) == kForms * sizeof(int64_t), "first_rows has an entry per form");

using Linear = void (*)(Context*, const LinearArgs&);
#if !defined(PK_PER_CHANNEL)
constexpr Linear linear_per_channel = nullptr;
#endif
#if !defined(PK_AMX)
constexpr Linear linear_bfloat16 = nullptr, linear_per_group = nullptr;
#endif
#if !defined(PK_HALF)
constexpr Linear linear_float16 = nullptr;
#endif

enum Weights { packed, per_channel };
enum Activations {
    any = -1,
    bfloat16 = 2,
#if defined(PK_AMX)
    any_but_on_tiles = bfloat16,
#else
    any_but_on_tiles = any,
#endif
};

const struct {
    Linear run;  // null: this instruction set does not have the form
    Weights weights;
    Activations activations;
} kFormTable[] = {
#define PK_LINEAR_FORM(name, weights, activations) {linear_##name, weights, activations},
#include "linear/forms.def"
#undef PK_LINEAR_FORM
};

Form form_of(const LinearArgs& a) {
    for (int f = 0; f < kForm_integer; ++f) {
        const auto& form = kFormTable[f];
        if (form.run && a.first_rows[f] > 0 && a.rows >= a.first_rows[f] &&
            (form.weights != per_channel || a.per_channel) && (form.activations == any || form.activations == a.dtype))
            return Form(f);
    }
    return kForm_integer;
}

// Whether the product applies the gate itself.
bool fuses_gate(Form form, const LinearArgs& a) { return form == kForm_per_channel && a.columns % (2 * kColumns) == 0; }

void linear(Context* ctx, const LinearArgs& a) {
    const Form form = form_of(a);
    if (!a.gate || fuses_gate(form, a)) return kFormTable[form].run(ctx, a);
    LinearArgs both = a;  // both halves first, then the gate
    both.gate = kNoGate;
    both.out = ctx->ungated.reserve(size_t(a.rows * a.columns) * (a.out_dtype == 0 ? 4 : 2));
    kFormTable[form].run(ctx, both);
    gate_all(ctx, Gate(a.gate), both.out, a.out, a.rows, a.columns / 2, a.out_dtype);
}

}  // namespace

PK_FUNCTION(void, pk_linear)(Context* ctx, const LinearArgs* args) {
    Guard hold(ctx->busy);
    if (args->rows > 0) linear(ctx, *args);
}

// A token sampled from the outputs of every row, as `pk_gumbel_argmax` does. Where sampling is not fused into the product,
// the outputs are written to `args->out`, float32, first.
PK_FUNCTION(void, pk_linear_sample)(Context* ctx, const LinearArgs* args, const float* temperatures,
                                    const uint64_t* keys, int64_t* out) {
    Guard hold(ctx->busy);
    if (args->rows <= 0) return;
#if defined(PK_AMX)
    if (form_of(*args) == kForm_per_channel) return sample_per_channel(ctx, *args, temperatures, keys, out);
#endif
    linear(ctx, *args);
    sample_rows(ctx, static_cast<const float*>(args->out), temperatures, keys, out, args->rows, args->columns);
}

PK_RECORDABLE(pk_linear)
PK_RECORDABLE(pk_linear_sample)
