#pragma once

// Random draws for synthesis. Everything that is drawn has its own stream, named by seed, purpose and indices, so that
// nothing depends on the order of the draws.

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

// Fisher–Yates.
void shuffle(Random& random, std::span<std::int32_t> values);

// 0, 1, …, n − 1 shuffled.
std::vector<std::int32_t> permutation(Random& random, std::size_t n);

// Gamma of scale 1, shape > 0 (Marsaglia and Tsang 2000).
double gamma(Random& random, double shape);

// Successes in n trials, 0 ≤ p ≤ 1: inversion where few are expected, else Hörmann's BTRS (1993). Exact.
std::int64_t binomial(Random& random, std::int64_t n, double p);

// n draws over p (sums to 1), no count above `limit`; the draws that a full category refuses go to the others.
// limit · p.size() ≥ n.
void multinomial(Random& random, std::int64_t n, std::span<const double> p, std::int64_t limit,
                 std::span<std::int64_t> counts);

// The same without chance: shares (≥ −1, summing to n) rounded by largest remainder, ties to the lowest category.
void apportion(std::int64_t n, std::span<const double> shares, std::int64_t limit, std::span<std::int64_t> counts);

// Weights ≥ 0 to probabilities of which none is above `limit`: what is cut is spread over the others in
// proportion (over all others alike where they have none). limit · p.size() ≥ 1.
void normalize(std::span<double> p, double limit = 1.0);

// k distinct categories per draw, category e with probability exactly k·p[e] (p ≤ 1/k): systematic sampling
// (Madow 1949) over a random order, which is drawn anew every few rows so that all pairs occur.
class DistinctSampler {
 public:
  DistinctSampler(std::span<const double> p, int k, Random& random);
  void draw(std::span<std::int64_t> chosen);  // [k]

 private:
  void draw_order();

  std::span<const double> p_;
  Random& random_;
  std::vector<std::int32_t> order_;
  std::vector<double> bound_;  // [position in order] cumulated k·p, ends with k
  int rows_left_ = 0;          // of this order
};

// k distinct categories per draw from no more than groups.per_token groups, as a router with groups chooses experts
// (DeepSeek-V3, arXiv 2412.19437, §2.1.2). The score of category e is ln p[e] plus Gumbel noise. The groups whose best
// ⌈k / per_token⌉ scores have the largest sums are kept, and of their categories the k best are chosen. Likelier
// categories are chosen more often, but not in proportion to p.
class GroupedSampler {
 public:
  GroupedSampler(std::span<const double> p, int k, const ExpertGroups& groups, Random& random);
  void draw(std::span<std::int64_t> chosen);  // [k], best first

 private:
  struct Scored {
    double time;  // exp(−score): exponential with rate p[e], so the smallest is the best
    std::int64_t category;
    bool operator<(const Scored& other) const { return time < other.time; }
  };

  std::span<const double> p_;
  ExpertGroups groups_;
  std::size_t counted_;  // scores of a group that count
  Random& random_;
  std::vector<Scored> scored_;                            // [category], group after group
  std::vector<std::pair<double, std::size_t>> of_group_;  // minus the sum of a group's best scores, group
  std::vector<Scored> kept_;
};

}  // namespace foremoe
