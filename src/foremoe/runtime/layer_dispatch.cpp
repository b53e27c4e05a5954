#include "foremoe/runtime/layer_dispatch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

// Which rank serves each row of this source.
struct SourceRowsTo {
  std::span<const ExpertId> routes;  // [token·k + j], negative: no row
  std::span<const RankId> rank;      // [token·k + j]
  int top_k = 1;
};

// Sent rows: a block per (destination, expert), rows within in row order.
void arrange_sent(const SourceRowsTo& rows, std::size_t num_ranks, std::size_t num_experts, DispatchWorkspace& ws,
                  LayerDispatch& dispatch) {
  const auto block = [&](std::size_t row) { return rows.rank[row].index() * num_experts + rows.routes[row].index(); };
  ws.block.assign(num_ranks * num_experts + 1, 0);
  for (std::size_t row = 0; row < rows.routes.size(); ++row) {
    if (rows.routes[row] >= ExpertId{0}) ++ws.block[block(row) + 1];
  }
  for (std::size_t b = 0; b < num_ranks * num_experts; ++b) ws.block[b + 1] += ws.block[b];
  dispatch.rows_to.resize(num_ranks);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    dispatch.rows_to[r] = ws.block[(r + 1) * num_experts] - ws.block[r * num_experts];
  }

  dispatch.token_of_sent_row.resize(static_cast<std::size_t>(ws.block.back()));
  dispatch.sent_row.assign(rows.routes.size(), -1);
  for (std::size_t row = 0; row < rows.routes.size(); ++row) {
    if (rows.routes[row] < ExpertId{0}) continue;
    const std::int64_t sent = ws.block[block(row)]++;
    dispatch.sent_row[row] = static_cast<std::int32_t>(sent);
    dispatch.token_of_sent_row[static_cast<std::size_t>(sent)] = static_cast<std::int32_t>(row / rows.top_k);
  }
}

void arrange_received(ArrayView<const std::int64_t, 2> received, DispatchWorkspace& ws, LayerDispatch& dispatch) {
  const std::size_t num_ranks = received.extent(0);
  const std::size_t num_experts = received.extent(1);
  ws.block.resize(num_ranks * num_experts);  // first received row of (source, expert)
  std::int64_t row = 0;
  dispatch.rows_from.assign(num_ranks, 0);
  for (std::size_t s = 0; s < num_ranks; ++s) {
    for (std::size_t e = 0; e < num_experts; ++e) {
      ws.block[s * num_experts + e] = row;
      row += received(s, e);
      dispatch.rows_from[s] += received(s, e);
    }
  }
  dispatch.received_row.clear();
  dispatch.received_row.reserve(static_cast<std::size_t>(row));
  dispatch.experts.clear();
  for (std::size_t e = 0; e < num_experts; ++e) {
    const std::int64_t first = dispatch.rows_computed();
    for (std::size_t s = 0; s < num_ranks; ++s) {
      for (std::int64_t i = 0; i < received(s, e); ++i) {
        dispatch.received_row.push_back(static_cast<std::int32_t>(ws.block[s * num_experts + e] + i));
      }
    }
    if (const std::int64_t rows = dispatch.rows_computed() - first; rows > 0) {
      dispatch.experts.push_back({ExpertId{e}, first, rows});
    }
  }
}

// From both sides' knowledge; `received` is [source][expert], rows that come to this rank.
void arrange(const SourceRowsTo& rows, ArrayView<const std::int64_t, 2> received, DispatchWorkspace& ws,
             LayerDispatch& dispatch) {
  assert(rows.routes.size() == rows.rank.size());
  arrange_sent(rows, received.extent(0), received.extent(1), ws, dispatch);
  arrange_received(received, ws, dispatch);
}

}  // namespace

void dispatch_planned_rows(const DispatchProblem& problem, DispatchWorkspace& ws, LayerDispatch& dispatch) {
  rank_dispatch(problem.routing, problem.rank, ws.rows_workspace, ws.rows);
  ws.order.resize(static_cast<std::size_t>(ws.rows.sent));
  row_order(ws.rows, problem.routes, ws.rows_workspace, ws.order);

  dispatch.token_of_sent_row.resize(ws.order.size());
  dispatch.sent_row.assign(problem.routes.size(), -1);
  for (std::size_t sent = 0; sent < ws.order.size(); ++sent) {
    dispatch.token_of_sent_row[sent] = ws.order[sent] / problem.top_k;
    dispatch.sent_row[static_cast<std::size_t>(ws.order[sent])] = static_cast<std::int32_t>(sent);
  }
  dispatch.rows_to = ws.rows.send;
  dispatch.rows_from = ws.rows.recv;
  dispatch.received_row = ws.rows.to_slots;
  dispatch.experts.clear();
  const std::span<const ExpertId> slots = problem.routing.quotas.slot_expert.row(problem.rank);
  for (std::size_t s = 0; s < slots.size(); ++s) {
    const std::int64_t first = ws.rows.slot_offsets[s];
    const std::int64_t rows = ws.rows.slot_offsets[s + 1] - first;
    if (rows > 0) dispatch.experts.push_back({slots[s], first, rows});
  }
}

RankId UnroutedRows::holder(const Turn& turn, ExpertId expert) const {
  if (plan_.residency != Residency::kFree) return plan_.home(turn.layer, expert);
  const ArrayView<const ExpertId, 2> slots = plan_.slot_expert[turn.event][turn.layer];  // [rank][slot]
  const auto at = std::ranges::find(slots.flat(), expert) - slots.flat().begin();
  return RankId{at / plan_.num_slots()};
}

void UnroutedRows::dispatch(const Turn& turn, const Rows& rows, LayerDispatch& dispatch) {
  const auto& [routes, picked, top_k] = rows;
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
