// Linears on MXFP4 weights as a checkpoint stores them: four bits per weight in memory, widened in registers.
//
// W is cut into tiles of 16 outputs. A tile is stored input pair by input pair: a byte for each output, the even input in
// its low half; 32 inputs of an output share a power of two. Products and sums of 32 inputs are float32, the power of two
// meets the sum; one order whatever the number of rows: results are batch-invariant. Decoding is exact.

#include "common/context.h"
#include "common/recorded_call.h"
#include "linear/output_tile.h"

using namespace pk::PK_SET;

namespace {

constexpr int kVectors = kTile / VL;
constexpr int kMost = 4;          // rows that share a decoded weight
constexpr int kShared = 32;       // inputs that share a power of two
constexpr int64_t kAhead = 1024;  // bytes

alignas(64) constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                           -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The weights of two inputs for 16 outputs.
PK_INLINE void load_tile(const uint8_t* from, vf (&even)[kVectors], vf (&odd)[kVectors]) {
#if defined(PK_AVX512)
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
    const __m512 values = _mm512_load_ps(kValues);  // looked up by the four lowest bits of an index
    even[0] = (vf)_mm512_permutexvar_ps(codes, values);
    odd[0] = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), values);
#elif defined(PK_AVX2)
    const __m256 values = _mm256_load_ps(kValues);  // by the three lowest bits; the fourth is the sign
    const __m256i sign = _mm256_set1_epi32(int(0x80000000));
    PK_UNROLL for (int c = 0; c < kVectors; ++c) {
        const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + c * VL)));
        const __m256i high = _mm256_srli_epi32(codes, 4);
        even[c] = (vf)_mm256_xor_ps(_mm256_permutevar8x32_ps(values, codes),
                                    _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(codes, 28), sign)));
        odd[c] = (vf)_mm256_xor_ps(_mm256_permutevar8x32_ps(values, high),
                                   _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(high, 28), sign)));
    }
#elif defined(PK_NEON)
    // The upper half of a float32 in two bytes that the code looks up: all values end in zeros.
    const uint8x16_t upper = {0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                              0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    const uint8x16_t lower = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0,
                              0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0};
    const uint8x16_t codes = vld1q_u8(from);
    const auto widen = [&](uint8x16_t index, vf(&out)[kVectors]) {
        const uint8x16_t a = vqtbl1q_u8(lower, index), b = vqtbl1q_u8(upper, index);
        const uint16x8_t zero = vdupq_n_u16(0), first = vreinterpretq_u16_u8(vzip1q_u8(a, b)),
                         second = vreinterpretq_u16_u8(vzip2q_u8(a, b));
        out[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, first));
        out[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, first));
        out[2] = vreinterpretq_f32_u16(vzip1q_u16(zero, second));
        out[3] = vreinterpretq_f32_u16(vzip2q_u16(zero, second));
    };
    widen(vandq_u8(codes, vdupq_n_u8(15)), even);
    widen(vshrq_n_u8(codes, 4), odd);
#else
    float low[kTile], high[kTile];
    for (int i = 0; i < kTile; ++i) {
        low[i] = kValues[from[i] & 15];
        high[i] = kValues[from[i] >> 4];
    }
    for (int c = 0; c < kVectors; ++c) {
        even[c] = load(low + c * VL);
        odd[c] = load(high + c * VL);
    }
#endif
}

// Powers of two of 16 outputs, from exponents that are 127 too large. 2^-127 has no exponent of its own in a float32.
PK_INLINE void load_powers(const uint8_t* from, float* to) {
    for (int i = 0; i < kTile; ++i) {
        const uint32_t bits = from[i] ? uint32_t(from[i]) << 23 : 0x400000;
        std::memcpy(to + i, &bits, 4);
    }
}

template <int MR, int LANE>
PK_INLINE void step(const uint8_t* w, const four (&x)[MR], vf (&acc)[MR][kVectors]) {
    vf even[kVectors], odd[kVectors];
    load_tile(w, even, odd);
    PK_UNROLL for (int m = 0; m < MR; ++m)
        PK_UNROLL for (int c = 0; c < kVectors; ++c) {
            acc[m][c] = add_product<LANE>(acc[m][c], even[c], x[m]);
            acc[m][c] = add_product<LANE + 1>(acc[m][c], odd[c], x[m]);
        }
}

