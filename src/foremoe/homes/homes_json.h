#pragma once

// Chosen homes and their costs as JSON. docs/users/formats.md explains the keys.

#include <nlohmann/json_fwd.hpp>

#include "foremoe/homes/choose_homes.h"

namespace foremoe {

nlohmann::ordered_json to_json(const ChosenHomes& chosen);

}  // namespace foremoe
