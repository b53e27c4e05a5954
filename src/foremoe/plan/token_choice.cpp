#include "foremoe/plan/token_choice.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>
#include <utility>

namespace foremoe {
namespace {

constexpr int kMostIterations = 60;
constexpr double kTolerance = 1e-3;  // of the experts of a token, how many are still of the wrong kind

// Weights stay finite where every token chooses an expert.
constexpr double kMostLikely = 1 - 1e-6;

// All polynomials have as many coefficients; higher ones are left out.
using Coefficients = std::span<double>;

// Times 1 + weight·t.
void multiply(Coefficients sets, double weight) {
  for (std::size_t i = sets.size(); i-- > 1;) sets[i] += weight * sets[i - 1];
}

void multiply(Coefficients sets, std::span<const double> by) {
  for (std::size_t i = sets.size(); i-- > 0;) {
    double sum = 0;
    for (std::size_t j = 0; j <= i; ++j) sum += sets[i - j] * by[j];
    sets[i] = sum;
  }
}

void become_one(Coefficients sets) {
  std::ranges::fill(sets, 0);
  sets[0] = 1;
}

// Sets from one group more: those that have experts of it.
void use_group(Array<double, 2>& used, std::span<const double> sets) {
  for (std::size_t u = used.extent(0); u-- > 1;) {
    const std::span<const double> from = used.row(u - 1);
    const std::span<double> to = used.row(u);
    for (std::size_t i = 1; i < to.size(); ++i) {
      for (std::size_t j = 1; j <= i; ++j) to[i] += from[i - j] * sets[j];
    }
  }
}

void become_one(Array<double, 2>& used) {
  std::ranges::fill(used.flat(), 0);
  used(0, 0) = 1;
}

}  // namespace

void TokenChoice::fit(std::span<const Tokens> counts, int top_k, const ExpertGroups& groups) {
  std::int64_t chosen = 0;
  std::int64_t most = 0;
  std::size_t experts = 0;
  for (const Tokens count : counts) {
    chosen += count.value;
    most = std::max(most, count.value);
    experts += count.value > 0 ? 1 : 0;
  }
  assert(chosen > 0);
  k_ = std::min(static_cast<std::size_t>(top_k), experts);
  groups_ = groups.per_token < groups.count ? groups : ExpertGroups{};
  tokens_ = std::max(static_cast<double>(chosen) / static_cast<double>(k_), static_cast<double>(most));

  // Weights are between this and its inverse: no product of top_k is infinite, and none of those is lost.
  const double largest = std::min(kMostLikely / (1 - kMostLikely), std::pow(1e250, 1 / static_cast<double>(k_)));
  each_apart_.resize(counts.size());
  std::iota(each_apart_.begin(), each_apart_.end(), std::size_t{0});
  wanted_.resize(counts.size());
  excluded_.resize(counts.size());
  weight_.resize(counts.size());
  for (std::size_t e = 0; e < counts.size(); ++e) {
    wanted_[e] = std::min(static_cast<double>(counts[e].value) / tokens_, kMostLikely);
    weight_[e] = std::min(wanted_[e] / (1 - wanted_[e]), largest);
  }
  double step = 1;
  double wrong_before = static_cast<double>(k_);
  for (int i = 0; i < kMostIterations; ++i) {
    misses(each_apart_, excluded_);
    double wrong = 0;
    for (std::size_t e = 0; e < counts.size(); ++e) wrong += std::abs(1 - excluded_[e] - wanted_[e]);
    if (wrong <= kTolerance * static_cast<double>(k_)) return;
    // All weights change at once, which overshoots where experts of a group are chosen together.
    if (wrong > wrong_before / 2) step = std::max(step / 2, 1 / static_cast<double>(k_));
    wrong_before = wrong;
    for (std::size_t e = 0; e < counts.size(); ++e) {
      const double included = std::min(1 - excluded_[e], kMostLikely);
      if (weight_[e] == 0 || included <= 0) continue;
      const double odds = wanted_[e] / (1 - wanted_[e]) * (1 - included) / included;
      weight_[e] = std::clamp(weight_[e] * std::pow(odds, step), 1 / largest, largest);
    }
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
  for (std::size_t p = 0; p < of_place.size(); ++p) {
    of_place[p] = parts_[p].empty() ? 1 : sets_without(parts_[p]) / all;
  }
}

// The parts of one group: each becomes the product of all the others, of what lies before it and of what lies behind.
void TokenChoice::multiply_group(std::size_t group, std::span<const std::size_t> place) {
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  const std::size_t size = weight_.size() / static_cast<std::size_t>(groups_.count);
  const std::size_t first = part_place_.size();
  std::ranges::fill(part_of_place_, kNone);
  for (std::size_t e = group * size; e < (group + 1) * size; ++e) {
    if (weight_[e] == 0) continue;
    std::size_t& part = part_of_place_[place[e]];
    if (part == kNone) {
      part = part_place_.size();
      part_place_.push_back(place[e]);
      part_group_.push_back(group);
      if (part_sets_.size() <= part) part_sets_.emplace_back();
      part_sets_[part].resize(k_ + 1);
      become_one(part_sets_[part]);
    }
    multiply(part_sets_[part], weight_[e]);
  }
  const std::size_t num_parts = part_place_.size() - first;
  Polynomials behind({num_parts + 1, k_ + 1});
  become_one(behind.row(num_parts));
  for (std::size_t i = num_parts; i-- > 0;) {
    std::ranges::copy(behind.row(i + 1), behind.row(i).begin());
    multiply(behind.row(i), part_sets_[first + i]);
  }
  std::ranges::copy(behind.row(0), group_sets_.row(group).begin());
  std::vector<double> before(k_ + 1);
  become_one(before);
  for (std::size_t i = 0; i < num_parts; ++i) {
    std::vector<double>& sets = part_sets_[first + i];
    std::vector<double> own = std::exchange(sets, before);
    multiply(sets, behind.row(i + 1));
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
    become_one(used_);
    for (std::size_t other = 0; other < num_groups; ++other) {
      if (other != g) use_group(used_, group_sets_.row(other));
    }
    for (std::size_t i = 0; i <= k_; ++i) {
      for (std::size_t u = 0; u < per_token; ++u) fewer_groups_(g, i) += used_(u, i);
      other_groups_(g, i) = fewer_groups_(g, i) + used_(per_token, i);
    }
  }
}

// Of all sets, those that have no expert of these parts, each of another group: the sum of their products.
double TokenChoice::sets_without(std::span<const std::size_t> parts) {
  if (parts.size() <= 1) {
    const std::size_t g = parts.empty() ? 0 : part_group_[parts[0]];
    const std::span<const double> sets = parts.empty() ? group_sets_.row(g) : std::span(part_sets_[parts[0]]);
    double sum = other_groups_(g, k_);
    for (std::size_t i = 1; i <= k_; ++i) sum += sets[i] * fewer_groups_(g, k_ - i);
    return sum;
  }
  become_one(used_);
  for (std::size_t g = 0; g < group_sets_.extent(0); ++g) {
    const auto part = std::ranges::find(parts, g, [&](std::size_t p) { return part_group_[p]; });
    use_group(used_, part == parts.end() ? group_sets_.row(g) : std::span(part_sets_[*part]));
  }
  double sum = 0;
  for (std::size_t u = 0; u < used_.extent(0); ++u) sum += used_(u, k_);
  return sum;
}

}  // namespace foremoe
