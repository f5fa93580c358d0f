// All products of one token between two attentions in one launch: y1 = W1 x, y2 = W2 f(y1), ... One block to a
// multiprocessor, whose warps stay and wait for those of the other blocks between two products.
//
// Reading the weights is all that takes time, so every lane keeps its own reads under way, whatever the others do: its
// part of a ring in shared memory is filled by its own asynchronous copies and read by itself alone, which needs no
// barrier. The copies run ahead over the ends of products, so that the next weights arrive while a block waits for the
// inputs that they are multiplied by.
//
// A product's rows are divided among the blocks. Within a block a row is cut into slices (columns that a warp reads,
// with its inputs in registers for the whole product), and groups of as many warps as there are slices take the rows in
// turns. Sums of slices meet in shared memory at the end of a product.
//
// Built with: CHAIN, the links in order; BLOCKS of the grid; WARPS of a block; STAGES of the ring; TENSOR=1 to multiply
// with tensor cores. For timings: WAITS=0 leaves out the waiting between products (results are wrong then), MULTIPLIES=0
// all but the copies.
#include "pieces.cuh"

#ifndef WAITS
#define WAITS 1
#endif
#ifndef MULTIPLIES
#define MULTIPLIES 1
#endif

constexpr int PIECE = 16;         // bytes that a lane copies at once
constexpr int UNIT = 32 * PIECE;  // what a warp copies of one row at once
constexpr int ROWS = 4;           // rows of a stage: one unit of each
constexpr int STAGE = ROWS * UNIT;
constexpr int RING = STAGES * STAGE;
constexpr uint32_t ALL = 0xffffffffu;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

enum Form { FP8 = 1, NORM = 2, GATED = 4, RESIDUAL = 8, BIAS = 16 };

// One product. FORM: the weights are e4m3 with a scale for each row (else bfloat16); the input is the RMS-normalized
// residual stream (else what the product before it gave); the rows are those of a gate and as many to be gated; the
// result is added to the residual stream (else written); there is a bias.
template <int INPUTS, int OUTPUTS, int SLICES, int FORM>
struct Link {
    static constexpr int inputs = INPUTS, outputs = OUTPUTS, slices = SLICES;
    static constexpr bool fp8 = FORM & FP8, norm = FORM & NORM, gated = FORM & GATED, residual = FORM & RESIDUAL;
    static constexpr bool bias = FORM & BIAS;
    static constexpr int row_bytes = INPUTS * (fp8 ? 1 : 2);
    static constexpr int per_lane = fp8 ? 16 : 8;                                // weights of a piece
    static constexpr int columns = ceil_div(ceil_div(row_bytes, UNIT), SLICES);  // units of a row for one warp
    static constexpr int groups = WARPS / SLICES;
    static constexpr int parts = gated ? 2 : 1;
    static constexpr int most_rows = ceil_div(OUTPUTS, BLOCKS);
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
    template <int I>
    using At = typename Nth<I, Links...>::type;
};
using Products = List<CHAIN>;

