#include "foremoe/policy/foremoe_review.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "foremoe/policy/placed_plan.h"

namespace foremoe::review {

namespace {

// What both phases change. Loads are doubled, so that halves are whole.
class Base {
 public:
  Base(std::span<const std::int64_t> load, std::vector<int> host, const BaseShape& shape)
      : shape_(shape), twice_load_(load.size()), rank_load_(shape.num_ranks), num_held_(shape.num_ranks) {
    std::ranges::transform(load, twice_load_.begin(), [](std::int64_t tokens) { return 2 * tokens; });
    placement_ = {.host = std::move(host), .replica = std::vector<int>(load.size(), -1)};
    for (std::size_t e = 0; e < load.size(); ++e) {
      rank_load_[placement_.host[e]] += twice_load_[e];
      ++num_held_[placement_.host[e]];
    }
    ideal_ = static_cast<double>(std::accumulate(rank_load_.begin(), rank_load_.end(), std::int64_t{0})) /
             static_cast<double>(shape.num_ranks);
  }

  void relocate() {
    std::vector<int> order(twice_load_.size());
    std::iota(order.begin(), order.end(), 0);
    std::vector<double> distance;  // [expert], of its host's load from ideal
    for (const int host : placement_.host) distance.push_back(std::abs(load(host) - ideal_));
    std::ranges::stable_sort(order, [&](int a, int b) { return distance[a] > distance[b]; });
    for (const int e : order) {
      const int host = placement_.host[e];
      const int to = least_loaded_with_room(host);
      if (to < 0 || rank_load_[to] + twice_load_[e] >= rank_load_[host]) continue;
      placement_.host[e] = to;
      move(host, to, twice_load_[e]);
      --num_held_[host];
    }
  }

  void replicate(double epsilon) {
    std::vector<int> overloaded;
    for (int r = 0; r < shape_.num_ranks; ++r) {
      if (load(r) > (1 + epsilon) * ideal_) overloaded.push_back(r);
    }
    std::ranges::stable_sort(overloaded, [&](int a, int b) { return rank_load_[a] > rank_load_[b]; });
    for (const int from : overloaded) {
      const int e = largest_hosted(from);
      const int to = least_loaded_with_room(from);
      if (e < 0 || to < 0 || load(to) >= (1 - epsilon) * ideal_) continue;
      placement_.replica[e] = to;
      move(from, to, twice_load_[e] / 2);
    }
  }

  BasePlacement result() && { return std::move(placement_); }

 private:
  double load(int rank) const { return static_cast<double>(rank_load_[rank]); }

  void move(int from, int to, std::int64_t twice_tokens) {
    rank_load_[from] -= twice_tokens;
    rank_load_[to] += twice_tokens;
    ++num_held_[to];
  }

  int least_loaded_with_room(int other_than) const {
    int least = -1;
    for (int r = 0; r < shape_.num_ranks; ++r) {
      if (r == other_than || num_held_[r] == shape_.slots_per_rank) continue;
      if (least < 0 || rank_load_[r] < rank_load_[least]) least = r;
    }
    return least;
  }

  int largest_hosted(int rank) const {
    int largest = -1;
    for (std::size_t e = 0; e < twice_load_.size(); ++e) {
      if (placement_.host[e] != rank) continue;
      if (largest < 0 || twice_load_[e] > twice_load_[largest]) largest = static_cast<int>(e);
    }
    return largest;
  }

