#include "foremoe/policy/systems/flexmoe.h"

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/policy/inside_first.h"
#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

// Compares ratios of largest to smallest load without dividing: a / b < c / d.
bool is_less_uneven(std::span<const std::int64_t> a, std::span<const std::int64_t> b) {
  const auto ratio = [](std::span<const std::int64_t> loads) {
    const auto [smallest, largest] = std::ranges::minmax(loads);
    return std::pair(static_cast<double>(largest), static_cast<double>(smallest));
  };
  const auto [largest_a, smallest_a] = ratio(a);
  const auto [largest_b, smallest_b] = ratio(b);
  return largest_a * smallest_b < largest_b * smallest_a;
}

// Returns [rank][slot]: each rank's home experts, then, in its guest slots, those of the next ranks, rank by rank.
Array<ExpertId, 2> uniform_placement(std::span<const RankId> home, std::size_t num_ranks, std::size_t guest_slots) {
  const std::size_t num_homes = home.size() / num_ranks;
  Array<ExpertId, 2> placement({num_ranks, num_homes + guest_slots}, kNoExpert);
  std::vector<std::size_t> next_slot(num_ranks);
  for (std::size_t e = 0; e < home.size(); ++e) placement(home[e], next_slot[home[e].index()]++) = ExpertId{e};
  for (std::size_t r = 0; r < num_ranks; ++r) {
    for (std::size_t g = 0; g < guest_slots && g < num_homes * (num_ranks - 1); ++g) {
      placement(r, num_homes + g) = placement((r + 1 + g / num_homes) % num_ranks, g % num_homes);
    }
  }
  return placement;
}

class FlexMoe final : public Policy {
 public:
  explicit FlexMoe(const FlexMoeOptions& options) : options_(options) {}

  std::string_view name() const override { return "flexmoe"; }
  std::string_view summary() const override {
    return "FlexMoE: moves a few replicas to the hottest experts in every micro-step, by the previous five";
  }
  bool plans_ahead(const PolicyInput& input) const override { return input.previous_load == nullptr; }
  std::string why_cold(const PlannerOptions& options) const override {
    return options.guest_slots == 0 ? "there are no guest slots" : "";
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const LoadTable* const former = former_load(input);
    if (former != nullptr && former->num_micro_steps() == 0) {
      throw InputError({.file = former->name, .field = "load"}, "must have at least one micro-step");
    }
    std::vector<Array<ExpertId, 3>> layouts(input.load.load.extent(1));  // [layer]
    FreePolicy policy{.name = name(), .split = Split::kEqual, .place = {}};
    policy.place = [&](LayerId layer, ArrayView<const std::int64_t, 2> load) {
      layouts[layer.index()] = adapt(input, layer, load);
      return layouts[layer.index()];
    };
    if (options_.inside_first) policy.own_split = split_inside_first(input, layouts);
    return plan_freely(policy, input, pool);
  }

 private:
  Array<ExpertId, 3> adapt(const PolicyInput& input, LayerId layer, ArrayView<const std::int64_t, 2> load) const {
    const Array<ExpertId, 2> first = first_placement(input, layer);
    Array<ExpertId, 3> placements({load.extent(0), first.extent(0), first.extent(1)}, kNoExpert);
    FlexMoePlacement placement(first, input.load.num_experts());
    for (std::size_t m = 0; m < load.extent(0); ++m) {
      flexmoe_adapt(placement, expected(input, layer, load, m), options_);
      placement.write(placements[m]);
    }
    return placements;
  }

  // Returns the load by which micro-step m is planned: [expert], tokens.
  std::vector<std::int64_t> expected(const PolicyInput& input, LayerId layer, ArrayView<const std::int64_t, 2> load,
                                     std::size_t m) const {
    const auto history = static_cast<std::size_t>(options_.history);
    if (history == 0) return sum_over_micro_steps(load, m, 1);
    const LoadTable* const former = input.previous_load;
    if (former == nullptr && m == 0) return sum_over_micro_steps(load);
    const std::size_t own = std::min(history, m);
    std::vector<std::int64_t> sum = sum_over_micro_steps(load, m - own, own);
    if (former != nullptr && own < history) {
      const auto num_former = static_cast<std::size_t>(former->num_micro_steps());
      const std::size_t count = std::min(history - own, num_former);
      std::ranges::transform(sum_over_micro_steps(layer_load(*former, layer), num_former - count, count), sum,
                             sum.begin(), std::plus<>{});
    }
    return sum;
  }

  Array<ExpertId, 2> first_placement(const PolicyInput& input, LayerId layer) const {
    if (const StepPlan* former = former_plan(input, name()); former != nullptr) return last_placement(*former, layer);
    return uniform_placement(input.home.row(layer), input.load.load.extent(2),
                             static_cast<std::size_t>(input.options.guest_slots));
  }

