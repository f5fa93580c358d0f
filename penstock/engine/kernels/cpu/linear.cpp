// Linear layers on quantized weights: y = x W^T + b with W in blocks of 32 along the input.
//
// W is cut into tiles of 16 output columns. A tile is its quantized blocks (layout in dot.h), then the blocks'
// float16 scales, then, for the 4-bit form, their float16 minima: w = scale * q + minimum. Activations are
// quantized here, per row and block, to int8; products are exact integers; sums over blocks are float32. With two
// digits, what the first int8 leaves over becomes a second one with a scale 253 times smaller, and a row counts as
// two: about 16 bits of activation for twice the arithmetic. Small models need that to keep their answers.
//
// On CPUs with matrix tiles, more than a few rows take that road instead (amx.h), and dense weights always do; on those
// with float16 vectors, more than a few rows take these (half.h). From how many on is measured at load.
//
// One to four rows read the packed weights directly, once: bytes decide. More rows first expand a tile of 4-bit
// weights to int8 inside the core's cache and then reuse it for every group of rows: arithmetic decides.

#include "amx.h"
#include "context.h"
#include "dot.h"
#include "half.h"
#include "tape.h"

using namespace pk;

struct LinearArgs {
    const void* x;
    const uint8_t* weights;
    const float* bias;  // may be null
    void* out;
    int64_t rows, columns, depth;
    int32_t bits, dtype, out_dtype;
    int32_t digits;  // int8 digits per activation: 1 or 2
    int32_t matrix_rows;    // from this many rows on, matrix tiles (0: never)
    const uint8_t* matrix;  // the weights in bfloat16 tiles, or null: widen `weights` then
    int64_t half_rows;      // from this many rows on, float16 vectors (0: never)
};

namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Tile {
    const uint8_t* q;
    const f16* scale;
    const f16* minimum;
};

int64_t tile_bytes(int64_t blocks, int bits) {
    if (bits == 16) return blocks * kDepth * kColumns * 2;
    return round_up(blocks * (bits == 4 ? Q4::kBytes + 4 * kColumns : Q8::kBytes + 2 * kColumns), 64);
}

Tile tile_at(const uint8_t* base, int64_t blocks, int bits, int64_t index) {
    const uint8_t* q = base + index * tile_bytes(blocks, bits);
    const f16* scale = reinterpret_cast<const f16*>(q + blocks * (bits == 4 ? Q4::kBytes : Q8::kBytes));
    return {q, scale, scale + blocks * kColumns};
}

// ---- activations -----------------------------------------------------------------------------------------