  BaseShape shape_;
  BasePlacement placement_;
  std::vector<std::int64_t> twice_load_;  // [expert]
  std::vector<std::int64_t> rank_load_;   // [rank], doubled
  std::vector<int> num_held_;             // [rank], hosts and replicas
  double ideal_ = 0;                      // rank load, doubled
};

}  // namespace

BasePlacement place_base(std::span<const std::int64_t> load, std::vector<int> host, const BaseShape& shape,
                         double epsilon) {
  Base base(load, std::move(host), shape);
  base.relocate();
  base.replicate(epsilon);
  return std::move(base).result();
}

std::vector<int> hosts_of(const StepPlan& former, LayerId layer) {
  Array<int, 2> num_events_held({former.home.extent(1), former.slot_expert.extent(2)});  // [expert][rank]
  for (int t = 0; t < former.num_events(); ++t) {
    for (int r = 0; r < former.num_ranks(); ++r) {
      for (const ExpertId e : former.slot_expert.row(t, layer, r)) {
        if (e != kNoExpert) ++num_events_held(e, r);
      }
    }
  }
  std::vector<int> host;
  std::vector<int> num_hosted(former.num_ranks());
  for (int e = 0; e < former.num_experts(); ++e) {
    const auto preference = [&](int r) {
      return std::tuple{num_hosted[r] < former.num_slots(), num_events_held(e, r), former.home(layer, e) == RankId{r}};
    };
    int best = 0;
    for (int r = 1; r < former.num_ranks(); ++r) {
      if (preference(r) > preference(best)) best = r;
    }
    ++num_hosted[best];
    host.push_back(best);
  }
  return host;
}

namespace {

std::vector<int> held_in_base(const BasePlacement& base, int num_ranks) {
  std::vector<int> num_held(num_ranks);
  for (std::size_t e = 0; e < base.host.size(); ++e) {
    ++num_held[base.host[e]];
    if (base.replica[e] >= 0) ++num_held[base.replica[e]];
  }
  return num_held;
}

// One micro-step while moves are made.
class Adjuster {
 public:
  Adjuster(const BasePlacement& base, std::span<const std::int64_t> load, const BaseShape& shape,
           const AdjustOptions& options)
      : base_(base),
        options_(options),
        parts_(base_parts(base, load)),
        rank_load_(shape.num_ranks),
        num_free_(held_in_base(base, shape.num_ranks)) {
    for (const auto& of_expert : parts_) {
      for (const Part& part : of_expert) rank_load_[part.rank] += part.tokens;
    }
    for (int& n : num_free_) n = shape.slots_per_rank - n;
    ideal_ = static_cast<double>(std::accumulate(load.begin(), load.end(), std::int64_t{0})) /
             static_cast<double>(shape.num_ranks);
  }

  // MDA once: the moves that it adds are the last ones.
  void adjust_once() {
    for (const auto& [from, to] : pairs()) {
      if (!is_over(from) || !is_under(to) || num_free_[to] == 0) continue;
      const double most = options_.overshoot * (static_cast<double>(rank_load_[from]) - ideal_);
      const int expert = largest_for(from, to, options_.try_smaller ? most : std::numeric_limits<double>::infinity());
      if (expert >= 0 && static_cast<double>(part_on(expert, from)->tokens) <= most) move({expert, from, to});
    }
  }

  void take_back(std::size_t num_kept) {
    for (; moves_.size() > num_kept; moves_.pop_back()) {
      const Move& last = moves_.back();
      Part& part = *part_on(last.expert, last.to);
      part.rank = last.from;
      rank_load_[last.to] -= part.tokens;
      rank_load_[last.from] += part.tokens;
      ++num_free_[last.to];
    }
  }

  bool is_balanced() const {
    return std::ranges::none_of(rank_load_, [&](std::int64_t load) { return is_over_load(load); });
  }
  std::int64_t largest_load() const { return std::ranges::max(rank_load_); }
  const std::vector<Move>& moves() const { return moves_; }

 private:
  bool is_over_load(std::int64_t load) const { return static_cast<double>(load) > (1 + options_.epsilon) * ideal_; }
  bool is_over(int rank) const { return is_over_load(rank_load_[rank]); }
  bool is_under(int rank) const { return static_cast<double>(rank_load_[rank]) < (1 - options_.epsilon) * ideal_; }

  // (overloaded, underloaded), the largest difference first.
  std::vector<std::pair<int, int>> pairs() const {
    std::vector<std::pair<int, int>> pairs;
    const int num_ranks = static_cast<int>(rank_load_.size());
    for (int o = 0; o < num_ranks; ++o) {
      for (int u = 0; is_over(o) && u < num_ranks; ++u) {
        if (is_under(u)) pairs.emplace_back(o, u);
      }
    }
    const auto difference = [&](const std::pair<int, int>& p) { return rank_load_[p.first] - rank_load_[p.second]; };
    std::ranges::stable_sort(pairs, std::greater<>{}, difference);
    return pairs;
  }

  Part* part_on(int expert, int rank) {
    const auto part = std::ranges::find(parts_[expert], rank, &Part::rank);
    return part == parts_[expert].end() ? nullptr : &*part;
  }

