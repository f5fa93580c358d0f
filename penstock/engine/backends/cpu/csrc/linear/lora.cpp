// Adapters behind a linear: y[t] += B(A x[t]), each token with the matrices of its own slot.
//
// Tokens come in tiles that share a slot, so a row of A or B is read once for up to four tokens at a time. First all
// products with A, in rows; then all products with B, in columns: two passes of the pool per call. Matrices come from
// memory, each used for a token or two, in runs too short for the hardware prefetcher: they are prefetched.
// An adapter is one buffer whose parts begin at multiples of its rank (adapters/layout.py): A [parts * rank, inputs],
// B [rank, outputs].

#include "common/context.h"
#include "common/simd.h"
#include "common/recorded_call.h"

using namespace pk::PK_SET;

namespace {

constexpr int kTokens = 4, kRows = 4;
constexpr int kRowsPerTask = 16;
constexpr int64_t kColumnsPerTask = 512;
constexpr int64_t kLine = 32;  // numbers of two bytes in a cache line: how far apart requests ahead of use are

// sums[m][r] = x[m] . a[r]
template <class T, class W, int M, int R>
void dots(const T* const* x, const W* a, int64_t n, float* const* sums, int at) {
    vf acc[M][R];
    PK_UNROLL
    for (int m = 0; m < M; ++m)
        PK_UNROLL
        for (int r = 0; r < R; ++r) acc[m][r] = splat(0.0f);
    int64_t k = 0;
    for (; k + VL <= n; k += VL) {
        if (k % kLine == 0) {
            PK_UNROLL
            for (int r = 0; r < R; ++r) __builtin_prefetch(a + (R + r) * n + k);
        }
        vf v[M];
        PK_UNROLL
        for (int m = 0; m < M; ++m) v[m] = load(x[m] + k);
        PK_UNROLL
        for (int r = 0; r < R; ++r) {
            const vf w = load(a + r * n + k);
            PK_UNROLL
            for (int m = 0; m < M; ++m) acc[m][r] += v[m] * w;
        }
    }
    PK_UNROLL
    for (int m = 0; m < M; ++m) {
        PK_UNROLL
        for (int r = 0; r < R; ++r) sums[m][at + r] = hsum(acc[m][r]);
    }
    for (; k < n; ++k)  // apart: one use of the sums in a loop of unknown length would keep all of them in memory
        for (int m = 0; m < M; ++m)
            for (int r = 0; r < R; ++r) sums[m][at + r] += to_float(x[m][k]) * to_float(a[r * n + k]);
}

// y[m][column .. column + V * VL) += sums[m][0 .. rank) B; `part` > 0: only that many columns of one vector.
template <class T, class W, int M, int V>
void products(T* const* y, const W* b, int64_t stride, int rank, const float* const* sums, int64_t column, int part) {
    vf acc[M][V];
    PK_UNROLL
    for (int m = 0; m < M; ++m)
        PK_UNROLL
        for (int v = 0; v < V; ++v)
            acc[m][v] = part ? load_part(y[m] + column, part) : load(y[m] + column + v * VL);
    for (int r = 0; r < rank; ++r) {
        const W* row = b + r * stride + column;
        __builtin_prefetch(row + 2 * kLine);
        vf w[V];
        PK_UNROLL
        for (int v = 0; v < V; ++v) w[v] = part ? load_part(row, part) : load(row + v * VL);
        PK_UNROLL
        for (int m = 0; m < M; ++m) {
            const vf s = splat(sums[m][r]);
            PK_UNROLL
            for (int v = 0; v < V; ++v) acc[m][v] += w[v] * s;
        }
    }
    PK_UNROLL
    for (int m = 0; m < M; ++m)
        PK_UNROLL
        for (int v = 0; v < V; ++v) {
            if (part) store_part(y[m] + column, acc[m][v], part);
            else store(y[m] + column + v * VL, acc[m][v]);
        }
}

template <class T, class W, int M>
void shrink(const T* const* x, const W* a, int64_t n, int rows, float* const* sums, int at) {
    int r = 0;
    for (; r + kRows <= rows; r += kRows) dots<T, W, M, kRows>(x, a + r * n, n, sums, at + r);
    for (; r < rows; ++r) dots<T, W, M, 1>(x, a + r * n, n, sums, at + r);
}

template <class T, class W, int M>
void expand(T* const* y, const W* b, int64_t stride, int rank, const float* const* sums, int64_t begin, int64_t end) {
    int64_t c = begin;
    for (; c + 4 * VL <= end; c += 4 * VL) products<T, W, M, 4>(y, b, stride, rank, sums, c, 0);
    for (; c + VL <= end; c += VL) products<T, W, M, 1>(y, b, stride, rank, sums, c, 0);
    if (c < end) products<T, W, M, 1>(y, b, stride, rank, sums, c, int(end - c));
}

// Calls body(tokens so far, number) for groups of up to four tokens of a tile, the number as a constant.
template <class F>
void in_groups(int count, F&& body) {
    int m = 0;
    for (; m + 4 <= count; m += 4) body(m, std::integral_constant<int, 4>());
    if (count - m == 3) body(m, std::integral_constant<int, 3>());
    if (count - m == 2) body(m, std::integral_constant<int, 2>());
    if (count - m == 1) body(m, std::integral_constant<int, 1>());
}

// Whether an adapter of the step changes this site; if not, the pool need not be woken.
bool touched(const LoraArgs& a) {
    const LoraStep& step = *a.step;
    for (int32_t tile = 0; tile < step.tiles; ++tile)
        if (a.ranks[step.tile_slots[tile] * a.sites + a.site]) return true;
    return false;
}

// T: of x; W: of the matrices; Y: of y.
template <class T, class W, class Y>
void apply(Context* ctx, const LoraArgs& a) {
    const LoraStep& step = *a.step;
    const int width = a.parts * step.most_rank;
    float* sums = ctx->shared.floats(size_t(step.entries) * width);
    const T* x = static_cast<const T*>(a.x);
    Y* y = static_cast<Y*>(a.y);
    const int groups = (width + kRowsPerTask - 1) / kRowsPerTask;
    ctx->pool.run(step.tiles * groups, [&](int task, int) {
        const int tile = task / groups, slot = step.tile_slots[tile], rank = a.ranks[slot * a.sites + a.site];
        const int first = task % groups * kRowsPerTask, rows = std::min(kRowsPerTask, a.parts * rank - first);
        if (rows <= 0) return;
        const W* matrix = static_cast<const W*>(a.slots[slot]) + rank * a.start + first * a.inputs;
        const int start = step.tile_starts[tile];
        if (a.ids) {
            for (int m = 0; m < step.tile_counts[tile]; ++m) {
                const W* column = matrix + a.ids[step.order[start + m]];
                float* to = sums + int64_t(start + m) * width + first;
                for (int r = 0; r < rows; ++r) to[r] = to_float(column[r * a.inputs]);
            }
            return;
        }
        in_groups(step.tile_counts[tile], [&](int done, auto number) {
            const T* from[kTokens];
            float* to[kTokens];
            for (int m = 0; m < number; ++m) {
                from[m] = x + step.order[start + done + m] * a.inputs;
                to[m] = sums + int64_t(start + done + m) * width;
            }
            shrink<T, W, decltype(number)::value>(from, matrix, a.inputs, rows, to, first);
        });
    });
    const int pieces = int((a.outputs + kColumnsPerTask - 1) / kColumnsPerTask);
    ctx->pool.run(step.tiles * pieces, [&](int task, int) {
        const int tile = task / pieces, slot = step.tile_slots[tile], rank = a.ranks[slot * a.sites + a.site];
        if (!rank) return;
        const W* matrix = static_cast<const W*>(a.slots[slot]) + rank * (a.start + a.parts * a.inputs);
        const int64_t low = task % pieces * kColumnsPerTask, high = std::min(a.outputs, low + kColumnsPerTask);
        const int start = step.tile_starts[tile];
        int64_t begin = 0;
        for (int part = 0; part < a.parts; begin += a.sizes[part++]) {
            const int64_t from = std::max(low, begin), end = std::min(high, begin + a.sizes[part]);
            if (from >= end) continue;
            in_groups(step.tile_counts[tile], [&](int done, auto number) {
                Y* to[kTokens];
                const float* by[kTokens];
                for (int m = 0; m < number; ++m) {
                    to[m] = y + step.order[start + done + m] * a.outputs;
                    by[m] = sums + int64_t(start + done + m) * width + part * rank;
                }
                expand<Y, W, decltype(number)::value>(to, matrix, a.outputs, rank, by, from, end);
            });
        }
    });
}

}  // namespace

