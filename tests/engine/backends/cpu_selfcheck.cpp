// Checks a build of the native kernels against plain double-precision loops, without Python: for instruction
// sets of another machine, run through an emulator. Prints one line per check; exits 1 if any is off.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "attention/attention.h"
#include "linear/linear.h"

using namespace pk::PK_SET;

PK_FUNCTION(Context*, pk_create)(int, int);
PK_FUNCTION(void, pk_destroy)(Context*);
PK_FUNCTION(const char*, pk_isa)();
PK_FUNCTION(void, pk_add_rms_norm)(Context*, const void*, void*, const void*, const void*, void*, int64_t, int64_t,
                                   float, int, int, int);
PK_FUNCTION(void, pk_silu_mul)(Context*, const void*, void*, int64_t, int64_t, int);
PK_FUNCTION(int, pk_rope_and_cache)(Context*, const RopeArgs*);
PK_FUNCTION(void, pk_attention)(Context*, const AttentionArgs*);
PK_FUNCTION(int64_t, pk_linear_bytes)(int64_t, int64_t, int);
PK_FUNCTION(int, pk_linear_pack_gguf)(Context*, const uint8_t*, uint8_t*, int64_t, int64_t, int);
PK_FUNCTION(void, pk_linear)(Context*, const LinearArgs*);
PK_FUNCTION(void, pk_argmax)(Context*, const float*, int64_t*, int64_t, int64_t);

PK_API const char* pk_runnable_sets();

static std::mt19937 rng(7);
static int failures = 0;

static float normal() { return std::normal_distribution<float>()(rng); }

static void report(const char* what, double error, double allowed) {
    const bool ok = error <= allowed;  // false for NaN
    failures += !ok;
    std::printf("%s %s: error %.3g, allowed %.3g\n", ok ? "ok  " : "FAIL", what, error, allowed);
}

// A tensor in one of the three storage types, readable as double.
struct Stored {
    Stored(int dtype, size_t n) : dtype(dtype), bytes(n * (dtype ? 2 : 4) + 64) {
        for (size_t i = 0; i < n; ++i) set(i, normal());
    }
    void set(size_t i, float v) {
        if (dtype == 0) return void(std::memcpy(&bytes[i * 4], &v, 4));
        uint16_t h;
        if (dtype == 1) {
            h = float_to_half(v);
        } else {
            uint32_t b;
            std::memcpy(&b, &v, 4);
            h = uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
        }
        std::memcpy(&bytes[i * 2], &h, 2);
    }
    double get(size_t i) const {
        if (dtype == 0) {
            float v;
            std::memcpy(&v, &bytes[i * 4], 4);
            return v;
        }
        uint16_t h;
        std::memcpy(&h, &bytes[i * 2], 2);
        return dtype == 1 ? half_to_float(h) : to_float(bf16{h});
    }
    int dtype;
    std::vector<uint8_t> bytes;
};

static const double kUnit[] = {1e-5, 2e-3, 1.6e-2};

static void check_elementwise(Context* ctx, int dtype) {
    const int rows = 5, n = 83;
    Stored x(dtype, rows * n), residual(dtype, rows * n), weight(dtype, n), out(dtype, rows * n);
    Stored before = residual;
    PK_OF_SET(pk_add_rms_norm)(ctx, x.bytes.data(), residual.bytes.data(), weight.bytes.data(), nullptr, out.bytes.data(), rows, n,
                    1e-5f, dtype, 0, dtype);
    double error = 0;
    for (int r = 0; r < rows; ++r) {
        double squares = 0;
        for (int i = 0; i < n; ++i) squares += residual.get(r * n + i) * residual.get(r * n + i);
        for (int i = 0; i < n; ++i) {
            const size_t at = r * n + i;
            const double expected = residual.get(at) / std::sqrt(squares / n + 1e-5) * weight.get(i);
            error = std::max(error, std::fabs(out.get(at) - expected) / (1 + std::fabs(expected)));
            error = std::max(error, std::fabs(residual.get(at) - before.get(at) - x.get(at)) / 8);
        }
    }
    report("add_rms_norm", error, kUnit[dtype]);
    Stored gate(dtype, rows * 2 * n), y(dtype, rows * n);
    PK_OF_SET(pk_silu_mul)(ctx, gate.bytes.data(), y.bytes.data(), rows, n, dtype);
    error = 0;
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < n; ++i) {
            const double g = gate.get(r * 2 * n + i), u = gate.get(r * 2 * n + n + i);
            error = std::max(error, std::fabs(y.get(r * n + i) - g / (1 + std::exp(-g)) * u));
        }
    report("silu_mul", error, 2 * kUnit[dtype]);
}

