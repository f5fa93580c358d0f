// Floating point of 16 and 8 bits: to double and back, rounded to nearest, ties to even, as the GPU converts.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace minifloat {

struct Format {
    int exponent_bits, mantissa_bits;
    bool finite;  // no infinities, and only all ones is NaN (e4m3); beyond the largest value becomes the largest

    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
    uint32_t largest_code() const {
        return finite ? sign_bit() - 2 : sign_bit() - (1u << mantissa_bits) - 1;
    }

    double decode(uint32_t bits) const {
        const uint32_t magnitude = bits & (sign_bit() - 1);
        const int exponent = static_cast<int>(magnitude >> mantissa_bits);
        const double mantissa = magnitude & ((1u << mantissa_bits) - 1);
        double value;
        if (magnitude > largest_code())
            value = !finite && mantissa == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
        else if (exponent == 0)
            value = std::ldexp(mantissa, 1 - bias() - mantissa_bits);
        else
            value = std::ldexp(mantissa + (1u << mantissa_bits), exponent - bias() - mantissa_bits);
        return bits & sign_bit() ? -value : value;
    }

    uint32_t encode(double value) const {
        const uint32_t sign = std::signbit(value) ? sign_bit() : 0;
        if (std::isnan(value)) return sign_bit() - 1;  // all ones is a NaN in every format here
        const double magnitude = std::fabs(value);
        const uint32_t beyond = finite ? largest_code() : largest_code() + 1;
        if (std::isinf(magnitude)) return sign | beyond;
        if (magnitude == 0) return sign;
        int exponent = std::ilogb(magnitude);
        if (exponent < 1 - bias()) exponent = 1 - bias();
        // In units of the last place; the carry of a mantissa that rounds up goes into the exponent by itself.
        const uint32_t units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
        const uint64_t code = (static_cast<uint64_t>(exponent - 1 + bias()) << mantissa_bits) + units;
        return sign | (code > largest_code() ? beyond : static_cast<uint32_t>(code));
    }
};

inline constexpr Format f16{5, 10, false}, bf16{8, 7, false}, e4m3{4, 3, true};

}  // namespace minifloat
