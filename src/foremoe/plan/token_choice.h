#pragma once

// Which experts tokens choose together, as far as their counts tell: the distribution of largest entropy over sets of
// top_k distinct experts in which every expert is as frequent as in the counts. P(set) is then proportional to the
// product of the weights of its experts. A model with groups of experts has sets of a few groups alone.
//
// Method. The probability that a set has no expert of some place is a ratio of two sums over sets, elementary symmetric
//   polynomials of the weights. They are coefficients of a product over experts, and all places have theirs from
//   products of what lies before and behind. No term is negative, so nothing cancels. Weights are found by iteration
//   (Chen, Dempster and Liu, Biometrika 81, 1994).
// Complexity. An iteration, and misses(): O(experts · top_k + places · top_k²) without groups. With groups a place that
//   has experts of several costs O(groups · per_token · top_k²).

#include <cstddef>
#include <span>
#include <vector>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/array.h"
#include "foremoe/core/units.h"

namespace foremoe {

class TokenChoice {
 public:
  // counts: [expert], tokens that chose it; at least one is positive. Counts that no such sets can have (an expert more
  // often than there are tokens) are met as closely as the iteration comes.
  void fit(std::span<const Tokens> counts, int top_k, const ExpertGroups& groups);

  // How many tokens have chosen.
  double tokens() const { return tokens_; }

  // of_place[p] becomes the probability that a token chooses no expert e with place[e] = p.
  void misses(std::span<const std::size_t> place, std::span<double> of_place);

 private:
  using Polynomials = Array<double, 2>;  // [which][exponent up to top_k], coefficients

  void multiply_group(std::size_t group, std::span<const std::size_t> place);
  void multiply_other_groups();
  double sets_without(std::span<const std::size_t> parts);

  std::size_t k_ = 0;
  ExpertGroups groups_;
  double tokens_ = 0;
  std::vector<double> weight_;             // [expert]
  std::vector<std::size_t> each_apart_;    // [expert] = expert
  std::vector<double> wanted_, excluded_;  // [expert], probabilities

  // Scratch memory of misses(). A part is the experts of one group at one place.
  std::vector<std::size_t> part_of_place_;       // [place], of the group at hand
  std::vector<std::size_t> part_group_;          // [part]
  std::vector<std::size_t> part_place_;          // [part]
  std::vector<std::vector<double>> part_sets_;   // [part], of its own experts, then of all others of its group
  std::vector<std::vector<std::size_t>> parts_;  // [place]
  Polynomials group_sets_;                       // [group]
  Polynomials fewer_groups_, other_groups_;      // [group], of less than per_token others, and of up to so many
  Polynomials used_;                             // [groups used]
};

}  // namespace foremoe
