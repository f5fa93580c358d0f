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
// A layer of experts is four links: scores; the first product of a shared expert, if there is one; that of the visited
// experts, whose outputs are multiplied by their weights; the second product of all of them, as one with long rows. Which
// experts these are every warp finds out itself, once all blocks have written their scores. Until then its copies stop
// before the weights of the visited experts; those of a shared one go on, and hide that wait.
//
// Built with: CHAIN, the links in order; BLOCKS of the grid; WARPS of a block; STAGES of the ring; TENSOR=1 to multiply
// with tensor cores; with experts what chain_choice.cuh says. For timings: WAITS=0 leaves out the waiting between products
// (results are wrong then), MULTIPLIES=0 all but the copies.
#include "chain_arithmetic.cuh"
#include "chain_choice.cuh"
#include "chain_copies.cuh"

#ifndef WAITS
#define WAITS 1
#endif
#ifndef SCALES  // floats for the scales of a sum over experts
#define SCALES 0
#endif
#ifndef MULTIPLIES
#define MULTIPLIES 1
#endif

// What one output is finished with.
struct Finish {
    float scale = 1.0f, up_scale = 1.0f, bias = 0.0f, up_bias = 0.0f, before = 0.0f;

    // `output` of all those that a scale or a bias is for; of experts it counts through all of them.
    template <class L>
    __device__ __forceinline__ void load_constants(const LinkArguments& link, int output) {
        if constexpr (L::scaled && !L::sum) {
            scale = __ldg(link.scale + output);
            if constexpr (L::gated) up_scale = __ldg(link.scale + L::outputs + output);
        }
        if constexpr (L::bias && !L::sum) {
            bias = bf16_to_float(__ldg(link.bias + output));
            if constexpr (L::gated) up_bias = bf16_to_float(__ldg(link.bias + L::outputs + output));
        }
    }
};

struct Memory {
    unsigned char* ring;  // this lane's pieces
    float* squares;       // [slices]
    float* weights;       // [visits] of the visited experts
    int* experts;         // [visits]
    float* gate;          // what the shared expert is multiplied by
    float* scales;        // [visits and the shared expert][most_rows], of a sum over experts in e4m3
    float* sums;          // [slices][parts][most_rows]
};

