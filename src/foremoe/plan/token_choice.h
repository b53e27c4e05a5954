#pragma once

// Models which experts a token chooses together, from the frequency of each expert alone.
//
// The model is the maximum-entropy distribution over sets of top_k distinct experts with these frequencies. The
// probability of a set is proportional to the product of its experts' weights (conditional Bernoulli distribution). If
// the model's experts form groups, only sets from at most `per_token` groups are possible. Groups that contradict the
// counts are ignored.
//
// Method. Each expert contributes a factor 1 − p + p·t with p = weight ÷ (1 + weight). In the product of all factors,
//   the coefficient of t^top_k is the probability that independent choices form a set. Without the experts of one
//   place, it is the probability of a set that misses the place. Prefix and suffix products yield both coefficients for
//   all places. All terms are positive, so nothing cancels. A damped fixed-point iteration fits the weights (Chen,
//   Dempster and Liu, Biometrika 81, 1994). The best iterate is kept. A fit depends only on the counts, which all plans
//   of a load share, so FittedChoices keeps the weights.
// Complexity. misses(): O(experts · top_k + (groups + places) · top_k²) without groups; with groups also O(groups² ·
//   per_token · top_k²), and O(groups · per_token · top_k²) for each place with experts of several groups. fit(): up to
//   60 calls of misses() with every expert at a place of its own.

#include <cstddef>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/array.h"
#include "foremoe/core/units.h"

namespace foremoe {

// The weights of earlier fits, by their problem. Threads may share it.
class FittedChoices {
 public:
  // Returns the weights of this key; empty if there are none.
  std::vector<double> find(const std::string& key);
  // Keeps the weights, unless kMostBytes are kept already.
  void keep(const std::string& key, std::span<const double> weights);
  std::size_t size() const { return weights_.size(); }  // kept fits; no thread may keep another meanwhile

 private:
  static constexpr std::size_t kMostBytes = std::size_t{1} << 30;

  std::mutex mutex_;
  std::unordered_map<std::string, std::vector<double>> weights_;
  std::size_t bytes_ = 0;
};

class TokenChoice {
 public:
  // Fits the weights. counts: [expert], tokens that chose it; at least one must be positive. Counts that no such
  // distribution has are approximated. If fewer than top_k counts are positive, sets consist of those experts. With
  // `fitted`, repeats no fit that it has; the result is the same.
  void fit(std::span<const Tokens> counts, int top_k, const ExpertGroups& groups, FittedChoices* fitted = nullptr);

  // Number of tokens: assignments ÷ size of a set, or the largest count if that is greater.
  double tokens() const { return tokens_; }

  // Sets of_place[p] to the probability that a token chooses no expert e with place[e] = p.
  void misses(std::span<const std::size_t> place, std::span<double> of_place);

 private:
  using Polynomials = Array<double, 2>;  // coefficients, [polynomial][exponent up to top_k]

  void multiply_group(std::size_t group, std::span<const std::size_t> place);
  void multiply_other_groups();
  double sets_without(std::span<const std::size_t> parts);
  void miss_independently(std::span<const std::size_t> place, std::span<double> of_place) const;
  void improve();
  void change_odds(double step);

  std::size_t k_ = 0;
  ExpertGroups groups_;
  double tokens_ = 0;
  // [expert]. frequency_: target fraction of tokens that choose it. chance_: weight ÷ (1 + weight). own_place_: a place
  // of its own. excluded_: modelled fraction of tokens that do not choose it.
  std::vector<double> frequency_, chance_;
  std::vector<std::size_t> own_place_;
  std::vector<double> excluded_;

  // Scratch memory of misses(). A part is the set of experts of one group at one place.
  std::vector<std::size_t> part_of_place_;       // [place], of the current group
  std::vector<std::size_t> part_group_;          // [part]
  std::vector<std::size_t> part_place_;          // [part]
  std::vector<std::vector<double>> part_sets_;   // [part], of its experts; later of the group's other experts
  std::vector<std::vector<std::size_t>> parts_;  // [place]
  Polynomials group_sets_;                       // [group]
  Polynomials fewer_groups_;                     // [group], sets from fewer than per_token other groups
  Polynomials other_groups_;                     // [group], sets from at most per_token other groups
  Polynomials used_;                             // [number of groups used]
};

}  // namespace foremoe
