#include "foremoe/transfer/copy_paths.h"

#include <algorithm>

namespace foremoe {

static Topology topology_of(const StepPlan& plan) {
  return {.num_ranks = plan.num_ranks(), .ranks_per_node = plan.ranks_per_node};
}

// Bytes that each link has moved since the step began.
class LinkLoads {
 public:
  explicit LinkLoads(const Topology& topology)
      : topology_(topology),
        host_link_(topology.num_ranks),
        arena_(topology.num_nodes()),
        node_ingress_(topology.num_ranks),
        egress_(topology.num_ranks),
        between_({static_cast<std::size_t>(topology.num_nodes()), static_cast<std::size_t>(topology.num_nodes())}) {}

  Path lighter(RankId source, RankId to) {
    const auto busiest = [](const auto& links) {
      return **std::ranges::max_element(links, {}, [](auto* l) { return *l; });
    };
    return busiest(host_path(to)) < busiest(peer_path(source, to)) ? Path::kHost : Path::kPeer;
  }

  void add(Path path, RankId source, RankId to, Bytes bytes) {
    for (Bytes* link : path == Path::kHost ? host_path(to) : peer_path(source, to)) *link += bytes;
  }

 private:
  std::vector<Bytes*> host_path(RankId to) { return {&host_link_[to.index()], &arena_[topology_.node_of(to).index()]}; }
  std::vector<Bytes*> peer_path(RankId source, RankId to) {
    if (topology_.same_node(source, to)) return {&node_ingress_[to.index()], &egress_[source.index()]};
    return {&host_link_[to.index()], &egress_[source.index()],
            &between_(topology_.node_of(source), topology_.node_of(to))};
  }

  Topology topology_;
  std::vector<Bytes> host_link_;     // [rank]
  std::vector<Bytes> arena_;         // [node]
  std::vector<Bytes> node_ingress_;  // [rank], from ranks of its node
  std::vector<Bytes> egress_;        // [rank]
  Array<Bytes, 2> between_;          // [from node][to node]
};

// A copy that only forward or only backward turns read moves their segments alone.
static Bytes bytes_of(const ScheduledCopy& copy, const PathProblem& problem) {
  const TurnOrder& order = problem.order;
  if (order.backward.empty()) return problem.layout.bytes_read_by(Pass::kForward);
  if (copy.arrives == copy.closes) return problem.layout.bytes_read_by(order[copy.arrives].pass);
  return problem.layout.bytes();
}

static void balance_paths(const PathProblem& problem, std::span<ScheduledCopy> copies) {
  const StepPlan& plan = problem.plan;
  const Topology topology = topology_of(plan);
  Array<int, 3> fetches({static_cast<std::size_t>(topology.num_nodes()), plan.home.extent(0), plan.home.extent(1)});
  for (const ScheduledCopy& copy : copies) ++fetches(topology.node_of(copy.rank), copy.layer, copy.expert);

  LinkLoads loads(topology);
  for (ScheduledCopy& copy : copies) {
    const bool arena_pays = fetches(topology.node_of(copy.rank), copy.layer, copy.expert) >= 2;
    copy.path = arena_pays ? loads.lighter(copy.source, copy.rank) : Path::kPeer;
    loads.add(copy.path, copy.source, copy.rank, bytes_of(copy, problem));
  }
}

void choose_paths(const PathProblem& problem, std::span<ScheduledCopy> copies) {
  for (ScheduledCopy& copy : copies) {
    copy.source = problem.plan.home(copy.layer, copy.expert);
    copy.path = problem.choice == PathChoice::kPeer ? Path::kPeer : Path::kHost;
  }
  // Under `free` a home may be overwritten before the copy begins, so its slot is no source.
  if (problem.choice == PathChoice::kAuto && problem.plan.residency != Residency::kFree) balance_paths(problem, copies);
}

std::vector<std::vector<ArenaExpert>> experts_of_arenas(const StepPlan& plan, std::span<const ScheduledCopy> copies) {
  const Topology topology = topology_of(plan);
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

}  // namespace foremoe