// 16 integers as bytes.
PK_INLINE void store_bytes(int8_t* to, const vi* q) {
#if defined(PK_NEON)
    int16x8_t low = vcombine_s16(vmovn_s32((int32x4_t)q[0]), vmovn_s32((int32x4_t)q[1]));
    int16x8_t high = vcombine_s16(vmovn_s32((int32x4_t)q[2]), vmovn_s32((int32x4_t)q[3]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
#elif defined(PK_AVX512)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8((__m512i)q[0]));
#else
    for (int i = 0; i < 16; ++i) to[i] = int8_t(q[i / VL][i % VL]);
#endif
}

PK_INLINE int32_t total(vi v) {
#if defined(PK_NEON)
    return vaddvq_s32((int32x4_t)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < VL; ++i) sum += v[i];
    return sum;
#endif
}

// Rounds v / scale to int8, row `m` of a record; v keeps what is left over.
PK_INLINE void quantize_digit(vf (&v)[kDepth / VL], float scale, float inverse, Record& r, int m) {
    constexpr int N = kDepth / VL;
    const vf magic = splat(12582912.0f);
    vi q[N], sum[2] = {vi{}, vi{}};
    for (int i = 0; i < N; ++i) {
        const vf rounded = v[i] * splat(inverse) + magic;  // rounds to nearest even
        q[i] = (vi)rounded - 0x4b400000;
        sum[i * 2 / N] += q[i];
        v[i] -= (rounded - magic) * splat(scale);
    }
    store_bytes(r.q[m], q);
    store_bytes(r.q[m] + 16, q + N / 2);
    const int32_t low = total(sum[0]), high = total(sum[1]);
    r.scale[m] = scale;
    r.sum[m] = scale * float(low + high);
    set_starts(r, m, low, high);
}

// A block of one row. A value that is not finite makes the block's scale NaN, so that it is seen in the result.
template <class T>
PK_INLINE void quantize_block(const T* x, Record& r, int m, int digits) {
    constexpr int N = kDepth / VL;
    vf v[N];
    vi top = vi{};  // magnitudes order as their bits do, with infinities and NaNs on top
    for (int i = 0; i < N; ++i) {
        v[i] = load(x + i * VL);
        top = max_bits(top, (vi)vabs(v[i]));
    }
    const int32_t bits = hmax_bits(top);
    float max;
    std::memcpy(&max, &bits, 4);
    const bool finite = bits < 0x7f800000, nonzero = max > 1e-30f;
    const float inverse = nonzero && finite ? 127.0f / max : 0.0f;
    const float scale = !finite ? NAN : nonzero ? max * (1.0f / 127.0f) : 0.0f;
    quantize_digit(v, scale, inverse, r, m);
    // What is left is at most half a step, and a little more by rounding: 253 instead of 254 keeps it inside int8.
    if (digits == 2) quantize_digit(v, scale * (1.0f / 253.0f), finite ? inverse * 253.0f : 0.0f, r, m + 1);
}

// `rows` rows into one group of records, where each takes `digits` of the kRows places.
template <class T>
void quantize_rows(const T* x, Record* records, int64_t rows, int64_t blocks, int digits) {
    for (int64_t b = 0; b < blocks; ++b) {
        if (rows * digits < kRows) std::memset((void*)&records[b], 0, sizeof(Record));
        for (int64_t i = 0; i < rows; ++i)
            quantize_block(x + (i * blocks + b) * kDepth, records[b], int(i) * digits, digits);
    }
}

// ---- products --------------------------------------------------------------------------------------------

constexpr int64_t kFarAhead = 32768;
constexpr int64_t kAhead = 4096;  // bytes; weights come from memory once per step and the hardware looks less far

PK_INLINE void prefetch(const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Further ahead and into the second-level cache, which has several times as many reads under way.
PK_INLINE void prefetch_far(const uint8_t* from, int64_t bytes) {
#if defined(PK_AVX512)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + kFarAhead + i, 0, 2);
#else
    (void)from, (void)bytes;
#endif
}

// y[MR][NC vectors] over the whole depth. S: type of scales and minima (float16 as stored, or expanded float32).
template <class Q, int MR, int NC, bool MIN, class S>
PK_INLINE void tile_rows(const uint8_t* q, const S* scale, const S* minimum, const Record* r, int64_t blocks,
                         float* y) {
    constexpr int64_t kShare = Q::kBytes + (MIN ? 4 : 2) * kColumns;  // a block's part of the tile, scales included
    const uint8_t* ahead = q + kAhead;
    vf acc[MR][NC];
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) acc[m][c] = splat(0);
    for (int64_t b = 0; b < blocks; ++b, q += Q::kBytes, scale += kColumns) {
        vf dots[MR][NC];
        if (std::is_same<S, f16>::value) {
            prefetch(ahead, kShare);
            prefetch_far(ahead - kAhead, kShare);
            ahead += kShare;
        }
        dot_block<MR, NC>(Q(), q, r[b], dots);
        for (int c = 0; c < NC; ++c) {
            vf d = load(scale + c * VL);
            for (int m = 0; m < MR; ++m)
                acc[m][c] += dots[m][c] * (d * splat(r[b].scale[m]));
        }
        if (MIN) {
            for (int c = 0; c < NC; ++c) {
                vf low = load(minimum + c * VL);
                for (int m = 0; m < MR; ++m) acc[m][c] += low * splat(r[b].sum[m]);
            }
            minimum += kColumns;
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int c = 0; c < NC; ++c) store(y + m * kColumns + c * VL, acc[m][c]);
}

// All 16 columns for the first `rows` rows of a record group.
template <class Q, bool MIN, class S>
void tile_product(const uint8_t* q, const S* scale, const S* minimum, const Record* r, int64_t blocks, int rows,
                  float* y) {
    if (rows == 1) return tile_rows<Q, 1, kVectors, MIN>(q, scale, minimum, r, blocks, y);
    if (rows == 2) return tile_rows<Q, 2, kVectors, MIN>(q, scale, minimum, r, blocks, y);
    constexpr int N = kGemmVectors;
    for (int c = 0; c < kVectors; c += N) {
        const uint8_t* part = q + c * VL * 4;
        const S *s = scale + c * VL, *low = minimum + c * VL;
        float* to = y + c * VL;
        if (kRows > 4 && rows <= 4)
            tile_rows<Q, 4, N, MIN>(part, s, low, r, blocks, to);
        else
            tile_rows<Q, kRows, N, MIN>(part, s, low, r, blocks, to);
    }
}

template <class O>
void write_rows(const LinearArgs& a, const float* y, int64_t row, int rows, int64_t column) {
    const int width = int(std::min<int64_t>(kColumns, a.columns - column));
    for (int m = 0; m < rows; ++m, y += kColumns * a.digits) {
        O* out = static_cast<O*>(a.out) + (row + m) * a.columns + column;
        for (int i = 0; i < width; i += VL) {
            const int n = std::min(VL, width - i);
            vf v = load(y + i);
            if (a.digits == 2) v += load(y + kColumns + i);
            if (a.bias) v += n == VL ? load(a.bias + column + i) : load_part(a.bias + column + i, n);
            if (n == VL)
                store(out + i, v);
            else
                store_part(out + i, v, n);
        }
    }
}

// Expands a 4-bit tile to int8 (the same values) and its scales and minima to float32.
void expand_q4(const Tile& tile, int64_t blocks, uint8_t* __restrict q) {
    const uint8_t* __restrict from = tile.q;
    for (int64_t b = 0; b < blocks; ++b, q += Q8::kBytes, from += Q4::kBytes) {
        for (int i = 0; i < Q4::kBytes; ++i) {
            q[i] = from[i] & 15;
            q[i + Q4::kBytes] = uint8_t(from[i] ^ kStoredFlip) >> 4;
        }
    }
}

void expand_floats(const f16* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i += VL) store(to + i, load(from + i));
}

template <class O>
void linear_tiles(const LinearArgs& a, const Record* records, int64_t blocks, int64_t begin, int64_t end,
                  void* scratch) {
    float y[kRows * kColumns];
    float *scale = static_cast<float*>(scratch), *minimum = scale + blocks * kColumns;
    uint8_t* wide = reinterpret_cast<uint8_t*>(minimum + blocks * kColumns);
    const int64_t group = kRows / a.digits;  // rows of one group of records
    const bool direct = a.rows <= group;
    for (int64_t t = begin; t < end; ++t) {
        const Tile tile = tile_at(a.weights, blocks, a.bits, t);
        if (!direct) {
            expand_floats(tile.scale, scale, blocks * kColumns);
            if (a.bits == 4) {
                expand_floats(tile.minimum, minimum, blocks * kColumns);
                expand_q4(tile, blocks, wide);
            }
        }
        const int64_t bytes = tile_bytes(blocks, a.bits), share = round_up(bytes * group / a.rows, 64);
        const bool ahead = a.rows > 2 * group && t + 1 < end;  // ask for the next tile in small portions
        for (int64_t row = 0; row < a.rows; row += group) {
            const Record* r = records + row / group * blocks;
            if (ahead) prefetch(tile.q + bytes + row / group * share, share);
            const int taken = int(std::min<int64_t>(group, a.rows - row)), rows = taken * a.digits;
            if (direct && a.bits == 4)
                tile_product<Q4, true>(tile.q, tile.scale, tile.minimum, r, blocks, rows, y);
            else if (direct)
                tile_product<Q8, false>(tile.q, tile.scale, tile.scale, r, blocks, rows, y);
            else if (a.bits == 4)
                tile_product<Q8, true>(wide, scale, minimum, r, blocks, rows, y);
            else
                tile_product<Q8, false>(tile.q, scale, scale, r, blocks, rows, y);
            write_rows<O>(a, y, row, taken, t * kColumns);
        }
    }
}

// ---- products on matrix tiles ----------------------------------------------------------------------------

#if defined(PK_AMX)

constexpr int64_t kMostChunk = 12;  // blocks whose weights for 32 columns stay in the first-level cache: 24 KB

bool by_matrix(const LinearArgs& a) {
    return amx_granted() && a.dtype == 2 && a.matrix_rows > 0 && a.rows >= a.matrix_rows;
}

template <class O>
void write_pair(const LinearArgs& a, const float* y, int64_t row, int rows, int64_t column) {
    const int width = int(std::min<int64_t>(kPair, a.columns - column));
    for (int m = 0; m < rows; ++m, y += kPair) {
        O* out = static_cast<O*>(a.out) + (row + m) * a.columns + column;
        for (int i = 0; i < width; i += VL) {
            const int n = std::min(VL, width - i);
            vf v = load(y + i);
            if (a.bias) v += n == VL ? load(a.bias + column + i) : load_part(a.bias + column + i, n);
            if (n == VL)
                store(out + i, v);
            else
                store_part(out + i, v, n);
        }
    }
}

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
                for (int64_t group = 0; group < groups_; ++group) {
                    float* y = sums + group * (kGroupBytes / 4);
                    if (from == 0)
                        zero_sums();
                    else if (groups_ > 1)
                        load_sums(y);
                    const RowTiles x = tiles(2 * group).from(from), lower = tiles(2 * group + 1).from(from);
                    if (a.matrix && group == 0)
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
                write_pair<O>(a, sums + group * (kGroupBytes / 4), group * 32,
                              int(std::min<int64_t>(32, a.rows - group * 32)), pair * kPair);
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
        if (a.matrix) return a.matrix + (tile * blocks() + from) * kTileBytes;
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

void linear_by_matrix(Context* ctx, const LinearArgs& a) {
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

#endif

// ---- products in float16 ---------------------------------------------------------------------------------

#if defined(PK_HALF)

template <class O>
void write_half(const LinearArgs& a, const float* y, const float* scales, int64_t row, int rows, int64_t column) {
    const int width = int(std::min<int64_t>(kColumns, a.columns - column));
    for (int m = 0; m < rows; ++m, y += kColumns) {
        O* out = static_cast<O*>(a.out) + (row + m) * a.columns + column;
        const vf scale = splat(scales[m]);
        for (int i = 0; i < width; i += VL) {
            const int n = std::min(VL, width - i);
            vf v = load(y + i) * scale;
            if (a.bias) v += n == VL ? load(a.bias + column + i) : load_part(a.bias + column + i, n);
            if (n == VL)
                store(out + i, v);
            else
                store_part(out + i, v, n);
        }
    }
}

template <class O>
void linear_half(const LinearArgs& a, const f16* x, const float* scales, int64_t begin, int64_t end, f16* wide) {
    float y[kHalfRows * kColumns];
    const int64_t blocks = a.depth / kDepth;
    for (int64_t t = begin; t < end; ++t) {
        const Tile tile = tile_at(a.weights, blocks, a.bits, t);
        if (a.bits == 4)
            widen_half4(tile.q, tile.scale, tile.minimum, blocks, wide);
        else
            widen_half8(tile.q, tile.scale, blocks, wide);
        const int64_t bytes = tile_bytes(blocks, a.bits), share = round_up(bytes * kHalfRows / a.rows, 64);
        for (int64_t row = 0; row < a.rows; row += kHalfRows) {
            const int rows = int(std::min<int64_t>(kHalfRows, a.rows - row));
            if (t + 1 < end) prefetch(tile.q + bytes + row / kHalfRows * share, share);
            if (rows > 4)
                half_rows<8>(wide, x + row * a.depth, a.depth, y);
            else
                half_rows<4>(wide, x + row * a.depth, a.depth, y);
            write_half<O>(a, y, scales + row, row, rows, t * kColumns);
        }
    }
}

void linear_by_half(Context* ctx, const LinearArgs& a) {
    const int64_t rows = round_up(a.rows, kHalfRows), groups = rows / kHalfRows;
    f16* x = static_cast<f16*>(ctx->shared.reserve(size_t(rows) * (a.depth * sizeof(f16) + sizeof(float))));
    float* scales = reinterpret_cast<float*>(x + rows * a.depth);
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(groups, std::max<int64_t>(1, 32768 / (a.depth * kHalfRows)), [&](int64_t begin, int64_t end, int) {
            for (int64_t g = begin; g < end; ++g)
                pack_half_rows(static_cast<const T*>(a.x) + g * kHalfRows * a.depth, a.rows - g * kHalfRows, a.depth,
                               x + g * kHalfRows * a.depth, scales + g * kHalfRows);
        });
    });
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].reserve(size_t(a.depth) * kColumns * sizeof(f16));
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        ctx->pool.rows(round_up(a.columns, kColumns) / kColumns, 1, [&](int64_t begin, int64_t end, int thread) {
            linear_half<O>(a, x, scales, begin, end, static_cast<f16*>(ctx->scratch[thread].reserve(0)));
        });
    });
}

