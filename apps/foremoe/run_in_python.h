#pragma once

// Commands, or parts of them, that the Python package has.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "command.h"

namespace foremoe::cli {

// The options of the table that were given, by name, as they were typed; true for a flag. Throws InputError for a text
// that is no UTF-8.
nlohmann::json texts_of(const std::vector<Option>& options, const Given& given);

// Becomes `python -m foremoe command request files…`, if the Python package started this program. Otherwise returns.
void run_in_python(const char* command, const std::string& request, const std::vector<std::string>& files);

}  // namespace foremoe::cli
