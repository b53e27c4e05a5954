#include "foremoe/policy/systems/finemoe/symmetric_placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numbers>
#include <span>
#include <vector>

#include "foremoe/core/random.h"

namespace foremoe::finemoe {

AbelianGroup::AbelianGroup(std::vector<int> factors) : factors_(std::move(factors)) {
  for (const int n : factors_) order_ *= n;
}

int AbelianGroup::add(int a, int b) const {
  int sum = 0;
  int place = 1;
  for (std::size_t i = factors_.size(); i-- > 0;) {
    const int n = factors_[i];
    sum += (a + b) % n * place;
    place *= n;
    a /= n;
    b /= n;
  }
  return sum;
}

int AbelianGroup::phase(int k, int x) const {
  std::int64_t phase = 0;
  for (std::size_t i = factors_.size(); i-- > 0;) {
    const int n = factors_[i];
    phase += static_cast<std::int64_t>(k % n) * (x % n) % n * (order_ / n);
    k /= n;
    x /= n;
  }
  return static_cast<int>(phase % order_);
}

std::vector<std::vector<int>> AbelianGroup::unit_blocks() const {
  std::vector<std::vector<int>> blocks;
  int place = 1;
  for (std::size_t i = factors_.size(); i-- > 0;) {
    blocks.push_back({0, place});
    place *= factors_[i];
  }
  return blocks;
}

static void factor(int order, int least, std::vector<int>& begun, std::vector<AbelianGroup>& groups) {
  for (int n = least; n * n <= order; ++n) {
    if (order % n != 0) continue;
    begun.push_back(n);
    factor(order / n, n, begun, groups);
    begun.pop_back();
  }
  begun.push_back(order);
  groups.emplace_back(begun);
  begun.pop_back();
}

std::vector<AbelianGroup> abelian_groups(int order) {
  std::vector<AbelianGroup> groups;
  std::vector<int> begun;
  factor(order, 2, begun, groups);
  return groups;
}

namespace {

using Block = std::vector<int>;  // elements of a group, identity first

constexpr int kCandidates = 400;
constexpr double kSame = 1e-9;  // smaller differences of eigenvalues are ties, which the first candidate wins

// Returns the second-largest eigenvalue of the graph that connects the ranks of every translate. May return any value ≥
// `enough` if the eigenvalue is at least `enough`. Characters are the eigenvectors. The eigenvalue of character χ is
// the sum over blocks and ordered pairs x ≠ y of Re χ(x)·χ(y)⁻¹. `cosine` is [order]: cos(2π·i ÷ order).
double second_eigenvalue(const AbelianGroup& group, const std::vector<Block>& blocks, std::span<const double> cosine,
                         double enough) {
  const int order = group.order();
  double largest = -std::numeric_limits<double>::infinity();
  std::vector<int> phase;
  for (int k = 1; k < order && largest < enough; ++k) {
    double eigenvalue = 0;
    for (const Block& block : blocks) {
      phase.clear();
      for (const int x : block) {
        const int turn = group.phase(k, x);
        for (const int other : phase) eigenvalue += 2 * cosine[std::abs(turn - other)];
        phase.push_back(turn);
      }
    }
    largest = std::max(largest, eigenvalue);
  }
  return largest;
}

// Returns `size` distinct elements, the identity first.
Block random_block(int order, int size, Random& random) {
  Block block{0};
  while (std::ssize(block) < size) {
    const int x = static_cast<int>(random.below(order));
    if (std::ranges::count(block, x) == 0) block.push_back(x);
  }
  return block;
}

class SymmetricPlacement {
 public:
  explicit SymmetricPlacement(const SymmetricShape& shape)
      : num_ranks_(shape.num_ranks),
        replicas_(shape.replicas),
        placement_({static_cast<std::size_t>(shape.num_ranks), static_cast<std::size_t>(shape.homes_per_rank),
                    static_cast<std::size_t>(shape.replicas)}) {
    if (replicas_ == 2) {
      place_edges(shape.homes_per_rank);
    } else {
      place_best(shape.homes_per_rank);
    }
    assert(next_ == shape.homes_per_rank);
  }

  Array<RankId, 3> take() { return std::move(placement_); }

