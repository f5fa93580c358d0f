// One new token against an int8 cache on AMX tiles: half the bytes of bfloat16, and no key or value is widened.
//
// Keys are tiles as they lie in the cache, 16 tokens of 64 bytes. Queries, and the weights that softmax makes of the
// scores, are 16-bit integers in two int8 digits: products and their sums are exact, so that the only rounding beyond
// the cache's own is to one part in 65,535 of the largest. Values are interleaved by four tokens on their way to a tile.

#pragma once

#include "attention_tiles.h"

#if defined(PK_AMX) && defined(__AVX512VBMI__)
#define PK_BYTE_TILES 1

namespace pk {

constexpr int kByteDepth = 64;  // numbers of a tile's row
constexpr int kByteGroup = 8;   // query heads that share keys, at most: two digits of each are 16 columns

inline bool by_byte_tiles(const AttentionArgs& a) {
    return a.dtype == 2 && a.cache_dtype == 3 && a.head_dim % kByteDepth == 0 && a.heads / a.kv_heads <= kByteGroup &&
           a.block_size % kTileGroup == 0 && amx_granted();
}

// A query head takes a lane of each digit: 4 or 8 lanes.
inline int byte_lanes(int group) { return group <= 4 ? 4 : 8; }

constexpr int kByteTasks = 4;  // that share the shapes of tiles: setting one takes as long as multiplying 500 keys
constexpr int kByteGroups = kPart / kTileGroup;

inline size_t byte_task_floats(const AttentionArgs& a) {
    const size_t lanes = byte_lanes(a.heads / a.kv_heads), scores = size_t(kPart) * lanes;
    return scores + (size_t(a.head_dim) * lanes * 2 + scores * 2 * 4 + 2 * kTileBytes) / 4;
}

inline size_t decode_byte_floats(const AttentionArgs& a) { return kByteTasks * byte_task_floats(a) + kTileBytes; }

// Keys, values and scales of a (sequence, kv head, part), by groups of 16 tokens.
struct ByteGroups {
    const uint8_t *keys[kByteGroups], *values[kByteGroups];
    const bf16 *key_scales[kByteGroups], *value_scales[kByteGroups];
    int count = 0;

    void find(const AttentionArgs& a, const Task& task) {
        const int32_t* table = a.block_tables + a.rows[task.sequence] * a.table_stride;
        count = 0;
        for (int key = task.begin / kTileGroup * kTileGroup; key < task.end; key += kTileGroup, ++count) {
            const int64_t block = table[key / a.block_size], offset = key % a.block_size;
            keys[count] = static_cast<const uint8_t*>(a.k_cache) + block * a.k_block_stride +
                          task.kv_head * a.k_head_stride + offset * a.head_dim;
            values[count] = static_cast<const uint8_t*>(a.v_cache) + block * a.v_block_stride +
                            task.kv_head * a.v_head_stride + offset * a.head_dim;
            const int64_t scale = (block * a.kv_heads + task.kv_head) * a.block_size + offset;
            key_scales[count] = static_cast<const bf16*>(a.k_scales) + scale;
            value_scales[count] = static_cast<const bf16*>(a.v_scales) + scale;
        }
    }

    // A core has only so many reads under way, and one that asks for more stands still until they are done: what is
    // needed next is asked for a few lines at a time, in step with the work. Here: part `turn` of `turns` of a group.
    PK_INLINE static void ask(const uint8_t* group, int bytes, int turn, int turns) {
        for (int at = bytes * turn / turns; at < bytes * (turn + 1) / turns; at += 64)
            __builtin_prefetch(group + at, 0, 2);
    }
    void ask_scales() const {
        for (int i = 0; i < count; ++i) {
            __builtin_prefetch(key_scales[i], 0, 2);
            __builtin_prefetch(value_scales[i], 0, 2);
        }
    }
};

template <int LANES>
class DecodeBytes {
  public:
    void start(const AttentionArgs& args, const Task& task_, float* scratch, const ByteGroups* following) {
        a = &args;
        task = &task_;
        next = following;
        group = a->heads / a->kv_heads;
        dim = a->head_dim;
        cached.find(*a, task_);
        scores = scratch;                                                    // [key][lane]
        sums = reinterpret_cast<int32_t*>(scores + kPart * LANES);           // [key][digit][lane]
        weights = reinterpret_cast<uint8_t*>(sums + kPart * LANES * 2);      // [panel][digit][head][64 keys]
        queries = weights + 2 * kTileBytes;                                  // [dim / 4][digit][lane][4]
        split_queries();
    }