// Rows that are read one after another: those of a link, or of its gate, or those that are gated.
struct Part {
    const unsigned char* weight;
    int32_t outputs, row_bytes, columns;
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

// What a lane copies next: the parts of the chain one after another, of each the stages of its warp.
struct Source {
    const unsigned char* at;  // this lane's piece of the first row of the stage
    int reach;                // bytes of the row from there on
    int rows;                 // that the warp still reads of this part
    int left;                 // units of these rows, from this one on
    int columns;
    int stride;  // bytes from one of its rows to the next one
    int hop;     // bytes from one of its units to the next one
    int part;
};

__device__ __forceinline__ void enter(Source& source, const Arguments& arguments) {
    const Part& part = arguments.parts[source.part];
    const int warp = threadIdx.x / 32, group = warp >> part.slices, slice = warp - (group << part.slices);
    const int offset = slice * UNIT + threadIdx.x % 32 * PIECE;
    source.at = part.weight + int64_t(first_of(part.outputs) + group) * part.row_bytes + offset;
    source.reach = part.row_bytes - offset;
    source.rows = (((count_of(part.outputs) - group - 1) << part.slices) + WARPS) / WARPS;
    source.left = source.columns = part.columns;
    source.stride = (WARPS >> part.slices) * part.row_bytes;
    source.hop = UNIT << part.slices;
}

// From `source.part` on, the first part of which this warp has any rows.
__device__ __forceinline__ void find(Source& source, const Arguments& arguments) {
    source.rows = 0;
    for (; source.part < Products::parts; ++source.part) {
        enter(source, arguments);
        if (source.rows > 0) break;
    }
}

// Copies the next stage. Behind the end of the chain there is none: waits count stages all the same.
__device__ __forceinline__ void fill(Source& source, unsigned char* to, const Arguments& arguments) {
    if (source.rows > 0) {
        const unsigned char* at = source.at;
        const int rows = source.reach > 0 ? source.rows : 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, at += source.stride) cp_async_16_or_zero(to + r * UNIT, at, rows > r);
        source.left -= 1;
        if (source.left > 0) {
            source.at += source.hop;
            source.reach -= source.hop;
        } else {
            const int back = (source.columns - 1) * source.hop;
            source.at = at - back;
            source.reach += back;
            source.left = source.columns;
            source.rows -= ROWS;
            if (source.rows <= 0) {
                source.part += 1;
                find(source, arguments);
            }
        }
    }
    cp_async_commit();
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) value += __shfl_xor_sync(ALL, value, mask);
    return value;
}

// Sums of four values over the lanes; lanes 8 r to 8 r + 7 have that of the r-th.
__device__ __forceinline__ float sum_rows(const float (&sums)[ROWS]) {
    const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    float a = upper ? sums[2] : sums[0], b = upper ? sums[3] : sums[1];
    a += __shfl_xor_sync(ALL, upper ? sums[0] : sums[2], 16);
    b += __shfl_xor_sync(ALL, upper ? sums[1] : sums[3], 16);
    float c = (odd ? b : a) + __shfl_xor_sync(ALL, odd ? a : b, 8);
#pragma unroll
    for (int mask = 4; mask; mask >>= 1) c += __shfl_xor_sync(ALL, c, mask);
    return c;
}

__device__ __forceinline__ void words_of(uint32_t (&words)[4], uint4 from) {
    words[0] = from.x;
    words[1] = from.y;
    words[2] = from.z;
    words[3] = from.w;
}

// The inputs of a lane's columns as they are stored, and the gains of the norm before them.
template <class L>
struct Loaded {
    static constexpr int quads = L::per_lane / 8;
    uint4 inputs[L::columns][quads], gains[L::columns][quads];

    static __device__ __forceinline__ int place(int c) {
        return ((int(threadIdx.x) / 32 % L::slices + c * L::slices) * 32 + int(threadIdx.x) % 32) * L::per_lane;
    }

    // Constants: on their way before the inputs are there.
    __device__ __forceinline__ void load_gains(const uint16_t* norm) {
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int q = 0; q < quads; ++q)
                gains[c][q] = place(c) < L::inputs ? load_stream(reinterpret_cast<const uint4*>(norm + place(c)) + q)
                                                   : make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void load_inputs(const uint16_t* x) {
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int q = 0; q < quads; ++q)
                inputs[c][q] = place(c) < L::inputs ? load_fresh(reinterpret_cast<const uint4*>(x + place(c)) + q)
                                                    : make_uint4(0, 0, 0, 0);
    }

    // The i-th pair of a unit, with its gains; `squares` grows by its squares.
    __device__ __forceinline__ float2 pair(int c, int i, float& squares) const {
        uint32_t words[4], by[4];
        words_of(words, inputs[c][i / 4]);
        float2 found = bf16x2_to_float2(words[i % 4]);
        if constexpr (L::norm) {
            squares += found.x * found.x + found.y * found.y;
            words_of(by, gains[c][i / 4]);
            const float2 gain = bf16x2_to_float2(by[i % 4]);
            found.x *= gain.x;
            found.y *= gain.y;
        }
        return found;
    }
};

