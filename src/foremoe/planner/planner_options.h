#pragma once

// User options of the planner. The defaults are those of `foremoe plan`.

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/plan/step_plan.h"

namespace foremoe {

struct PlannerStages {
  bool base = true;         // B: homes (with rehome) and the step's initial guests
  bool relocation = true;   // L: whole experts
  bool replication = true;  // P: guests at the bottleneck
  bool tokens = true;       // T: exact quotas; if off, an equal split over the serving replicas
  bool sweeps = false;      // S: B revises its guests even if copies are expected to hide (planner/base_guests.h)
};

// kLinks: guests also keep tokens on their node. kTime is kLinks with copies at a price.
enum class Prefer : std::uint8_t { kBalance, kLinks, kTime };

inline constexpr double kMostCopyPrice = 1e9;  // no copy pays
inline constexpr int kNoLimit = std::numeric_limits<int>::max();

struct PlannerOptions {
  int guest_slots = 1;  // G, at most kMaxExperts
  Residency residency = Residency::kResident;
  int in_flight = 1;  // K ≥ 1
  PlannerStages stages = {};
  int rehome = 0;                     // home moves allowed per layer; kNoLimit: any number
  std::optional<Prefer> prefer = {};  // none: kTime if there is a copy_price, else kBalance
  // For Prefer::kTime, which needs a price. copy_price: tokens of a node whose way to other nodes and back takes as
  // long as one copy on the link of one rank, in mean rank loads. free_copies: per rank and layer, without a price,
  // because computation hides them; none: 0.
  std::optional<double> copy_price = {};
  std::optional<double> free_copies = {};
  // Largest rank load of a balanced micro-step: max(⌈mean⌉, ⌊(1 + tolerance)·mean⌋). None: default_tolerance().
  std::optional<double> tolerance = {};
  std::optional<int> max_copies_per_rank = {};  // per event and layer; none: G (under `free` no limit)
  int max_copies_per_source = kNoLimit;         // per event and layer, counted at the home of the copied expert
  std::int64_t min_tokens_per_guest = 0;        // a guest has quota 0 or at least this
  std::uint64_t seed = 0;
};

// Under `shared`, every use of a guest is a copy, and the last 1 % of balance would cost a tenth of all copies.
inline double default_tolerance(Residency residency) { return residency == Residency::kShared ? 0.01 : 0.006; }

// What `prefer` stands for.
inline Prefer preference(const PlannerOptions& options) {
  return options.prefer.value_or(options.copy_price ? Prefer::kTime : Prefer::kBalance);
}

// Why stage B chooses no guests at the start of a step; empty if it does.
std::string without_base_guests(const PlannerOptions& options);

// Throws InputError with the field's name if an option is out of range.
void expect_in_range(const PlannerOptions& options);

// Command-line options for the fields above.
std::vector<Option> options_of(PlannerOptions& options);

std::string_view to_string(Prefer prefer);

// The options as a JSON object keyed by long option name, for the plan's metadata.
std::string to_json(const PlannerOptions& options);

}  // namespace foremoe