 private:
  void place_edges(int num_homes) {
    const int complete = 2 * num_homes / (num_ranks_ - 1);  // copies of the complete graph
    int rest = 2 * num_homes % (num_ranks_ - 1);            // remaining degree
    const AbelianGroup cyclic({num_ranks_});
    for (int copy = 0; copy < complete; ++copy) {
      for (int s = 1; 2 * s < num_ranks_; ++s) place_translates(cyclic, {0, s});
      // With an even number of ranks, two copies share one set of translates for the edges to opposite ranks.
      if (num_ranks_ % 2 == 0 && copy % 2 == 1) place_translates(cyclic, {0, num_ranks_ / 2});
    }
    if (num_ranks_ % 2 == 0 && complete % 2 == 1) {
      place_opposites_and_neighbours();
      --rest;
    }
    place_sparse_edges(rest / 2);
  }

  // Places edges of degree 2·num_homes < R − 1.
  void place_sparse_edges(int num_homes) {
    if (num_homes == 0) return;
    if (num_homes == 1) {
      place_translates(AbelianGroup({num_ranks_}), {0, 1});
    } else if (num_homes == 2 && num_ranks_ == 16) {
      const AbelianGroup torus({4, 4});
      for (const Block& block : torus.unit_blocks()) place_translates(torus, block);
    } else if (4 * num_homes == num_ranks_) {
      for (int s = 1; 2 * s < num_ranks_; s += 2) place_translates(AbelianGroup({num_ranks_}), {0, s});
    } else {
      place_best(num_homes);
    }
  }

  // Places the torus, or the random blocks on groups of any shape, with the smallest second eigenvalue.
  void place_best(int num_homes) {
    const std::vector<AbelianGroup> groups = abelian_groups(num_ranks_);
    const AbelianGroup* best_group = nullptr;
    std::vector<Block> best_blocks;
    double best = std::numeric_limits<double>::infinity();
    std::vector<double> cosine(num_ranks_);
    for (int r = 0; r < num_ranks_; ++r) cosine[r] = std::cos(2 * std::numbers::pi * r / num_ranks_);
    const auto consider = [&](const AbelianGroup& group, const std::vector<Block>& blocks) {
      const double eigenvalue = second_eigenvalue(group, blocks, cosine, best - kSame);
      if (eigenvalue > best - kSame) return;
      best = eigenvalue;
      best_group = &group;
      best_blocks = blocks;
    };
    for (const AbelianGroup& group : groups) {
      if (replicas_ == 2 && std::ssize(group.factors()) == num_homes) consider(group, group.unit_blocks());
    }
    Random random(0);
    for (int n = 0; n < kCandidates; ++n) {
      std::vector<Block> blocks;
      for (int j = 0; j < num_homes; ++j) blocks.push_back(random_block(num_ranks_, replicas_, random));
      consider(groups[n % groups.size()], blocks);
    }
    for (const Block& block : best_blocks) place_translates(*best_group, block);
  }

  void place_translates(const AbelianGroup& group, const Block& block) {
    for (int r = 0; r < num_ranks_; ++r) {
      for (int i = 0; i < replicas_; ++i) placement_(r, next_, i) = RankId{group.add(r, block[i])};
    }
    ++next_;
  }

  // Places the edges (a, a + R/2) and (0, 1), (2, 3), …. They form cycles that alternate between both kinds. Each rank
  // is home of the edge along which the traversal leaves the rank.
  void place_opposites_and_neighbours() {
    std::vector<bool> left(num_ranks_);
    for (int start = 0; start < num_ranks_; ++start) {
      bool opposite = true;
      for (int r = start; !left[r]; opposite = !opposite) {
        left[r] = true;
        const int next = opposite ? (r + num_ranks_ / 2) % num_ranks_ : r ^ 1;
        placement_(r, next_, 0) = RankId{r};
        placement_(r, next_, 1) = RankId{next};
        r = next;
      }
    }
    ++next_;
  }