#if TENSOR
// Tensor cores: a product of 16 rows by 16 columns with 8 vectors, of which a lane's weights meet its own inputs alone in
// the elements of the diagonal. So nothing moves between lanes: of the matrix, lane l has rows l / 4 and l / 4 + 8 (two
// rows of the weights), of the vectors it has a part of the (l / 4)-th. E4m3 weights are float16 there, exactly, and the
// inputs too: scaled by a power of two for each warp, so that they fit and lose nothing. Of bfloat16 inputs with gains the
// rounding errors are a second vector.
template <class L>
struct Inputs {
    static constexpr int words = L::per_lane / 2;
    static constexpr bool split = !L::fp8 && L::norm;
    uint32_t high[L::columns][words], low[split ? L::columns : 1][words];
    float unscale;

    __device__ __forceinline__ float take(const Loaded<L>& loaded) {
        float squares = 0.0f, ignored = 0.0f, scale = 1.0f;
        unscale = 1.0f;
        if constexpr (L::fp8) {
            float peak = 0.0f;
#pragma unroll
            for (int c = 0; c < L::columns; ++c)
#pragma unroll
                for (int i = 0; i < words; ++i) {
                    const float2 pair = loaded.pair(c, i, ignored);
                    peak = fmaxf(peak, fmaxf(fabsf(pair.x), fabsf(pair.y)));
                }
            const uint32_t exponent = max(15u, __reduce_max_sync(ALL, __float_as_uint(peak) >> 23));
            scale = __uint_as_float((268 - exponent) << 23);
            unscale = __uint_as_float((exponent - 14) << 23);
        }
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const float2 pair = loaded.pair(c, i, squares);
                if constexpr (L::fp8) {
                    high[c][i] = float2_to_f16x2(pair.x * scale, pair.y * scale);
                } else {
                    high[c][i] = float2_to_bf16x2(pair.x, pair.y);
                    if constexpr (split) {
                        const float2 kept = bf16x2_to_float2(high[c][i]);
                        low[c][i] = float2_to_bf16x2(pair.x - kept.x, pair.y - kept.y);
                    }
                }
            }
        return squares;
    }
};

template <class L>
struct Sums {
    float tiles[ROWS / 2][4] = {};

    // Rows r and r + 1 of a stage.
    __device__ __forceinline__ void add(uint4 first, uint4 second, int r, const Inputs<L>& inputs, int c) {
        uint32_t even[4], odd[4];
        words_of(even, first);
        words_of(odd, second);
        if constexpr (L::fp8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint2 upper = e4m3x4_to_f16x4(even[i]), lower = e4m3x4_to_f16x4(odd[i]);
                const uint32_t a[4] = {upper.x, lower.x, upper.y, lower.y};
                const uint32_t b[2] = {inputs.high[c][2 * i], inputs.high[c][2 * i + 1]};
                mma_f16(tiles[r / 2], a, b);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const uint32_t a[4] = {even[i], odd[i], even[i + 1], odd[i + 1]};
                const uint32_t b[2] = {inputs.high[c][i], inputs.high[c][i + 1]};
                mma_bf16(tiles[r / 2], a, b);
                if constexpr (Inputs<L>::split) {
                    const uint32_t rest[2] = {inputs.low[c][i], inputs.low[c][i + 1]};
                    mma_bf16(tiles[r / 2], a, rest);
                }
            }
        }
    }

    // This lane's part of the sum of each row.
    __device__ __forceinline__ void get(float (&found)[ROWS], const Inputs<L>& inputs) const {
        const int vector = threadIdx.x % 32 / 4;
        const bool diagonal = int(threadIdx.x) % 4 == vector / 2;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float value = vector % 2 ? tiles[r / 2][r % 2 * 2 + 1] : tiles[r / 2][r % 2 * 2];
            found[r] = diagonal ? value * inputs.unscale : 0.0f;
        }
    }
};
#else
// Ordinary arithmetic in float32. Many inputs are kept in bfloat16.
template <class L>
struct Inputs {
    static constexpr bool wide = L::columns * L::per_lane <= 32;
    float values[wide ? L::columns : 1][L::per_lane];
    uint32_t pairs[wide ? 1 : L::columns][L::per_lane / 2];

