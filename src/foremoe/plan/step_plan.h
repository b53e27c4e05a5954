#pragma once

// A stage's plan: what every slot holds and how many tokens it is to serve, at every event of every layer.
// It is all that passes from the planner to whoever checks, simulates or executes.
//
// A rank has E/R home slots, ascending expert ids, then G guest slots. With `Residency::kFree` any expert
// may sit in any slot. An expert that stays keeps its slot.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/units.h"
#include "foremoe/plan/execution_order.h"

namespace foremoe {

enum class Residency : std::uint8_t {
  kStatic,    // homes pinned, guests chosen once per step
  kResident,  // homes pinned, each layer's guests stay until replaced
  kShared,    // homes pinned, guest buffers lent to layers in turn: fetched at every use
  kFree,      // any expert in any slot, at least one replica each; forward-only stages
};

std::string_view to_string(Residency residency);  // "static", "resident", …
std::optional<Residency> residency_from_string(std::string_view text);

struct StepPlan {
  std::string policy;
  Residency residency = Residency::kResident;
  int guest_slots = 0;  // G, per rank in one layer
  int ranks_per_node = 1;
  int in_flight = 1;           // K
  std::string options = "{}";  // JSON object keyed by long option name
  std::string load_digest;     // hex SHA-256, see load_digest()

  Array<ExpertId, 4> slot_expert;             // [event][layer][rank][slot], kNoExpert when empty
  Array<Tokens, 4> slot_tokens;               // [event][layer][rank][slot], quota
  std::vector<MicroStepId> event_micro_step;  // [event]
  std::vector<Pass> event_pass;               // [event]
  Array<RankId, 2> home;                      // [layer][expert]
  Array<Tokens, 2> max_load;                  // [micro_step][layer], largest rank load; empty when not recorded
  Array<Tokens, 2> lower_bound;               // [micro_step][layer], ⌈mean⌉ or better; empty when not recorded

  int num_events() const { return static_cast<int>(slot_expert.extent(0)); }
  int num_layers() const { return static_cast<int>(slot_expert.extent(1)); }
  int num_ranks() const { return static_cast<int>(slot_expert.extent(2)); }
  int num_slots() const { return static_cast<int>(slot_expert.extent(3)); }
  int num_experts() const { return static_cast<int>(home.extent(1)); }
  int num_micro_steps() const;  // 1 + the largest event_micro_step
};

}  // namespace foremoe
