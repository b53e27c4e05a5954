#pragma once

// A plan's figures and check reports as JSON. Apart from the other headers, which need no JSON library.

#include <nlohmann/json_fwd.hpp>

#include "foremoe/plan/check_plan.h"

namespace foremoe {

// The keys that docs/users/formats.md explains; the caller adds times and threads.
nlohmann::ordered_json to_json(const PlanFigures& figures);

nlohmann::ordered_json to_json(const Violation& violation);  // {kind, message} and where it is
nlohmann::ordered_json to_json(const CheckReport& report);   // {ok, violations, num_violations, not_checked, figures}

}  // namespace foremoe