static void check_attention(Context* ctx, int dtype, int cache_dtype, int dim, int group, int window) {
    const int kv_heads = 2, heads = kv_heads * group, block_size = 16, blocks = 30, span = 24;
    const std::vector<int32_t> starts{0, 1, 2, 40}, contexts{200, 5, 90}, rows{2, 0, 1};
    const int tokens = 40;
    std::vector<int32_t> tables(3 * span, 0);
    int next = 1;
    for (int s = 0; s < 3; ++s)
        for (int b = 0; b * block_size < contexts[s]; ++b) tables[rows[s] * span + b] = next++;
    Stored q(dtype, size_t(tokens) * heads * dim), out(dtype, size_t(tokens) * heads * dim);
    Stored k(cache_dtype, size_t(blocks) * kv_heads * block_size * dim), v = k;
    for (size_t i = 0; i < size_t(blocks) * kv_heads * block_size * dim; ++i) v.set(i, normal());
    const int64_t head_stride = block_size * dim, block_stride = kv_heads * head_stride;
    const float scale = 1 / std::sqrt(float(dim));
    AttentionArgs a{q.bytes.data(), out.bytes.data(), k.bytes.data(), v.bytes.data(), nullptr, nullptr,
                    starts.data(), contexts.data(), rows.data(), tables.data(), nullptr, heads * dim, span, block_stride, head_stride, block_stride, head_stride,
                    3, heads, kv_heads, dim, block_size, window, 0, dtype, cache_dtype, 0, scale, 0};
    PK_OF_SET(pk_attention)(ctx, &a);
    double error = 0;
    for (int s = 0; s < 3; ++s)
        for (int t = starts[s]; t < starts[s + 1]; ++t)
            for (int h = 0; h < heads; ++h) {
                const int last = contexts[s] - (starts[s + 1] - t), first = window ? std::max(0, last - window + 1) : 0;
                std::vector<double> weights, sum(dim);
                double total = 0;
                auto at = [&](int key) {
                    return tables[rows[s] * span + key / block_size] * block_stride + h / group * head_stride +
                           key % block_size * dim;
                };
                for (int key = first; key <= last; ++key) {
                    double dot = 0;
                    for (int d = 0; d < dim; ++d) dot += q.get((t * heads + h) * dim + d) * k.get(at(key) + d);
                    weights.push_back(std::exp(dot * scale));
                    total += weights.back();
                }
                for (int d = 0; d < dim; ++d) {
                    double expected = 0;
                    for (int key = first; key <= last; ++key) expected += weights[key - first] * v.get(at(key) + d);
                    error = std::max(error, std::fabs(out.get((t * heads + h) * dim + d) - expected / total));
                }
            }
    char name[96];
    std::snprintf(name, sizeof name, "attention dim %d group %d window %d cache %d", dim, group, window, cache_dtype);
    report(name, error, 2 * kUnit[dtype]);
}

static void check_rope(Context* ctx, int dtype) {
    const int tokens = 3, heads = 3, kv_heads = 1, dim = 24, width = (heads + 2 * kv_heads) * dim;
    Stored qkv(dtype, tokens * width), before = qkv, k(dtype, 4 * 16 * dim), v(dtype, 4 * 16 * dim);
    std::vector<float> table(10 * dim);
    for (int p = 0; p < 10; ++p)
        for (int i = 0; i < dim / 2; ++i) {
            table[p * dim + i] = std::cos(p * 0.3f * (i + 1));
            table[p * dim + dim / 2 + i] = std::sin(p * 0.3f * (i + 1));
        }
    const int64_t positions[] = {0, 4, 9}, slots[] = {17, 33, 50};
    RopeArgs a{qkv.bytes.data(), table.data(), positions, slots, k.bytes.data(), v.bytes.data(), nullptr, nullptr,
               nullptr, nullptr, nullptr, nullptr, tokens, 10, 64, 16 * dim, 16 * dim, 16 * dim, 16 * dim, heads, kv_heads, dim, 16, dim, dtype, dtype, 0, 1e-6f};
    double error = PK_OF_SET(pk_rope_and_cache)(ctx, &a);
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads + kv_heads; ++h)
            for (int i = 0; i < dim / 2; ++i) {
                const size_t at = t * width + h * dim + i;
                const double low = before.get(at), high = before.get(at + dim / 2);
                const double c = table[positions[t] * dim + i], s = table[positions[t] * dim + dim / 2 + i];
                const bool key = h == heads;
                const double got0 = key ? k.get(slots[t] * dim + i) : qkv.get(at);
                const double got1 = key ? k.get(slots[t] * dim + dim / 2 + i) : qkv.get(at + dim / 2);
                error = std::max({error, std::fabs(got0 - low * c + high * s), std::fabs(got1 - high * c - low * s)});
                error = std::max(error, std::fabs(v.get(slots[t] * dim + i) - before.get(t * width + 4 * dim + i)));
            }
    report("rope_and_cache", error, 4 * kUnit[dtype]);
}

