#pragma once

// What `foremoe run` prints: a row for each policy and phase, as JSON or as a table for people.

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
  std::string skipped;  // the reason; empty: it ran, and all below holds

  Residency residency = Residency::kResident;
  int in_flight = 1;
  PhaseOutcome outcome;                    // result and routes may be gone
  std::optional<std::int64_t> mismatched;  // rows of the whole input that a given plan does not know, where it may
  Spread rho_planned;
  Spread rho_computed;
  GuestMemory predicted;
  std::vector<Violation> violations;      // of the plan
  std::optional<Agreement> agreement;     // none: not held against the reference
  std::optional<bool> outputs_identical;  // with --bitwise: to those of the first row of this phase

  double critical_path() const { return outcome.critical_path.seconds; }
};

struct RunSettings {
  Optimizer optimizer;
  int repeats = 1;
  int steps = 1;
};

// Nothing that ran came out wrong.
bool right(const RunRow& row, const RunSettings& settings);

// The keys that docs/users/formats.md explains.
nlohmann::ordered_json to_json(const RunRow& row, const RunSettings& settings);

// The table and what its columns mean.
std::string to_text(const std::vector<RunRow>& rows, const RunSettings& settings);
std::string meaning_of_columns();

}  // namespace foremoe::cli
