// Weights in int8 with one scale per output: their layout and how packed few-bit weights become them.
//
// A tile is 16 outputs, in steps of 64 depths: a row of 64 bytes holds four neighbouring depths of every output, side by
// side, which is what both a tile register and a dot product of byte vectors take. The scales follow the last step.
// Weights are rotated (hadamard.h) before they are rounded.

#pragma once

#include "linear/hadamard.h"
#include "linear/linear.h"

#if defined(PK_AVX512) || defined(PK_AVX2)
#define PK_PER_CHANNEL 1

namespace pk::PK_SET {

constexpr int64_t kStep = 64;                      // depths of a step
constexpr int64_t kStepBytes = kStep * kColumns;

#if defined(PK_VNNI) && !defined(__AMX_INT8__)
constexpr int32_t kPerChannelFlip = 128;  // stored unsigned, as the dot products of VNNI take them
#else
constexpr int32_t kPerChannelFlip = 0;
#endif

inline int64_t per_channel_steps(int64_t depth) { return (depth + kStep - 1) / kStep; }

// A tile of 16 columns: its steps, then the columns' scales.
inline int64_t per_channel_tile_bytes(int64_t depth) { return per_channel_steps(depth) * kStepBytes + kColumns * 4; }

// Calls f(k, values) for depths k .. k + 3 of vector `part` of a packed tile, a column per lane; times `input_scale`, if any.
template <class F>
inline void each_four(const Tile& tile, int bits, int64_t blocks, int part, const float* input_scale, F&& f) {
    const auto give = [&](int64_t k, vf (&values)[4]) {
        if (input_scale)
            PK_UNROLL for (int j = 0; j < 4; ++j) values[j] *= splat(input_scale[k + j]);
        f(k, values);
    };
    const auto load_row = [&](const uint8_t* from) {
        vi row;
        std::memcpy(&row, from + part * VB, VB);
        return row;
    };
    for (int64_t b = 0; b < blocks; ++b) {
        const vf scale = load(tile.scale + b * kColumns + part * VL);
        if (bits == 4) {
            const vf minimum = load(tile.minimum + b * kColumns + part * VL);
            for (int row = 0; row < 4; ++row) {
                const vi pairs = load_row(tile.q + b * Q4::kBytes + row * 64) ^ (0x01010101 * kStoredFlip);
                PK_UNROLL for (int half = 0; half < 2; ++half) {
                    vf values[4];
                    PK_UNROLL for (int j = 0; j < 4; ++j)
                        values[j] = scale * __builtin_convertvector(pairs >> (8 * j + 4 * half) & 15, vf) + minimum;
                    give(b * kDepth + half * 16 + row * 4, values);
                }
            }
        } else {
            for (int row = 0; row < 8; ++row) {
                const vi bytes = load_row(tile.q + b * Q8::kBytes + row * 64);
                vf values[4];
                PK_UNROLL for (int j = 0; j < 4; ++j)
                    values[j] = scale * __builtin_convertvector((bytes << (24 - 8 * j)) >> 24, vf);
                give(b * kDepth + row * 4, values);
            }
        }
    }
}

// One per-channel tile from a packed one. `rotated`: memory for as many vectors as its steps have depths.
inline void pack_per_channel_tile(const Tile& tile, int bits, int64_t blocks, const float* input_scale, vf* rotated,
                                  uint8_t* to) {
    const int64_t depth = per_channel_steps(blocks * kDepth) * kStep;
    float* const scales = reinterpret_cast<float*>(to + depth / kStep * kStepBytes);
    for (int part = 0; part < kVectors; ++part) {
        each_four(tile, bits, blocks, part, input_scale, [&](int64_t k, const vf (&values)[4]) {
            PK_UNROLL for (int j = 0; j < 4; ++j) rotated[k + j] = values[j];
        });
        std::fill(rotated + blocks * kDepth, rotated + depth, splat(0));
        rotate_lanes(rotated, depth);
        vf most = splat(0);
        for (int64_t k = 0; k < depth; ++k) most = vmax(most, vabs(rotated[k]));
        store(scales + part * VL, most * splat(1 / (127.0f * kRotation)));
        vf inverse;
        for (int n = 0; n < VL; ++n) inverse[n] = most[n] > 0 ? 127.0f / most[n] : 0.0f;
        for (int64_t k = 0; k < depth; k += 4) {
            vi bytes = vi{};
            PK_UNROLL for (int j = 0; j < 4; ++j)
                bytes |= (((vi)(rotated[k + j] * inverse + splat(12582912.0f)) - 0x4b400000 + kPerChannelFlip) & 255) << 8 * j;
            std::memcpy(to + k / kStep * kStepBytes + k % kStep / 4 * 64 + part * VB, &bytes, VB);
        }
    }
}

}  // namespace pk::PK_SET

#endif