    __device__ __forceinline__ float take(const Loaded<L>& loaded) {
        float squares = 0.0f;
#pragma unroll
        for (int c = 0; c < L::columns; ++c)
#pragma unroll
            for (int i = 0; i < L::per_lane / 2; ++i) {
                const float2 pair = loaded.pair(c, i, squares);
                if constexpr (wide) {
                    values[c][2 * i] = pair.x;
                    values[c][2 * i + 1] = pair.y;
                } else {
                    pairs[c][i] = float2_to_bf16x2(pair.x, pair.y);
                }
            }
        return squares;
    }
};

template <class L>
struct Sums {
    float rows[ROWS] = {};

    __device__ __forceinline__ void add(uint4 first, uint4 second, int r, const Inputs<L>& inputs, int c) {
        float x[L::per_lane];
#pragma unroll
        for (int i = 0; i < L::per_lane / 2; ++i) {
            if constexpr (Inputs<L>::wide) {
                x[2 * i] = inputs.values[c][2 * i];
                x[2 * i + 1] = inputs.values[c][2 * i + 1];
            } else {
                const float2 pair = bf16x2_to_float2(inputs.pairs[c][i]);
                x[2 * i] = pair.x;
                x[2 * i + 1] = pair.y;
            }
        }
        rows[r] = multiply(rows[r], first, x);
        rows[r + 1] = multiply(rows[r + 1], second, x);
    }

    static __device__ __forceinline__ float multiply(float sum, uint4 weights, const float (&x)[L::per_lane]) {
        uint32_t words[4];
        words_of(words, weights);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (L::fp8) {
                const uint2 halves = e4m3x4_to_f16x4(words[i]);
                const float2 low = f16x2_to_float2(halves.x), high = f16x2_to_float2(halves.y);
                sum = fmaf(low.x, x[4 * i], sum);
                sum = fmaf(low.y, x[4 * i + 1], sum);
                sum = fmaf(high.x, x[4 * i + 2], sum);
                sum = fmaf(high.y, x[4 * i + 3], sum);
            } else {
                const float2 w = bf16x2_to_float2(words[i]);
                sum = fmaf(w.x, x[2 * i], sum);
                sum = fmaf(w.y, x[2 * i + 1], sum);
            }
        }
        return sum;
    }

    __device__ __forceinline__ void get(float (&found)[ROWS], const Inputs<L>&) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) found[r] = rows[r];
    }
};
#endif

// What one output is finished with.
struct Finish {
    float scale = 1.0f, up_scale = 1.0f, bias = 0.0f, up_bias = 0.0f, before = 0.0f;

    template <class L>
    __device__ __forceinline__ void load_constants(const LinkArguments& link, int output) {
        if constexpr (L::fp8) {
            scale = __ldg(link.scale + output);
            if constexpr (L::gated) up_scale = __ldg(link.scale + L::outputs + output);
        }
        if constexpr (L::bias) {
            bias = bf16_to_float(__ldg(link.bias + output));
            if constexpr (L::gated) up_bias = bf16_to_float(__ldg(link.bias + L::outputs + output));
        }
    }
};

struct Memory {
    unsigned char* ring;  // this lane's pieces
    float* squares;       // [slices]
    float* sums;          // [slices][parts][most_rows]
};