  // The expert of the base placement with most tokens on `from`, `most` or fewer, that `to` neither holds nor has been
  // given; −1 when none has any.
  int largest_for(int from, int to, double most) {
    int largest = -1;
    std::int64_t tokens = 0;
    for (int e = 0; e < std::ssize(parts_); ++e) {
      const Part* part = part_on(e, from);
      if (part == nullptr || part->tokens <= tokens || static_cast<double>(part->tokens) > most) continue;
      if (!base_.holds(from, e) || base_.holds(to, e) || part_on(e, to) != nullptr) continue;
      largest = e;
      tokens = part->tokens;
    }
    return largest;
  }

  void move(const Move& move) {
    Part& part = *part_on(move.expert, move.from);
    part.rank = move.to;
    rank_load_[move.from] -= part.tokens;
    rank_load_[move.to] += part.tokens;
    --num_free_[move.to];
    moves_.push_back(move);
  }

  const BasePlacement& base_;
  AdjustOptions options_;
  std::vector<std::vector<Part>> parts_;  // [expert]
  std::vector<std::int64_t> rank_load_;   // [rank], tokens
  std::vector<int> num_free_;             // [rank], slots
  std::vector<Move> moves_;
  double ideal_ = 0;  // rank load, tokens
};

}  // namespace

std::vector<std::vector<Part>> base_parts(const BasePlacement& base, std::span<const std::int64_t> load) {
  std::vector<std::vector<Part>> parts(load.size());
  for (std::size_t e = 0; e < load.size(); ++e) {
    if (base.replica[e] < 0) {
      parts[e] = {{base.host[e], load[e]}};
    } else {
      const auto [low, high] = std::minmax(base.host[e], base.replica[e]);
      parts[e] = {{low, (load[e] + 1) / 2}, {high, load[e] / 2}};
    }
  }
  return parts;
}

std::vector<std::vector<Part>> adjusted_parts(const BasePlacement& base, std::span<const Move> moves,
                                              std::span<const std::int64_t> load) {
  std::vector<std::vector<Part>> parts = base_parts(base, load);
  for (const Move& move : moves) std::ranges::find(parts[move.expert], move.from, &Part::rank)->rank = move.to;
  return parts;
}

std::vector<Move> adjust(const BasePlacement& base, std::span<const std::int64_t> load, const BaseShape& shape,
                         const AdjustOptions& options) {
  Adjuster adjuster(base, load, shape, options);
  for (int round = 0; round < options.rounds && !adjuster.is_balanced(); ++round) {
    const std::size_t num_before = adjuster.moves().size();
    const std::int64_t largest_before = adjuster.largest_load();
    adjuster.adjust_once();
    if (adjuster.largest_load() >= largest_before) {
      adjuster.take_back(num_before);
      break;
    }
  }
  return adjuster.moves();
}

bool is_consistent(const BasePlacement& base, std::span<const Move> moves, const BaseShape& shape) {
  std::vector<int> num_held = held_in_base(base, shape.num_ranks);
  std::set<std::pair<int, int>> sources;       // (expert, rank)
  std::set<std::pair<int, int>> destinations;  // (expert, rank)
  for (const auto& [expert, from, to] : moves) {
    if (!base.holds(from, expert) || base.holds(to, expert)) return false;
    if (!sources.emplace(expert, from).second || !destinations.emplace(expert, to).second) return false;
    ++num_held[to];
  }
  return std::ranges::all_of(num_held, [&](int n) { return n <= shape.slots_per_rank; });
}

}  // namespace foremoe::review

namespace foremoe {

namespace {

using review::BasePlacement;
using review::Move;

// What one layer's placements and quotas are made from.
struct Layer {
  BasePlacement base;
  std::vector<std::vector<Move>> moves;  // [micro_step]
};

class ForeMoeReview final : public Policy {
 public:
  explicit ForeMoeReview(const ForeMoeReviewOptions& options) : options_(options) {
    assert(options.base || options.adjust);
  }

  std::string_view name() const override {
    if (!options_.adjust) return "foremoe-review-bpo";
    return options_.base ? "foremoe-review" : "foremoe-review-mda";
  }