// Matrices have the type of the activations; beside float32 also float16 (half the bytes, which is what a step with many
// adapters waits for). y is float32 where x is not for logits and for the residual stream.
// 1: a token of the tiles is not one of the step; 2: one is not in the vocabulary; nothing is written then.
PK_FUNCTION(int, pk_lora)(Context* ctx, const LoraArgs* args) {
    Guard hold(ctx->busy);
    const LoraStep& step = *args->step;
    for (int32_t i = 0; i < step.entries; ++i)
        if (uint32_t(step.order[i]) >= uint64_t(args->tokens)) return 1;
    if (args->ids)
        for (int32_t i = 0; i < step.entries; ++i)
            if (uint64_t(args->ids[step.order[i]]) >= uint64_t(args->inputs)) return 2;
    if (!touched(*args)) return 0;
    switch (args->dtype) {
        case 0:
            if (args->matrix_dtype == 0) apply<float, float, float>(ctx, *args);
            else if (args->matrix_dtype == 1) apply<float, f16, float>(ctx, *args);
            else apply<float, bf16, float>(ctx, *args);
            break;
        case 1: args->out_dtype ? apply<f16, f16, f16>(ctx, *args) : apply<f16, f16, float>(ctx, *args); break;
        default: args->out_dtype ? apply<bf16, bf16, bf16>(ctx, *args) : apply<bf16, bf16, float>(ctx, *args);
    }
    return 0;
}
PK_RECORDABLE(pk_lora)