    // Registers 0..3: sums; 4, 5: keys; 6: queries.
    static void shape_for_keys() { shape(16, LANES * 8, 16, 64, 16, LANES * 8); }

    void multiply_keys() {
        for (int i = 0; i < cached.count; i += 4) {
            const int left = cached.count - i;
            zero_sums();
            for (int s = 0; s < dim; s += kByteDepth) {
                _tile_loadd(6, queries + s / 4 * LANES * 8, LANES * 8);
                _tile_loadd(4, cached.keys[i] + s, dim);
                _tile_dpbssd(0, 4, 6);
                if (left > 1) {
                    _tile_loadd(5, cached.keys[i + 1] + s, dim);
                    _tile_dpbssd(1, 5, 6);
                }
                if (left > 2) {
                    _tile_loadd(4, cached.keys[i + 2] + s, dim);
                    _tile_dpbssd(2, 4, 6);
                }
                if (left > 3) {
                    _tile_loadd(5, cached.keys[i + 3] + s, dim);
                    _tile_dpbssd(3, 5, 6);
                }
            }
            constexpr int kStride = kTileGroup * LANES * 2;
            int32_t* to = sums + i * kStride;
            _tile_stored(0, to, LANES * 8);
            if (left > 1) _tile_stored(1, to + kStride, LANES * 8);
            if (left > 2) _tile_stored(2, to + 2 * kStride, LANES * 8);
            if (left > 3) _tile_stored(3, to + 3 * kStride, LANES * 8);
        }
    }

    // Sums to scores, scores to the digits of weights. `partial`: [head][width], then the largest score and the sum.
    void soften(float* partial) {
        const int width = padded(dim), stride = width + VL;
        const vf top = finish_scores(), total = weigh(top);
        for (int g = 0; g < group; ++g) {
            partial[g * stride + width] = top[g];
            partial[g * stride + width + 1] = total[g];
        }
    }

    // Registers 0..3: sums of both digits by 16 numbers each; 4: weights; 5, 6: values.
    void shape_for_values() const { shape(2 * group, 64, 2 * group, 64, 16, 64); }

    // `panel`: room for four right-hand tiles.
    void add_values(uint8_t* panel, float* partial) {
        for (int d = 0; d < dim; d += kByteDepth) {
            zero_sums();
            for (int i = 0; i < cached.count; i += 4) {
                for (int j = i; j < std::min(cached.count, i + 4); ++j) interleave(j, d, panel + j % 4 * 256);
                before_tiles();
                _tile_loadd(4, weights + i / 4 * kTileBytes, 64);
                _tile_loadd(5, panel, 64);
                _tile_dpbusd(0, 4, 5);
                _tile_loadd(6, panel + kTileBytes, 64);
                _tile_dpbusd(1, 4, 6);
                _tile_loadd(5, panel + 2 * kTileBytes, 64);
                _tile_dpbusd(2, 4, 5);
                _tile_loadd(6, panel + 3 * kTileBytes, 64);
                _tile_dpbusd(3, 4, 6);
            }
            write(partial + d);
        }
    }

