#pragma once

// What a plan copies. A copy is an expert in a rank's slots at an event that was in none of that rank's slots
// at the event before; before the first event there are homes alone. Under `Residency::kShared` nothing stays,
// so every guest with quota is a copy at every event.

#include <span>
#include <vector>

#include "foremoe/plan/step_plan.h"

namespace foremoe {

struct Copy {
  ExpertId expert;
  SlotId slot;  // where it goes

  friend bool operator==(const Copy&, const Copy&) = default;
};

// The copies of one layer. Keeps a reference to the plan.
class CopyFinder {
 public:
  CopyFinder(const StepPlan& plan, LayerId layer) : plan_(plan), layer_(layer) {}

  // Into the slots of one rank for one event, slots ascending; valid until the next call.
  std::span<const Copy> into(EventId event, RankId rank);

 private:
  bool held_before(ExpertId e, EventId event, RankId rank) const;

  const StepPlan& plan_;
  LayerId layer_;
  std::vector<Copy> copies_;
};

}  // namespace foremoe