  std::string_view summary() const override {
    if (!options_.adjust) return "ForeMoE by its review, base placement only";
    return options_.base ? "ForeMoE by its review: base placement on means, experts moved in every micro-step"
                         : "ForeMoE by its review, from homes, experts moved in every micro-step";
  }
  std::span<const std::string_view> uses() const override { return std::span(kUses).first(options_.base ? 3 : 2); }
  std::string note_on_previous(const PolicyInput& input) const override {
    return options_.base ? note_on_former_plan(input, name()) : Policy::note_on_previous(input);
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    std::vector<Layer> layers(input.load.load.extent(1));
    FreePolicy policy{.name = name(), .place = {}};
    policy.place = [&](LayerId l, ArrayView<const std::int64_t, 2> load) {
      Layer& layer = layers[l.index()];
      layer = plan_layer(input, l, load);
      return placements(layer, shape_of(input));
    };
    policy.own_split = [&](LayerId l) {
      return [&layer = layers[l.index()]](MicroStepId m, const planner::ReplicaGraph& graph,
                                          std::span<const std::int64_t> load, planner::Assignment& assignment) {
        split(adjusted_parts(layer.base, layer.moves[m.index()], load), graph, assignment);
      };
    };
    return plan_freely(policy, input, pool);
  }

 private:
  static constexpr std::array<std::string_view, 3> kUses{"guest_slots", "in_flight", "previous"};

  static review::BaseShape shape_of(const PolicyInput& input) {
    const int num_ranks = input.load.num_ranks();
    return {.num_ranks = num_ranks, .slots_per_rank = input.load.num_experts() / num_ranks + input.options.guest_slots};
  }

  Layer plan_layer(const PolicyInput& input, LayerId l, ArrayView<const std::int64_t, 2> load) const {
    const review::BaseShape shape = shape_of(input);
    std::vector<int> host;
    if (const StepPlan* former = former_plan(input, name()); options_.base && former != nullptr) {
      host = review::hosts_of(*former, l);
    } else {
      for (const RankId r : input.home.row(l)) host.push_back(r.value);
    }
    Layer layer;
    if (options_.base) {
      layer.base = review::place_base(sum_over_micro_steps(load), std::move(host), shape, options_.base_epsilon);
    } else {
      layer.base.replica.assign(host.size(), -1);
      layer.base.host = std::move(host);
    }
    layer.moves.resize(load.extent(0));
    for (std::size_t m = 0; options_.adjust && m < load.extent(0); ++m) {
      std::vector<Move> moves = review::adjust(layer.base, load.row(m), shape, options_.moves);
      if (review::is_consistent(layer.base, moves, shape)) layer.moves[m] = std::move(moves);
    }
    return layer;
  }

  // [micro_step][rank][slot]
  static Array<ExpertId, 3> placements(const Layer& layer, const review::BaseShape& shape) {
    Array<ExpertId, 3> slots(
        {layer.moves.size(), static_cast<std::size_t>(shape.num_ranks), static_cast<std::size_t>(shape.slots_per_rank)},
        kNoExpert);
    for (std::size_t m = 0; m < layer.moves.size(); ++m) {
      const auto put = [&](int rank, int expert) {
        *std::ranges::find(slots.row(m, rank), kNoExpert) = ExpertId{expert};
      };
      for (int e = 0; e < std::ssize(layer.base.host); ++e) {
        put(layer.base.host[e], e);
        if (layer.base.replica[e] >= 0) put(layer.base.replica[e], e);
      }
      for (const Move& move : layer.moves[m]) put(move.to, move.expert);
    }
    return slots;
  }

  static void split(const std::vector<std::vector<review::Part>>& parts, const planner::ReplicaGraph& graph,
                    planner::Assignment& assignment) {
    assignment.quota.assign(graph.num_slots(), 0);
    assignment.rank_load.assign(graph.num_ranks(), 0);
    for (int e = 0; e < std::ssize(parts); ++e) {
      for (const review::Part& part : parts[e]) {
        assignment.quota[graph.find(e, part.rank)] = part.tokens;
        assignment.rank_load[part.rank] += part.tokens;
      }
    }
  }

  ForeMoeReviewOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_foremoe_review(const ForeMoeReviewOptions& options) {
  return std::make_unique<ForeMoeReview>(options);
}

}  // namespace foremoe