  FlexMoeOptions options_;
};

}  // namespace

FlexMoePlacement::FlexMoePlacement(ArrayView<const ExpertId, 2> placement, int num_experts)
    : replicas_({placement.extent(0), static_cast<std::size_t>(num_experts)}), num_replicas_(num_experts) {
  for (std::size_t r = 0; r < placement.extent(0); ++r) {
    for (const ExpertId e : placement.row(r)) {
      if (e != kNoExpert) add(static_cast<int>(r), e.value);
    }
  }
}

void FlexMoePlacement::add(int rank, int expert) {
  ++replicas_(rank, expert);
  ++num_replicas_[expert];
}

void FlexMoePlacement::remove(int rank, int expert) {
  --replicas_(rank, expert);
  --num_replicas_[expert];
}

std::vector<std::int64_t> FlexMoePlacement::rank_loads(std::span<const std::int64_t> load) const {
  std::vector<std::int64_t> loads(replicas_.extent(0));
  std::vector<std::int64_t> remainder(load.size());  // one token each for replicas on the lowest ranks
  for (std::size_t e = 0; e < load.size(); ++e) remainder[e] = load[e] % num_replicas_[e];
  for (std::size_t r = 0; r < loads.size(); ++r) {
    for (std::size_t e = 0; e < load.size(); ++e) {
      const std::int64_t parts = replicas_(r, e);
      const std::int64_t extra = std::min(parts, remainder[e]);
      loads[r] += load[e] / num_replicas_[e] * parts + extra;
      remainder[e] -= extra;
    }
  }
  return loads;
}

bool FlexMoePlacement::move_replica(std::span<const std::int64_t> load, bool packed) {
  const auto num_experts = static_cast<int>(load.size());
  const auto num_ranks = static_cast<int>(replicas_.extent(0));
  const auto per_replica = [&](int e) { return load[e] / num_replicas_[e]; };
  int hottest = 0;
  int coldest = -1;
  for (int e = 0; e < num_experts; ++e) {
    if (per_replica(e) > per_replica(hottest)) hottest = e;
    if (num_replicas_[e] > 1 && (coldest < 0 || per_replica(e) < per_replica(coldest))) coldest = e;
  }
  if (coldest < 0 || coldest == hottest) return false;

  const std::vector<std::int64_t> loads = rank_loads(load);
  int freed = -1;  // rank on which the coldest expert loses a replica
  for (int r = 0; r < num_ranks; ++r) {
    if (replicas_(r, coldest) > 0 && (freed < 0 || loads[r] < loads[freed])) freed = r;
  }
  int evicted = -1;  // expert that moves from `target` to `freed`
  int target = freed;
  for (int r = 0; packed && r < num_ranks && evicted < 0; ++r) {
    if (replicas_(r, hottest) == 0) continue;
    for (int e = 0; e < num_experts; ++e) {
      if (e == hottest || replicas_(r, e) == 0) continue;
      if (evicted < 0 || per_replica(e) > per_replica(evicted)) evicted = e;
    }
    if (evicted >= 0) target = r;
  }
  add(target, hottest);
  remove(freed, coldest);
  if (target != freed) {
    remove(target, evicted);
    add(freed, evicted);
  }
  return true;
}

void FlexMoePlacement::write(ArrayView<ExpertId, 2> placement) const {
  for (std::size_t r = 0; r < replicas_.extent(0); ++r) {
    std::size_t slot = 0;
    for (std::size_t e = 0; e < replicas_.extent(1); ++e) {
      for (int i = 0; i < replicas_(r, e); ++i) placement(r, slot++) = ExpertId{e};
    }
  }
}

void flexmoe_adapt(FlexMoePlacement& placement, std::span<const std::int64_t> load, const FlexMoeOptions& options) {
  std::vector<std::int64_t> loads = placement.rank_loads(load);
  for (int round = 0; round < options.rounds; ++round) {
    const auto [smallest, largest] = std::ranges::minmax(loads);
    FlexMoePlacement changed = placement;
    if (smallest == largest || !changed.move_replica(load, options.packed)) return;
    std::vector<std::int64_t> changed_loads = changed.rank_loads(load);
    if (std::ranges::max(changed_loads) >= largest && !is_less_uneven(changed_loads, loads)) return;
    placement = std::move(changed);
    loads = std::move(changed_loads);
  }
}

std::unique_ptr<Policy> make_flexmoe(const FlexMoeOptions& options) { return std::make_unique<FlexMoe>(options); }

}  // namespace foremoe