// y[MR][16] of a tile.
template <int MR>
void tile_rows(const float* x, int64_t depth, const uint8_t* w, const uint8_t* exponents, float* y) {
    vf sums[MR][kVectors];
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < kVectors; ++c) sums[m][c] = splat(0.0f);
    for (int64_t k = 0; k < depth; k += kShared, exponents += kTile) {
        vf acc[MR][kVectors];
        for (int m = 0; m < MR; ++m)
            for (int c = 0; c < kVectors; ++c) acc[m][c] = splat(0.0f);
        for (int i = 0; i < kShared; i += 4, w += 2 * kTile) {
            __builtin_prefetch(w + kAhead);
            four part[MR];
            PK_UNROLL for (int m = 0; m < MR; ++m) part[m] = load_four(x + m * depth + k + i);
            step<MR, 0>(w, part, acc);
            step<MR, 2>(w + kTile, part, acc);
        }
        float powers[kTile];
        load_powers(exponents, powers);
        for (int m = 0; m < MR; ++m)
            for (int c = 0; c < kVectors; ++c) sums[m][c] += acc[m][c] * load(powers + c * VL);
    }
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < kVectors; ++c) store(y + m * kTile + c * VL, sums[m][c]);
}

template <class O>
void mxfp4_tiles(const Mxfp4Args& a, const float* x, int64_t begin, int64_t end) {
    float y[kMost * kTile];
    for (int64_t t = begin; t < end; ++t) {
        const uint8_t* w = a.weights + t * (a.depth / 2) * kTile;
        const uint8_t* exponents = a.exponents + t * (a.depth / kShared) * kTile;
        for (int64_t row = 0; row < a.rows;) {
            const int64_t left = a.rows - row;
            const int taken = left >= kMost ? kMost : left >= 2 ? 2 : 1;
            const float* from = x + row * a.depth;
            if (taken == kMost)
                tile_rows<kMost>(from, a.depth, w, exponents, y);
            else if (taken == 2)
                tile_rows<2>(from, a.depth, w, exponents, y);
            else
                tile_rows<1>(from, a.depth, w, exponents, y);
            write_tile(y, taken, static_cast<O*>(a.out) + row * a.columns, a.columns, t * kTile, a.bias);
            row += taken;
        }
    }
}

// A tile as rows of [columns, depth].
template <class O>
void widen_tile(const uint8_t* w, const uint8_t* exponents, int64_t t, int64_t columns, int64_t depth, O* out) {
    const int width = int(std::min<int64_t>(kTile, columns - t * kTile));
    w += t * (depth / 2) * kTile;
    exponents += t * (depth / kShared) * kTile;
    O lines[kShared][kTile];  // some inputs of all outputs, to be written output by output
    for (int64_t k = 0; k < depth; k += kShared, exponents += kTile) {
        float powers[kTile];
        load_powers(exponents, powers);
        for (int i = 0; i < kShared; i += 2, w += kTile) {
            vf even[kVectors], odd[kVectors];
            load_tile(w, even, odd);
            for (int c = 0; c < kVectors; ++c) {
                store(lines[i] + c * VL, even[c] * load(powers + c * VL));
                store(lines[i + 1] + c * VL, odd[c] * load(powers + c * VL));
            }
        }
        for (int n = 0; n < width; ++n)
            for (int i = 0; i < kShared; ++i) out[(t * kTile + n) * depth + k + i] = lines[i][n];
    }
}

}  // namespace

PK_FUNCTION(void, pk_mxfp4)(Context* ctx, const Mxfp4Args* args) {
    Guard hold(ctx->busy);
    const Mxfp4Args& a = *args;
    if (a.rows == 0) return;
    float* x = ctx->shared.floats(size_t(a.rows * a.depth));
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(a.rows, std::max<int64_t>(1, 32768 / a.depth), [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin * a.depth; i < end * a.depth; i += VL)
                store(x + i, load(static_cast<const T*>(a.x) + i));
        });
    });
    const int64_t work = std::max<int64_t>(1, a.depth * kTile * a.rows);
    dispatch(a.out_dtype, [&](auto* o) {
        ctx->pool.rows((a.columns + kTile - 1) / kTile, std::max<int64_t>(1, 32768 / work),
                       [&](int64_t begin, int64_t end, int) { mxfp4_tiles<elem<decltype(o)>>(a, x, begin, end); });
    });
}

// The weights as [columns, depth], for a library that multiplies many rows faster than this one.
PK_FUNCTION(void, pk_mxfp4_widen)(Context* ctx, const uint8_t* weights, const uint8_t* exponents, void* out,
                                  int64_t columns, int64_t depth, int dtype) {
    Guard hold(ctx->busy);
    dispatch(dtype, [&](auto* o) {
        ctx->pool.rows((columns + kTile - 1) / kTile, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t t = begin; t < end; ++t)
                widen_tile(weights, exponents, t, columns, depth, static_cast<decltype(o)>(out));
        });
    });
}

PK_RECORDABLE(pk_mxfp4)
