#include "foremoe/plan/rank_dispatch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "foremoe/core/error.h"
#include "foremoe/plan/assign_rows.h"

namespace foremoe {
namespace {

// Throws InputError if the row numbers do not fit in 32 bits.
void expect_numbered(std::int64_t rows) {
  if (rows <= std::numeric_limits<std::int32_t>::max()) return;
  throw InputError({.field = "load"},
                   fmt::format("gives one rank {} rows in one layer, more than can be executed", rows));
}

// Orders sent rows by destination, then expert. Shipments are sorted by expert.
void lay_out_sent(std::span<const Shipment> shipments, std::size_t num_ranks, RankDispatchWorkspace& ws,
                  RankDispatch& rows) {
  rows.send.assign(num_ranks, 0);
  for (const Shipment& s : shipments) rows.send[s.replica.index()] += s.rows.value;
  ws.next.resize(num_ranks);
  std::exclusive_scan(rows.send.begin(), rows.send.end(), ws.next.begin(), std::int64_t{0});
  rows.sent = num_ranks == 0 ? 0 : ws.next.back() + rows.send.back();
  expect_numbered(rows.sent);
  rows.blocks.assign(shipments.begin(), shipments.end());
  rows.first.clear();
  for (const Shipment& s : shipments) {
    rows.first.push_back(ws.next[s.replica.index()]);
    ws.next[s.replica.index()] += s.rows.value;
  }
}

// Sorts received rows by (source, expert), since shipments are sorted by expert, and computed rows by (slot, source).
void lay_out_received(std::span<const Shipment> shipments, std::size_t num_ranks, std::size_t num_slots,
                      RankDispatchWorkspace& ws, RankDispatch& rows) {
  rows.recv.assign(num_ranks, 0);
  rows.slot_offsets.assign(num_slots + 1, 0);
  rows.received.assign(num_slots * num_ranks, 0);
  for (const Shipment& s : shipments) {
    rows.recv[s.source.index()] += s.rows.value;
    rows.slot_offsets[s.slot.index() + 1] += s.rows.value;
  }
  std::partial_sum(rows.slot_offsets.begin(), rows.slot_offsets.end(), rows.slot_offsets.begin());
  expect_numbered(rows.slot_offsets.back());

  ws.next.resize(num_ranks);
  std::exclusive_scan(rows.recv.begin(), rows.recv.end(), ws.next.begin(), std::int64_t{0});
  ws.first.resize(rows.received.size());
  for (const Shipment& s : shipments) {
    const std::size_t at = s.slot.index() * num_ranks + s.source.index();
    assert(rows.received[at] == 0);  // one shipment per expert and pair of ranks
    rows.received[at] = s.rows.value;
    ws.first[at] = ws.next[s.source.index()];
    ws.next[s.source.index()] += s.rows.value;
  }
  rows.to_slots.resize(static_cast<std::size_t>(rows.slot_offsets.back()));
  auto next = rows.to_slots.begin();
  for (std::size_t at = 0; at < rows.received.size(); ++at) {
    const auto end = next + rows.received[at];
    std::iota(next, end, static_cast<std::int32_t>(ws.first[at]));
    next = end;
  }
}

[[noreturn]] void refuse_routes(const RankDispatch& rows, std::span<const ExpertId> routes) {
  std::vector<std::int64_t> counted(static_cast<std::size_t>(rows.num_experts));
  for (std::size_t row = 0; row < routes.size(); ++row) {
    const ExpertId e = routes[row];
    if (e < ExpertId{0}) continue;
    if (e.value >= rows.num_experts) {
      throw InputError({.field = "routes", .index = fmt::format("[{}]", row)},
                       fmt::format("expert {}, but there are {}", e.value, rows.num_experts));
    }
    ++counted[e.index()];
  }
  for (const Shipment& block : rows.blocks) counted[block.expert.index()] -= block.rows.value;
  const auto wrong = std::ranges::find_if(counted, [](std::int64_t n) { return n != 0; });
  assert(wrong != counted.end());
  throw InputError({.field = "routes"},
                   fmt::format("rank {} has {} rows {} of expert {} than the planned load counts", rows.rank.value,
                               std::abs(*wrong), *wrong > 0 ? "more" : "fewer", wrong - counted.begin()));
}

}  // namespace

void rank_dispatch(const RoutingProblem& problem, RankId rank, RankDispatchWorkspace& ws, RankDispatch& rows) {
  if (rank.value < 0 || rank.index() >= problem.load.extent(0)) {
    throw InputError({.field = "rank"}, fmt::format("{} is not in 0 … {}", rank.value, problem.topology.num_ranks - 1));
  }
  route_tokens_of(problem, rank, ws.route, ws.routed);
  rank_dispatch({.of_rank = ws.routed,
                 .num_ranks = problem.load.extent(0),
                 .num_experts = problem.load.extent(1),
                 .num_slots = problem.quotas.slot_expert.extent(1)},
                rank, ws, rows);
  rows.topology = problem.topology;
  rows.choice = problem.rows;
}

void rank_dispatch(const Shipments& shipments, RankId rank, RankDispatchWorkspace& ws, RankDispatch& rows) {
  const auto& [of_rank, num_ranks, num_experts, num_slots] = shipments;
  rows.rank = rank;
  rows.choice = Rows::kOrder;
  rows.num_experts = static_cast<int>(num_experts);
  rows.num_slots = static_cast<int>(num_slots);
  lay_out_sent(of_rank.sent, num_ranks, ws, rows);
  lay_out_received(of_rank.received, num_ranks, num_slots, ws, rows);
}

void row_slots(const RankDispatch& rows, std::span<const ExpertId> routes, int top_k, RankDispatchWorkspace& ws,
               std::span<std::int32_t> slots) {
  if (routes.size() > std::numeric_limits<std::int32_t>::max()) {
    throw InputError({.field = "routes"}, fmt::format("{} entries, more than can be executed", routes.size()));
  }
  if (top_k < 1 || routes.size() % static_cast<std::size_t>(top_k) != 0) {
    throw InputError({.field = "top_k"}, fmt::format("{} does not divide {} routes", top_k, routes.size()));
  }
  const bool counted = rows.choice == Rows::kToken
                           ? choose_rows({rows.blocks, routes, top_k, rows.rank, rows.topology}, ws.choice, slots)
                           : assign_shipments(rows.blocks, routes, ws.route, slots);
  if (!counted) refuse_routes(rows, routes);
  for (std::int32_t& slot : slots) {
    if (slot < 0) continue;
    const Shipment& block = rows.blocks[static_cast<std::size_t>(slot)];
    slot = block.replica.value * rows.num_slots + block.slot.value;
  }
}

void row_order(const RankDispatch& rows, std::span<const std::int32_t> slots, RankDispatchWorkspace& ws,
               std::span<std::int32_t> order) {
  if (static_cast<std::int64_t>(order.size()) != rows.sent) {
    throw InputError({.field = "order"}, fmt::format("has {} entries, expected {}", order.size(), rows.sent));
  }
  const auto num_slots = static_cast<std::size_t>(rows.num_slots);
  ws.next.resize(rows.send.size() * num_slots);
  for (std::size_t b = 0; b < rows.blocks.size(); ++b) {
    ws.next[rows.blocks[b].replica.index() * num_slots + rows.blocks[b].slot.index()] = rows.first[b];
  }
  for (std::size_t entry = 0; entry < slots.size(); ++entry) {
    if (slots[entry] < 0) continue;
    const auto slot = static_cast<std::size_t>(slots[entry]);
    const std::int64_t row = slot < ws.next.size() ? ws.next[slot]++ : rows.sent;
    if (row >= rows.sent) {
      throw InputError({.field = "slots", .index = fmt::format("[{}]", entry)}, "is not the result of row_slots()");
    }
    order[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(entry);
  }
}

}  // namespace foremoe
