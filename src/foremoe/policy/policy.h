#pragma once

// Every system's planner behind one interface, so that comparisons are on equal terms: loads in, a plan out
// that `check_plan` accepts, or the reason why the policy is not defined for this input.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/planner/planner.h"

namespace foremoe {

struct PolicyInput {
  const LoadTable& load;
  ArrayView<const RankId, 2> home;           // [layer][expert]
  PlannerOptions options;                    // each policy uses those that Policy::uses() lists
  const StepPlan* previous = nullptr;        // a former step's plan, for warm starts
  const LoadTable* previous_load = nullptr;  // a former step's load, for policies that predict from history
  // As PlanRequest has it, for policies that plan micro-step by micro-step; others never call it.
  std::function<void(const StepPlan&, MicroStepId)> on_micro_step = {};
};

struct Skipped {
  std::string reason;
};

using PolicyResult = std::variant<PlannedStep, Skipped>;

// How the peer copies of one expert for one turn reach their ranks.
enum class Fanout : std::uint8_t {
  kFromHome,   // the home sends each of them, and receives each gradient
  kBroadcast,  // in a ring: the home sends one, every rank passes it on; gradients come back that way, added up
  kRelays,     // UltraEP: of many copies the home sends some, whose ranks pass them on; gradients as kFromHome
};

// What a system does between a layer's router and its experts where it runs as published, for the simulator to charge.
// Nothing for one that plans before the phase begins.
struct OnlineWork {
  // Its copies begin when the router of their layer and micro-step has run, and come from peers.
  bool copies_after_router = false;
  double planning_seconds = 0;           // per layer and micro-step, between router and experts; source in the file
  double planning_seconds_per_slot = 0;  // besides, for every home and guest slot of the group; the file has its source
  // Part of the dispatch that needs no plan, in an exchange of its own while planning runs.
  double dispatched_unplanned = 0;
  // After dispatch a rank computes its own experts, then its guests. With copies_after_router copies begin beside them.
  bool own_experts_first = false;
  // With own_experts_first: planning begins after dispatch too, which goes to homes; they pass on the rows of guests.
  bool plans_after_dispatch = false;
  // Under `shared`: where activations are kept, guests are kept with them, from a micro-step's forward to its backward.
  bool keeps_guests = false;
  Fanout fanout = Fanout::kFromHome;
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual std::string_view summary() const = 0;  // one line for `--help`
  virtual OnlineWork online() const { return {}; }
  // The fields of PlannerOptions and PolicyInput on which plans of this policy depend, for some input: "guest_slots",
  // "previous_load", … A user who sets another one learns that it is ignored. Whether the plans can train says their
  // residency, StepPlan::can_train().
  virtual std::span<const std::string_view> uses() const = 0;
  // Whether the step is planned ahead, from its own recorded routes: then it waits for what is planned before its first
  // micro-step. Not where a plan follows former routes, or the router, or no routes at all.
  virtual bool plans_ahead(const PolicyInput& input) const = 0;
  // What becomes of `input.previous` where it is not taken as it is, in a sentence for the user; empty when there is
  // nothing to say.
  virtual std::string note_on_previous(const PolicyInput& input) const;
  virtual PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const = 0;
};

// Our planner as a policy, and its ablation with residency `static`, in which guests are chosen once per step and only
// quotas change inside it. Expert parallelism without balancing: every expert is served at its home.
std::unique_ptr<Policy> make_foremoe();
std::unique_ptr<Policy> make_static();
std::unique_ptr<Policy> make_vanilla();

// Each system once, in the order in which tables show them: what `compare --policy all` compares.
const std::vector<std::unique_ptr<Policy>>& all_systems();
// Variants of these systems: halves of one for ablations, other token splits. Found by their names alone.
const std::vector<std::unique_ptr<Policy>>& all_variants();

std::vector<const Policy*> all_policies();         // systems, then variants
const Policy* find_policy(std::string_view name);  // nullptr when there is none

}  // namespace foremoe
