#pragma once

// Row dispatch of one rank in one layer of one micro-step: the row counts and row orders that the two all-to-alls and
// the grouped GEMM need. plan/rank_dispatch.h defines the order of rows.
//
// Planned rows require no communication: RankTurns determines their counts. Rows without a route are known only to
// their source rank, so ranks exchange the counts of these rows. Homes compute these rows.

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
  std::vector<std::int32_t> sent_row;           // −1 if the entry sends no row

  std::int64_t rows_sent() const { return rows.sent; }
  std::int64_t rows_computed() const { return rows.slot_offsets.back(); }
};

// Scratch memory, reused so that a warm call allocates nothing.
struct DispatchWorkspace {
  RankDispatchWorkspace rows;
  std::vector<std::int32_t> slots;  // [token·k + j]
  std::vector<std::int32_t> order;  // [sent row] → index into routes
};

// Maps each route, [token·k + j], to its sent row in dispatch.rows. Throws InputError as row_slots() does.
void find_sent_rows(std::span<const ExpertId> routes, int top_k, DispatchWorkspace& workspace, LayerDispatch& dispatch);

// Rows without a recorded route: padding, last tokens, prefix-cached tokens. The router selects their experts when the
// layer runs. After an exchange of counts, a separate all-to-all sends these rows to the homes of the selected experts.
// Under `free`, a home's slot may contain another expert; the lowest rank with the expert receives the rows.
class UnroutedRows {
 public:
  UnroutedRows(Communicator& communicator, const StepPlan& plan) : communicator_(communicator), plan_(plan) {}

  // Collective. Dispatches rows whose `routes` entry is kNoExpert to the homes of the experts in `picked`. Both arrays
  // are [token·k + j]. `picked` may be empty if this rank has no such row.
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
  std::vector<ExpertId> rows_;          // [token·k + j]; kNoExpert: the row has a planned route
  std::vector<std::int64_t> sent_;      // [destination][expert]
  std::vector<std::int64_t> received_;  // [source][expert]
  std::vector<std::int64_t> bytes_;
  RoutedRank shipments_;
};

}  // namespace foremoe
