#pragma once

// Suggests a name for a word that a user misspelt.
//
// Method. The nearest name by insertions, deletions, replacements and exchanges of adjacent characters (optimal string
// alignment), if the distance is at most a third of the word's length, or 1. Otherwise the shortest name that begins
// with the word, if the word has at least 4 characters without leading hyphens. Ignores the case of ASCII letters.
// Complexity: the product of both lengths, per name.

#include <span>
#include <string>
#include <string_view>

namespace foremoe {

// Returns "; did you mean --guest-slots?", or an empty text if no name is similar. Equal distances: the first name.
std::string did_you_mean(std::string_view word, std::span<const std::string> names);

}  // namespace foremoe
