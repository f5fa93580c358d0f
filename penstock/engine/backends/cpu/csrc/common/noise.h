// Hashes behind sampling; `reference/noise.py` defines them.

#pragma once

#include <cstdint>

#include "common/simd.h"

namespace pk::PK_SET {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kPosition = 0xD1342543DE82EF95ull;

// splitmix64's output function.
PK_INLINE uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// The noise key of the token at `position` of a sequence.
PK_INLINE uint64_t row_key(uint64_t seed, int64_t position) { return mix(seed + uint64_t(position) * kPosition); }

}  // namespace pk::PK_SET
