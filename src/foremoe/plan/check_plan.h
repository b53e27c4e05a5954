#pragma once

// Checks a plan against the load that it is made for. The rules are written from the definitions in
// docs/users/formats.md and docs/users/glossary.md. They share no code with the planners or plan_figures, so `foremoe
// verify` is an independent check. Simple code is preferred to fast code.

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
  kShape,            // the shapes of plan and load, or of the plan's own arrays, do not match
  kEvents,           // events differ from the execution order for in_flight
  kDigest,           // the plan was made for another load, or from other homes
  kOptions,          // recorded options are missing, invalid, or contradict the plan
  kHomes,            // a home is out of range, or a rank does not have E/R homes in a layer
  kHomeMoves,        // more homes moved than `rehome` permits
  kUnknownExpert,    // a slot holds an expert id out of range
  kHomeSlots,        // homes are pinned, but a home slot does not hold its expert
  kDuplicate,        // a rank holds an expert twice
  kUnheldExpert,     // an expert is in no slot
  kMovedSlot,        // an expert that stays on its rank changed its slot
  kChangedGuest,     // residency static: a guest changed during the step
  kForwardOnly,      // residency free in a plan with backward events
  kQuota,            // a quota is negative or on an empty slot, or an expert's quotas do not sum to its load
  kPasses,           // a (rank, expert) has different quotas in the forward and backward of a micro-step
  kCopiesPerRank,    // budget max-copies-per-rank
  kCopiesPerSource,  // budget max-copies-per-source
  kTokensPerGuest,   // budget min-tokens-per-guest
  kMaxLoad,          // recorded max_load is not the largest rank load
  kLowerBound,       // recorded lower_bound is not ⌈mean⌉
  kRoutes,           // route_tokens or assign_rows does not deliver the rows of loads and quotas
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

// The violation's ids, such as "event 3, layer 0, expert 17"; empty if it has none.
std::string place_of(const Violation& violation);

struct CheckOptions {
  // [layer][expert], homes before the plan. Empty: those of its options, or with its homes_digest.
  ArrayView<const RankId, 2> initial_home = {};
  int align = 128;                        // tokens, for rho_padded
  const BatchedTrace* tokens = nullptr;   // the tokens that the load counts; null: unknown
  const PlanFigures* reported = nullptr;  // figures to compare with the recomputed ones
  int max_listed = 100;                   // maximum number of violations to list; all are counted
  const ThreadPool* pool = nullptr;       // the check throws Cancelled after this pool is cancelled
};

struct CheckReport {
  std::vector<Violation> violations;                           // the first max_listed
  std::array<std::int64_t, kNumViolationKinds> num_of_kind{};  // [kind], all violations
  std::vector<std::string> not_checked;                        // skipped checks, with reasons
  std::optional<PlanFigures> figures;                          // recomputed; none if shapes, slots or quotas are wrong

  std::int64_t num_violations() const;
  bool ok() const { return num_violations() == 0; }
};

// Throws Cancelled, and InputError for an invalid load and for options that do not fit it. Does not throw for an
// invalid plan: every defect is a violation.
CheckReport check_plan(const StepPlan& plan, const LoadTable& load, const CheckOptions& options = {});

}  // namespace foremoe