#endif

// ---- packing ---------------------------------------------------------------------------------------------

// To nearest even; what is not finite stays so.
bf16 round_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000) == 0x7f800000) return {uint16_t((bits >> 16) | ((bits & 0xffff) != 0))};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct Packer {
    uint8_t* base;
    int64_t blocks;
    int bits;
    uint8_t* q(int64_t n, int64_t b) const {
        return base + n / kColumns * tile_bytes(blocks, bits) + b * (bits == 4 ? Q4::kBytes : Q8::kBytes);
    }
    uint16_t* factors(int64_t n, int64_t b, bool minimum) const {
        uint8_t* tile = base + n / kColumns * tile_bytes(blocks, bits);
        uint8_t* scales = tile + blocks * (bits == 4 ? Q4::kBytes : Q8::kBytes);
        return reinterpret_cast<uint16_t*>(scales) + ((minimum ? blocks : 0) + b) * kColumns + n % kColumns;
    }
    // bfloat16 in the order of matrix tiles.
    void put16(int64_t n, int64_t b, const float* values) const {
        bf16* to = reinterpret_cast<bf16*>(base + n / kColumns * tile_bytes(blocks, 16)) + b * kDepth * kColumns;
        for (int k = 0; k < kDepth; ++k) to[k / 2 * 2 * kColumns + n % kColumns * 2 + k % 2] = round_bf16(values[k]);
    }
    void put8(int64_t n, int64_t b, const int8_t* values, uint16_t scale) const {
        uint8_t* to = q(n, b) + n % kColumns * 4;
        for (int k = 0; k < kDepth; ++k) to[k / 4 * 4 * kColumns + k % 4] = uint8_t(values[k]);
        *factors(n, b, false) = scale;
    }
    // `pairs`: low nibble depth i, high nibble depth i + 16.
    void put4(int64_t n, int64_t b, const uint8_t* pairs, uint16_t scale, uint16_t minimum) const {
        uint8_t* to = q(n, b) + n % kColumns * 4;
        for (int k = 0; k < kDepth / 2; ++k) to[k / 4 * 4 * kColumns + k % 4] = pairs[k] ^ kStoredFlip;
        *factors(n, b, false) = scale;
        *factors(n, b, true) = minimum;
    }
};

