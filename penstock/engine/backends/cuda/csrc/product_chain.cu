// All products of one token between two attentions in one launch: y1 = W1 x, y2 = W2 f(y1), ... with weights in FP8. One
// block to a multiprocessor, whose warps stay and wait for those of the other blocks between two products.
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
// Built with: CHAIN, the links in order; BLOCKS of the grid; WARPS of a block; STAGES of the ring. For timings: WAITS=0
// leaves out the waiting between products (results are wrong then), MULTIPLIES=0 all but the copies.
#include "chain_arithmetic.cuh"
#include "chain_copies.cuh"

// What one output is finished with.
struct Finish {
    float scale = 1.0f, up_scale = 1.0f, bias = 0.0f, up_bias = 0.0f, before = 0.0f;

    template <class L>
    __device__ __forceinline__ void load_constants(const LinkArguments& link, int output) {
        scale = __ldg(link.scale + output);
        if constexpr (L::gated) up_scale = __ldg(link.scale + L::outputs + output);
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

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// The top bit of the counter when so many waits of this launch are over.
__device__ __forceinline__ uint32_t phase_after(uint32_t begun, int waits) {
    return waits % 2 ? begun ^ GRID_PHASE : begun;
}

template <int I>
__device__ __forceinline__ void run(Source& source, int& slot, uint32_t begun, const Arguments& arguments,
                                    const Memory& memory) {
    using L = typename Products::template At<I>;
    const LinkArguments& link = arguments.links[I];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = warp / L::slices, slice = warp % L::slices;
    const int first = first_of(L::outputs), count = count_of(L::outputs);
    const int own = threadIdx.x;  // of the outputs that this thread finishes, the first

    Finish finish;
    Loaded<L> loaded;
    if constexpr (L::norm) loaded.load_gains(link.norm);
    if (own < count) finish.load_constants<L>(link, first + own);
    if constexpr (I == 0) {
        wait_dependencies();
        begun = load_relaxed(arguments.counter) & GRID_PHASE;
    } else {
        if (WAITS && threadIdx.x == 0) grid_wait(arguments.counter, phase_after(begun, I - 1));
        __syncthreads();
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
            y = silu(y) * up;
        }
        if constexpr (L::residual) {
            arguments.residual[first + output] = float_to_bf16(y + finish.before);
        } else {
            link.out[first + output] = float_to_bf16(y);
        }
    }
    if constexpr (I + 1 < Products::count) {
        if (WAITS) grid_arrive(arguments.counter);
        else __syncthreads();
        run<I + 1>(source, slot, begun, arguments, memory);
    }
}

extern "C" __global__ void product_chain(const __grid_constant__ Arguments arguments) {
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
    run<0>(source, slot, 0, arguments, memory);
}
