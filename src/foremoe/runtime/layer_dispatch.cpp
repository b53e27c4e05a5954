#include "foremoe/runtime/layer_dispatch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

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

void expect_counts(const DispatchProblem& problem, DispatchWorkspace& ws) {
  const std::size_t num_experts = problem.routing.load.extent(1);
  ws.counted.assign(num_experts, 0);
  for (std::size_t row = 0; row < problem.routes.size(); ++row) {
    const ExpertId e = problem.routes[row];
    if (e < ExpertId{0}) continue;
    if (e.index() >= num_experts) {
      throw InputError({.file = {}, .field = "routes", .index = fmt::format("[{}]", row)},
                       fmt::format("expert {}, but there are {}", e.value, num_experts));
    }
    ++ws.counted[e.index()];
  }
  for (std::size_t e = 0; e < num_experts; ++e) {
    const std::int64_t load = problem.routing.load(problem.rank, e).value;
    if (ws.counted[e] != load) {
      throw InputError({.file = {}, .field = "routes", .index = {}},
                       fmt::format("rank {} has {} rows of expert {}, but the load that was planned has {}",
                                   problem.rank.value, ws.counted[e], e, load));
    }
  }
}

}  // namespace

void arrange(const SourceRowsTo& rows, ArrayView<const std::int64_t, 2> received, DispatchWorkspace& ws,
             LayerDispatch& dispatch) {
  assert(rows.routes.size() == rows.rank.size());
  arrange_sent(rows, received.extent(0), received.extent(1), ws, dispatch);
  arrange_received(received, ws, dispatch);
}

void dispatch_planned_rows(const DispatchProblem& problem, DispatchWorkspace& ws, LayerDispatch& dispatch) {
  expect_counts(problem, ws);
  route_tokens(problem.routing, ws.route, ws.routed);
  ws.replica.resize(problem.routes.size());
  assign_rows(ws.routed, {problem.rank, problem.routes}, ws.route, ws.replica);

  const std::size_t num_ranks = problem.routing.load.extent(0);
  const std::size_t num_experts = problem.routing.load.extent(1);
  if (ws.received.shape() != Array<std::int64_t, 2>::Shape{num_ranks, num_experts}) {
    ws.received = Array<std::int64_t, 2>({num_ranks, num_experts});
  }
  std::ranges::fill(ws.received.flat(), 0);
  for (const Shipment& s : ws.routed.shipments) {
    if (s.replica == problem.rank) ws.received(s.source, s.expert) += s.rows.value;
  }
  arrange({problem.routes, ws.replica, problem.top_k}, ws.received, ws, dispatch);
}

LayerQuotas HomeQuotas::of(const StepPlan& plan, const LoadTable& load, const Turn& turn) {
  const auto ranks = static_cast<std::size_t>(plan.num_ranks());
  experts_ = Array<ExpertId, 2>({ranks, static_cast<std::size_t>(plan.num_slots() - plan.guest_slots)}, kNoExpert);
  tokens_ = Array<Tokens, 2>(experts_.shape());
  std::vector<std::int64_t> total(static_cast<std::size_t>(plan.num_experts()));
  load.expert_loads(turn.micro_step, turn.layer, total);
  std::vector<std::size_t> next(ranks);
  for (int e = 0; e < plan.num_experts(); ++e) {
    const RankId owner = plan.home(turn.layer, e);
    const std::size_t slot = next[owner.index()]++;
    experts_(owner, slot) = ExpertId{e};
    tokens_(owner, slot) = Tokens{total[static_cast<std::size_t>(e)]};
  }
  return {experts_, tokens_};
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
