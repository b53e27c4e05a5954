#include "foremoe/transfer/copy_paths.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace foremoe {

// A copy read only by forward turns, or only by backward turns, contains only the segments of that pass.
static Bytes bytes_of(const ScheduledCopy& copy, const PathProblem& problem) {
  const TurnOrder& order = problem.order;
  if (order.backward.empty()) return problem.layout.bytes_read_by(Pass::kForward);
  if (copy.arrives == copy.closes) return problem.layout.bytes_read_by(order[copy.arrives].pass);
  return problem.layout.bytes();
}

// Time that each link takes for the bytes assigned to it.
class LinkLoads {
 public:
  explicit LinkLoads(const ClusterLinks& links) : links_(links), seconds_(static_cast<std::size_t>(links.size())) {}

  // Time of the busiest link on the way after adding `bytes`.
  double done_with(const Way& way, Bytes bytes) {
    links_.cross(way, bytes, crossings_);
    double last = 0;
    for (const auto& crossing : crossings_) last = std::max(last, seconds_[crossing.link.index()] + crossing.seconds);
    return last;
  }

  void add(const Way& way, Bytes bytes) {
    links_.cross(way, bytes, crossings_);
    for (const auto& crossing : crossings_) seconds_[crossing.link.index()] += crossing.seconds;
  }

  double busiest() const { return seconds_.empty() ? 0 : *std::ranges::max_element(seconds_); }

 private:
  const ClusterLinks& links_;
  std::vector<double> seconds_;  // [link]
  std::vector<ClusterLinks::Crossing> crossings_;
};

static Way way_of(const ScheduledCopy& copy, Path path) { return {.path = path, .from = copy.source, .to = copy.rank}; }

// Seconds to fill the arenas plus those of the busiest link.
static double seconds_of(const PathProblem& problem, std::span<const ScheduledCopy> copies) {
  LinkLoads loads(problem.links);
  for (const ScheduledCopy& copy : copies) loads.add(way_of(copy, copy.path), bytes_of(copy, problem));
  const auto arena = experts_of_arenas(problem.plan, copies);
  return load_arenas(arena, problem.plan, problem.layout.bytes(), problem.links).seconds + loads.busiest();
}

// Time to write one more expert to an arena. Depends only on whether the expert's home is on the arena's node.
class ArenaWrites {
 public:
  explicit ArenaWrites(const PathProblem& problem) : problem_(problem) {}

  double seconds(const ScheduledCopy& copy) {
    const Topology topology = problem_.plan.topology();
    const NodeId node = topology.node_of(copy.rank);
    std::optional<double>& seconds = topology.same_node(copy.source, copy.rank) ? near_ : far_;
    if (!seconds) {
      std::vector<std::vector<ArenaExpert>> alone(static_cast<std::size_t>(topology.num_nodes()));
      alone[node.index()].push_back({copy.layer, copy.expert});
      seconds = load_arenas(alone, problem_.plan, problem_.layout.bytes(), problem_.links).seconds;
    }
    return *seconds;
  }

 private:
  const PathProblem& problem_;
  std::optional<double> near_;  // home on the arena's node
  std::optional<double> far_;
};

// Moves copies from peers to the host path if that is faster overall.
static void balance_paths(const PathProblem& problem, std::span<ScheduledCopy> copies) {
  const StepPlan& plan = problem.plan;
  const Topology topology = plan.topology();
  Array<int, 3> fetches({static_cast<std::size_t>(topology.num_nodes()), plan.home.extent(0), plan.home.extent(1)});
  for (const ScheduledCopy& copy : copies) ++fetches(topology.node_of(copy.rank), copy.layer, copy.expert);

  const double by_peers = seconds_of(problem, copies);
  LinkLoads loads(problem.links);
  ArenaWrites writes(problem);
  for (ScheduledCopy& copy : copies) {
    const Bytes bytes = bytes_of(copy, problem);
    const int times = fetches(topology.node_of(copy.rank), copy.layer, copy.expert);
    if (times >= 2) {
      const double by_host = loads.done_with(way_of(copy, Path::kHost), bytes) + writes.seconds(copy) / times;
      if (by_host < loads.done_with(way_of(copy, Path::kPeer), bytes)) copy.path = Path::kHost;
    }
    loads.add(way_of(copy, copy.path), bytes);
  }
  if (seconds_of(problem, copies) < by_peers) return;
  for (ScheduledCopy& copy : copies) copy.path = Path::kPeer;
}

