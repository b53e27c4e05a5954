#include "foremoe/sim/layer_rows.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"

namespace foremoe {

namespace {

using Replica = RowWorkspace::Replica;

void clear(const Topology& topology, LayerRows& rows) {
  const auto ranks = static_cast<std::size_t>(topology.num_ranks);
  const auto nodes = static_cast<std::size_t>(topology.num_nodes());
  rows.ranks.assign(ranks, {});
  rows.assignments.assign(ranks, 0);
  if (rows.between_nodes.shape() != std::array{nodes, nodes})
    rows.between_nodes = Array<std::int64_t, 2>({nodes, nodes});
  std::ranges::fill(rows.between_nodes.flat(), 0);
}

class Counter {
 public:
  Counter(const RoutingProblem& problem, RowWorkspace& workspace, LayerRows& rows)
      : problem_(problem), ws_(workspace), rows_(rows), num_experts_(static_cast<int>(problem.load.extent(1))) {}

  void count() {
    clear(problem_.topology, rows_);
    collect_replicas();
    add_sources();
    for (int e = 0; e < num_experts_; ++e) route(ExpertId{e});
    for (std::size_t s = 0; s < rows_.ranks.size(); ++s) {
      rows_.ranks[s].sent_to_nodes = rows_.assignments[s] - ws_.kept[s];
    }
  }

 private:
  void collect_replicas() {
    ws_.replicas.resize(static_cast<std::size_t>(num_experts_));
    for (auto& replicas : ws_.replicas) replicas.clear();
    const LayerQuotas& quotas = problem_.quotas;
    for (std::size_t r = 0; r < quotas.slot_expert.extent(0); ++r) {
      for (std::size_t s = 0; s < quotas.slot_expert.extent(1); ++s) {
        const ExpertId e = quotas.slot_expert(r, s);
        const std::int64_t tokens = quotas.slot_tokens(r, s).value;
        if (e != kNoExpert && tokens > 0) ws_.replicas[e.index()].push_back({RankId{r}, tokens});
      }
    }
  }

  void add_sources() {
    const Topology& topology = problem_.topology;
    const std::array shape{static_cast<std::size_t>(topology.num_nodes()), static_cast<std::size_t>(num_experts_)};
    if (ws_.node_load.shape() != shape) ws_.node_load = Array<std::int64_t, 2>(shape);
    std::ranges::fill(ws_.node_load.flat(), 0);
    ws_.kept.assign(rows_.ranks.size(), 0);
    ws_.carry.assign(rows_.ranks.size(), 0);
    for (int s = 0; s < topology.num_ranks; ++s) {
      const std::span<const Tokens> load = problem_.load.row(s);
      const std::span<std::int64_t> node = ws_.node_load.row(topology.node_of(RankId{s}));
      std::int64_t sum = 0;
      for (std::size_t e = 0; e < load.size(); ++e) {
        node[e] += load[e].value;
        sum += load[e].value;
      }
      rows_.assignments[static_cast<std::size_t>(s)] = sum;
    }
  }

  void route(ExpertId e) {
    std::vector<Replica>& replicas = ws_.replicas[e.index()];
    for (auto first = replicas.begin(); first != replicas.end();) {
      const NodeId node = problem_.topology.node_of(first->rank);
      const auto last = std::find_if(first, replicas.end(),
                                     [&](const Replica& r) { return problem_.topology.node_of(r.rank) != node; });
      sweep_node(e, node, {first, last});
      first = last;
    }
    sweep_the_rest(e, replicas);
  }

