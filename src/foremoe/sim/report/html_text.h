#pragma once

// The one place where text becomes part of a page. Names of files, models and policies are whatever somebody called
// them; here they lose the power to be anything but text.

#include <string>
#include <string_view>

namespace foremoe::report {

// As it may stand between tags and inside quoted attributes. Bytes that are no UTF-8, control characters and those that
// turn the direction of writing become U+FFFD, so that a name cannot rearrange what stands beside it.
std::string escaped(std::string_view text);

// Characters as a reader counts them: code points.
std::size_t num_characters(std::string_view text);

// The first characters and an ellipsis, where there are more than `most`. At least one is kept.
std::string shortened(std::string_view text, std::size_t most);

// How wide the text stands in a sans-serif font, roughly, in the unit of `font_size`.
double text_width(std::string_view text, double font_size);

// Shortened until it fits.
std::string fitted(std::string_view text, double font_size, double width);

}  // namespace foremoe::report
