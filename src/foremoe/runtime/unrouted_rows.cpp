#include "foremoe/runtime/unrouted_rows.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"

namespace foremoe {

RankId UnroutedRows::holder(const Turn& turn, ExpertId expert) const {
  if (plan_.residency != Residency::kFree) return plan_.home(turn.layer, expert);
  const ArrayView<const ExpertId, 2> slots = plan_.slot_expert[turn.event][turn.layer];  // [rank][slot]
  const auto at = std::ranges::find(slots.flat(), expert) - slots.flat().begin();
  return RankId{at / plan_.num_slots()};
}

void UnroutedRows::dispatch(const Turn& turn, std::span<const ExpertId> routes, std::span<const ExpertId> picked,
                            int top_k, LayerDispatch& dispatch) {
  const auto num_ranks = static_cast<std::size_t>(communicator_.num_ranks());
  const auto num_experts = static_cast<std::size_t>(plan_.num_experts());
  rows_.assign(routes.size(), kNoExpert);
  workspace_.replica.assign(routes.size(), kNoReplica);
  sent_.assign(num_ranks * num_experts, 0);  // [destination][expert]
  for (std::size_t row = 0; row < routes.size(); ++row) {
    if (routes[row] != kNoExpert) continue;
    if (row >= picked.size() || picked[row] < ExpertId{0} || picked[row].index() >= num_experts) {
      throw InputError({.file = {}, .field = "picked", .index = fmt::format("[{}]", row)},
                       "no expert was picked for a row without a route");
    }
    rows_[row] = picked[row];
    workspace_.replica[row] = holder(turn, picked[row]);
    ++sent_[workspace_.replica[row].index() * num_experts + picked[row].index()];
  }

  received_.resize(num_ranks * num_experts);  // [source][expert]
  bytes_.assign(num_ranks, static_cast<std::int64_t>(num_experts * sizeof(std::int64_t)));
  communicator_.exchange({reinterpret_cast<const std::byte*>(sent_.data()), bytes_,
                          reinterpret_cast<std::byte*>(received_.data()), bytes_});
  arrange({rows_, workspace_.replica, top_k},
          ArrayView<const std::int64_t, 2>(received_.data(), {num_ranks, num_experts}), workspace_, dispatch);
}

}  // namespace foremoe
