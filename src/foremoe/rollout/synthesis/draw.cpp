#include "foremoe/rollout/synthesis/draw.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <numeric>

namespace foremoe {

namespace {

constexpr int kRowsPerOrder = 16;
constexpr double kFewExpected = 10.0;  // BTRS is not valid below this

// SplitMix64's finaliser (Steele, Lea, Flood 2014).
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Returns ln k! minus the main terms of Stirling's formula.
double stirling_tail(double k) {
  static constexpr std::array<double, 10> kTail{
      0.0810614667953272, 0.0413406959554092, 0.0276779256849983, 0.0207906721037650,  0.0166446911898211,
      0.0138761288230707, 0.0118967099458917, 0.0104112652619720, 0.00925546218271273, 0.00833056343336287};
  if (k < 10) return kTail[static_cast<std::size_t>(k)];
  const double k1 = k + 1;
  const double squared = k1 * k1;
  return (1.0 / 12 - (1.0 / 360 - 1.0 / 1260 / squared) / squared) / k1;
}

// Requires p ≤ 1/2.
std::int64_t binomial_by_inversion(Random& random, std::int64_t n, double p) {
  const double odds = p / (1 - p);
  double probability = std::exp(static_cast<double>(n) * std::log1p(-p));
  double u = random.uniform();
  std::int64_t k = 0;
  while (u > probability && k < n) {
    u -= probability;
    ++k;
    probability *= odds * static_cast<double>(n - k + 1) / static_cast<double>(k);
  }
  return k;
}

// Requires p ≤ 1/2 and n·p ≥ 10. Constants are named as in Hörmann's paper.
std::int64_t binomial_by_rejection(Random& random, std::int64_t trials, double p) {
  const auto n = static_cast<double>(trials);
  const double deviation = std::sqrt(n * p * (1 - p));
  const double b = 1.15 + 2.53 * deviation;
  const double a = -0.0873 + 0.0248 * b + 0.01 * p;
  const double c = n * p + 0.5;
  const double v_r = 0.92 - 4.2 / b;
  const double alpha = (2.83 + 5.1 / b) * deviation;
  const double odds = p / (1 - p);
  const double m = std::floor((n + 1) * p);
  for (;;) {
    const double u = random.uniform() - 0.5;
    const double v = 1.0 - random.uniform();
    const double us = 0.5 - std::abs(u);
    const double k = std::floor((2 * a / us + b) * u + c);
    if (us >= 0.07 && v <= v_r) return static_cast<std::int64_t>(k);
    if (!(k >= 0 && k <= n)) continue;
    const double log_v = std::log(v * alpha / (a / (us * us) + b));
    const double bound = (m + 0.5) * std::log((m + 1) / (odds * (n - m + 1))) +
                         (n + 1) * std::log((n - m + 1) / (n - k + 1)) +
                         (k + 0.5) * std::log(odds * (n - k + 1) / (k + 1)) + stirling_tail(m) + stirling_tail(n - m) -
                         stirling_tail(k) - stirling_tail(n - k);
    if (log_v <= bound) return static_cast<std::int64_t>(k);
  }
}

}  // namespace

Random stream_of(std::uint64_t seed, Purpose purpose, std::uint64_t a, std::uint64_t b) {
  std::uint64_t state = seed;
  for (const std::uint64_t part : {static_cast<std::uint64_t>(purpose), a, b}) state = mixed(state) ^ part;
  return Random(mixed(state));
}

void shuffle(Random& random, std::span<std::int32_t> values) {
  for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random.below(i)]);
}

std::vector<std::int32_t> permutation(Random& random, std::size_t n) {
  std::vector<std::int32_t> values(n);
  std::iota(values.begin(), values.end(), 0);
  shuffle(random, values);
  return values;
}

double gamma(Random& random, double shape) {
  if (shape < 1) {
    const double u = 1.0 - random.uniform();
    return gamma(random, shape + 1) * std::pow(u, 1 / shape);
  }
  const double d = shape - 1.0 / 3;
  const double c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = random.normal();
    const double v = std::pow(1 + c * x, 3);
    if (v <= 0) continue;
    const double u = 1.0 - random.uniform();
    if (std::log(u) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
  }
}

std::int64_t binomial(Random& random, std::int64_t n, double p) {
  if (n <= 0 || p <= 0) return 0;
  if (p >= 1) return n;
  if (p > 0.5) return n - binomial(random, n, 1 - p);
  return static_cast<double>(n) * p < kFewExpected ? binomial_by_inversion(random, n, p)
                                                   : binomial_by_rejection(random, n, p);
}

void multinomial(Random& random, std::int64_t n, std::span<const double> p, std::int64_t limit,
                 std::span<std::int64_t> counts) {
  assert(static_cast<std::int64_t>(p.size()) * limit >= n);
  double mass = 1;  // probability of the remaining categories
  for (std::size_t e = 0; e < p.size(); ++e) {
    const auto room_after = static_cast<std::int64_t>(p.size() - e - 1) * limit;
    const std::int64_t drawn = binomial(random, n, mass > 0 ? std::min(1.0, p[e] / mass) : 1.0);
    counts[e] = std::clamp(drawn, std::max(std::int64_t{0}, n - room_after), std::min(n, limit));
    n -= counts[e];
    mass -= p[e];
  }
}

