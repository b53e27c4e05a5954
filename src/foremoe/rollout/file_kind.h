#pragma once

// What a file says it is: the `format` of its metadata names kind and version.

#include <cstdint>
#include <string>
#include <string_view>

#include "foremoe/core/safetensors.h"

namespace foremoe {

enum class FileKind : std::uint8_t { kTrace, kLoad, kPlan };

inline constexpr std::string_view kTraceFormat = "foremoe.trace/1";
inline constexpr std::string_view kLoadFormat = "foremoe.load/1";
inline constexpr std::string_view kPlanFormat = "foremoe.plan/1";

// Throw InputError when the file is none of these, or of a version that this build does not read.
FileKind file_kind(const Safetensors& file);
FileKind file_kind(const std::string& path);
void expect_format(const Safetensors& file, std::string_view format);

}  // namespace foremoe
