#include "output_file.h"

#include <filesystem>

#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"

namespace foremoe::cli {

void expect_output(const std::string& out, const std::vector<std::string>& inputs, const char* option) {
  if (out.empty()) return;
  std::error_code absent;  // neither there: not the same
  for (const std::string& input : inputs) {
    if (std::filesystem::equivalent(out, input, absent)) {
      throw InputError({.file = option, .field = {}, .index = {}}, "is also an input");
    }
  }
  // A device or a pipe is not opened in vain: its reader would see the end.
  if (std::filesystem::is_other(out, absent)) return;
  const AtomicFile made_as_it_will_be(out);  // and taken away again
}

}  // namespace foremoe::cli
