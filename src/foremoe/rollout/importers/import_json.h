#pragma once

// What an import tells of itself, as JSON: the keys that docs/users/formats.md lists.

#include <nlohmann/json_fwd.hpp>

#include "foremoe/rollout/importers/importer.h"

namespace foremoe {

nlohmann::ordered_json to_json(const ImportReport& report);

}  // namespace foremoe
