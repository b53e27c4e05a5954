#pragma once

// Shortens text that messages quote from files, since it can be of any length.

#include <cstddef>
#include <string>

namespace foremoe {

inline constexpr std::size_t kLongestText = 1000;  // bytes of one value in a message

// Replaces the middle of a longer text by "…", without splitting UTF-8 characters.
std::string shortened(std::string text);

}  // namespace foremoe
