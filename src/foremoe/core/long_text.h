#pragma once

// Shortens long text from files for messages.

#include <cstddef>
#include <string>

namespace foremoe {

inline constexpr std::size_t kLongestText = 1000;  // bytes of one value in a message

// Replaces the middle of a text longer than kLongestText by "…", without splitting UTF-8 characters.
std::string shortened(std::string text);

}  // namespace foremoe
