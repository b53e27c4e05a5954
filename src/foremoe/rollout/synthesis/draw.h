#pragma once

// Random draws for synthesis. Every drawn object has its own random stream, identified by seed, purpose and indices, so
// that results do not depend on the order of draws.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/random.h"

namespace foremoe {

enum class Purpose : std::uint64_t {
  kLengths = 1,
  kGroups,
  kOrder,
  kChange,
  kBase,
  kTopic,
  kSequence,
  kCounts,
  kRows,
  kRagged,
  kBurst
};

Random stream_of(std::uint64_t seed, Purpose purpose, std::uint64_t a = 0, std::uint64_t b = 0);

// Fisher–Yates shuffle.
void shuffle(Random& random, std::span<std::int32_t> values);

// Returns a random permutation of 0, 1, …, n − 1.
std::vector<std::int32_t> permutation(Random& random, std::size_t n);

// Gamma variate of scale 1, shape > 0 (Marsaglia and Tsang 2000).
double gamma(Random& random, double shape);

// Number of successes in n trials, 0 ≤ p ≤ 1. Exact: inversion for small n·p, otherwise Hörmann's BTRS (1993).
std::int64_t binomial(Random& random, std::int64_t n, double p);

// Distributes n draws over p (sums to 1), at most `limit` per category; other categories get the excess draws. Requires
// limit · p.size() ≥ n.
void multinomial(Random& random, std::int64_t n, std::span<const double> p, std::int64_t limit,
                 std::span<std::int64_t> counts);

// Deterministic multinomial(): rounds shares (≥ −1, summing to n) by largest remainder, ties to the lowest category.
void apportion(std::int64_t n, std::span<const double> shares, std::int64_t limit, std::span<std::int64_t> counts);

// Normalises weights ≥ 0 to probabilities of at most `limit`. The excess is distributed over the other categories in
// proportion to their weights (evenly if these are 0). Requires limit · p.size() ≥ 1.
void normalize(std::span<double> p, double limit = 1.0);

// Draws k distinct categories by systematic sampling (Madow 1949) over a random order. Draws category e with
// probability exactly k·p[e] (p ≤ 1/k). Redraws the order every few rows, so that all pairs occur.
class DistinctSampler {
 public:
  DistinctSampler(std::span<const double> p, int k, Random& random);
  void draw(std::span<std::int64_t> chosen);  // [k]

 private:
  void draw_order();

  std::span<const double> p_;
  Random& random_;
  std::vector<std::int32_t> order_;
  std::vector<double> bound_;  // [position in order], cumulative k·p; the last is k
  int rows_left_ = 0;          // rows left before the order is redrawn
};

// Draws k distinct categories from at most groups.per_token groups, as a router with expert groups does (DeepSeek-V3,
// arXiv 2412.19437, §2.1.2). The score of category e is ln p[e] plus Gumbel noise. Selects the groups with the largest
// sums of their best ⌈k / per_token⌉ scores, then the k best categories of these groups. More probable categories are
// chosen more often, but not in proportion to p.
class GroupedSampler {
 public:
  GroupedSampler(std::span<const double> p, int k, const ExpertGroups& groups, Random& random);
  void draw(std::span<std::int64_t> chosen);  // [k], best first

 private:
  struct Scored {
    double time;  // exp(−score), exponentially distributed with rate p[e]: smallest is best
    std::int64_t category;
    bool operator<(const Scored& other) const { return time < other.time; }
  };

  std::span<const double> p_;
  ExpertGroups groups_;
  std::size_t counted_;  // number of scores that count per group
  Random& random_;
  std::vector<Scored> scored_;                            // [category], grouped
  std::vector<std::pair<double, std::size_t>> of_group_;  // (negated sum of a group's best scores, group)
  std::vector<Scored> kept_;
};

}  // namespace foremoe
