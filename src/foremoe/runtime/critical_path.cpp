#include "foremoe/runtime/critical_path.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace foremoe {
namespace {

constexpr int kRounds = 50;               // rounds of reweighting; after 20, costs change by less than 1e-4
constexpr double kLeastDeviation = 1e-4;  // relative to the mean time; limits the weight of a timing that fits exactly
constexpr double kCollinear = 1e-9;       // relative to the product of squares; below it, calls and rows are collinear

struct Deviations {
  std::span<const ExpertTiming> timings;
  double floor = 0;

  double weight(const ExpertTiming& t, const ExpertCost& cost) const {
    return 1 / std::max(std::abs(t.seconds - cost.of(t.calls, t.rows)), floor);
  }
};

// Solves weighted least squares with both costs ≥ 0. `before` determines the weights.
ExpertCost refit(const Deviations& deviations, const ExpertCost& before, bool equal_weights) {
  double cc = 0, cr = 0, rr = 0, ct = 0, rt = 0;
  for (const ExpertTiming& t : deviations.timings) {
    const double w = equal_weights ? 1 : deviations.weight(t, before);
    const auto c = static_cast<double>(t.calls), r = static_cast<double>(t.rows);
    cc += w * c * c;
    cr += w * c * r;
    rr += w * r * r;
    ct += w * c * t.seconds;
    rt += w * r * t.seconds;
  }
  const ExpertCost by_rows{.per_row = rr > 0 ? std::max(rt / rr, 0.0) : 0};
  const ExpertCost by_calls{.per_call = cc > 0 ? std::max(ct / cc, 0.0) : 0};
  const double determinant = cc * rr - cr * cr;
  if (determinant <= kCollinear * cc * rr) return by_rows;
  const ExpertCost both{.per_call = (ct * rr - rt * cr) / determinant, .per_row = (rt * cc - ct * cr) / determinant};
  if (both.per_call < 0) return by_rows;
  if (both.per_row < 0) return by_calls;
  return both;
}

using Seconds = ArrayView<const double, 2>;  // [turn][rank]

double path_fitted_to(const TurnTable& turns, Seconds seconds) {
  std::array<std::vector<ExpertTiming>, 2> timings;  // [pass]
  const auto of = [&](std::size_t t) { return static_cast<std::size_t>(turns.pass[t] == Pass::kBackward); };
  for (std::size_t t = 0; t < turns.pass.size(); ++t) {
    for (std::size_t r = 0; r < seconds.extent(1); ++r) {
      timings[of(t)].push_back({.seconds = seconds(t, r), .calls = turns.calls(t, r), .rows = turns.rows(t, r)});
    }
  }
  const std::array costs = {fit_expert_cost(timings[0]), fit_expert_cost(timings[1])};
  double path = 0;
  for (std::size_t t = 0; t < turns.pass.size(); ++t) {
    double slowest = 0;
    for (std::size_t r = 0; r < seconds.extent(1); ++r) {
      slowest = std::max(slowest, costs[of(t)].of(turns.calls(t, r), turns.rows(t, r)));
    }
    path += slowest;
  }
  return path;
}

}  // namespace

ExpertCost fit_expert_cost(std::span<const ExpertTiming> timings) {
  if (timings.empty()) return {};
  double total = 0;
  for (const ExpertTiming& t : timings) total += t.seconds;
  const Deviations deviations{.timings = timings,
                              .floor = std::max(kLeastDeviation * total / static_cast<double>(timings.size()), 1e-15)};
  ExpertCost cost = refit(deviations, {}, true);
  for (int i = 0; i < kRounds; ++i) cost = refit(deviations, cost, false);
  return cost;
}

CriticalPath fitted_critical_path(const TurnTable& turns) {
  const Array<double, 2> least = least_compute_seconds(turns);
  CriticalPath path{.seconds = path_fitted_to(turns, least)};
  if (path.seconds <= 0) return path;
  std::vector<double> of_repeats;
  for (std::size_t i = 0; i < turns.compute_seconds.extent(0); ++i) {
    of_repeats.push_back(path_fitted_to(turns, turns.compute_seconds.view()[i]));
  }
  const auto [shortest, longest] = std::ranges::minmax(of_repeats);
  path.spread = (longest - shortest) / 2 / path.seconds;
  return path;
}

}  // namespace foremoe
