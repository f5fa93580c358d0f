// Integer dot products of one 32-deep block: `MR` rows of int8 activations against `NC` vectors of output
// columns. A weight vector holds VL columns x 4 consecutive depths, so each int32 lane is one output column and
// no horizontal sum is ever needed.
//
// Two weight forms: int8 as stored (`Q8`), and 4-bit pairs where the low nibble belongs to depth k and the high
// one to depth k + 16 (`Q4`, unsigned). Results are exact integers, as floats, on every instruction set.

#pragma once

#include "common/simd.h"

namespace pk::PK_SET {

constexpr int kColumns = 16;             // output columns of a weight tile
constexpr int kDepth = 32;               // block length along the input
constexpr int kVectors = kColumns / VL;  // vectors across a tile

#if defined(PK_AVX512)
constexpr int kRows = 8;  // activation rows interleaved in a packed record
constexpr int kGemmVectors = 1;
#elif defined(PK_AVX2)
constexpr int kRows = 4;
constexpr int kGemmVectors = 1;
#else
constexpr int kRows = 4;
constexpr int kGemmVectors = 2;
#endif

struct Q8 {
    static constexpr int kBytes = kColumns * kDepth;
};
struct Q4 {
    static constexpr int kBytes = kColumns * kDepth / 2;
};

// Activations of kRows rows and one block of depth, quantized: value = scale * q.
struct Record {
    int8_t q[kRows][kDepth];
    float scale[kRows];
    float sum[kRows];         // scale * (sum of q): what a weight block's minimum is multiplied by
    int32_t start8[kRows];    // where the integer sums start, for Q8 and Q4 weights: each instruction set has
    int32_t start4[kRows];    // a constant to take back, and starting from it costs nothing
};

// Called with the sums of q over the first and the second half of the block.
PK_INLINE void set_starts(Record& r, int m, int32_t low, int32_t high);

}  // namespace pk::PK_SET

#if defined(PK_NEON)
#include "linear/neon/dot.h"
#elif defined(PK_AVX512)
#include "linear/avx512/bytes.h"
#include "linear/x86_dot.h"
#elif defined(PK_AVX2)
#include "linear/avx2/bytes.h"
#include "linear/x86_dot.h"
#else
#include "linear/generic/dot.h"
#endif