void apportion(std::int64_t n, std::span<const double> shares, std::int64_t limit, std::span<std::int64_t> counts) {
  const std::size_t size = shares.size();
  assert(static_cast<std::int64_t>(size) * limit >= n);
  constexpr double kRounding = 1e-6;                         // tolerance for equal shares and for integer shares
  std::vector<std::pair<double, std::size_t>> by_remainder;  // largest first
  std::int64_t left = n;
  for (std::size_t e = 0; e < size; ++e) {
    const auto whole = static_cast<std::int64_t>(std::floor(shares[e] + kRounding));
    counts[e] = std::clamp(whole, std::int64_t{0}, limit);
    left -= counts[e];
    by_remainder.emplace_back(-std::round((shares[e] - static_cast<double>(counts[e])) / kRounding), e);
  }
  std::sort(by_remainder.begin(), by_remainder.end());
  for (std::size_t i = 0; left > 0; i = (i + 1) % size) {
    std::int64_t& count = counts[by_remainder[i].second];
    if (count == limit) continue;
    ++count;
    --left;
  }
  // Negative shares count as 0, so the counts may exceed n. Remove the excess from the smallest remainders.
  for (std::size_t i = size - 1; left < 0; i = (i + size - 1) % size) {
    std::int64_t& count = counts[by_remainder[i].second];
    if (count == 0) continue;
    --count;
    ++left;
  }
}

void normalize(std::span<double> p, double limit) {
  assert(limit * static_cast<double>(p.size()) >= 1 - 1e-12);
  double sum = std::accumulate(p.begin(), p.end(), 0.0);
  if (!(sum > 0)) {
    std::fill(p.begin(), p.end(), 1.0);
    sum = static_cast<double>(p.size());
  }
  for (double& x : p) x /= sum;
  // Each round sets at least one more category to the limit, so there are at most p.size() rounds.
  for (std::size_t round = 0; round < p.size(); ++round) {
    double excess = 0;
    double free_mass = 0;
    std::size_t free = 0;
    for (double& x : p) {
      if (x >= limit) {
        excess += x - limit;
        x = limit;
      } else {
        free_mass += x;
        ++free;
      }
    }
    if (excess <= 0 || free == 0) return;
    for (double& x : p) {
      if (x < limit) x += free_mass > 0 ? excess * (x / free_mass) : excess / static_cast<double>(free);
    }
  }
}

DistinctSampler::DistinctSampler(std::span<const double> p, int k, Random& random)
    : p_(p), random_(random), order_(p.size()), bound_(p.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  bound_.back() = k;
}

void DistinctSampler::draw_order() {
  shuffle(random_, order_);
  const double k = bound_.back();
  double sum = 0;
  for (std::size_t i = 0; i < order_.size(); ++i) bound_[i] = sum += k * p_[static_cast<std::size_t>(order_[i])];
  bound_.back() = k;
  rows_left_ = kRowsPerOrder;
}

void DistinctSampler::draw(std::span<std::int64_t> chosen) {
  if (rows_left_-- == 0) {
    draw_order();
    --rows_left_;
  }
  const double u = random_.uniform();
  std::size_t at = 0;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    // Leaves enough categories for the remaining choices. Steps are at most 1, so only rounding errors need this.
    const std::size_t last = order_.size() - (chosen.size() - i);
    while (at < last && bound_[at] <= u + static_cast<double>(i)) ++at;
    chosen[i] = order_[at++];
  }
}

GroupedSampler::GroupedSampler(std::span<const double> p, int k, const ExpertGroups& groups, Random& random)
    : p_(p),
      groups_(groups),
      counted_(static_cast<std::size_t>((k + groups.per_token - 1) / groups.per_token)),
      random_(random),
      scored_(p.size()),
      of_group_(static_cast<std::size_t>(groups.count)) {
  counted_ = std::min(counted_, p.size() / of_group_.size());
}

void GroupedSampler::draw(std::span<std::int64_t> chosen) {
  const auto size = static_cast<std::ptrdiff_t>(p_.size() / of_group_.size());
  const auto counted = static_cast<std::ptrdiff_t>(counted_);
  for (std::size_t e = 0; e < p_.size(); ++e) {
    const double unscaled = -std::log(1 - random_.uniform());
    scored_[e] = {p_[e] > 0 ? unscaled / p_[e] : std::numeric_limits<double>::infinity(), static_cast<std::int64_t>(e)};
  }
  for (std::size_t g = 0; g < of_group_.size(); ++g) {
    const auto first = scored_.begin() + static_cast<std::ptrdiff_t>(g) * size;
    std::partial_sort(first, first + counted, first + size);
    const double sum = std::accumulate(first, first + counted, 0.0,
                                       [](double before, const Scored& s) { return before + std::log(s.time); });
    of_group_[g] = {sum, g};
  }
  std::partial_sort(of_group_.begin(), of_group_.begin() + groups_.per_token, of_group_.end());
  kept_.clear();
  for (int i = 0; i < groups_.per_token; ++i) {
    const auto first =
        scored_.begin() + static_cast<std::ptrdiff_t>(of_group_[static_cast<std::size_t>(i)].second) * size;
    kept_.insert(kept_.end(), first, first + size);
  }
  std::partial_sort(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(chosen.size()), kept_.end());
  for (std::size_t i = 0; i < chosen.size(); ++i) chosen[i] = kept_[i].category;
}

}  // namespace foremoe
