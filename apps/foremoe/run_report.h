#pragma once

// The output of `foremoe run`: one row per policy and phase, as JSON or as a table.

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/plan/check_plan.h"
#include "foremoe/reference/run_reference.h"

namespace foremoe::cli {

struct RunRow {
  std::string policy;
  Phase phase = Phase::kRecompute;
  std::string skipped;  // the reason; if empty, the phase ran and the members below are valid

  Residency residency = Residency::kResident;
  int in_flight = 1;
  PhaseOutcome outcome;                    // result and routes may have been released
  std::optional<std::int64_t> mismatched;  // rows of the whole input that are not in the fitted plan
  Spread rho_planned;
  Spread rho_computed;
  GuestMemory predicted;
  std::vector<Violation> violations;      // of the plan
  std::optional<Agreement> agreement;     // none: not compared with the reference
  std::optional<bool> outputs_identical;  // with --bitwise: compared with the first row of this phase

  double critical_path() const { return outcome.critical_path.seconds; }
};

struct RunSettings {
  Optimizer optimizer;
  int repeats = 1;
  int steps = 1;
};

// Returns whether all results of the row are correct.
bool right(const RunRow& row, const RunSettings& settings);

// docs/users/formats.md explains the keys.
nlohmann::ordered_json to_json(const RunRow& row, const RunSettings& settings);

// The table with an explanation of its columns.
std::string to_text(const std::vector<RunRow>& rows, const RunSettings& settings);
std::string meaning_of_columns();

}  // namespace foremoe::cli