  private:
    // Registers 0..3, 4, and 5 to 7; in the shape for keys, 5 is as 4 and 6 as 7.
    static void shape(int sum_rows, int sum_bytes, int left_rows, int left_bytes, int right_rows, int right_bytes) {
        TileShape shape;
        for (int i = 0; i < 8; ++i) {
            shape.rows[i] = uint8_t(i < 4 ? sum_rows : i == 4 ? left_rows : right_rows);
            shape.bytes[i] = uint16_t(i < 4 ? sum_bytes : i == 4 ? left_bytes : i == 5 ? 64 : right_bytes);
        }
        _tile_loadconfig(&shape);
    }

    // Of group i: the keys that are there.
    __mmask16 there(int i) const {
        const int key = task->begin / kTileGroup * kTileGroup + i * kTileGroup;
        const int from = std::max(0, task->begin - key), to = std::min(kTileGroup, task->end - key);
        return __mmask16(((1u << to) - 1) & ~((1u << from) - 1));
    }

    void split_queries() {
        const bf16* q = static_cast<const bf16*>(a->q) + a->query_starts[task->sequence] * a->q_stride +
                        int64_t(task->kv_head) * group * dim;
        std::memset(queries, 0, size_t(dim) * LANES * 2);
        for (int g = 0; g < group; ++g, q += dim) {
            vf top = splat(0);
            for (int d = 0; d < dim; d += VL) top = vmax(top, vabs(load(q + d)));
            const float most = hmax(top);
            unit[g] = most / 32512.0f;
            const vf inverse = splat(most > 0 ? 32512.0f / most : 0.0f);
            for (int d = 0; d < dim; d += VL) {
                const vi v = (vi)(load(q + d) * inverse + splat(12582912.0f)) - 0x4b400000;
                const vi low = ((v + 128) & 255) - 128;
                alignas(16) uint32_t digit[2][4];
                _mm_storeu_si128(reinterpret_cast<__m128i*>(digit[0]), _mm512_cvtepi32_epi8((__m512i)((v - low) >> 8)));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(digit[1]), _mm512_cvtepi32_epi8((__m512i)low));
                uint32_t* to = reinterpret_cast<uint32_t*>(queries) + d / 4 * LANES * 2 + g;
                for (int j = 0; j < 4; ++j, to += LANES * 2) {
                    to[0] = digit[0][j];
                    to[LANES] = digit[1][j];
                }
            }
        }
    }

    static constexpr int kPerVector = VL / LANES;  // keys of a vector of scores

    // The scales of keys j * kPerVector ... of a group, each in all lanes of its key.
    PK_INLINE static vf by_key(vf scales, int j) {
        alignas(64) int32_t of[VL];
        PK_UNROLL for (int i = 0; i < VL; ++i) of[i] = j * kPerVector + i / LANES;
        return (vf)_mm512_permutexvar_ps(_mm512_load_si512(of), (__m512)scales);
    }

