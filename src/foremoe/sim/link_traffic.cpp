#include "foremoe/sim/link_traffic.h"

#include <algorithm>

#include "foremoe/sim/layer_scale.h"

namespace foremoe {

namespace {

std::int64_t round_trips(const ReplayProblem& phase) {
  const CostModel& cost = phase.input.cost;
  const bool updates = phase.options.phase == Phase::kPolicyUpdate;
  return cost.round_trips(Pass::kForward) + (updates ? cost.round_trips(Pass::kBackward) : 0);
}

// What rows take one way they or their gradients take back, so both directions carry the same.
std::vector<Bytes> bytes_of_rows(const ReplayProblem& phase) {
  const ClusterLinks& links = phase.links;
  std::vector<Bytes> bytes(static_cast<std::size_t>(links.size()));
  const std::int64_t per_row = phase.input.cost.row().value * round_trips(phase);
  const auto carry = [&](LinkKind kind, std::size_t rank, std::int64_t rows) {
    for (const LinkSide side : {LinkSide::kIn, LinkSide::kOut}) {
      bytes[links.of_rank(kind, side, RankId{rank}).index()] += Bytes{rows * per_row};
    }
  };
  for (const LayerProfile& layer : phase.profile.layers) {
    for (std::size_t r = 0; r < layer.rows.size(); ++r) {
      const RankRows& rows = layer.rows[r];
      const std::int64_t network = rows.sent_to_nodes + rows.received_from_nodes;
      carry(LinkKind::kPeers, r, rows.sent_to_peers + rows.received_from_peers);
      carry(LinkKind::kNetwork, r, network);
      if (links.shares_uplink()) carry(LinkKind::kHost, r, network);
    }
  }
  return bytes;
}

}  // namespace

std::vector<LinkTraffic> link_traffic(const TrafficProblem& problem) {
  const ClusterLinks& links = problem.phase.links;
  const std::vector<Bytes> rows = bytes_of_rows(problem.phase);
  std::vector<LinkTraffic> traffic;
  for (int k = 0; k < kNumLinkKinds; ++k) traffic.push_back({.link = std::string(to_string(static_cast<LinkKind>(k)))});
  for (std::size_t l = 0; l < static_cast<std::size_t>(links.size()); ++l) {
    const ClusterLinks::Named named = links[LinkId{l}];
    LinkTraffic& kind = traffic[static_cast<std::size_t>(named.kind)];
    const Bytes copies = problem.replay.copy_bytes[l] + problem.arena.bytes[l];
    const Bytes gradients = problem.replay.gradient_bytes[l];
    const double scale = problem.phase.layer_scale;
    const Bytes all = scaled(rows[l] + copies + gradients, scale);
    // What leaves one rank enters another, so one side counts; what goes to an arena only leaves.
    const bool host = named.kind == LinkKind::kHost || named.kind == LinkKind::kSwitch;
    if (named.side == LinkSide::kIn) {
      kind.rows += scaled(rows[l], scale);
      kind.copies += scaled(copies, scale);
      kind.gradients += scaled(gradients, scale);
    } else if (host) {
      kind.copies += scaled(problem.arena.bytes[l], scale);
    }
    kind.busiest = std::max(kind.busiest, all);
    if (problem.seconds > 0) {
      kind.busiest_use = std::max(kind.busiest_use, links.seconds(LinkId{l}, all) / problem.seconds);
    }
  }
  return traffic;
}

Array<Bytes, 2> bytes_between_nodes(const TrafficProblem& problem) {
  const ReplayProblem& phase = problem.phase;
  Array<Bytes, 2> bytes = problem.replay.copies_between;
  const auto& rows = phase.profile.rows_between;
  for (std::size_t from = 0; from < bytes.extent(0); ++from) {
    for (std::size_t to = 0; to < bytes.extent(1); ++to) {
      const std::int64_t both_ways = rows.empty() ? 0 : rows(from, to) + rows(to, from);
      bytes(from, to) +=
          problem.arena.between_nodes(from, to) + Bytes{both_ways * round_trips(phase) * phase.input.cost.row().value};
      bytes(from, to) = scaled(bytes(from, to), phase.layer_scale);
    }
  }
  return bytes;
}

}  // namespace foremoe
