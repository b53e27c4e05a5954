#include "foremoe/plan/token_choice.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "foremoe/core/sha256.h"

namespace foremoe {
namespace {

constexpr int kMostIterations = 60;
constexpr double kTolerance = 1e-3;  // total error of the experts' frequencies ÷ top_k

// Bounds on the odds of an expert. They keep products finite if every token, or no token, chooses the expert.
constexpr double kLeastOdds = 1e-9;
constexpr double kMostOdds = 1e6;
constexpr double kMostLikely = kMostOdds / (1 + kMostOdds);

double odds_of(double chance) { return chance / (1 - chance); }

// A polynomial whose coefficient i is the probability of choosing i experts. Coefficients above top_k are dropped, so
// all polynomials have the same length.
using Chances = std::span<double>;

// Adds one expert: multiplies by 1 − chance + chance·t.
void multiply(Chances chances, double chance) {
  for (std::size_t i = chances.size(); i-- > 1;) chances[i] = (1 - chance) * chances[i] + chance * chances[i - 1];
  chances[0] *= 1 - chance;
}

void multiply(Chances chances, std::span<const double> by) {
  for (std::size_t i = chances.size(); i-- > 0;) {
    double sum = 0;
    for (std::size_t j = 0; j <= i; ++j) sum += chances[i - j] * by[j];
    chances[i] = sum;
  }
}

void set_to_one(Chances chances) {
  std::ranges::fill(chances, 0);
  chances[0] = 1;
}

// Adds a group. A set uses a group if it contains any of its experts. used: [number of groups used][number of experts].
void add_group(Array<double, 2>& used, std::span<const double> chances) {
  for (std::size_t u = used.extent(0); u-- > 0;) {
    const std::span<double> to = used.row(u);
    for (double& chance : to) chance *= chances[0];
    if (u == 0) continue;
    const std::span<const double> from = used.row(u - 1);
    for (std::size_t i = 1; i < to.size(); ++i) {
      for (std::size_t j = 1; j <= i; ++j) to[i] += from[i - j] * chances[j];
    }
  }
}

void set_to_one(Array<double, 2>& used) {
  std::ranges::fill(used.flat(), 0);
  used(0, 0) = 1;
}

// Scales frequencies so that they sum to `sum` and none exceeds kMostLikely.
void scale_to(double sum, std::span<double> frequency) {
  for (;;) {
    double capped = 0;
    double free = 0;
    for (double& f : frequency) {
      f = std::min(f, kMostLikely);
      (f == kMostLikely ? capped : free) += f;
    }
    if (free == 0) return;
    bool exceeds = false;
    for (double& f : frequency) {
      if (f < kMostLikely) f *= (sum - capped) / free;
      exceeds = exceeds || f > kMostLikely;
    }
    if (!exceeds) return;
  }
}

// Returns whether at most groups.per_token groups contain k experts with positive counts.
bool permit(const ExpertGroups& groups, std::span<const Tokens> counts, std::size_t k) {
  const std::size_t size = counts.size() / static_cast<std::size_t>(groups.count);
  std::vector<std::ptrdiff_t> chosen;  // [group], number of experts with positive counts
  for (std::size_t e = 0; e < counts.size(); e += size) {
    chosen.push_back(std::ranges::count_if(counts.subspan(e, size), [](Tokens n) { return n > Tokens{0}; }));
  }
  std::ranges::sort(chosen, std::ranges::greater{});
  return std::accumulate(chosen.begin(), chosen.begin() + groups.per_token, std::ptrdiff_t{0}) >=
         static_cast<std::ptrdiff_t>(k);
}

// Identifies the fit of these counts.
std::string key_of(std::span<const Tokens> counts, std::size_t k, const ExpertGroups& groups) {
  Sha256 digest;
  digest.update(std::as_bytes(counts));
  const std::array sizes{static_cast<std::int64_t>(k), std::int64_t{groups.count}, std::int64_t{groups.per_token}};
  digest.update(std::as_bytes(std::span(sizes)));
  return digest.hex();
}

}  // namespace

std::vector<double> FittedChoices::find(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = weights_.find(key);
  return found == weights_.end() ? std::vector<double>{} : found->second;
}

void FittedChoices::keep(const std::string& key, std::span<const double> weights) {
  const std::lock_guard lock(mutex_);
  if (bytes_ + weights.size_bytes() > kMostBytes) return;
  if (weights_.try_emplace(key, weights.begin(), weights.end()).second) bytes_ += weights.size_bytes();
}

void TokenChoice::fit(std::span<const Tokens> counts, int top_k, const ExpertGroups& groups, FittedChoices* fitted) {
  std::int64_t assignments = 0;
  std::int64_t most = 0;
  std::size_t chosen = 0;  // experts
  frequency_.clear();
  for (const Tokens count : counts) {
    assignments += count.value;
    most = std::max(most, count.value);
    chosen += count.value > 0 ? 1 : 0;
    frequency_.push_back(static_cast<double>(count.value));
  }
  assert(chosen > 0);
  k_ = std::min(static_cast<std::size_t>(top_k), chosen);
  const bool restrict = groups.restrict_tokens(static_cast<int>(k_)) && permit(groups, counts, k_);
  groups_ = restrict ? groups : ExpertGroups{};
  tokens_ = std::max(static_cast<double>(assignments) / static_cast<double>(k_), static_cast<double>(most));
  for (double& f : frequency_) f /= tokens_;
  scale_to(static_cast<double>(k_), frequency_);
  chance_ = frequency_;
  if (k_ == 1) {  // a set is one expert, and its odds are its frequency
    for (double& chance : chance_) chance /= 1 + chance;
    return;
  }
  if (fitted == nullptr) return improve();
  const std::string key = key_of(counts, k_, groups_);
  if (std::vector<double> weights = fitted->find(key); !weights.empty()) {
    chance_ = std::move(weights);
    return;
  }
  improve();
  fitted->keep(key, chance_);
}

void TokenChoice::improve() {
  own_place_.resize(chance_.size());
  std::iota(own_place_.begin(), own_place_.end(), std::size_t{0});
  excluded_.resize(chance_.size());
  std::vector<double> best = chance_;
  double least = std::numeric_limits<double>::infinity();
  double before = least;
  double step = 1;
  for (int i = 0; i < kMostIterations && least > kTolerance * static_cast<double>(k_); ++i) {
    misses(own_place_, excluded_);
    double wrong = 0;
    for (std::size_t e = 0; e < chance_.size(); ++e) wrong += std::abs(1 - excluded_[e] - frequency_[e]);
    if (wrong < least) {
      least = wrong;
      best = chance_;
    }
    // Changing all odds at once overshoots if the experts of a group are chosen together.
    step = wrong > 0.8 * before ? std::max(step / 2, 0.5 / static_cast<double>(k_)) : std::min(step * 1.1, 1.0);
    before = wrong;
    change_odds(step);
  }
  chance_ = best;
}

// Changes the odds of each expert so that its frequency approaches the target. Scaling all odds by a common factor does
// not change the probability of a set. The factor used here keeps the expected number of experts near top_k.
void TokenChoice::change_odds(double step) {
  double sum = 0;
  for (std::size_t e = 0; e < chance_.size(); ++e) {
    if (chance_[e] == 0) continue;
    const double included = std::clamp(1 - excluded_[e], kLeastOdds, kMostLikely);
    const double odds = odds_of(chance_[e]) * std::pow(odds_of(frequency_[e]) / odds_of(included), step);
    chance_[e] = std::clamp(odds, kLeastOdds, kMostOdds);
    chance_[e] /= 1 + chance_[e];
    sum += chance_[e];
  }
  const double scale = static_cast<double>(k_) / sum;
  for (double& chance : chance_) {
    if (chance == 0) continue;
    const double odds = std::clamp(odds_of(chance) * scale, kLeastOdds, kMostOdds);
    chance = odds / (1 + odds);
  }
}

void TokenChoice::misses(std::span<const std::size_t> place, std::span<double> of_place) {
  const auto num_groups = static_cast<std::size_t>(groups_.count);
  group_sets_ = Polynomials({num_groups, k_ + 1});
  part_group_.clear();
  part_place_.clear();
  part_of_place_.resize(of_place.size());
  for (std::size_t g = 0; g < num_groups; ++g) multiply_group(g, place);
  multiply_other_groups();

  parts_.resize(std::max(parts_.size(), of_place.size()));
  for (auto& parts : parts_) parts.clear();
  for (std::size_t part = 0; part < part_place_.size(); ++part) parts_[part_place_[part]].push_back(part);
  const double all = sets_without({});
  if (!(all > 0)) return miss_independently(place, of_place);
  for (std::size_t p = 0; p < of_place.size(); ++p) {
    of_place[p] = parts_[p].empty() ? 1 : sets_without(parts_[p]) / all;
  }
}

// Fallback for sets whose probabilities underflow.
void TokenChoice::miss_independently(std::span<const std::size_t> place, std::span<double> of_place) const {
  std::ranges::fill(of_place, 1);
  for (std::size_t e = 0; e < place.size(); ++e) of_place[place[e]] *= 1 - frequency_[e];
}

// Makes the parts of one group. For each part, computes the probabilities of choosing 0 … top_k of the group's experts
// outside the part, as the product of a prefix and a suffix.
void TokenChoice::multiply_group(std::size_t group, std::span<const std::size_t> place) {
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  const std::size_t size = chance_.size() / static_cast<std::size_t>(groups_.count);
  const std::size_t first = part_place_.size();
  std::ranges::fill(part_of_place_, kNone);
  for (std::size_t e = group * size; e < (group + 1) * size; ++e) {
    if (chance_[e] == 0) continue;
    std::size_t& part = part_of_place_[place[e]];
    if (part == kNone) {
      part = part_place_.size();
      part_place_.push_back(place[e]);
      part_group_.push_back(group);
      if (part_sets_.size() <= part) part_sets_.emplace_back();
      part_sets_[part].resize(k_ + 1);
      set_to_one(part_sets_[part]);
    }
    multiply(part_sets_[part], chance_[e]);
  }
  const std::size_t num_parts = part_place_.size() - first;
  Polynomials behind({num_parts + 1, k_ + 1});
  set_to_one(behind.row(num_parts));
  for (std::size_t i = num_parts; i-- > 0;) {
    std::ranges::copy(behind.row(i + 1), behind.row(i).begin());
    multiply(behind.row(i), part_sets_[first + i]);
  }
  std::ranges::copy(behind.row(0), group_sets_.row(group).begin());
  std::vector<double> before(k_ + 1);
  set_to_one(before);
  for (std::size_t i = 0; i < num_parts; ++i) {
    std::vector<double>& sets = part_sets_[first + i];
    const std::vector<double> own = std::exchange(sets, before);
    multiply(sets, behind.row(i + 1));
    for (double& chance : sets) chance *= own[0];  // and no expert of this part
    multiply(before, own);
  }
}

void TokenChoice::multiply_other_groups() {
  const auto num_groups = static_cast<std::size_t>(groups_.count);
  const auto per_token = static_cast<std::size_t>(groups_.per_token);
  fewer_groups_ = Polynomials({num_groups, k_ + 1});
  other_groups_ = Polynomials({num_groups, k_ + 1});
  used_ = Polynomials({per_token + 1, k_ + 1});
  for (std::size_t g = 0; g < num_groups; ++g) {
    set_to_one(used_);
    for (std::size_t other = 0; other < num_groups; ++other) {
      if (other != g) add_group(used_, group_sets_.row(other));
    }
    for (std::size_t i = 0; i <= k_; ++i) {
      for (std::size_t u = 0; u < per_token; ++u) fewer_groups_(g, i) += used_(u, i);
      other_groups_(g, i) = fewer_groups_(g, i) + used_(per_token, i);
    }
  }
}

// Probability of choosing top_k experts from at most per_token groups and no expert of `parts`. The parts must
// belong to different groups.
double TokenChoice::sets_without(std::span<const std::size_t> parts) {
  if (parts.size() <= 1) {
    const std::size_t g = parts.empty() ? 0 : part_group_[parts[0]];
    const std::span<const double> sets = parts.empty() ? group_sets_.row(g) : std::span(part_sets_[parts[0]]);
    double sum = sets[0] * other_groups_(g, k_);
    for (std::size_t i = 1; i <= k_; ++i) sum += sets[i] * fewer_groups_(g, k_ - i);
    return sum;
  }
  set_to_one(used_);
  for (std::size_t g = 0; g < group_sets_.extent(0); ++g) {
    const auto part = std::ranges::find(parts, g, [&](std::size_t p) { return part_group_[p]; });
    add_group(used_, part == parts.end() ? group_sets_.row(g) : std::span(part_sets_[*part]));
  }
  double sum = 0;
  for (std::size_t u = 0; u < used_.extent(0); ++u) sum += used_(u, k_);
  return sum;
}

}  // namespace foremoe
