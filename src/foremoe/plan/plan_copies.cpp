#include "foremoe/plan/plan_copies.h"

#include <algorithm>

namespace foremoe {

std::span<const Copy> CopyFinder::into(EventId event, RankId rank) {
  copies_.clear();
  for (int s = 0; s < plan_.num_slots(); ++s) {
    const ExpertId e = plan_.slot_expert(event, layer_, rank, s);
    if (e == kNoExpert) continue;
    const bool fetched = plan_.residency == Residency::kShared
                             ? plan_.home(layer_, e) != rank && plan_.slot_tokens(event, layer_, rank, s) > Tokens{0}
                             : !held_before(e, event, rank);
    if (fetched) copies_.push_back({e, SlotId{s}});
  }
  return copies_;
}

bool CopyFinder::held_before(ExpertId e, EventId event, RankId rank) const {
  if (event == EventId{0}) return plan_.home(layer_, e) == rank;
  const std::span<const ExpertId> before = plan_.slot_expert.row(event.value - 1, layer_, rank);
  return std::ranges::find(before, e) != before.end();
}

}  // namespace foremoe