static void check_linear(Context* ctx, int kind, int rows, int columns, int depth, int parts) {
    const int bits = kind == 8 ? 8 : 4, head = kind == 3 ? 4 : 2, stride = kind == 8 ? 34 : head + 16;
    std::vector<uint8_t> raw(size_t(columns) * depth / 32 * stride);
    std::vector<double> w(size_t(columns) * depth);
    for (size_t b = 0; b < w.size() / 32; ++b) {
        uint8_t* block = &raw[b * stride];
        const uint16_t scale = float_to_half(0.01f * normal()), low = float_to_half(-0.1f);
        std::memcpy(block, &scale, 2);
        if (kind == 3) std::memcpy(block + 2, &low, 2);
        for (int i = head; i < stride; ++i) block[i] = uint8_t(rng());
        for (int i = 0; i < 32; ++i) {
            const double d = half_to_float(scale);
            if (kind == 8)
                w[b * 32 + i] = d * int8_t(block[2 + i]);
            else
                w[b * 32 + i] = d * ((i < 16 ? block[head + i] & 15 : block[head + i - 16] >> 4) - (kind == 2 ? 8 : 0)) +
                                (kind == 3 ? half_to_float(low) : 0);
        }
    }
    std::vector<uint8_t> packed(PK_OF_SET(pk_linear_bytes)(columns, depth, bits) + 64);
    uint8_t* aligned = packed.data() + (64 - reinterpret_cast<uintptr_t>(packed.data()) % 64) % 64;
    double error = PK_OF_SET(pk_linear_pack_gguf)(ctx, raw.data(), aligned, columns, depth, kind);
    std::vector<float> x(size_t(rows) * depth), y(size_t(rows) * columns, NAN), bias(columns);
    for (size_t i = 0; i < x.size(); ++i) x[i] = (i % 32 == 5 ? 127.0f : float(int(rng() % 255) - 127)) / 64;
    for (float& v : bias) v = normal();
    LinearArgs a{};
    a.x = x.data(), a.weights = aligned, a.bias = bias.data(), a.out = y.data();
    a.rows = rows, a.columns = columns, a.depth = depth, a.bits = bits, a.activation_parts = parts;
    PK_OF_SET(pk_linear)(ctx, &a);
    for (int r = 0; r < rows; ++r)
        for (int n = 0; n < columns; ++n) {
            double expected = bias[n], size = 1;
            for (int k = 0; k < depth; ++k) {
                expected += double(x[r * depth + k]) * w[size_t(n) * depth + k];
                size += std::fabs(double(x[r * depth + k])) * 0.2;
            }
            error = std::max(error, std::fabs(y[size_t(r) * columns + n] - expected) / size);
        }
    char name[96];
    std::snprintf(name, sizeof name, "linear type %d parts %d rows %d columns %d depth %d", kind, parts, rows, columns, depth);
    report(name, error, 1e-6);
}

int main() {
    std::printf("instruction set %s, of %s\n", PK_OF_SET(pk_isa)(), pk_runnable_sets());
    Context* ctx = PK_OF_SET(pk_create)(2, 50);
    for (int dtype : {0, 1, 2}) {
        check_elementwise(ctx, dtype);
        check_rope(ctx, dtype);
        check_attention(ctx, dtype, dtype, 64, 3, 0);
    }
    check_attention(ctx, 0, 1, 20, 1, 0);
    check_attention(ctx, 0, 2, 80, 8, 33);
    check_attention(ctx, 0, 0, 128, 2, 7);
    for (int kind : {2, 3, 8})
        for (int rows : {1, 2, 3, 4, 5, 7, 8, 9, 19}) for (int parts : {1, 2}) check_linear(ctx, kind, rows, 37, 160, parts);
    std::vector<float> logits(1000);
    for (float& v : logits) v = normal();
    logits[731] = 9;
    int64_t best = 0;
    PK_OF_SET(pk_argmax)(ctx, logits.data(), &best, 1, 1000);
    report("argmax", std::fabs(double(best - 731)), 0);
    PK_OF_SET(pk_destroy)(ctx);
    return failures != 0;
}
