#pragma once

// Converts figures and check reports to JSON. Separate, so that other headers need no JSON library.

#include <nlohmann/json_fwd.hpp>

#include "foremoe/plan/check_plan.h"

namespace foremoe {

// docs/users/formats.md documents the keys. The caller adds times and threads.
nlohmann::ordered_json to_json(const PlanFigures& figures);

nlohmann::ordered_json to_json(const Violation& violation);  // {kind, message} and the ids of its place
nlohmann::ordered_json to_json(const CheckReport& report);   // {ok, violations, num_violations, not_checked, figures}

}  // namespace foremoe
