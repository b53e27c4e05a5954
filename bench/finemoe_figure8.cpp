// FineMoE's figure 8: largest rank load ÷ mean on 8 ranks with 32 experts. The experts' popularity follows a Zipf law,
// i^−s for the i-th most popular, in many random orders. Prints Markdown tables with mean / maximum over the orders.
//
//   finemoe_figure8 [orders] [tokens]
//
// Each order is one layer of one load table. Every policy plans this table with 4 guest slots (d = 2). `tokens`
// defaults to 8 sequences of 2,048 tokens per rank with top 2. The first table uses rounded expected loads. For the
// second table, four batches are drawn around the expected loads (normal approximation of the binomial), and `finemoe`
// places by their sum. ForeMoE runs with tolerance 0 and with its default tolerance.
//
// "eq. 3" is the bound of equation 3 for pairs of ranks under the symmetric placement, in which every two ranks share
// an expert and four pairs share two. The bound is half the tokens of the most popular expert ÷ mean. If one pair of
// ranks shares the two most popular experts, it is half the tokens of both ÷ mean.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/policy/policy.h"

namespace foremoe {
namespace {

constexpr int kRanks = 8;
constexpr int kExperts = 32;
constexpr int kGuestSlots = 4;
constexpr int kBatches = 4;

std::vector<double> zipf(double s) {  // descending
  std::vector<double> share(kExperts);
  for (int i = 0; i < kExperts; ++i) share[i] = std::pow(i + 1, -s);
  const double sum = std::accumulate(share.begin(), share.end(), 0.0);
  for (double& p : share) p /= sum;
  return share;
}

LoadTable draw(double s, int num_orders, double tokens, bool sampled) {
  LoadTable table{.top_k = 2, .ranks_per_node = kRanks};
  const std::size_t batches = sampled ? kBatches : 1;
  table.load = Array<Tokens, 4>({batches, static_cast<std::size_t>(num_orders), kRanks, kExperts});
  Random random(8);
  for (int order = 0; order < num_orders; ++order) {
    std::vector<double> share = zipf(s);
    for (std::size_t i = share.size(); i > 1; --i) std::swap(share[i - 1], share[random.below(i)]);
    for (std::size_t m = 0; m < batches; ++m) {
      for (int r = 0; r < kRanks; ++r) {
        const double of_rank = tokens / kRanks;
        for (int e = 0; e < kExperts; ++e) {
          const double noise = sampled ? random.normal() * std::sqrt(of_rank * share[e] * (1 - share[e])) : 0;
          table.load(m, order, r, e) = Tokens{std::llround(std::max(0.0, of_rank * share[e] + noise))};
        }
      }
    }
  }
  return table;
}

std::string rho_of(std::string_view name, const LoadTable& load, ThreadPool& pool,
                   std::optional<double> tolerance = {}) {
  PlannerOptions options;
  options.guest_slots = kGuestSlots;
  options.tolerance = tolerance;
  const Array<RankId, 2> home = contiguous_homes(load.num_layers(), kExperts, kRanks);
  const PolicyResult result = find_policy(name)->plan({.load = load, .home = home, .options = options}, pool);
  const StepPlan& plan = std::get<PlannedStep>(result).plan;
  if (!check_plan(plan, load).ok()) return "refused";
  const Spread rho = plan_figures(plan, load).rho;
  return fmt::format("{:.4f} / {:.4f}", rho.mean, rho.max);
}

int run(int num_orders, double tokens) {
  ThreadPool pool;
  for (const bool sampled : {false, true}) {
    fmt::print("{}, {} orders, {:.0f} tokens\n\n", sampled ? "sampled batches" : "expected loads", num_orders, tokens);
    fmt::print(
        "| s | eq. 3 | vanilla | eplb | finemoe-random | finemoe-symmetric | finemoe | foremoe, tolerance 0 | foremoe "
        "|\n");
    fmt::print("|---|---|---|---|---|---|---|---|---|\n");
    for (int tenths = 0; tenths <= 20; tenths += 2) {
      const double s = tenths / 10.0;
      const LoadTable load = draw(s, num_orders, tokens, sampled);
      const std::vector<double> share = zipf(s);
      fmt::print("| {:.1f} | {:.3f} / {:.3f} |", s, std::max(1.0, share[0] * kRanks / 2),
                 std::max(1.0, (share[0] + share[1]) * kRanks / 2));
      for (const char* name : {"vanilla", "eplb", "finemoe-random", "finemoe-symmetric", "finemoe"}) {
        fmt::print(" {} |", rho_of(name, load, pool));
      }
      fmt::print(" {} | {} |\n", rho_of("foremoe", load, pool, 0.0), rho_of("foremoe", load, pool));
      std::fflush(stdout);
    }
    fmt::print("\n");
  }
  return 0;
}

}  // namespace
}  // namespace foremoe

int main(int argc, char** argv) {
  const int orders = argc > 1 ? std::atoi(argv[1]) : 1000;
  const double tokens = argc > 2 ? std::atof(argv[2]) : 262144;
  return foremoe::run(orders, tokens);
}
