// Which experts a token visits, and with what weights: every warp finds out for itself, from scores that all blocks have
// written. The rules are those of kernels/moe_route.py. Among equals the expert with the lowest number comes first.
//
// Built with, beside EXPERTS and TOP_K: SIGMOID of the scores (else softmax); NORMALIZE the weights of the chosen;
// CORRECTED by a bias when choosing; GROUPS of experts, of which the TOP_GROUPS best take part, by the sum of their
// BEST_TWO or by their best; FACTOR of all weights.
#pragma once
#include "chain_links.cuh"

#ifndef SIGMOID
#define SIGMOID 0
#define NORMALIZE 0
#define CORRECTED 0
#define GROUPS 1
#define TOP_GROUPS 1
#define BEST_TWO 0
#define FACTOR 1.0f
#endif

// Of lane i the i-th visit.
struct Chosen {
    int expert;
    float weight;
};

// Larger for larger numbers, and never below `LEFT_OUT`.
__device__ __forceinline__ uint32_t rank_of(float value) {
    const uint32_t bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
constexpr uint32_t TAKEN = 0, LEFT_OUT = 1;

__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) value += __shfl_xor_sync(ALL, value, mask);
    return value;
}

__device__ __forceinline__ float max_of_lanes(float value) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) value = fmaxf(value, __shfl_xor_sync(ALL, value, mask));
    return value;
}

// The scores of experts: lane + 32 i is the i-th of a lane.
struct Scored {
    static constexpr int each = ceil_div(EXPERTS, 32);
    static constexpr bool corrected = CORRECTED || GROUPS > 1;
    float share[corrected ? each : 1];  // what weights are in proportion to, where ranks do not say it
    uint32_t rank[each];
    float top;  // of all scores

    __device__ __forceinline__ int expert(int i) const { return int(threadIdx.x) % 32 + 32 * i; }

    __device__ __forceinline__ float share_of(float score) const {
        return SIGMOID ? 1.0f / (1.0f + expf(-score)) : expf(score - top);
    }

    // Returns the sum that weights are divided by, unless they are normalized.
    __device__ __forceinline__ float load(const float* scores, const float* correction) {
        float x[each], whole = 0.0f;
        top = -INFINITY;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            x[i] = expert(i) < EXPERTS
                       ? __uint_as_float(load_fresh(reinterpret_cast<const uint32_t*>(scores) + expert(i)))
                       : -INFINITY;
            top = fmaxf(top, x[i]);
        }
        if (!SIGMOID) top = max_of_lanes(top);
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const float found = expert(i) < EXPERTS ? share_of(x[i]) : 0.0f;
            if constexpr (corrected) share[i] = found;
            whole += found;
        }
        whole = SIGMOID ? 1.0f : sum_of_lanes(whole);
#pragma unroll
        for (int i = 0; i < each; ++i) {
            // Scores themselves where they decide: shares of very small ones are all zero, sigmoids of large ones one.
            float by = x[i];
            if constexpr (corrected) by = share[i] / whole;
            if (CORRECTED) by += expert(i) < EXPERTS ? __ldg(correction + expert(i)) : 0.0f;
            rank[i] = expert(i) < EXPERTS ? rank_of(by) : TAKEN;
        }
        return whole;
    }

    // The best that is left, of all lanes.
    __device__ __forceinline__ int best() const {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < each; ++i) top = max(top, rank[i]);
        top = __reduce_max_sync(ALL, top);
        uint32_t first = EXPERTS;
#pragma unroll
        for (int i = each - 1; i >= 0; --i)
            if (rank[i] == top && expert(i) < EXPERTS) first = expert(i);
        return min(EXPERTS - 1, int(__reduce_min_sync(ALL, first)));
    }

    __device__ __forceinline__ void keep_groups() {
        constexpr int size = EXPERTS / GROUPS;
        uint32_t kept = 0;  // of lane g: the rank of group g
        for (int group = 0; group < GROUPS; ++group) {
            float first = -INFINITY, second = -INFINITY;
#pragma unroll
            for (int i = 0; i < each; ++i) {
                if (expert(i) / size != group || rank[i] == TAKEN) continue;
                const float value = number(rank[i]);
                second = fmaxf(second, fminf(first, value));
                first = fmaxf(first, value);
            }
            const float best = max_of_lanes(first);
            float score = best;
            if (BEST_TWO) {
                const uint32_t at = __ballot_sync(ALL, first == best);
                const bool mine = int(threadIdx.x) % 32 == __ffs(int(at)) - 1;
                score += max_of_lanes(mine ? second : first);
            }
            if (int(threadIdx.x) % 32 == group) kept = rank_of(score);
        }
        uint32_t chosen = 0;  // groups, a bit for each
        for (int turn = 0; turn < TOP_GROUPS; ++turn) {
            const uint32_t top = __reduce_max_sync(ALL, kept);
            const int group = __ffs(int(__ballot_sync(ALL, kept == top))) - 1;
            chosen |= 1u << group;
            if (int(threadIdx.x) % 32 == group) kept = 0;
        }
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (rank[i] == TAKEN || (chosen >> (expert(i) / size) & 1)) continue;
            rank[i] = LEFT_OUT;
            if constexpr (corrected) share[i] = 0.0f;
        }
    }

    static __device__ __forceinline__ float number(uint32_t rank) {
        return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
    }

    // The share of an expert, in all lanes; it is not chosen again.
    __device__ __forceinline__ float take(int taken) {
        float found = 0.0f;
#pragma unroll
        for (int i = 0; i < each; ++i)
            if (expert(i) == taken) {
                found = corrected ? share[corrected ? i : 0] : number(rank[i]);
                rank[i] = TAKEN;
            }
        found = __shfl_sync(ALL, found, taken % 32);
        return corrected ? found : share_of(found);
    }
};

// Its own function: it is needed in two places, and its registers in none of them.
__device__ __noinline__ Chosen choose(const float* scores, const float* correction) {
    static_assert(TOP_K <= 31 && GROUPS <= 32 && EXPERTS % GROUPS == 0 && TOP_K <= EXPERTS, "");
    Scored scored;
    float total = scored.load(scores, correction);
    if constexpr (GROUPS > 1) scored.keep_groups();
    Chosen chosen{0, 0.0f};
    float sum = 0.0f;
#pragma unroll 1
    for (int visit = 0; visit < TOP_K; ++visit) {
        const int expert = scored.best();
        const float share = scored.take(expert);
        sum += share;
        if (int(threadIdx.x) % 32 == visit) chosen = Chosen{expert, share};
    }
    if (NORMALIZE) total = sum + (SIGMOID ? 1e-20f : 0.0f);
    chosen.weight *= FACTOR / total;
    return chosen;
}
