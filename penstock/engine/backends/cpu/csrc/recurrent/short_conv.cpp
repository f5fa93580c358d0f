// Gated short convolutions: a token's gated input and those of a few tokens before it, in each channel by itself.
// Invariant: a number does not depend on which other tokens are in the call.

#include "common/recorded_call.h"
#include "elementwise/rows.h"

using namespace pk::PK_SET;

namespace {

constexpr int64_t kPiece = 16 * VL;  // channels that a thread takes at once

struct Shape {
    int64_t rows, channels, width;
};

struct States {
    const int64_t* positions;
    const int32_t *first, *reads, *writes;
};

// One row in the channels from `at`. `read` and `write` handle as many of them as a vector holds, or what is left.
template <class T, class L, class S>
PK_INLINE void convolve(const T* projected, const float* taps, const float* bias, const States& states, T* cache, T* out,
                        const Shape& shape, int64_t row, int64_t at, L&& read, S&& write) {
    const int64_t n = shape.channels, width = shape.width;
    const int64_t position = states.positions[row], slot = states.reads[row], kept = states.writes[row];
    const int64_t before = row - states.first[row];  // tokens of its run
    const auto place = [&](int64_t of, int64_t back) {
        return cache + (of * width + (position - back) % width) * n + at;
    };
    vf sum = read(bias + at);
    for (int64_t back = 0; back < width; ++back) {
        vf x = splat(0);
        if (back <= before) {
            const T* line = projected + (row - back) * 3 * n + at;
            x = as_stored<T>(read(line) * read(line + 2 * n));
        } else if (slot > 0 && position >= back) {
            x = read(place(slot, back));
        }
        sum += read(taps + (width - 1 - back) * n + at) * x;
        if (kept > 0 && position >= back) write(place(kept, back), x);
    }
    write(out + row * n + at, read(projected + row * 3 * n + n + at) * sum);
}

// All rows in the channels of [begin, end). Rows go in order: one that keeps a state overwrites nothing that a later row
// of its run reads, since a slot has room for as many positions as a token sees.
template <class T>
void channels(const T* projected, const float* taps, const float* bias, const States& states, T* cache, T* out,
              const Shape& shape, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < shape.rows; ++row) {
        int64_t at = begin;
        for (; at + VL <= end; at += VL) {
            convolve(projected, taps, bias, states, cache, out, shape, row, at, [](auto* p) { return load(p); },
                     [](auto* p, vf v) { store(p, v); });
        }
        if (const int rest = int(end - at)) {
            convolve(projected, taps, bias, states, cache, out, shape, row, at,
                     [&](auto* p) { return load_part(p, rest); }, [&](auto* p, vf v) { store_part(p, v, rest); });
        }
    }
}

}  // namespace

// projected [rows, 3 * channels]: input gates, output gates, inputs; taps [width, channels], bias [channels]; cache
// [slots, width, channels], of which slot 0 stands for none. See `Ops.short_conv`.
PK_FUNCTION(void, pk_short_conv)(Context* ctx, const void* projected, const float* taps, const float* bias,
                                 const int64_t* positions, const int32_t* first, const int32_t* reads,
                                 const int32_t* writes, void* cache, void* out, int64_t rows, int64_t n, int64_t width,
                                 int dtype) {
    Guard hold(ctx->busy);
    const States states{positions, first, reads, writes};
    const Shape shape{rows, n, width};
    dispatch(dtype, [&](auto* t) {
        using T = elem<decltype(t)>;
        const T* from = static_cast<const T*>(projected);
        T *kept = static_cast<T*>(cache), *to = static_cast<T*>(out);
        const int64_t pieces = (n + kPiece - 1) / kPiece;
        ctx->pool.rows(pieces, grain(rows * width * kPiece), [&](int64_t begin, int64_t end, int) {
            for (int64_t piece = begin; piece < end; ++piece) {
                channels(from, taps, bias, states, kept, to, shape, piece * kPiece, std::min(n, (piece + 1) * kPiece));
            }
        });
    });
}

PK_RECORDABLE(pk_short_conv)
