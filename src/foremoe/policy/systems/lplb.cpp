#include "foremoe/policy/systems/lplb.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <span>

#include "foremoe/policy/placed_plan.h"

namespace foremoe::lplb {

namespace {

constexpr std::array<int, 16> kCube = {3, 0, 1, 2, 7, 4, 5, 6,                                         // first column
                                       6, 7, 4, 5, 0, 1, 2, 3};                                        // second column
constexpr std::array<int, 32> kHypercube = {3,  0,  1,  2,  7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14,  //
                                            12, 13, 14, 15, 0, 1, 2, 3, 4,  5, 6, 7,  8,  9,  10, 11};

bool has_torus(const Topology& topology) {
  return topology.ranks_per_node >= 2 && topology.num_nodes() >= 2 && topology.num_ranks % topology.ranks_per_node == 0;
}

int ring_size(const Topology& topology) { return topology.num_ranks % 8 == 0 ? 8 : topology.num_ranks; }

// `table` is [column][rank of the group].
Array<RankId, 2> repeated(std::span<const int> table, int group, int num_ranks) {
  const std::size_t num_columns = table.size() / static_cast<std::size_t>(group);
  Array<RankId, 2> sources({static_cast<std::size_t>(num_ranks), num_columns});
  for (int r = 0; r < num_ranks; ++r) {
    for (std::size_t c = 0; c < num_columns; ++c) {
      sources(r, c) = RankId{r / group * group + table[c * static_cast<std::size_t>(group) + r % group]};
    }
  }
  return sources;
}

Array<RankId, 2> torus(const Topology& topology) {
  const int nodes = topology.num_nodes();
  const int per_node = topology.ranks_per_node;
  Array<RankId, 2> sources({static_cast<std::size_t>(topology.num_ranks), 2});
  for (int i = 0; i < nodes; ++i) {
    for (int j = 0; j < per_node; ++j) {
      sources(i * per_node + j, 0) = RankId{(i + 1) % nodes * per_node + j};
      sources(i * per_node + j, 1) = RankId{i * per_node + (j + 1) % per_node};
    }
  }
  return sources;
}

}  // namespace

Edges choose_edges(const Topology& topology, int copies) {
  if (copies < 2) return Edges::kRing;
  if (topology.num_ranks == 16) return Edges::kHypercube;
  if (topology.num_ranks == 8) return Edges::kCube;
  if (has_torus(topology)) return Edges::kTorus;
  return topology.num_ranks % 8 == 0 ? Edges::kCube : Edges::kRing;
}

std::optional<std::string> edges_error(Edges edges, const Topology& topology, int copies) {
  const auto unless = [&](std::string_view name, std::string_view asks, bool ranks_fit,
                          int columns) -> std::optional<std::string> {
    if (!ranks_fit) return fmt::format("the {} asks for {}, not {} ranks", name, asks, topology.num_ranks);
    if (copies < columns) {
      return fmt::format("the {} asks for {} guest slots and {} experts per rank at least", name, columns, columns);
    }
    return std::nullopt;
  };
  switch (edges) {
    case Edges::kAutomatic:
      return edges_error(choose_edges(topology, copies), topology, copies);
    case Edges::kRing:
      return unless("ring", "at least two ranks", topology.num_ranks >= 2, 1);
    case Edges::kCube:
      return unless("cube", "a multiple of 8 ranks", topology.num_ranks % 8 == 0, 2);
    case Edges::kHypercube:
      return unless("hypercube", "a multiple of 16 ranks", topology.num_ranks % 16 == 0, 2);
    case Edges::kTorus:
      return unless("torus", "several nodes of equal size, at least two ranks each", has_torus(topology), 2);
  }
  return std::nullopt;
}

Array<RankId, 2> edge_sources(Edges edges, const Topology& topology) {
  switch (edges) {
    case Edges::kCube:
      return repeated(kCube, 8, topology.num_ranks);
    case Edges::kHypercube:
      return repeated(kHypercube, 16, topology.num_ranks);
    case Edges::kTorus:
      return torus(topology);
    case Edges::kRing:
    case Edges::kAutomatic:
      break;
  }
  std::vector<int> ring;
  for (int r = 0; r < ring_size(topology); ++r) ring.push_back((r + 1) % ring_size(topology));
  return repeated(ring, ring_size(topology), topology.num_ranks);
}

}  // namespace foremoe::lplb

namespace foremoe {

namespace {

// Returns one layer's placement, [1][rank][slot]: homes, most loaded first, then copies along the edges.
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
    return "LPLB: copies each rank's largest experts along the edges of a fixed topology, tokens split by LP";
  }
  bool plans_ahead(const PolicyInput& input) const override { return input.previous_load == nullptr; }
  // "The solver takes ~100 µs for intra-node optimization, longer for inter-node" (the repository's README).
  OnlineWork online() const override { return {.gathers_loads = true, .planning_seconds = 100e-6}; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    expect_valid(input.load, input.load.name);
    const LoadTable* const former = former_load(input);
    const Topology topology = input.load.topology();
    const int copies = std::min(input.options.guest_slots, input.load.num_experts() / input.load.num_ranks());
    const bool without_edges = options_.edges == lplb::Edges::kAutomatic && (copies < 1 || topology.num_ranks == 1);
    Array<RankId, 2> sources;
    if (!without_edges) {
      if (auto reason = lplb::edges_error(options_.edges, topology, copies)) return Skipped{*std::move(reason)};
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
