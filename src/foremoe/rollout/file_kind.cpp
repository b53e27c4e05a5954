#include "foremoe/rollout/file_kind.h"

#include <fmt/format.h>

namespace foremoe {

FileKind file_kind(const Safetensors& file) {
  const std::string& format = file.text("format");
  if (format == kTraceFormat) return FileKind::kTrace;
  if (format == kLoadFormat) return FileKind::kLoad;
  if (format == kPlanFormat) return FileKind::kPlan;
  if (format == kHomesFormat) return FileKind::kHomes;
  file.fail(
      "__metadata__.format", "",
      fmt::format("'{}', expected {}, {}, {} or {}", format, kTraceFormat, kLoadFormat, kPlanFormat, kHomesFormat));
}

FileKind file_kind(const std::string& path) { return file_kind(Safetensors::open(path)); }

void expect_format(const Safetensors& file, std::string_view format) {
  const std::string& found = file.text("format");
  if (found != format) file.fail("__metadata__.format", "", fmt::format("'{}', expected {}", found, format));
}

}  // namespace foremoe
