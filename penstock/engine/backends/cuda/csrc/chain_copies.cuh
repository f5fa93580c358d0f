// What a lane copies, and when: the parts of a chain one after another, of each the stages of its warp. Before a part whose
// weights depend on the choice of experts it stops; what it missed until then is copied once the choice is known.
#pragma once
#include "chain_links.cuh"

struct Source {
    const unsigned char* at;  // this lane's piece of the first row of the stage
    int reach;                // bytes of the row from there on
    int rows;                 // that the warp still reads of this part
    int left;                 // units of these rows, from this one on
    int columns;
    int stride;  // bytes from one of its rows to the next one
    int hop;     // bytes from one of its units to the next one
    int part;
    // Of chains with experts.
    int kind;
    int row;       // OF_EACH: of the visited expert, the next one. OF_SUM: the first of this stage
    int visit;     // OF_EACH: of the next row
    int cross;     // rows of the stage up to the next visit
    int64_t jump;  // bytes by which that is further than a stride
    int expert;    // the lane-th visited one; below 0: not known yet
    int missed;    // stages that were not copied when it was their turn
};

// OF_EACH: at the beginning of a stage of other rows. OF_SUM: at that of every stage.
__device__ __forceinline__ void aim(Source& source, const Part& part) {
    const int warp = threadIdx.x / 32, groups = WARPS >> part.slices;
    const int slice = warp - (warp >> part.slices << part.slices), lane = threadIdx.x % 32 * PIECE;
    if (part.kind == OF_EACH) {
        const int expert = __shfl_sync(ALL, source.expert, source.visit);
        const int next = __shfl_sync(ALL, source.expert, source.visit + 1);
        source.at = part.weight + expert * part.expert_bytes + int64_t(source.row) * part.row_bytes + slice * UNIT + lane;
        source.cross = (part.span - source.row + groups - 1) / groups;
        source.jump = (next - expert) * part.expert_bytes - int64_t(part.span) * part.row_bytes;
        source.row += ROWS * groups;
        if (source.row >= part.span) {
            source.row -= part.span;
            source.visit += 1;
        }
    } else {
        const int unit = slice + ((source.columns - source.left) << part.slices);
        const bool visited = unit < part.visited;
        const int visit = visited ? unit * part.reciprocal >> 16 : 0;
        const int expert = __shfl_sync(ALL, source.expert, visit);
        const int bytes = visited ? part.row_bytes : part.shared_bytes;
        const int offset = (visited ? unit - visit * part.span : unit - part.visited) * UNIT + lane;
        source.at = visited ? part.weight + expert * part.expert_bytes : part.shared;
        source.at += int64_t(source.row) * bytes + offset;
        source.reach = bytes - offset;
        source.stride = groups * bytes;
    }
}

__device__ __forceinline__ void enter(Source& source, const Arguments& arguments) {
    const Part& part = arguments.parts[source.part];
    const int warp = threadIdx.x / 32, group = warp >> part.slices, slice = warp - (group << part.slices);
    const int offset = slice * UNIT + threadIdx.x % 32 * PIECE;
    int first = first_of(part.outputs), count = count_of(part.outputs);
    if constexpr (Products::routed) {
        source.kind = part.kind;
        source.cross = 0;  // never
        if (part.kind == ALIKE) first = 0, count = 1;
    }
    source.at = part.weight + int64_t(first + group) * part.row_bytes + offset;
    source.reach = part.row_bytes - offset;
    source.rows = (((count - group - 1) << part.slices) + WARPS) / WARPS;
    source.left = source.columns = part.columns;
    source.stride = (WARPS >> part.slices) * part.row_bytes;
    source.hop = UNIT << part.slices;
    if constexpr (Products::routed) {
        if (part.kind >= OF_EACH && source.rows > 0) {
            source.row = first + group;
            if (part.kind == OF_EACH) {
                source.visit = source.row / part.span;
                source.row -= source.visit * part.span;
            }
            aim(source, part);
        }
    }
}

// Whether copies wait for the choice of experts.
__device__ __forceinline__ bool stopped(const Source& source, const Arguments& arguments) {
    if constexpr (Products::routed)
        return source.expert < 0 && source.part < Products::parts && arguments.parts[source.part].kind >= OF_EACH;
    return false;
}

// From `source.part` on, the first part of which this warp has any rows.
__device__ __forceinline__ void find(Source& source, const Arguments& arguments) {
    source.rows = 0;
    for (; source.part < Products::parts && !stopped(source, arguments); ++source.part) {
        enter(source, arguments);
        if (source.rows > 0) break;
    }
}

// Copies the next stage. Behind the end of the chain there is none, and before a choice none can be: waits count stages
// all the same.
__device__ __forceinline__ void fill(Source& source, unsigned char* to, const Arguments& arguments) {
    if (source.rows > 0) {
        const unsigned char* at = source.at;
        const int rows = source.reach > 0 ? source.rows : 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            cp_async_16_or_zero(to + r * UNIT, at, rows > r);
            at += source.stride;
            if constexpr (Products::routed)
                if (r + 1 == source.cross) at += source.jump;
        }
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
            if constexpr (Products::routed)
                if (source.kind == OF_SUM) source.row += ROWS * (WARPS >> arguments.parts[source.part].slices);
        }
        if (source.rows <= 0) {
            source.part += 1;
            find(source, arguments);
        } else if constexpr (Products::routed) {
            if (source.kind == OF_SUM || (source.kind == OF_EACH && source.left == source.columns))
                aim(source, arguments.parts[source.part]);
        }
    } else if constexpr (Products::routed) {
        source.missed += stopped(source, arguments);
    }
    cp_async_commit();
}

// The choice is known: goes on, and copies what was missed. `ring`, `slot`: where the next stage to be read lies. Every
// missed one is a group of copies of its own, so a wait for all but the newest groups is again one for the same stage.
__device__ __forceinline__ void resume(Source& source, unsigned char* ring, int slot, const Arguments& arguments) {
    const int missed = source.missed;
    source.missed = 0;
    find(source, arguments);
#pragma unroll 1
    for (int stage = STAGES - missed; stage < STAGES; ++stage) {
        const int place = slot + stage * STAGE;
        fill(source, ring + (place >= RING ? place - RING : place), arguments);
    }
}
