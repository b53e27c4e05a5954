#pragma once

// The independent check of a plan against the load that it claims to serve. It is written from the definitions of
// docs/users/formats.md and docs/users/glossary.md, and shares no code with any planner nor with plan_figures, so that
// what `foremoe verify` accepts is right for reasons of its own. Where it has a choice it is plain rather than fast.

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

enum class ViolationKind : std::uint8_t {
  kShape,            // plan and load, or the plan's own arrays, do not fit each other
  kEvents,           // not the execution order of in_flight
  kDigest,           // made for another load
  kOptions,          // the plan's options cannot be understood, or contradict the plan
  kHomes,            // a rank out of range, or not E/R homes on each rank of a layer
  kHomeMoves,        // more homes moved than `rehome` permits
  kUnknownExpert,    // a slot holds an id out of range
  kHomeSlots,        // homes pinned: a home slot does not hold its expert
  kDuplicate,        // an expert twice on one rank
  kUnheldExpert,     // an expert is in no slot at all
  kMovedSlot,        // an expert that stays on its rank changed its slot
  kChangedGuest,     // residency static: a guest changed inside the step
  kForwardOnly,      // residency free in a plan that has backward events
  kQuota,            // negative, on an empty slot, or over the replicas not the sum of the load
  kPasses,           // forward and backward of a micro-step give a (rank, expert) different quotas
  kCopiesPerRank,    // budget max-copies-per-rank
  kCopiesPerSource,  // budget max-copies-per-source
  kTokensPerGuest,   // budget min-tokens-per-guest
  kMaxLoad,          // recorded max_load is not the largest rank load
  kLowerBound,       // recorded lower_bound is not ⌈mean⌉
  kRoutes,           // route_tokens does not deliver what loads and quotas say
  kFigure,           // a reported figure differs from the recomputed one
};

inline constexpr std::size_t kNumViolationKinds = static_cast<std::size_t>(ViolationKind::kFigure) + 1;

std::string_view to_string(ViolationKind kind);  // "shape", "events", "copies-per-rank", …

struct Violation {
  ViolationKind kind{};
  std::optional<EventId> event;
  std::optional<LayerId> layer;
  std::optional<RankId> rank;
  std::optional<SlotId> slot;
  std::optional<ExpertId> expert;
  std::string message;
};

// "event 3, layer 0, expert 17": where it is, as far as it has a place.
std::string place_of(const Violation& violation);

struct CheckOptions {
  ArrayView<const RankId, 2> initial_home;  // [layer][expert], homes before the plan; empty: as the plan's options say
  int align = 128;                          // tokens, for rho_padded
  const BatchedTrace* tokens = nullptr;     // the tokens behind the load; null: unknown
  const PlanFigures* reported = nullptr;    // figures to hold against the recomputed ones
  int max_listed = 100;                     // violations listed; all are counted
  const ThreadPool* pool = nullptr;         // the check ends with Cancelled once this pool is cancelled
};

struct CheckReport {
  std::vector<Violation> violations;                           // the first max_listed
  std::array<std::int64_t, kNumViolationKinds> num_of_kind{};  // all
  std::vector<std::string> not_checked;                        // what could not be checked, and why
  std::optional<PlanFigures> figures;                          // recomputed; none for a plan too broken to measure

  std::int64_t num_violations() const;
  bool ok() const { return num_violations() == 0; }
};

// Never throws for a bad plan: whatever is wrong with it is a violation. Throws Cancelled.
CheckReport check_plan(const StepPlan& plan, const LoadTable& load, const CheckOptions& options = {});

}  // namespace foremoe
