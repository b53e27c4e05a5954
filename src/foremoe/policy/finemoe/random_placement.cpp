#include "foremoe/policy/finemoe/random_placement.h"

#include <algorithm>
#include <cassert>
#include <vector>

namespace foremoe::finemoe {

namespace {

constexpr int kShuffles = 20;

// Experts are numbered home rank by home rank. Guest slots likewise: slot / slots_per_rank is the rank.
class Shuffle {
 public:
  explicit Shuffle(const SymmetricShape& shape)
      : homes_(shape.homes_per_rank),
        slots_per_rank_((shape.replicas - 1) * shape.homes_per_rank),
        guest_(static_cast<std::size_t>(shape.num_ranks) * slots_per_rank_) {
    assert(shape.replicas >= 2);
    for (std::size_t i = 0; i < guest_.size(); ++i) guest_[i] = static_cast<int>(i) / (shape.replicas - 1);
  }

  // Whether no rank holds an expert twice in the end.
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

  // Whether the rank of this slot holds the expert in no other.
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
