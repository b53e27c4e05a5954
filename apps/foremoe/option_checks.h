#pragma once

// Checks of option values, in the words of our errors: "--guest-slots: -1 is less than 0".

#include <CLI/CLI.hpp>
#include <cstdint>

namespace foremoe::cli {

CLI::Validator at_least(std::int64_t least);
CLI::Validator in_range(std::int64_t least, std::int64_t most);
CLI::Validator fraction(double most);  // a number in [0, most]
CLI::Validator positive_number();      // of at most 10⁹, as all of these finite
CLI::Validator number_from_zero();     // likewise, and 0

}  // namespace foremoe::cli
