// What a chain is made of, and what its kernel is given; see product_chain.cu.
#pragma once
#include "pieces.cuh"

constexpr int PIECE = 16;         // bytes, so weights, that a lane copies at once
constexpr int UNIT = 32 * PIECE;  // what a warp copies of one row at once
constexpr int ROWS = 4;           // rows of a stage: one unit of each
constexpr int STAGE = ROWS * UNIT;
constexpr int RING = STAGES * STAGE;
constexpr uint32_t ALL = 0xffffffffu;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

enum Form { NORM = 1, GATED = 2, RESIDUAL = 4, BIAS = 8 };

// One product with weights in e4m3, a scale for each row. FORM: the input is the RMS-normalized residual stream (else what
// the product before it gave); the rows are those of a gate and as many to be gated; the result is added to the residual
// stream (else written); there is a bias.
template <int INPUTS, int OUTPUTS, int SLICES, int FORM>
struct Link {
    static constexpr int inputs = INPUTS, outputs = OUTPUTS, slices = SLICES;
    static constexpr bool norm = FORM & NORM, gated = FORM & GATED, residual = FORM & RESIDUAL, bias = FORM & BIAS;
    static constexpr int columns = ceil_div(ceil_div(INPUTS, UNIT), SLICES);  // units of a row for one warp
    static constexpr int groups = WARPS / SLICES;
    static constexpr int parts = gated ? 2 : 1;
    static constexpr int most_rows = ceil_div(OUTPUTS, BLOCKS);
    static_assert(INPUTS % PIECE == 0 && WARPS % SLICES == 0, "");
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
    template <int I>
    using At = typename Nth<I, Links...>::type;
};
using Products = List<CHAIN>;

// Rows that are read one after another: those of a link, or of its gate, or those that are gated.
struct Part {
    const unsigned char* weight;
    int32_t outputs, inputs, columns;
    int32_t slices;  // the logarithm of how many
};

struct LinkArguments {
    const float* scale;
    const uint16_t* bias;
    const uint16_t* norm;
    uint16_t* out;
    float eps;
    int32_t unused;
};

struct Arguments {
    const uint16_t* x;
    uint16_t* residual;
    uint32_t* counter;
    LinkArguments links[Products::count];
    Part parts[Products::parts];
};

__device__ __forceinline__ int first_of(int outputs) { return int(blockIdx.x) * outputs / BLOCKS; }
__device__ __forceinline__ int count_of(int outputs) {
    return (int(blockIdx.x) + 1) * outputs / BLOCKS - first_of(outputs);
}
