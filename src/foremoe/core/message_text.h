#pragma once

// Prepares text from files for messages.

#include <cstddef>
#include <string>
#include <string_view>

namespace foremoe {

inline constexpr std::size_t kLongestText = 1000;  // bytes of one value in a message

// Escapes control characters and bytes that are not UTF-8 ("\\x1b", "\\n"). Text from files must not move the cursor or
// imitate our output, and Python accepts only UTF-8.
std::string printable(std::string_view text);

// Returns the bytes of the UTF-8 character at the beginning of a text that is not empty (RFC 3629), or 0 if there is
// none.
std::size_t character_bytes(std::string_view text);

// Replaces the middle of a text longer than kLongestText by "…", without splitting UTF-8 characters, and makes it
// printable.
std::string shortened(std::string text);

}  // namespace foremoe
