#pragma once

// What `foremoe import` does: reads recorded routes, writes a trace or load, and says what was read.

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "foremoe/rollout/importers/importer.h"

namespace foremoe {

// Imports the files, and writes the trace (of counts: the load) to `out`. Throws InputError as import_files, and for an
// output that cannot be written.
Imported import_to_file(std::span<const std::string> paths, const ImportOptions& options, const std::string& out,
                        const Decode& decode = {});

// The report in sentences, and as JSON.
std::vector<std::string> describe(const Imported& imported, const std::string& out);
nlohmann::ordered_json to_json(const Imported& imported, const std::string& out);

}  // namespace foremoe
