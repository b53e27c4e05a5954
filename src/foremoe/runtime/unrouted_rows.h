#pragma once

// Rows without a recorded route (padding, last tokens, prefix-cached ones): the router picks their experts when the
// layer runs, so only their source knows them. They ride in an all-to-all of their own, whose counts are exchanged
// first, to the homes of those experts (under `free`, where a home's slot may hold another, to the lowest rank that
// holds the expert at that event); only where there are any.

#include <span>
#include <vector>

#include "foremoe/plan/step_plan.h"
#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/layer_dispatch.h"
#include "foremoe/transfer/turn_order.h"

namespace foremoe {

class UnroutedRows {
 public:
  UnroutedRows(Communicator& communicator, const StepPlan& plan) : communicator_(communicator), plan_(plan) {}

  // Collective. [token·k + j]: rows where `routes` has kNoExpert, to the homes of the experts in `picked`, which may be
  // empty when this rank has none.
  void dispatch(const Turn& turn, std::span<const ExpertId> routes, std::span<const ExpertId> picked, int top_k,
                LayerDispatch& dispatch);

 private:
  RankId holder(const Turn& turn, ExpertId expert) const;

  Communicator& communicator_;
  const StepPlan& plan_;
  DispatchWorkspace workspace_;
  std::vector<ExpertId> rows_;  // [token·k + j], kNoExpert: not one of these rows
  std::vector<std::int64_t> sent_, received_;
  std::vector<std::int64_t> bytes_;
};

}  // namespace foremoe
