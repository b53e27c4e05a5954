#include "foremoe/runtime/layer_dispatch.h"

#include <fmt/format.h>

#include "foremoe/core/error.h"
#include "foremoe/plan/assign_rows.h"

namespace foremoe {

void find_sent_rows(std::span<const ExpertId> routes, int top_k, DispatchWorkspace& ws, LayerDispatch& dispatch) {
  ws.slots.resize(routes.size());
  row_slots(dispatch.rows, routes, top_k, ws.rows, ws.slots);
  ws.order.resize(static_cast<std::size_t>(dispatch.rows.sent));
  row_order(dispatch.rows, ws.slots, ws.rows, ws.order);
  dispatch.token_of_sent_row.resize(ws.order.size());
  dispatch.sent_row.assign(routes.size(), -1);
  for (std::size_t sent = 0; sent < ws.order.size(); ++sent) {
    dispatch.token_of_sent_row[sent] = ws.order[sent] / top_k;
    dispatch.sent_row[static_cast<std::size_t>(ws.order[sent])] = static_cast<std::int32_t>(sent);
  }
}

void UnroutedRows::find_holders(const Turn& turn) {
  const bool free = plan_.residency == Residency::kFree;
  const int slots = free ? plan_.num_slots() : plan_.num_slots() - plan_.guest_slots;
  constexpr Holder kNobody{.rank = kNoReplica, .slot = {}};
  holders_.assign(static_cast<std::size_t>(plan_.num_experts()), kNobody);
  for (int r = 0; r < plan_.num_ranks(); ++r) {
    for (int s = 0; s < slots; ++s) {
      const ExpertId expert = plan_.slot_expert(turn.event, turn.layer, r, s);
      if (expert == kNoExpert || holders_[expert.index()].rank != kNoReplica) continue;
      holders_[expert.index()] = {.rank = RankId{r}, .slot = SlotId{s}};
    }
  }
}

void UnroutedRows::take_picked(const Rows& rows) {
  const std::size_t num_experts = holders_.size();
  rows_.assign(rows.routes.size(), kNoExpert);
  sent_.assign(static_cast<std::size_t>(plan_.num_ranks()) * num_experts, 0);
  for (std::size_t row = 0; row < rows.routes.size(); ++row) {
    if (rows.routes[row] != kNoExpert) continue;
    if (row >= rows.picked.size() || rows.picked[row] < ExpertId{0} || rows.picked[row].index() >= num_experts) {
      throw InputError({.file = {}, .field = "picked", .index = fmt::format("[{}]", row)},
                       "no expert was picked for a row without a route");
    }
    rows_[row] = rows.picked[row];
    ++sent_[holders_[rows_[row].index()].rank.index() * num_experts + rows_[row].index()];
  }
}

void UnroutedRows::exchange_counts() {
  received_.resize(sent_.size());
  bytes_.assign(static_cast<std::size_t>(plan_.num_ranks()),
                static_cast<std::int64_t>(holders_.size() * sizeof(std::int64_t)));
  communicator_.exchange({reinterpret_cast<const std::byte*>(sent_.data()), bytes_,
                          reinterpret_cast<std::byte*>(received_.data()), bytes_});
}

void UnroutedRows::dispatch(const Turn& turn, const Rows& rows, LayerDispatch& dispatch) {
  find_holders(turn);
  take_picked(rows);
  exchange_counts();

  const RankId self = communicator_.rank();
  shipments_.sent.clear();
  shipments_.received.clear();
  for (std::size_t e = 0; e < holders_.size(); ++e) {
    const auto& [holder, slot] = holders_[e];
    const Tokens sent{sent_[holder.index() * holders_.size() + e]};
    if (sent > Tokens{0}) shipments_.sent.push_back({ExpertId{e}, self, holder, sent, slot});
    for (int r = 0; holder == self && r < plan_.num_ranks(); ++r) {
      const Tokens received{received_[static_cast<std::size_t>(r) * holders_.size() + e]};
      if (received > Tokens{0}) shipments_.received.push_back({ExpertId{e}, RankId{r}, self, received, slot});
    }
  }
  rank_dispatch({.of_rank = shipments_,
                 .num_ranks = static_cast<std::size_t>(plan_.num_ranks()),
                 .num_experts = holders_.size(),
                 .num_slots = static_cast<std::size_t>(plan_.num_slots())},
                self, workspace_.rows, dispatch.rows);
  find_sent_rows(rows_, rows.top_k, workspace_, dispatch);
}

}  // namespace foremoe
