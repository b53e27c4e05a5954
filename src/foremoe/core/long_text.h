#pragma once

// Messages quote what a file holds, whatever that is.

#include <cstddef>
#include <string>

namespace foremoe {

inline constexpr std::size_t kLongestText = 1000;  // bytes of one value in a message

// Leaves out the middle of a longer text, between characters of UTF-8.
std::string shortened(std::string text);

}  // namespace foremoe