  // Gives each replica rows of its own rank, then each source's share of the rest; all in ascending order.
  void sweep_node(ExpertId e, NodeId node, std::span<Replica> replicas) {
    const RankRange ranks = problem_.topology.ranks_of(node);
    ws_.rows_left.clear();
    std::int64_t stayed = 0;
    for (int s = ranks.first; s < ranks.last; ++s) ws_.rows_left.push_back(problem_.load(s, e).value);
    const auto keep = [&](int source, std::int64_t rows) {
      ws_.rows_left[static_cast<std::size_t>(source - ranks.first)] -= rows;
      ws_.kept[static_cast<std::size_t>(source)] += rows;
      stayed += rows;
    };
    for (Replica& replica : replicas) {
      const int own = replica.rank.value;
      const std::int64_t rows = std::min(replica.left, ws_.rows_left[static_cast<std::size_t>(own - ranks.first)]);
      replica.left -= rows;
      keep(own, rows);
    }
    std::int64_t quota = 0;
    for (const Replica& replica : replicas) quota += replica.left;
    ws_.share.resize(ws_.rows_left.size());
    divide_fairly(quota, ws_.rows_left, std::span(ws_.carry).subspan(ranks.first, ranks.size()), ws_.share);
    auto replica = replicas.begin();
    for (int s = ranks.first; s < ranks.last; ++s) {
      std::int64_t left = ws_.share[static_cast<std::size_t>(s - ranks.first)];
      keep(s, left);
      rows_.ranks[static_cast<std::size_t>(s)].sent_to_peers += left;
      while (left > 0) {
        const std::int64_t rows = std::min(replica->left, left);
        replica->left -= rows;
        left -= rows;
        rows_.ranks[replica->rank.index()].received_from_peers += rows;
        if (replica->left == 0) ++replica;
      }
    }
    ws_.node_load(node, e) -= stayed;
  }

  // Assigns the remaining rows of the nodes to the remaining quotas of the replicas, both in ascending order.
  void sweep_the_rest(ExpertId e, std::span<Replica> replicas) {
    auto replica = replicas.begin();
    for (std::size_t n = 0; n < ws_.node_load.extent(0); ++n) {
      std::int64_t left = ws_.node_load(n, e);
      while (left > 0) {
        while (replica != replicas.end() && replica->left == 0) ++replica;
        if (replica == replicas.end()) refuse(e);
        const std::int64_t rows = std::min(replica->left, left);
        replica->left -= rows;
        left -= rows;
        rows_.ranks[replica->rank.index()].received_from_nodes += rows;
        rows_.between_nodes(n, problem_.topology.node_of(replica->rank)) += rows;
      }
    }
    for (; replica != replicas.end(); ++replica) {
      if (replica->left != 0) refuse(e);
    }
  }

  [[noreturn]] static void refuse(ExpertId e) {
    throw InputError({.field = "slot_tokens"}, fmt::format("the quotas of expert {} do not sum to its load", e.value));
  }

  const RoutingProblem& problem_;
  RowWorkspace& ws_;
  LayerRows& rows_;
  int num_experts_;
};

}  // namespace

void count_rows(const RoutingProblem& problem, RowWorkspace& workspace, LayerRows& rows) {
  Counter(problem, workspace, rows).count();
}

void count_token_rows(const RoutingProblem& problem, const TokenDispatch& dispatch, LayerRows& rows) {
  const Topology& topology = problem.topology;
  clear(topology, rows);
  const auto within = [&](RankId gate, NodeId node, RankId source) {
    const RankRange ranks = topology.ranks_of(node);
    for (int d = ranks.first; d < ranks.last; ++d) {
      if (RankId{d} == gate) continue;
      const std::int64_t count = dispatch.to_rank(source, d).value;
      rows.ranks[gate.index()].sent_to_peers += count;
      rows.ranks[static_cast<std::size_t>(d)].received_from_peers += count;
    }
  };
  for (int s = 0; s < topology.num_ranks; ++s) {
    const RankId source{s};
    const NodeId home = topology.node_of(source);
    for (const Tokens load : problem.load.row(source)) rows.assignments[source.index()] += load.value;
    for (int n = 0; n < topology.num_nodes(); ++n) {
      const RankRange ranks = topology.ranks_of(NodeId{n});
      if (NodeId{n} == home) {
        within(source, home, source);
        continue;
      }
      const int place = (s - topology.ranks_of(home).first) % ranks.size();
      const RankId gate{ranks.first + place};
      const std::int64_t count = dispatch.to_node(source, n).value;
      rows.ranks[source.index()].sent_to_nodes += count;
      rows.ranks[gate.index()].received_from_nodes += count;
      rows.between_nodes(home, n) += count;
      within(gate, NodeId{n}, source);
    }
  }
}

}  // namespace foremoe
