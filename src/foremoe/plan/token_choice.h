#pragma once

// Models which experts a token chooses together, given only how often each expert is chosen.
//
// Among all distributions over sets of top_k distinct experts with the given frequencies, it takes the one of maximum
// entropy: the probability of a set is proportional to the product of its experts' weights (the conditional Bernoulli
// distribution). For a model whose experts form groups, only sets from at most `per_token` groups are possible. Groups
// that the counts contradict are ignored.
//
// Method. Each expert is a factor 1 − p + p·t with p = weight ÷ (1 + weight). The coefficient of t^top_k in the product
//   of all factors is the probability that independent experts make a set, and the same without the experts of a place
//   is the probability that the set misses it. Prefix and suffix products give these for all places at once. All terms
//   are positive, so nothing cancels. A fixed-point iteration fits the weights (Chen, Dempster and Liu, Biometrika 81,
//   1994), damped, and keeps the best it has seen.
// Complexity. misses(): O(experts · top_k + (groups + places) · top_k²) without groups; with groups also O(groups² ·
//   per_token · top_k²), and O(groups · per_token · top_k²) for each place that has experts of several groups. fit():
//   up to 60 times that of misses() with each expert at a place of its own.

#include <cstddef>
#include <span>
#include <vector>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/array.h"
#include "foremoe/core/units.h"

namespace foremoe {

class TokenChoice {
 public:
  // Fits the weights. counts: [expert], how many tokens chose it; at least one must be positive. Counts that no
  // distribution over such sets has are approximated. Where fewer than top_k experts are chosen, sets are smaller.
  void fit(std::span<const Tokens> counts, int top_k, const ExpertGroups& groups);

  // The number of tokens: assignments ÷ top_k, or the count of an expert that is chosen more often.
  double tokens() const { return tokens_; }

  // Sets of_place[p] to the probability that a token chooses no expert e with place[e] = p.
  void misses(std::span<const std::size_t> place, std::span<double> of_place);

 private:
  using Polynomials = Array<double, 2>;  // [which][exponent up to top_k], coefficients

  void multiply_group(std::size_t group, std::span<const std::size_t> place);
  void multiply_other_groups();
  double sets_without(std::span<const std::size_t> parts);
  void miss_independently(std::span<const std::size_t> place, std::span<double> of_place) const;
  void improve();
  void change_odds(double step);

  std::size_t k_ = 0;
  ExpertGroups groups_;
  double tokens_ = 0;
  // [expert]: how often it is to be chosen; odds ÷ (1 + odds), where odds are the weight; a place of its own; how often
  // it is not chosen.
  std::vector<double> frequency_, chance_;
  std::vector<std::size_t> each_apart_;
  std::vector<double> excluded_;

  // Scratch memory of misses(). A part is the set of experts of one group at one place.
  std::vector<std::size_t> part_of_place_;       // [place], of the current group
  std::vector<std::size_t> part_group_;          // [part]
  std::vector<std::size_t> part_place_;          // [part]
  std::vector<std::vector<double>> part_sets_;   // [part], first of its own experts, then of all others of its group
  std::vector<std::vector<std::size_t>> parts_;  // [place]
  Polynomials group_sets_;                       // [group]
  Polynomials fewer_groups_;                     // [group], sets from fewer than per_token other groups
  Polynomials other_groups_;                     // [group], sets from at most per_token other groups
  Polynomials used_;                             // [number of groups used]
};

}  // namespace foremoe
