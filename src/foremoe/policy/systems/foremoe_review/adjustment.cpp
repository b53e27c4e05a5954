#include "foremoe/policy/systems/foremoe_review/adjustment.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

namespace foremoe::review {

namespace {

std::vector<int> held_in_base(const BasePlacement& base, int num_ranks) {
  std::vector<int> num_held(num_ranks);
  for (std::size_t e = 0; e < base.host.size(); ++e) {
    ++num_held[base.host[e]];
    if (base.replica[e] >= 0) ++num_held[base.replica[e]];
  }
  return num_held;
}

// Applies moves to one micro-step.
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

  // Runs MDA once and appends its moves.
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

  // Returns (overloaded, underloaded) pairs, largest difference first.
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

  // Considers the base placement's experts on `from` with at most `most` tokens there that `to` neither holds nor has
  // received. Returns the one with the most tokens, or −1 if there is none.
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
