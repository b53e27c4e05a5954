#include "foremoe/policy/lplb.h"

#include <algorithm>
#include <functional>

#include "foremoe/policy/former_step.h"
#include "foremoe/policy/free_plan.h"

namespace foremoe {

namespace {

// What every rank holds in one layer, [1][rank][slot]: homes, most loaded first, then copies along the edges.
Array<ExpertId, 3> place_on_edges(std::span<const RankId> home, std::span<const std::int64_t> expected,
                                  ArrayView<const RankId, 2> sources, std::size_t num_ranks, std::size_t guest_slots) {
  const std::size_t num_homes = home.size() / num_ranks;
  Array<ExpertId, 3> placement({1, num_ranks, num_homes + guest_slots}, kNoExpert);
  std::vector<std::size_t> next_slot(num_ranks);
  for (std::size_t e = 0; e < home.size(); ++e) placement(0, home[e], next_slot[home[e].index()]++) = ExpertId{e};
  for (std::size_t r = 0; r < num_ranks; ++r) {
    std::ranges::stable_sort(placement.row(0, r).first(num_homes), std::ranges::greater{},
                             [&](ExpertId e) { return expected[e.index()]; });
  }
  if (sources.size() == 0) return placement;
  const std::size_t num_columns = sources.extent(1);
  const std::size_t num_copies = std::min(guest_slots, num_homes) / num_columns * num_columns;
  for (std::size_t r = 0; r < num_ranks; ++r) {
    for (std::size_t i = 0; i < num_copies; ++i) {
      placement(0, r, num_homes + i) = placement(0, sources(r, i % num_columns), i);
    }
  }
  return placement;
}

class Lplb final : public Policy {
 public:
  explicit Lplb(const LplbOptions& options) : options_(options) {}

  std::string_view name() const override { return "lplb"; }
  std::string_view summary() const override {
    return "LPLB: one copy of each rank's largest experts along the edges of a fixed topology, tokens split by LP";
  }
  // "The solver takes ~100 µs for intra-node optimization, longer for inter-node" (the repository's README).
  OnlineWork online() const override { return {.planning_seconds = 100e-6}; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const LoadTable* const former = former_load(input);
    const Topology topology = input.load.topology();
    const int copies = std::min(input.options.guest_slots, input.load.num_experts() / input.load.num_ranks());
    const bool without_edges = options_.edges == lplb::Edges::kAutomatic && (copies < 1 || topology.num_ranks == 1);
    Array<RankId, 2> sources;
    if (!without_edges) {
      if (auto obstacle = lplb::edges_obstacle(options_.edges, topology, copies)) return Skipped{*std::move(obstacle)};
      const bool is_automatic = options_.edges == lplb::Edges::kAutomatic;
      sources = lplb::edge_sources(is_automatic ? lplb::choose_edges(topology, copies) : options_.edges, topology);
    }
    const auto place = [&](LayerId layer, ArrayView<const std::int64_t, 2> load) {
      const Array<std::int64_t, 2> of_former = former ? layer_load(*former, layer) : Array<std::int64_t, 2>();
      return place_on_edges(input.home.row(layer), sum_over_micro_steps(former ? of_former.view() : load), sources,
                            static_cast<std::size_t>(topology.num_ranks),
                            static_cast<std::size_t>(input.options.guest_slots));
    };
    return plan_freely({.name = name(), .split = Split::kExact, .place = place, .residency = Residency::kResident},
                       input, pool);
  }

 private:
  LplbOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_lplb(const LplbOptions& options) { return std::make_unique<Lplb>(options); }

}  // namespace foremoe
