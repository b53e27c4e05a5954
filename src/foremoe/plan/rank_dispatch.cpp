#include "foremoe/plan/rank_dispatch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

// Rows have numbers of 32 bits.
void expect_numbered(std::int64_t rows) {
  if (rows <= std::numeric_limits<std::int32_t>::max()) return;
  throw InputError({.field = "load"},
                   fmt::format("gives one rank {} rows in one layer, more than can be executed", rows));
}

// Sent rows lie by destination, then expert: shipments come by expert.
void lay_out_sent(std::span<const Shipment> shipments, std::size_t num_ranks, RankDispatchWorkspace& ws,
                  RankDispatch& rows) {
  rows.send.assign(num_ranks, 0);
  for (const Shipment& s : shipments) rows.send[s.replica.index()] += s.rows.value;
  ws.next.resize(num_ranks);
  std::exclusive_scan(rows.send.begin(), rows.send.end(), ws.next.begin(), std::int64_t{0});
  rows.sent = num_ranks == 0 ? 0 : ws.next.back() + rows.send.back();
  expect_numbered(rows.sent);
  rows.blocks.clear();
  for (const Shipment& s : shipments) {
    rows.blocks.push_back({s.expert, s.replica, ws.next[s.replica.index()], s.rows.value});
    ws.next[s.replica.index()] += s.rows.value;
  }
}

// Received rows lie by source, then expert; computed rows by slot, then source.
void lay_out_received(std::span<const Shipment> shipments, std::span<const ExpertId> slots, std::size_t num_ranks,
                      RankDispatchWorkspace& ws, RankDispatch& rows) {
  ws.slot_of.assign(static_cast<std::size_t>(rows.num_experts), -1);
  for (std::size_t s = 0; s < slots.size(); ++s) {
    if (slots[s] != kNoExpert) ws.slot_of[slots[s].index()] = static_cast<std::int32_t>(s);
  }
  rows.recv.assign(num_ranks, 0);
  rows.slot_offsets.assign(slots.size() + 1, 0);
  rows.received.assign(slots.size() * num_ranks, 0);
  for (const Shipment& s : shipments) {
    const auto slot = static_cast<std::size_t>(ws.slot_of[s.expert.index()]);
    rows.received[slot * num_ranks + s.source.index()] += s.rows.value;
    rows.recv[s.source.index()] += s.rows.value;
    rows.slot_offsets[slot + 1] += s.rows.value;
  }
  std::partial_sum(rows.slot_offsets.begin(), rows.slot_offsets.end(), rows.slot_offsets.begin());

  ws.first.resize(rows.received.size());
  std::int64_t row = 0;
  for (std::size_t source = 0; source < num_ranks; ++source) {
    for (const std::int32_t slot : ws.slot_of) {  // experts ascending
      if (slot < 0) continue;
      const std::size_t at = static_cast<std::size_t>(slot) * num_ranks + source;
      ws.first[at] = row;
      row += rows.received[at];
    }
  }
  expect_numbered(row);
  rows.to_slots.resize(static_cast<std::size_t>(row));
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
  for (const RankDispatch::Block& block : rows.blocks) counted[block.expert.index()] -= block.rows;
  const auto wrong = std::ranges::find_if(counted, [](std::int64_t n) { return n != 0; });
  assert(wrong != counted.end());
  throw InputError({.field = "routes"},
                   fmt::format("rank {} has {} rows {} of expert {} than the planned load counts", rows.rank.value,
                               std::abs(*wrong), *wrong > 0 ? "more" : "fewer", wrong - counted.begin()));
}

}  // namespace

void rank_dispatch(const RoutingProblem& problem, RankId rank, RankDispatchWorkspace& ws, RankDispatch& rows) {
  const std::size_t num_ranks = problem.load.extent(0);
  rows.rank = rank;
  rows.num_experts = static_cast<int>(problem.load.extent(1));
  route_tokens_of(problem, rank, ws.route, ws.routed);
  lay_out_sent(ws.routed.sent, num_ranks, ws, rows);
  lay_out_received(ws.routed.received, problem.quotas.slot_expert.row(rank), num_ranks, ws, rows);
}

void row_order(const RankDispatch& rows, std::span<const ExpertId> routes, RankDispatchWorkspace& ws,
               std::span<std::int32_t> order) {
  assert(static_cast<std::int64_t>(order.size()) == rows.sent);
  if (routes.size() > std::numeric_limits<std::int32_t>::max()) {
    throw InputError({.field = "routes"}, fmt::format("{} entries, more than can be executed", routes.size()));
  }
  const auto num_experts = static_cast<std::size_t>(rows.num_experts);
  ws.next.assign(num_experts, 0);  // rows that the expert's block still takes
  ws.block.assign(num_experts, rows.blocks.size());
  for (std::size_t b = rows.blocks.size(); b-- > 0;) {
    ws.block[rows.blocks[b].expert.index()] = b;
    ws.next[rows.blocks[b].expert.index()] = rows.blocks[b].rows;
  }

  std::int64_t sent = 0;
  for (std::size_t row = 0; row < routes.size(); ++row) {
    const ExpertId e = routes[row];
    if (e < ExpertId{0}) continue;
    if (e.index() >= num_experts) refuse_routes(rows, routes);
    std::size_t& b = ws.block[e.index()];
    std::int64_t& left = ws.next[e.index()];
    if (left == 0) {
      if (b + 1 >= rows.blocks.size() || rows.blocks[b + 1].expert != e) refuse_routes(rows, routes);
      left = rows.blocks[++b].rows;
    }
    order[static_cast<std::size_t>(rows.blocks[b].first + rows.blocks[b].rows - left)] = static_cast<std::int32_t>(row);
    --left;
    ++sent;
  }
  if (sent != rows.sent) refuse_routes(rows, routes);
}

}  // namespace foremoe
