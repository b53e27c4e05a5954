#pragma once

// Where the rows of one rank go in one layer of one micro-step, and from where it receives rows: everything that the
// two all-to-alls and the grouped GEMM need.
//
// Rows lie as plan/rank_dispatch.h says, so that those of an expert are one block.
//
// Planned rows need no word between ranks: routes and plan determine them. Rows without a route are known to their
// source alone, so their counts are exchanged; they go to homes.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/plan/rank_dispatch.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/runtime/communicator.h"
#include "foremoe/transfer/rank_turns.h"

namespace foremoe {

struct ComputedExpert {
  ExpertId expert;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
};

struct LayerDispatch {
  std::vector<std::int32_t> token_of_sent_row;  // [sent row]
  std::vector<std::int32_t> sent_row;           // [token·k + j]; −1 where the entry sends no row
  std::vector<std::int64_t> rows_to;            // [rank]
  std::vector<std::int64_t> rows_from;          // [rank]
  std::vector<std::int32_t> received_row;       // [computed row]
  std::vector<ComputedExpert> experts;          // by first_row; those with rows alone

  std::int64_t rows_sent() const { return static_cast<std::int64_t>(token_of_sent_row.size()); }
  std::int64_t rows_computed() const { return static_cast<std::int64_t>(received_row.size()); }
};

struct DispatchWorkspace {
  // Of planned rows.
  RankDispatchWorkspace rows_workspace;
  RankDispatch rows;
  std::vector<std::int32_t> order;  // [sent row], the entry of routes
  // Of rows without a route.
  std::vector<RankId> replica;      // [token·k + j]
  std::vector<std::int64_t> block;  // [destination][expert] or [source][expert]
};

struct DispatchProblem {
  RoutingProblem routing;
  RankId rank;
  std::span<const ExpertId> routes;  // [token·k + j], of this rank as a source; negative: no planned row
  int top_k = 1;
};

// Of planned rows. Throws InputError when the routes are not those that the load counts.
void dispatch_planned_rows(const DispatchProblem& problem, DispatchWorkspace& workspace, LayerDispatch& dispatch);

// Rows without a recorded route (padding, last tokens, prefix-cached ones): the router picks their experts when the
// layer runs. They travel in an all-to-all of their own, whose counts are exchanged first, to the homes of those
// experts (under `free`, where a home's slot may hold another, to the lowest rank that holds the expert at that event).
class UnroutedRows {
 public:
  UnroutedRows(Communicator& communicator, const StepPlan& plan) : communicator_(communicator), plan_(plan) {}

  // Collective. [token·k + j]: rows where `routes` has kNoExpert go to the homes of the experts in `picked`, which may
  // be empty when this rank has no such row.
  struct Rows {
    std::span<const ExpertId> routes;
    std::span<const ExpertId> picked;
    int top_k = 1;
  };
  void dispatch(const Turn& turn, const Rows& rows, LayerDispatch& dispatch);

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
