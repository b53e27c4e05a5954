#include "foremoe/policy/systems/relibra.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>

#include "foremoe/core/timeline.h"
#include "foremoe/policy/placed_plan.h"
#include "foremoe/policy/systems/relibra/node_replication.h"

namespace foremoe {

namespace {

// Chooses the replicas of one layer, node by node.
class LayerReplication {
 public:
  void choose(const LayerLoad& of, std::vector<Share>& shares) {
    for (int n = 0; n < of.topology.num_nodes(); ++n) {
      gather(of, NodeId{n});
      const relibra::NodeReplicas replicas = relibra::replicate_in_node(node_, search_);
      const int first_rank = of.topology.ranks_of(NodeId{n}).first;
      for (int s = 0; s < replicas.graph.num_slots(); ++s) {
        const int e = replicas.graph.expert_in(s);
        const int rank = replicas.graph.rank_of(s);
        if (e < 0 || rank == node_.home[e] || replicas.assignment.quota[s] == 0) continue;
        shares.push_back({experts_[e], RankId{first_rank + rank}, replicas.assignment.quota[s]});
      }
    }
  }

 private:
  void gather(const LayerLoad& of, NodeId node) {
    const RankRange ranks = of.topology.ranks_of(node);
    node_.num_ranks = ranks.size();
    node_.guest_slots = of.guest_slots;
    node_.home.clear();
    node_.load.clear();
    experts_.clear();
    for (int e = 0; e < std::ssize(of.home); ++e) {
      if (of.topology.node_of(of.home[e]) != node) continue;
      experts_.push_back(ExpertId{e});
      node_.home.push_back(of.home[e].value - ranks.first);
      node_.load.push_back(of.of_expert[e]);
    }
  }

  relibra::NodeLoad node_;
  std::vector<ExpertId> experts_;  // of node_
  planner::AssignmentSearch search_;
};

class Relibra final : public Policy {
 public:
  explicit Relibra(const RelibraOptions& options) : options_(options) {}

  std::string_view name() const override { return "relibra"; }
  std::string_view summary() const override {
    return "ReLibra: homes annealed across nodes once per step, greedy replicas within nodes in every micro-step";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return true; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    expect_valid(input.load, input.load.name);
    FetchedPolicy policy{.name = name(), .of_layer = [](LayerId) {
                           return [replication = std::make_shared<LayerReplication>()](const LayerLoad& of,
                                                                                       std::vector<Share>& shares) {
                             replication->choose(of, shares);
                           };
                         }};
    const bool is_even = input.load.num_experts() % input.load.num_ranks() == 0;
    if (!options_.reorder || !is_even || input.load.topology().num_nodes() == 1) {
      return plan_fetched(policy, input, pool);
    }

    const auto begin = std::chrono::steady_clock::now();
    check_policy_input(input);
    Array<RankId, 2> home(input.home.shape());
    std::vector<double> cpu_seconds(home.extent(0));  // [layer]
    pool.for_each_index(home.extent(0), [&](std::size_t l, std::size_t) {
      const double layer_begin = thread_cpu_seconds();
      const std::uint64_t seed = input.options.seed + 0x9e3779b97f4a7c15 * (l + 1);  // a separate sequence per layer
      std::ranges::copy(relibra::reorder_experts(input.load, LayerId{l}, input.home.row(l), options_.reordering, seed),
                        home.row(l).begin());
      cpu_seconds[l] = thread_cpu_seconds() - layer_begin;
    });
    policy.home = home;
    const double reordering_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    PolicyResult result = plan_fetched(policy, input, pool);
    if (auto* step = std::get_if<PlannedStep>(&result)) {
      step->times.base_cpu_seconds = std::accumulate(cpu_seconds.begin(), cpu_seconds.end(), 0.0);
      step->times.once_of_layer = std::move(cpu_seconds);
      step->times.wall_seconds += reordering_seconds;
    }
    return result;
  }

  std::vector<Option> options() override {
    return {number_option({.name = "move_price", .help = "A moved home costs as much as this many tokens"},
                          options_.reordering.move_price, {})};
  }
  std::unique_ptr<Policy> copy() const override { return std::make_unique<Relibra>(*this); }

 private:
  RelibraOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_relibra(const RelibraOptions& options) { return std::make_unique<Relibra>(options); }

}  // namespace foremoe
