// What a chain is made of, and what its kernel is given; see product_chain.cu.
#pragma once
#include "pieces.cuh"

#ifndef TOP_K  // no link of this chain has experts
#define TOP_K 1
#define EXPERTS 1
#endif

constexpr int PIECE = 16;         // bytes that a lane copies at once
constexpr int UNIT = 32 * PIECE;  // what a warp copies of one row at once
constexpr int ROWS = 4;           // rows of a stage: one unit of each
constexpr int STAGE = ROWS * UNIT;
constexpr int RING = STAGES * STAGE;
constexpr uint32_t ALL = 0xffffffffu;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// SCORES to GATES: of a layer of experts, see product_chain.cu.
enum Form { FP8 = 1, NORM = 2, GATED = 4, RESIDUAL = 8, BIAS = 16, SCORES = 32, EACH = 64, SUM = 128, SHARED = 256, GATES = 512, FP4 = 1024, WIDE = 2048 };

// One product. FORM: the weights are e4m3 or MXFP4 with a scale for each row (else bfloat16); the input is the RMS-normalized
// residual stream (else what the product before it gave); the rows are those of a gate and as many to be gated; the
// result is added to the residual stream (else written); there is a bias.
// Of experts: the result is the SCORES by which they are chosen; the rows are those of EACH visited expert, one after
// another, OUTPUTS of each; an output is the SUM over the visited experts, with INPUTS of each, and WIDTH inputs of a
// shared one behind them; it is the first product of a SHARED expert, which does not depend on the choice. GATES: one
// more row of the scores says how much of the shared expert counts.
template <int INPUTS, int OUTPUTS, int SLICES, int FORM, int WIDTH = 0>
struct Link {
    static constexpr int inputs = INPUTS, outputs = OUTPUTS, slices = SLICES, width = WIDTH;
    static constexpr bool fp8 = FORM & FP8, norm = FORM & NORM, gated = FORM & GATED, residual = FORM & RESIDUAL;
    static constexpr bool bias = FORM & BIAS, scores = FORM & SCORES, each = FORM & EACH, sum = FORM & SUM;
    static constexpr bool shared = FORM & SHARED, gates = FORM & GATES, fp4 = FORM & FP4, scaled = fp8 || fp4;
    static constexpr bool wide = FORM & WIDE;  // gains of the norm are float32
    static constexpr int per_lane = fp4 ? 32 : fp8 ? 16 : 8;  // weights of a piece
    static constexpr int lanes = fp4 ? 30 : 32;               // whose pieces are weights; see kernels/mxfp4_rows.py
    static constexpr int per_unit = lanes * per_lane;
    static constexpr int span = ceil_div(INPUTS, per_unit);
    static constexpr int row_bytes = fp4 ? span * UNIT : INPUTS * (fp8 ? 1 : 2);
    static constexpr int visited = sum ? TOP_K * span : span;  // units of a row, without those of a shared expert
    static constexpr int units = visited + ceil_div(WIDTH, per_unit);
    static constexpr int columns = ceil_div(units, SLICES);  // units of a row for one warp
    static constexpr int groups = WARPS / SLICES;
    static constexpr int rows = each ? TOP_K * OUTPUTS : OUTPUTS;
    static constexpr int parts = (gated ? 2 : 1) + (scores && gates);
    static constexpr int most_rows = ceil_div(rows, BLOCKS);
    // Whether it needs what all blocks wrote before it; the choice of experts is waited for apart.
    static constexpr bool waits = !each && !shared;
    static_assert(row_bytes % PIECE == 0 && WARPS % SLICES == 0, "");
};

template <int I, class First, class... Rest>
struct Nth {
    using type = typename Nth<I - 1, Rest...>::type;
};
template <class First, class... Rest>
struct Nth<0, First, Rest...> {
    using type = First;
};
template <class... Links>
struct List {
    static constexpr int count = sizeof...(Links);
    static constexpr int parts = (0 + ... + Links::parts);
    static constexpr bool routed = (false || ... || Links::scores);
    template <int I>
    using At = typename Nth<I, Links...>::type;

    // Whether blocks say that they have ended the I-th link: others wait for it.
    template <int I>
    static __device__ constexpr bool arrives() {
        if constexpr (I + 1 < count) return At<I>::scores || At<I + 1>::waits;
        return false;
    }
    // How often they have said so before it.
    template <int I>
    static __device__ constexpr int arrivals() {
        if constexpr (I > 0) return arrivals<I - 1>() + arrives<I - 1>();
        return 0;
    }
    // The link that makes the scores, if there is one.
    template <int I = 0>
    static __device__ constexpr int scoring() {
        if constexpr (At<I>::scores || I + 1 == count) return I;
        else return scoring<I + 1>();
    }
};
using Products = List<CHAIN>;

enum Kind { PLAIN, ALIKE, OF_EACH, OF_SUM };

// Rows that are read one after another: those of a link, or of its gate, or those that are gated. Of one row ALIKE every
// block reads all.
struct Part {
    const unsigned char* weight;
    const unsigned char* shared;  // rows of a shared expert
    int64_t expert_bytes;         // from one expert to the next
    int32_t outputs, row_bytes, columns;
    int32_t slices;        // the logarithm of how many
    int32_t kind;
    int32_t span;          // OF_EACH: rows of an expert. OF_SUM: units of its rows
    int32_t reciprocal;    // OF_SUM: of the span, times 2^16
    int32_t visited;       // OF_SUM: units of all visited experts
    int32_t shared_bytes;  // of a row of the shared one
    int32_t unused;
};

struct LinkArguments {
    const float* scale;
    const float* shared_scale;
    const uint16_t* bias;
    const uint16_t* norm;
    uint16_t* out;  // of scores float
    float eps;
    int32_t unused;
};

struct Arguments {
    const uint16_t* x;
    uint16_t* residual;
    uint32_t* counter;
    const float* correction;  // of the scores by which experts are chosen
    LinkArguments links[Products::count];
    Part parts[Products::parts];
};

__device__ __forceinline__ int first_of(int outputs) { return int(blockIdx.x) * outputs / BLOCKS; }
__device__ __forceinline__ int count_of(int outputs) {
    return (int(blockIdx.x) + 1) * outputs / BLOCKS - first_of(outputs);
}