bool finite_half(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

// The nearest float16, or the next one up where the nearest would cut off more than half a step of the range.
uint16_t scale_half(float exact, float steps) {
    uint16_t h = float_to_half(exact);
    if (half_to_float(h) * (steps + 0.5f) < exact * steps) ++h;
    return h;
}

bool pack_floats8(const Packer& p, int64_t n, int64_t b, const float* w) {
    float max = 0;
    for (int k = 0; k < kDepth; ++k) max = std::fabs(w[k]) > max || w[k] != w[k] ? std::fabs(w[k]) : max;
    const uint16_t half = scale_half(max / 127.0f, 127.0f);
    if (!finite_half(half) || max != max) return false;
    const float scale = half_to_float(half);
    int8_t q[kDepth];
    for (int k = 0; k < kDepth; ++k)
        q[k] = scale > 0 ? int8_t(std::min(127.0f, std::max(-127.0f, std::nearbyint(w[k] / scale)))) : 0;
    p.put8(n, b, q, half);
    return true;
}

bool pack_floats4(const Packer& p, int64_t n, int64_t b, const float* w) {
    float low = w[0], high = w[0], check = 0;
    for (int k = 0; k < kDepth; ++k) {
        low = std::min(low, w[k]);
        high = std::max(high, w[k]);
        check += std::fabs(w[k]);
    }
    const uint16_t minimum = float_to_half(low), half = scale_half((high - half_to_float(minimum)) / 15.0f, 15.0f);
    if (!finite_half(half) || !finite_half(minimum) || check != check) return false;
    const float scale = half_to_float(half), from = half_to_float(minimum);
    uint8_t q[kDepth], pairs[kDepth / 2];
    for (int k = 0; k < kDepth; ++k)
        q[k] = scale > 0 ? uint8_t(std::min(15.0f, std::max(0.0f, std::nearbyint((w[k] - from) / scale)))) : 0;
    for (int k = 0; k < kDepth / 2; ++k) pairs[k] = uint8_t(q[k] | q[k + 16] << 4);
    p.put4(n, b, pairs, half, minimum);
    return true;
}

uint16_t half_at(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

}  // namespace

// Bytes of the packed form.
PK_API int64_t pk_linear_bytes(int64_t columns, int64_t depth, int bits) {
    return round_up(columns, kColumns) / kColumns * tile_bytes(depth / kDepth, bits);
}

// Whether this CPU has matrix tiles.
PK_API int pk_linear_has_matrix() {
#if defined(PK_AMX)
    return amx_granted();
#else
    return 0;
#endif
}

// Whether products of these packed weights can be done in float16: the CPU has the vectors, the weights the range.
PK_API int pk_linear_has_half(const uint8_t* weights, int64_t columns, int64_t depth, int bits) {
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
PK_API int pk_linear_pack_floats(Context* ctx, const float* w, uint8_t* out, int64_t columns, int64_t depth,
                                 int bits) {
    Guard hold(ctx->busy);
    const Packer p{out, depth / kDepth, bits};
    std::memset(out, 0, size_t(pk_linear_bytes(columns, depth, bits)));
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
PK_API int pk_linear_pack_gguf(Context* ctx, const uint8_t* raw, uint8_t* out, int64_t columns, int64_t depth,
                               int kind) {
    Guard hold(ctx->busy);
    const int bits = kind == 8 ? 8 : 4, stride = kind == 8 ? 34 : kind == 3 ? 20 : 18;
    const Packer p{out, depth / kDepth, bits};
    std::memset(out, 0, size_t(pk_linear_bytes(columns, depth, bits)));
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

// The weights of a packed few-bit form as bfloat16 tiles (pk_linear_bytes with bits 16).
PK_API void pk_linear_widen(Context* ctx, const uint8_t* weights, uint8_t* out, int64_t columns, int64_t depth,
                            int bits) {
#if defined(PK_AMX)
    Guard hold(ctx->busy);
    const int64_t blocks = depth / kDepth, tiles = round_up(columns, kColumns) / kColumns;
    ctx->pool.rows(tiles, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            const Tile tile = tile_at(weights, blocks, bits, t);
            uint8_t* to = out + t * blocks * kTileBytes;
            if (bits == 4)
                widen4(tile.q, tile.scale, tile.minimum, blocks, to);
            else
                widen8(tile.q, tile.scale, blocks, to);
        }
    });
#else
    (void)ctx, (void)weights, (void)out, (void)columns, (void)depth, (void)bits;
#endif
}

PK_API void pk_linear(Context* ctx, const LinearArgs* args) {
    Guard hold(ctx->busy);
    const LinearArgs& a = *args;
    if (a.rows == 0) return;
#if defined(PK_AMX)
    if (by_matrix(a)) return linear_by_matrix(ctx, a);
#endif
#if defined(PK_HALF)
    if (a.half_rows > 0 && a.rows >= a.half_rows) return linear_by_half(ctx, a);
#endif
    const int64_t group = kRows / a.digits, blocks = a.depth / kDepth, groups = round_up(a.rows, group) / group;
    Record* records = static_cast<Record*>(ctx->shared.reserve(size_t(groups * blocks) * sizeof(Record)));
    dispatch(a.dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        ctx->pool.rows(groups, std::max<int64_t>(1, 32768 / (a.depth * kRows)), [&](int64_t begin, int64_t end, int) {
            for (int64_t g = begin; g < end; ++g)
                quantize_rows(static_cast<const T*>(a.x) + g * group * a.depth, records + g * blocks,
                              std::min<int64_t>(group, a.rows - g * group), blocks, a.digits);
        });
    });
    const size_t scratch = size_t(blocks) * (2 * kColumns * sizeof(float) + Q8::kBytes);
    for (int i = 0; i < ctx->pool.threads(); ++i) ctx->scratch[i].reserve(scratch);
    const int64_t tiles = round_up(a.columns, kColumns) / kColumns;
    const int64_t work = std::max<int64_t>(1, tile_bytes(blocks, a.bits) * a.rows);
    dispatch(a.out_dtype, [&](auto* o) {
        using O = elem<decltype(o)>;
        ctx->pool.rows(tiles, std::max<int64_t>(1, 32768 / work), [&](int64_t begin, int64_t end, int thread) {
            linear_tiles<O>(a, records, blocks, begin, end, ctx->scratch[thread].reserve(0));
        });
    });
}

PK_TAPED(pk_linear)
