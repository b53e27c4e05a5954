#pragma once

// A step's plan: what every slot holds and how many tokens it is to serve, at every event of every layer.
// It is all that passes from the planner to whoever checks, simulates or executes.
//
// A rank has E/R home slots, ascending expert ids, then G guest slots. With `Residency::kFree` any expert
// may sit in any slot. An expert that stays keeps its slot; under `Residency::kShared` no guest does.
//
// Rank loads and copies are not stored. They follow from the slots: planned_loads() and CopyFinder derive them.

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
  kStatic,    // homes pinned, guests chosen once per step
  kResident,  // homes pinned, each layer's guests stay until replaced
  kShared,    // homes pinned, guest buffers lent to layers in turn: fetched at every use
  kFree,      // any expert in any slot, at least one replica each; forward-only phases
};

std::string_view to_string(Residency residency);  // "static", "resident", …
std::optional<Residency> residency_from_string(std::string_view text);

// The order in which one rank runs the passes of a phase: the time axis of a plan.
//
// With one micro-step in flight, forward and backward of a micro-step share one event and events are
// micro-steps. With K > 1 each pass is an event, in the order of 1F1B:
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

// in_flight ≥ 1. Above num_micro_steps it acts as num_micro_steps, save that of a single micro-step too both passes
// are events.
ExecutionOrder make_execution_order(int num_micro_steps, int in_flight);

struct StepPlan {
  std::string policy;
  Residency residency = Residency::kResident;
  int guest_slots = 0;  // G, per rank in one layer
  int ranks_per_node = 1;
  int in_flight = 1;           // K, as it was asked for; see effective_in_flight()
  std::string options = "{}";  // JSON object keyed by long option name
  std::string load_digest;     // hex SHA-256, see load_digest()

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
  int num_micro_steps() const;      // 1 + the largest event_micro_step
  int effective_in_flight() const;  // min(in_flight, num_micro_steps()): more can never be in flight
  bool can_train() const { return residency != Residency::kFree; }  // else it serves forward-only phases alone
};

// A plan before anything is in its slots, as every planner begins one. `header` has policy, residency, guest slots
// (≥ 0), micro-steps in flight (≥ 1) and options. The rest is made for the load, of R ranks and E experts: E/R and the
// guest slots on each rank, all empty, without tokens; events in the execution order; largest loads and bounds 0; all
// homes rank 0, for the caller to fill. Where R does not divide E the home slots are rounded down. Throws nothing.
StepPlan empty_plan(StepPlan header, const LoadTable& load);

// The part of `plan` that is for `part`, itself the first micro-steps and layers of the load that `plan` is for, as
// take_first() of load_table.h makes it: the events of those micro-steps in the plan's order, in each the first layers.
// Slots, quotas [tokens], homes, largest loads and bounds are the plan's, empty where its are; the digest is that of
// `part`. If check_plan accepts the plan, it accepts the part. No more micro-steps and layers than the plan has;
// throws nothing.
StepPlan take_first(const StepPlan& plan, const LoadTable& part);

// [micro_step][layer][rank], tokens: the sum of the quotas of the rank's slots. A micro-step counts once, whether its
// passes are one event or two, as both have the same quotas in a plan that check_plan accepts. Throws nothing.
Array<Tokens, 3> planned_loads(const StepPlan& plan);

// ρ of one micro-step and layer: largest ÷ mean of `rank_loads`, [rank]; none without load. Throws nothing.
std::optional<double> imbalance(std::span<const Tokens> rank_loads);

// [expert], the slot of each expert on its home, from the homes of one layer: the experts of a rank fill its first
// slots in ascending order. Ranks must not be negative.
std::vector<SlotId> home_slots(std::span<const RankId> home);

struct Copy {
  ExpertId expert;
  SlotId slot;  // where it goes

  friend bool operator==(const Copy&, const Copy&) = default;
};

// The copies of one layer. A copy is an expert in a rank's slots at an event that was in none of that rank's slots
// at the event before; before the first event there are homes alone. Under `Residency::kShared` nothing stays, so
// every guest with quota is a copy at every event.
class CopyFinder {
 public:
  CopyFinder(const StepPlan& plan, LayerId layer) : plan_(plan), layer_(layer) {}  // keeps a reference to the plan

  // Into the slots of one rank for one event, slots ascending; valid until the next call.
  std::span<const Copy> into(EventId event, RankId rank);

 private:
  bool held_before(ExpertId e, EventId event, RankId rank) const;

  const StepPlan& plan_;
  LayerId layer_;
  std::vector<Copy> copies_;
};

}  // namespace foremoe
