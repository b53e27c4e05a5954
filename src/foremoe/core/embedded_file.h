#pragma once

// A file of the repository that is part of the program (cmake/EmbedFiles.cmake), so that presets need no search path.

#include <string_view>

namespace foremoe {

struct EmbeddedFile {
  std::string_view name;  // without folder and ending
  std::string_view text;
};

}  // namespace foremoe
