#pragma once

// A step's plan: the expert and the quota of every slot, at every event of every layer. It is the planner's only output
// and the input of the checker, the simulator and the executor.
//
// A rank has E/R home slots, in ascending order of expert id, then G guest slots. With `Residency::kFree` any slot may
// hold any expert. An expert that stays on a rank keeps its slot, except guests under `Residency::kShared`.
//
// Rank loads and copies are not stored: planned_loads() and CopyFinder derive them from the slots.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/core/units.h"

namespace foremoe {

struct LoadTable;

enum class Residency : std::uint8_t {
  kStatic,    // homes pinned; guests chosen once per step
  kResident,  // homes pinned; each layer's guests stay until replaced
  kShared,    // homes pinned; layers share the guest buffers in turn and fetch guests at every use
  kFree,      // any expert in any slot, at least one replica per expert; forward-only phases
};

std::string_view to_string(Residency residency);  // "static", "resident", …
std::optional<Residency> residency_from_string(std::string_view text);

// The order in which a rank runs the passes of a phase. It is the time axis of a plan.
//
// With one micro-step in flight, its forward and backward share one event, so events are micro-steps. With K > 1 each
// pass is an event, in 1F1B order:
//   F0 … F(K−1) B0 F(K) B1 … B(M−1)
struct ExecutionOrder {
  int num_micro_steps = 0;
  int in_flight = 1;
  std::vector<MicroStepId> micro_step;  // [event]
  std::vector<Pass> pass;               // [event]
  std::vector<EventId> forward;         // [micro_step]
  std::vector<EventId> backward;        // [micro_step]; equals forward[m] with one in flight

  int num_events() const { return static_cast<int>(micro_step.size()); }
};

// in_flight ≥ 1. Values above num_micro_steps have the same effect as num_micro_steps, except that the two passes of a
// single micro-step remain separate events.
ExecutionOrder make_execution_order(int num_micro_steps, int in_flight);

struct StepPlan {
  std::string policy;
  Residency residency = Residency::kResident;
  int guest_slots = 0;  // G, per rank in one layer
  int ranks_per_node = 1;
  int in_flight = 1;           // K, as requested; see effective_in_flight()
  std::string options = "{}";  // JSON object keyed by long option name
  std::string load_digest;     // hex SHA-256, see load_digest()
  std::string homes_digest;    // of the homes before planning, see homes_digest(); empty: contiguous or not recorded

  Array<ExpertId, 4> slot_expert;             // [event][layer][rank][slot], kNoExpert when empty
  Array<Tokens, 4> slot_tokens;               // [event][layer][rank][slot], quota
  std::vector<MicroStepId> event_micro_step;  // [event]
  std::vector<Pass> event_pass;               // [event]
  Array<RankId, 2> home;                      // [layer][expert]
  Array<Tokens, 2> max_load;                  // [micro_step][layer], largest rank load; empty when not recorded
  Array<Tokens, 2> lower_bound;               // [micro_step][layer], ⌈mean⌉; empty when not recorded

  int num_events() const { return static_cast<int>(slot_expert.extent(0)); }
  int num_layers() const { return static_cast<int>(slot_expert.extent(1)); }
  int num_ranks() const { return static_cast<int>(slot_expert.extent(2)); }
  Topology topology() const { return {.num_ranks = num_ranks(), .ranks_per_node = ranks_per_node}; }
  int num_slots() const { return static_cast<int>(slot_expert.extent(3)); }
  int num_experts() const { return static_cast<int>(home.extent(1)); }
  int num_micro_steps() const;                                      // 1 + the largest event_micro_step
  int effective_in_flight() const;                                  // min(in_flight, num_micro_steps())
  bool can_train() const { return residency != Residency::kFree; }  // residency free: forward-only phases
};

// Throws InputError, with the name of a member as field, unless the arrays have the shapes above, events are in
// execution order, ids and quotas are in range, each rank is home to E/R experts, and slots of pinned homes hold homes.
// check_plan checks the other rules. The second function also requires a valid load with the plan's shape, or throws
// with field `load`.
void expect_valid(const StepPlan& plan);
void expect_valid(const StepPlan& plan, const LoadTable& load);

// Throws InputError, field `homes` with index, unless each rank is home to E/R experts in every layer.
void expect_homes(ArrayView<const RankId, 2> home, int num_ranks);

// Returns a plan for `load` with empty slots. `header` supplies policy, residency, guest slots (≥ 0), micro-steps in
// flight (≥ 1) and options. Each of the R ranks has E/R slots (rounded down) plus the guest slots, without experts or
// tokens. Events follow the execution order. Largest loads, bounds and homes are 0; the caller must set them. Throws
// nothing.
StepPlan empty_plan(StepPlan header, const LoadTable& load);

// Cuts `plan` to `part`, the first micro-steps and layers of its load (take_first() in load_table.h). The result has
// the events of those micro-steps, in the plan's order. Copies slots, quotas [tokens], homes, largest loads and bounds;
// loads and bounds that the plan does not record stay empty. Sets the digest of `part`. If check_plan accepts the plan,
// it accepts the result. Throws InputError, field `load`, if `part` exceeds the plan.
StepPlan take_first(const StepPlan& plan, const LoadTable& part);

// [micro_step][layer][rank], tokens: sum of the quotas of the rank's slots. A micro-step with two events counts once,
// since both passes have the same quotas in a plan that check_plan accepts. Throws the errors of expect_valid(plan).
Array<Tokens, 3> planned_loads(const StepPlan& plan);

// ρ of one micro-step and layer: largest ÷ mean of `rank_loads` [rank]. Returns nullopt without load. Throws nothing.
std::optional<double> imbalance(std::span<const Tokens> rank_loads);

// [expert]: the home slot of each expert in one layer. The experts of a rank fill its first slots in ascending order.
// Ranks in `home` must not be negative.
std::vector<SlotId> home_slots(std::span<const RankId> home);

struct Copy {
  ExpertId expert;
  SlotId slot;  // destination

  friend bool operator==(const Copy&, const Copy&) = default;
};

// Finds the copies of one layer. An expert is copied at an event if it is in a slot of a rank but was in none of that
// rank's slots at the previous event. Before the first event a rank holds only its home experts. Under
// `Residency::kShared` guests do not persist, so every guest with quota is copied at every event.
class CopyFinder {
 public:
  CopyFinder(const StepPlan& plan, LayerId layer) : plan_(plan), layer_(layer) {}  // keeps a reference to the plan
  CopyFinder(const StepPlan&& plan, LayerId layer) = delete;

  // Returns the copies into the slots of one rank for one event, in ascending slot order; valid until the next call.
  std::span<const Copy> into(EventId event, RankId rank);

 private:
  bool held_before(ExpertId e, EventId event, RankId rank) const;

  const StepPlan& plan_;
  LayerId layer_;
  std::vector<Copy> copies_;
};

}  // namespace foremoe
