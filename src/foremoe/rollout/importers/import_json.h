#pragma once

// Converts an import report to JSON.

#include <nlohmann/json_fwd.hpp>

#include "foremoe/rollout/importers/importer.h"

namespace foremoe {

nlohmann::ordered_json to_json(const ImportReport& report);

}  // namespace foremoe
