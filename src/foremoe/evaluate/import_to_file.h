#pragma once

// The work of `foremoe import`: reads recorded routes, writes a trace or load, and describes what was read.

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "foremoe/rollout/importers/importer.h"

namespace foremoe {

// Imports the files and writes the trace (or, for counts, the load) to `out`. Throws InputError like import_files(),
// and if `out` cannot be written.
Imported import_to_file(std::span<const std::string> paths, const ImportOptions& options, const std::string& out,
                        const Decode& decode = {});

// Describe the import as sentences and as JSON.
std::vector<std::string> describe(const Imported& imported, const std::string& out);
nlohmann::ordered_json to_json(const Imported& imported, const std::string& out);

}  // namespace foremoe
