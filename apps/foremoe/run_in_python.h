#pragma once

// Commands that continue in the Python package.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "command.h"

namespace foremoe::cli {

// Returns the options in `options` that the user gave: their texts by name, and true for each flag. Throws InputError
// for a text that is not UTF-8.
nlohmann::json texts_of(const std::vector<Option>& options, const Given& given);

// Throws InputError, field `option`, unless the Python package started this process and its Python has `package`, which
// the package's extra of the same name as the option installs.
void expect_in_python(const char* option, const char* package);

// If the Python package started this process, replaces it by `python -m foremoe command request files…`. Otherwise
// returns.
void run_in_python(const char* command, const std::string& request, const std::vector<std::string>& files);

}  // namespace foremoe::cli