// Of an output, the biases of all visited experts; load_constants has those of other links.
template <class L>
__device__ __forceinline__ float sum_biases(const LinkArguments& link, const Memory& memory, int output) {
    float sum = 0.0f;
    if constexpr (L::bias && L::sum) {
#pragma unroll
        for (int visit = 0; visit < TOP_K; ++visit)
            sum += memory.weights[visit] *
                   bf16_to_float(__ldg(link.bias + memory.experts[visit] * L::outputs + output));
    }
    return sum;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// What a gate makes of itself and what it gates; with LIMIT clamped, as gpt-oss has it.
__device__ __forceinline__ float gated(float gate, float up) {
#ifdef LIMIT
    gate = fminf(gate, LIMIT);
    up = fminf(fmaxf(up, -LIMIT), LIMIT) + 1.0f;
    return gate * sigmoid(ALPHA * gate) * up;
#else
    return gate * sigmoid(gate) * up;
#endif
}

// The top bit of the counter when so many waits of this launch are over.
__device__ __forceinline__ uint32_t phase_after(uint32_t begun, int waits) {
    return waits % 2 ? begun ^ GRID_PHASE : begun;
}

// Waits for the scores of all blocks and goes on with the weights of the chosen experts. All lanes of a warp.
__device__ __forceinline__ void enter_experts(Source& source, int slot, uint32_t begun, const Arguments& arguments,
                                              const Memory& memory) {
    constexpr int scoring = Products::template scoring<>();
    if (WAITS && threadIdx.x % 32 == 0)
        grid_wait(arguments.counter, phase_after(begun, Products::template arrivals<scoring>()));
    __syncwarp();
    const float* scores = reinterpret_cast<const float*>(arguments.links[scoring].out);
    const Chosen chosen = choose(scores, arguments.correction);
    source.expert = chosen.expert;
    if (threadIdx.x < TOP_K) {
        memory.experts[threadIdx.x] = chosen.expert;
        memory.weights[threadIdx.x] = chosen.weight;
    }
    resume(source, memory.ring, slot, arguments);
}

// Scales of the rows of this block, for all visits and the shared expert.
template <class L>
__device__ __forceinline__ void load_scales(const LinkArguments& link, const Memory& memory) {
    const int first = first_of(L::outputs), count = count_of(L::outputs);
    for (int i = threadIdx.x; i < (TOP_K + (L::width > 0)) * count; i += WARPS * 32) {
        const int visit = i / count, output = first + i % count;
        const float* from = visit < TOP_K ? link.scale + memory.experts[visit] * L::outputs : link.shared_scale;
        memory.scales[visit * L::most_rows + i % count] = __ldg(from + output);
    }
}

// The power of this lane's piece of a unit in MXFP4, which starts at `piece`.
__device__ __forceinline__ uint32_t power_of(const unsigned char* piece) {
    const int lane = threadIdx.x % 32;
    return uint32_t(piece[30 * PIECE + lane - lane * PIECE]) * 0x00800080u;
}

template <int I>
__device__ __forceinline__ void run(Source& source, int& slot, uint32_t begun, const Arguments& arguments,
                                    const Memory& memory) {
    using L = typename Products::template At<I>;
    const LinkArguments& link = arguments.links[I];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = warp / L::slices, slice = warp % L::slices;
    const int first = first_of(L::rows), count = count_of(L::rows);
    const int own = threadIdx.x;  // of the outputs that this thread finishes, the first

    Finish finish;
    Loaded<L> loaded;
    if constexpr (L::norm) loaded.load_gains(link.norm);
    if constexpr (L::each) {
        if (source.expert < 0) enter_experts(source, slot, begun, arguments, memory);
        const int visit = min((first + own) / L::outputs, TOP_K - 1);
        const int expert = __shfl_sync(ALL, source.expert, visit);
        const int output = (2 * expert - visit) * L::outputs + first + own;
        if (own < count) finish.load_constants<L>(link, output);
    } else {
        if (own < count) finish.load_constants<L>(link, first + own);
    }
    if constexpr (L::scaled && L::sum) load_scales<L>(link, memory);
    if constexpr (L::bias && L::sum)
        if (own < count) finish.bias = sum_biases<L>(link, memory, first + own);
    if constexpr (I == 0) {
        wait_dependencies();
        begun = load_relaxed(arguments.counter) & GRID_PHASE;
    } else if constexpr (L::waits) {
        if (WAITS && threadIdx.x == 0)
            grid_wait(arguments.counter, phase_after(begun, Products::template arrivals<I>() - 1));
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
        const int rows = L::scores && part == 1 ? 1 : count;
        for (int row = group; row < rows; row += ROWS * L::groups) {
            if constexpr (L::shared)
                if (stopped(source, arguments)) enter_experts(source, slot, begun, arguments, memory);
            Sums<L> found;
            float each[ROWS] = {};
#pragma unroll
            for (int c = 0; c < L::columns; ++c) {
                cp_async_wait<STAGES - 1>();
                if constexpr (L::fp4) __syncwarp();  // powers were copied by other lanes
                unsigned char* stage = memory.ring + slot;
                slot = slot + STAGE == RING ? 0 : slot + STAGE;
#if MULTIPLIES
#pragma unroll
                for (int r = 0; r < ROWS; r += 2) {
                    const uint4 even = *reinterpret_cast<const uint4*>(stage + r * UNIT);
                    const uint4 odd = *reinterpret_cast<const uint4*>(stage + (r + 1) * UNIT);
                    if constexpr (L::fp4) {
                        const uint32_t by_even = power_of(stage + r * UNIT), by_odd = power_of(stage + (r + 1) * UNIT);
                        if (r + 2 == ROWS) {
                            __syncwarp();  // before two lanes copy the next powers
                            fill(source, stage, arguments);
                        }
                        found.add_fp4(even, odd, by_even, by_odd, r, inputs, c);
                    } else {
                        if (r + 2 == ROWS) fill(source, stage, arguments);  // all of it has been read
                        found.add(even, odd, r, inputs, c);
                    }
                }
#else
                fill(source, stage, arguments);
#endif
                if constexpr (L::scaled && L::sum) {  // other experts have other scales
                    const int visit = min(unit_of<L>(c) / L::span, TOP_K);
                    float part_of[ROWS];
                    found.get(part_of, inputs);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
                        if (row + r * L::groups < rows && unit_of<L>(c) < L::units)
                            each[r] += part_of[r] * memory.scales[visit * L::most_rows + row + r * L::groups];
                    found = Sums<L>();
                }
            }
            if constexpr (!(L::scaled && L::sum)) found.get(each, inputs);
            const float sum = sum_rows(each);
            const int local = row + lane / 8 * L::groups;
            if (lane % 8 == 0 && local < rows) sums[local] = sum;
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
        const int visit = L::each ? (first + output) / L::outputs : 0;
        if (output != own) {
            const int before = L::each ? (2 * memory.experts[visit] - visit) * L::outputs : 0;
            finish.load_constants<L>(link, before + first + output);
            if constexpr (L::bias && L::sum) finish.bias = sum_biases<L>(link, memory, first + output);
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
            y = gated(y, up);
        }
        if constexpr (L::each) y *= memory.weights[visit];
        if constexpr (L::shared && L::gates) y *= *memory.gate;
        if constexpr (L::residual) {
            arguments.residual[first + output] = float_to_bf16(y + finish.before);
        } else if constexpr (L::scores) {
            // Rounded as a linear's own result would be.
            reinterpret_cast<float*>(link.out)[first + output] = bf16_to_float(float_to_bf16(y));
        } else {
            link.out[first + output] = float_to_bf16(y);
        }
    }
    if constexpr (L::scores && L::gates) {
        if (threadIdx.x == 0) {
            float y = 0.0f;
            for (int s = 0; s < L::slices; ++s) y += memory.sums[(s * L::parts + 1) * L::most_rows];
            *memory.gate = sigmoid(bf16_to_float(float_to_bf16(y * inverse)));
        }
    }
    if constexpr (Products::template arrives<I>()) {
        if (WAITS) grid_arrive(arguments.counter);
        else __syncthreads();
    }
    if constexpr (I + 1 < Products::count) {
        if constexpr (!Products::template arrives<I>()) __syncthreads();  // sums have been read
        run<I + 1>(source, slot, begun, arguments, memory);
    }
}

extern "C" __global__ void product_chain(const __grid_constant__ Arguments arguments) {
    DYNAMIC_SHARED(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Memory memory;
    memory.ring = shared + warp * RING + lane * PIECE;
    memory.squares = reinterpret_cast<float*>(shared + WARPS * RING);
    memory.weights = memory.squares + WARPS;
    memory.experts = reinterpret_cast<int*>(memory.weights + TOP_K);
    memory.gate = memory.weights + 2 * TOP_K;
    memory.scales = memory.gate + 1;
    memory.sums = memory.scales + SCALES;

    Source source;
    source.part = source.missed = 0;
    source.expert = -1;
    find(source, arguments);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) fill(source, memory.ring + stage * STAGE, arguments);
    launch_dependents();
    int slot = 0;
    run<0>(source, slot, 0, arguments, memory);
}