    // The largest score of every lane, in all its places.
    vf finish_scores() {
        alignas(64) int32_t pick[VL];
        alignas(64) float units[VL];
        for (int j = 0; j < VL; ++j) {
            pick[j] = j / LANES * 2 * LANES + j % LANES;  // of two vectors of sums: the high digits
            units[j] = j % LANES < group ? unit[j % LANES] * a->scale : 0.0f;
        }
        const __m512i high = _mm512_load_si512(pick), low = _mm512_add_epi32(high, _mm512_set1_epi32(LANES));
        const vf factor = load(units);
        vf top = splat(kUnseen);
        for (int i = 0; i < cached.count; ++i) {
            const vf scale = load(cached.key_scales[i]);
            const __mmask16 seen = there(i);
            const vf limit = (vf)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, _mm512_set1_ps(INFINITY));
            const int32_t* from = sums + i * kTileGroup * LANES * 2;
            float* to = scores + i * kTileGroup * LANES;
            PK_UNROLL for (int j = 0; j < LANES; ++j) {
                const __m512i x = _mm512_load_si512(from + j * 2 * VL), y = _mm512_load_si512(from + (j * 2 + 1) * VL);
                const vf h = (vf)_mm512_cvtepi32_ps(_mm512_permutex2var_epi32(x, high, y));
                const vf l = (vf)_mm512_cvtepi32_ps(_mm512_permutex2var_epi32(x, low, y));
                vf score = (h * splat(256.0f) + l) * (factor * by_key(scale, j));
                if (a->softcap > 0) score = capped(score, a->softcap);
                if (seen != 0xffff) score = vmin(score, by_key(limit, j));
                store(to + j * VL, score);
                top = vmax(top, score);
                if (next && i < next->count) ByteGroups::ask(next->keys[i], kTileGroup * dim, j, LANES);
            }
        }
        return across_keys(top, LANES, [](vf x, vf y) { return vmax(x, y); });
    }

    // Scores to the digits of weights times the values' scales; the weights' sum.
    vf weigh(vf top) {
        vf scale[kByteGroups], most = splat(0);
        for (int i = 0; i < cached.count; ++i) {
            scale[i] = (vf)_mm512_maskz_mov_ps(there(i), (__m512)load(cached.value_scales[i]));
            most = vmax(most, scale[i]);
        }
        const float largest = hmax(most);
        value_unit = largest / 65535.0f;
        const vf inverse = splat(largest > 0 ? 65535.0f / largest : 0.0f);
        // Packing four vectors of integers to bytes leaves number 4 k + j of vector v in byte 16 k + 4 v + j.
        constexpr int kRun = 64 / LANES;  // keys of a vector of bytes
        alignas(64) uint8_t turn[64], rows[64];
        for (int i = 0; i < 64; ++i) {
            const int number = i % kRun * LANES + i / kRun;
            turn[i] = uint8_t(number % 16 / 4 * 16 + number / 16 * 4 + number % 4);
        }
        const __m512i turned = _mm512_load_si512(turn), byte = _mm512_set1_epi16(255);
        std::memset(weights, 0, 2 * kTileBytes);
        vf total = splat(0);
        for (int i = 0; i < cached.count; ++i) {
            const vf factor = scale[i] * inverse;
            const float* from = scores + i * kTileGroup * LANES;
            __m512i whole[LANES];
            PK_UNROLL for (int j = 0; j < LANES; ++j) {
                const vf weight = exp_below(load(from + j * VL), top);
                total += weight;
                whole[j] = (__m512i)((vi)(weight * by_key(factor, j) + splat(12582912.0f)) - 0x4b400000);
            }
            uint8_t* const panel = weights + i / 4 * kTileBytes + i % 4 * kTileGroup;
            PK_UNROLL for (int part = 0; part < LANES / 4; ++part) {
                const __m512i* w = whole + part * 4;
                const __m512i x = _mm512_packus_epi32(w[0], w[1]), y = _mm512_packus_epi32(w[2], w[3]);
                const __m512i digits[2] = {_mm512_packus_epi16(_mm512_srli_epi16(x, 8), _mm512_srli_epi16(y, 8)),
                                           _mm512_packus_epi16(_mm512_and_si512(x, byte), _mm512_and_si512(y, byte))};
                for (int digit = 0; digit < 2; ++digit) {
                    _mm512_store_si512(rows, _mm512_permutexvar_epi8(turned, digits[digit]));
                    for (int g = 0; g < group; ++g)
                        std::memcpy(panel + (digit * group + g) * 64 + part * kRun, rows + g * kRun, size_t(kRun));
                }
            }
        }
        // A key that is not there weighed exp(-87): less than any sum can show.
        return across_keys(total, LANES, [](vf x, vf y) { return x + y; });
    }

    // 64 numbers of 16 values as rows of four right-hand tiles, by fours of tokens.
    void interleave(int i, int d, uint8_t* to) {
        const uint8_t* row = cached.values[i] + d;
        PK_UNROLL for (int quad = 0; quad < 4; ++quad, row += 4 * dim, to += 64) {
            const __m512i r0 = _mm512_loadu_si512(row), r1 = _mm512_loadu_si512(row + dim);
            const __m512i r2 = _mm512_loadu_si512(row + 2 * dim), r3 = _mm512_loadu_si512(row + 3 * dim);
            const __m512i x = _mm512_unpacklo_epi8(r0, r1), y = _mm512_unpackhi_epi8(r0, r1);
            const __m512i z = _mm512_unpacklo_epi8(r2, r3), w = _mm512_unpackhi_epi8(r2, r3);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(x, z));
            _mm512_store_si512(to + kTileBytes, _mm512_unpackhi_epi16(x, z));
            _mm512_store_si512(to + 2 * kTileBytes, _mm512_unpacklo_epi16(y, w));
            _mm512_store_si512(to + 3 * kTileBytes, _mm512_unpackhi_epi16(y, w));
            if (next && d == 0 && i < next->count) ByteGroups::ask(next->values[i], kTileGroup * dim, quad, 4);
        }
    }

    // Interleaving left numbers 16 k + 4 t + j in lane 4 k + j of tile t.
    void write(float* out) const {
        alignas(64) int32_t got[4][2 * kByteGroup * 16];
        _tile_stored(0, got[0], 64);
        _tile_stored(1, got[1], 64);
        _tile_stored(2, got[2], 64);
        _tile_stored(3, got[3], 64);
        const int stride = padded(dim) + VL;
        for (int g = 0; g < group; ++g, out += stride) {
            __m512 x[4];
            PK_UNROLL for (int t = 0; t < 4; ++t) {
                const vf high = (vf)_mm512_cvtepi32_ps(_mm512_load_si512(got[t] + g * 16));
                const vf low = (vf)_mm512_cvtepi32_ps(_mm512_load_si512(got[t] + (group + g) * 16));
                x[t] = (__m512)((high * splat(256.0f) + low) * splat(value_unit));
            }
            const __m512 a0 = _mm512_shuffle_f32x4(x[0], x[1], 0x44), a1 = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
            const __m512 b0 = _mm512_shuffle_f32x4(x[0], x[1], 0xee), b1 = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
            _mm512_storeu_ps(out, _mm512_shuffle_f32x4(a0, a1, 0x88));
            _mm512_storeu_ps(out + 16, _mm512_shuffle_f32x4(a0, a1, 0xdd));
            _mm512_storeu_ps(out + 32, _mm512_shuffle_f32x4(b0, b1, 0x88));
            _mm512_storeu_ps(out + 48, _mm512_shuffle_f32x4(b0, b1, 0xdd));
        }
    }

    const AttentionArgs* a;
    const Task* task;
    const ByteGroups* next;  // what this thread will probably need then, or null
    ByteGroups cached;
    int group, dim;
    float* scores;
    int32_t* sums;
    uint8_t *weights, *queries;
    float unit[kByteGroup], value_unit;
};

// Several tasks, those after next in `following`. partial(i): where the result of tasks[i] goes.
template <int LANES, class F>
void decode_bytes(const AttentionArgs& a, const Task* tasks, int count, const Task* following, int followers,
                  float* scratch, F&& partial) {
    DecodeBytes<LANES> parts[kByteTasks];
    ByteGroups next[kByteTasks];
    uint8_t* const panel = reinterpret_cast<uint8_t*>(scratch + kByteTasks * byte_task_floats(a));
    for (int i = 0; i < count; ++i) {
        if (i < followers) {
            next[i].find(a, following[i]);
            next[i].ask_scales();
        }
        parts[i].start(a, tasks[i], scratch + i * byte_task_floats(a), i < followers ? next + i : nullptr);
    }
    parts[0].shape_for_keys();
    for (int i = 0; i < count; ++i) parts[i].multiply_keys();
    for (int i = 0; i < count; ++i) parts[i].soften(partial(i));
    parts[0].shape_for_values();
    for (int i = 0; i < count; ++i) parts[i].add_values(panel, partial(i));
    _tile_release();
}

}  // namespace pk

#endif
