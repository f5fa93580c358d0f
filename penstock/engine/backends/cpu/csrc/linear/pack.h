// Packing weights into tiles of blocks (linear.h), or of bfloat16 (amx/weight_tiles.h).

#pragma once

#include "linear/linear.h"

namespace pk::PK_SET {

// To nearest even; what is not finite stays so.
inline bf16 round_bf16(float x) {
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

inline bool finite_half(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

// The nearest float16, or the next one up where the nearest would cut off more than half a step of the range.
inline uint16_t scale_half(float exact, float steps) {
    uint16_t h = float_to_half(exact);
    if (half_to_float(h) * (steps + 0.5f) < exact * steps) ++h;
    return h;
}

inline bool pack_floats8(const Packer& p, int64_t n, int64_t b, const float* w) {
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

inline bool pack_floats4(const Packer& p, int64_t n, int64_t b, const float* w) {
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

inline uint16_t half_at(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

}  // namespace pk::PK_SET
