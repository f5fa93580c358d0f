// What a lane copies, and when: the parts of a chain one after another, of each the stages of its warp.
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
};

__device__ __forceinline__ void enter(Source& source, const Arguments& arguments) {
    const Part& part = arguments.parts[source.part];
    const int warp = threadIdx.x / 32, group = warp >> part.slices, slice = warp - (group << part.slices);
    const int offset = slice * UNIT + threadIdx.x % 32 * PIECE;
    source.at = part.weight + int64_t(first_of(part.outputs) + group) * part.inputs + offset;
    source.reach = part.inputs - offset;
    source.rows = (((count_of(part.outputs) - group - 1) << part.slices) + WARPS) / WARPS;
    source.left = source.columns = part.columns;
    source.stride = (WARPS >> part.slices) * part.inputs;
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
        for (int r = 0; r < ROWS; ++r) {
            cp_async_16_or_zero(to + r * UNIT, at, rows > r);
            at += source.stride;
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
        }
        if (source.rows <= 0) {
            source.part += 1;
            find(source, arguments);
        }
    }
    cp_async_commit();
}
