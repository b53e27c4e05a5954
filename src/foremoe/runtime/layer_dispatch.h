#pragma once

// Where the rows of one rank go in one layer of one micro-step, and from where it receives rows: everything that the
// two all-to-alls and the grouped GEMM need. Rows lie as plan/rank_dispatch.h says.
//
// Planned rows need no word between ranks: RankTurns knows them. Rows without a route are known to their source alone,
// so their counts are exchanged; they go to homes.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/plan/rank_dispatch.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/runtime/communicator.h"

namespace foremoe {

struct LayerDispatch {
  RankDispatch rows;
  std::vector<std::int32_t> token_of_sent_row;  // [sent row]
  std::vector<std::int32_t> sent_row;           // [token·k + j]; −1 where the entry sends no row

  std::int64_t rows_sent() const { return rows.sent; }
  std::int64_t rows_computed() const { return rows.slot_offsets.back(); }
};

// Scratch memory, reused so that a warm call allocates nothing.
struct DispatchWorkspace {
  RankDispatchWorkspace rows;
  std::vector<std::int32_t> slots;  // [token·k + j]
  std::vector<std::int32_t> order;  // [sent row], the entry of routes
};

// Finds the sent row of each of these routes, [token·k + j], in dispatch.rows. Throws InputError as row_slots().
void find_sent_rows(std::span<const ExpertId> routes, int top_k, DispatchWorkspace& workspace, LayerDispatch& dispatch);

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
  void find_holders(const Turn& turn);
  void take_picked(const Rows& rows);
  void exchange_counts();

  Communicator& communicator_;
  const StepPlan& plan_;
  DispatchWorkspace workspace_;
  struct Holder {
    RankId rank;
    SlotId slot;
  };
  std::vector<Holder> holders_;         // [expert]
  std::vector<ExpertId> rows_;          // [token·k + j], kNoExpert: not one of these rows
  std::vector<std::int64_t> sent_;      // [destination][expert]
  std::vector<std::int64_t> received_;  // [source][expert]
  std::vector<std::int64_t> bytes_;
  RoutedRank shipments_;
};

}  // namespace foremoe
