#pragma once

// What an import tells of itself, as JSON.

#include <nlohmann/json_fwd.hpp>

#include "foremoe/rollout/importers/importer.h"

namespace foremoe {

nlohmann::ordered_json to_json(const ImportReport& report);

}  // namespace foremoe