void choose_paths(const PathProblem& problem, std::span<ScheduledCopy> copies) {
  // Under `free` a home may be overwritten before the copy starts, so homes cannot be sources.
  const bool host_alone = problem.choice == PathChoice::kHost || problem.plan.residency == Residency::kFree;
  for (ScheduledCopy& copy : copies) {
    copy.source = problem.plan.home(copy.layer, copy.expert);
    copy.path = host_alone ? Path::kHost : Path::kPeer;
  }
  if (problem.choice == PathChoice::kAuto && !host_alone) balance_paths(problem, copies);
}

ClusterLinks links_between(const Cluster* cluster, const Topology& topology, bool shares_uplink) {
  if (cluster != nullptr) return {*cluster, topology, shares_uplink};
  constexpr LinkSpeed kAlike{.bytes_per_second = 1, .latency_seconds = 0};
  Cluster alike{.peers = kAlike, .network = kAlike, .host = kAlike};
  alike.switch_bytes_per_second = std::numeric_limits<double>::infinity();
  alike.host_memory_bytes_per_second = 1;
  return {alike, topology, shares_uplink};
}

std::vector<std::vector<ArenaExpert>> experts_of_arenas(const StepPlan& plan, std::span<const ScheduledCopy> copies) {
  const Topology topology = plan.topology();
  std::vector<std::vector<ArenaExpert>> arena(topology.num_nodes());
  for (const ScheduledCopy& copy : copies) {
    if (copy.path == Path::kHost) arena[topology.node_of(copy.rank).index()].push_back({copy.layer, copy.expert});
  }
  for (std::vector<ArenaExpert>& experts : arena) {
    std::ranges::sort(experts);
    experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
  }
  return arena;
}

ArenaLoad load_arenas(const std::vector<std::vector<ArenaExpert>>& arena, const StepPlan& plan, Bytes expert,
                      const ClusterLinks& links) {
  const Topology& topology = links.topology();
  const auto nodes = static_cast<std::size_t>(topology.num_nodes());
  ArenaLoad load{.bytes = std::vector<Bytes>(static_cast<std::size_t>(links.size())),
                 .between_nodes = Array<Bytes, 2>({nodes, nodes})};
  const auto carry = [&](LinkId link, Bytes bytes) { load.bytes[link.index()] += bytes; };
  for (std::size_t n = 0; n < nodes; ++n) {
    Bytes from_others;
    for (const ArenaExpert& entry : arena[n]) {
      const RankId home = plan.home(entry.layer, entry.expert);
      carry(links.host_memory(NodeId{n}), expert);
      if (topology.node_of(home) == NodeId{n}) {
        carry(links.of_rank(LinkKind::kHost, LinkSide::kOut, home), expert);
        carry(links.of_switch(LinkSide::kOut, home), expert);
        continue;
      }
      from_others += expert;
      load.between_nodes(topology.node_of(home), n) += expert;
      carry(links.of_rank(LinkKind::kNetwork, LinkSide::kOut, home), expert);
      if (links.shares_uplink()) carry(links.of_rank(LinkKind::kHost, LinkSide::kOut, home), expert);
    }
    const RankRange ranks = topology.ranks_of(NodeId{n});
    const Bytes part{from_others.value / ranks.size()};
    for (int r = ranks.first; r < ranks.last; ++r) {
      carry(links.of_rank(LinkKind::kNetwork, LinkSide::kIn, RankId{r}), part);
      carry(links.of_switch(LinkSide::kOut, RankId{r}), part);  // from network card to host
    }
    load.largest = std::max(load.largest, Bytes{expert.value * static_cast<std::int64_t>(arena[n].size())});
  }
  for (int l = 0; l < links.size(); ++l) {
    load.seconds = std::max(load.seconds, links.seconds(LinkId{l}, load.bytes[static_cast<std::size_t>(l)]));
  }
  return load;
}

}  // namespace foremoe