template <int I>
__device__ __forceinline__ void run(Source& source, int& slot, const Arguments& arguments, const Memory& memory) {
    using L = typename Products::template At<I>;
    const LinkArguments& link = arguments.links[I];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = warp / L::slices, slice = warp % L::slices;
    const int first = first_of(L::outputs), count = count_of(L::outputs);
    const int own = threadIdx.x;  // of the outputs that this thread finishes, the first

    Finish finish;
    Loaded<L> loaded;
    if (own < count) finish.load_constants<L>(link, first + own);
    if constexpr (L::norm) loaded.load_gains(link.norm);
    if constexpr (I == 0) {
        wait_dependencies();
    } else if (WAITS) {
        grid_barrier(arguments.counter);
    }
    const uint16_t* from = arguments.x;
    if constexpr (L::norm) {
        from = arguments.residual;
    } else if constexpr (I > 0) {
        from = arguments.links[I > 0 ? I - 1 : 0].out;
    }
    loaded.load_inputs(from);
    if constexpr (L::residual)
        if (own < count) finish.before = bf16_to_float(load_fresh(arguments.residual + first + own));
    Inputs<L> inputs;
    const float squares = inputs.take(loaded);
    if constexpr (L::norm) {
        const float sum = warp_sum(squares);
        if (group == 0 && lane == 0) memory.squares[slice] = sum;
    }

    for (int part = 0; part < L::parts; ++part) {
        float* sums = memory.sums + (slice * L::parts + part) * L::most_rows;
        for (int row = group; row < count; row += ROWS * L::groups) {
            Sums<L> found;
#pragma unroll
            for (int c = 0; c < L::columns; ++c) {
                cp_async_wait<STAGES - 1>();
                unsigned char* stage = memory.ring + slot;
                slot = slot + STAGE == RING ? 0 : slot + STAGE;
#if MULTIPLIES
#pragma unroll
                for (int r = 0; r < ROWS; r += 2) {
                    const uint4 even = *reinterpret_cast<const uint4*>(stage + r * UNIT);
                    const uint4 odd = *reinterpret_cast<const uint4*>(stage + (r + 1) * UNIT);
                    if (r + 2 == ROWS) fill(source, stage, arguments);  // all of it has been read
                    found.add(even, odd, r, inputs, c);
                }
#else
                fill(source, stage, arguments);
#endif
            }
            float each[ROWS];
            found.get(each, inputs);
            const float sum = sum_rows(each);
            const int local = row + lane / 8 * L::groups;
            if (lane % 8 == 0 && local < count) sums[local] = sum;
        }
    }
    __syncthreads();

    float inverse = 1.0f;
    if constexpr (L::norm) {
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < L::slices; ++s) total += memory.squares[s];
        inverse = rsqrtf(total / L::inputs + link.eps);
    }
    for (int output = own; output < count; output += WARPS * 32) {
        if (output != own) {
            finish.load_constants<L>(link, first + output);
            if constexpr (L::residual) finish.before = bf16_to_float(load_fresh(arguments.residual + first + output));
        }
        float y = 0.0f, up = 0.0f;
#pragma unroll
        for (int s = 0; s < L::slices; ++s) {
            y += memory.sums[s * L::parts * L::most_rows + output];
            if constexpr (L::gated) up += memory.sums[(s * L::parts + 1) * L::most_rows + output];
        }
        y = y * inverse * finish.scale + finish.bias;
        if constexpr (L::gated) {
            up = up * inverse * finish.up_scale + finish.up_bias;
            y = y / (1.0f + expf(-y)) * up;
        }
        if constexpr (L::residual) {
            arguments.residual[first + output] = float_to_bf16(y + finish.before);
        } else {
            link.out[first + output] = float_to_bf16(y);
        }
    }
    if constexpr (I + 1 < Products::count) run<I + 1>(source, slot, arguments, memory);
}

extern "C" __global__ void product_chain(const Arguments arguments) {
    DYNAMIC_SHARED(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Memory memory;
    memory.ring = shared + warp * RING + lane * PIECE;
    memory.squares = reinterpret_cast<float*>(shared + WARPS * RING);
    memory.sums = memory.squares + WARPS;

    Source source;
    source.part = 0;
    find(source, arguments);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) fill(source, memory.ring + stage * STAGE, arguments);
    launch_dependents();
    int slot = 0;
    run<0>(source, slot, arguments, memory);
}
