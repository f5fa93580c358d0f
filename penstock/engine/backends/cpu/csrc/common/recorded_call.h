// Makes a function recordable: a second entry point that takes its arguments as 64-bit words.
//
// `PK_RECORDABLE(name)` follows the definition, so that the words are read back with the function's own types.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/context.h"

namespace pk::PK_SET {

// An argument as it lies in the low bytes of a word.
template <class T>
T from_word(uint64_t word) {
    static_assert(sizeof(T) <= sizeof word, "arguments are scalars or pointers");
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

template <class R, class... A, size_t... I>
int call_with(R (*f)(Context*, A...), Context* ctx, const uint64_t* words, std::index_sequence<I...>) {
    if constexpr (std::is_void<R>::value) {
        f(ctx, from_word<A>(words[I])...);
        return 0;
    } else {
        return int(f(ctx, from_word<A>(words[I])...));
    }
}

template <class R, class... A>
int call_with(R (*f)(Context*, A...), Context* ctx, const uint64_t* words) {
    return call_with(f, ctx, words, std::index_sequence_for<A...>());
}

}  // namespace pk::PK_SET

#define PK_RECORDABLE(name)                                                   \
    PK_FUNCTION(int, name##_recorded)(void* ctx, const uint64_t* words) {     \
        return call_with(PK_OF_SET(name), static_cast<Context*>(ctx), words); \
    }
