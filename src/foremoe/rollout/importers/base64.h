#pragma once

// Standard base64 with padding, as Python's b64encode writes it; nothing else is let through.

#include <cstddef>
#include <string_view>
#include <vector>

#include "foremoe/core/error.h"

namespace foremoe {

std::vector<std::byte> decode_base64(std::string_view text, const Where& where);

bool looks_like_base64(std::string_view text);  // alphabet, padding and length

}  // namespace foremoe