  int num_ranks_;
  int replicas_;
  Array<RankId, 3> placement_;
  int next_ = 0;  // home experts placed so far on each rank
};

}  // namespace

std::optional<std::string> symmetric_shape_error(int num_ranks, int homes_per_rank, int guest_slots) {
  if (homes_per_rank < 1 || guest_slots < homes_per_rank || guest_slots % homes_per_rank != 0) {
    return fmt::format(
        "needs as many guest slots as d − 1 times the {} experts per rank, d ≥ 2: {}, not {}", homes_per_rank,
        std::max(homes_per_rank, guest_slots / std::max(1, homes_per_rank) * homes_per_rank), guest_slots);
  }
  if (guest_slots / homes_per_rank >= num_ranks) {
    return fmt::format("{} replicas of every expert cannot be on different ranks among {}",
                       guest_slots / homes_per_rank + 1, num_ranks);
  }
  return std::nullopt;
}

Array<RankId, 3> symmetric_placement(const SymmetricShape& shape) {
  assert(!symmetric_shape_error(shape.num_ranks, shape.homes_per_rank, (shape.replicas - 1) * shape.homes_per_rank));
  return SymmetricPlacement(shape).take();
}

namespace {

constexpr int kShuffles = 20;

// Experts are numbered by home rank, guest slots by rank: slot / slots_per_rank is the rank.
class Shuffle {
 public:
  explicit Shuffle(const SymmetricShape& shape)
      : homes_(shape.homes_per_rank),
        slots_per_rank_((shape.replicas - 1) * shape.homes_per_rank),
        guest_(static_cast<std::size_t>(shape.num_ranks) * slots_per_rank_) {
    assert(shape.replicas >= 2);
    for (std::size_t i = 0; i < guest_.size(); ++i) guest_[i] = static_cast<int>(i) / (shape.replicas - 1);
  }

  // Shuffles. Returns whether no rank holds an expert twice.
  bool deal(Random& random) {
    for (std::size_t i = guest_.size(); i > 1; --i) std::swap(guest_[i - 1], guest_[random.below(i)]);
    for (std::size_t s = 0; s < guest_.size(); ++s) {
      if (fits(s, guest_[s])) continue;
      const std::size_t start = random.below(guest_.size());
      std::size_t tried = 0;
      for (; tried < guest_.size(); ++tried) {
        const std::size_t t = (start + tried) % guest_.size();
        if (rank(t) != rank(s) && fits(s, guest_[t]) && fits(t, guest_[s])) {
          std::swap(guest_[s], guest_[t]);
          break;
        }
      }
      if (tried == guest_.size()) return false;
    }
    return true;
  }

  void write(Array<RankId, 3>& placement) const {
    std::vector<int> next(placement.extent(0) * homes_, 1);  // [expert], replica
    for (std::size_t s = 0; s < guest_.size(); ++s) {
      const int e = guest_[s];
      placement(e / homes_, e % homes_, next[e]++) = RankId{rank(s)};
    }
  }

 private:
  int rank(std::size_t slot) const { return static_cast<int>(slot) / slots_per_rank_; }

  // Returns whether the slot's rank has no other replica of the expert.
  bool fits(std::size_t slot, int expert) const {
    if (expert / homes_ == rank(slot)) return false;
    const std::size_t first = static_cast<std::size_t>(rank(slot)) * slots_per_rank_;
    for (std::size_t s = first; s < first + slots_per_rank_; ++s) {
      if (s != slot && guest_[s] == expert) return false;
    }
    return true;
  }

  int homes_;
  int slots_per_rank_;
  std::vector<int> guest_;  // [guest slot], expert
};

}  // namespace

Array<RankId, 3> random_placement(const SymmetricShape& shape, Random& random) {
  Array<RankId, 3> placement({static_cast<std::size_t>(shape.num_ranks), static_cast<std::size_t>(shape.homes_per_rank),
                              static_cast<std::size_t>(shape.replicas)});
  for (int r = 0; r < shape.num_ranks; ++r) {
    for (int j = 0; j < shape.homes_per_rank; ++j) {
      for (int i = 0; i < shape.replicas; ++i) placement(r, j, i) = RankId{(r + i) % shape.num_ranks};
    }
  }
  Shuffle shuffle(shape);
  for (int n = 0; n < kShuffles; ++n) {
    if (!shuffle.deal(random)) continue;
    shuffle.write(placement);
    break;
  }
  return placement;
}

}  // namespace foremoe::finemoe
