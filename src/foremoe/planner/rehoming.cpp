#include "foremoe/planner/rehoming.h"

#include <algorithm>

namespace foremoe::planner {

namespace {

constexpr int kMaxExchangesPerExpert = 4;    // bounds the search, which usually ends far earlier
constexpr float kLeastExchangeGain = 1e-4F;  // minimum gain of an exchange, so that rounding errors decide nothing

class Rehoming {
 public:
  explicit Rehoming(const LayerProblem& p)
      : problem_(p),
        home_(p.home),
        gain_({static_cast<std::size_t>(p.num_experts), static_cast<std::size_t>(p.num_experts)}),
        share_({static_cast<std::size_t>(p.num_experts), static_cast<std::size_t>(p.num_micro_steps)}),
        load_({static_cast<std::size_t>(p.num_ranks()), static_cast<std::size_t>(p.num_micro_steps)}) {
    for (int m = 0; m < p.num_micro_steps; ++m) {
      for (int e = 0; e < p.num_experts; ++e) {
        share_(e, m) = static_cast<float>(p.load(m)[e]) * p.per_mean[m];
        load_(home_[e], m) += share_(e, m);
      }
    }
  }

  std::vector<int> run(int max_moves) {
    for (int r = 0; r < problem_.num_ranks(); r += 2) weigh_pairs_of(r, std::min(r + 1, problem_.num_ranks() - 1));
    const int limit = kMaxExchangesPerExpert * problem_.num_experts;
    for (int i = 0; i < limit && exchange_best(max_moves); ++i) {
    }
    return home_;
  }

 private:
  static float over(float load) {
    const float x = std::max(0.0F, load - 1.0F);
    return x * x;
  }

  float gain(int e, int f) const {
    const auto a = load_.row(home_[e]);
    const auto b = load_.row(home_[f]);
    const auto x = share_.row(e);
    const auto y = share_.row(f);
    float sum = 0;
    for (std::size_t m = 0; m < a.size(); ++m) {
      const float d = x[m] - y[m];
      sum += over(a[m]) + over(b[m]) - over(a[m] - d) - over(b[m] + d);
    }
    return sum;
  }

  int moves_after(int e, int f) const {
    const auto moved = [&](int expert, int rank) { return problem_.home[expert] != rank ? 1 : 0; };
    return num_moved_ - moved(e, home_[e]) - moved(f, home_[f]) + moved(e, home_[f]) + moved(f, home_[e]);
  }

  // Updates the gains of all pairs with an expert on rank a or b. All other gains are unchanged.
  void weigh_pairs_of(int a, int b) {
    for (int e = 0; e < problem_.num_experts; ++e) {
      if (home_[e] != a && home_[e] != b) continue;
      for (int f = 0; f < problem_.num_experts; ++f) {
        const float g = home_[e] == home_[f] ? 0.0F : gain(e, f);
        gain_(std::min(e, f), std::max(e, f)) = g;
      }
    }
  }

  bool exchange_best(int max_moves) {
    float best = kLeastExchangeGain;
    int best_e = -1;
    int best_f = -1;
    for (int e = 0; e < problem_.num_experts; ++e) {
      const auto gains = gain_.row(e);
      for (int f = e + 1; f < problem_.num_experts; ++f) {
        if (gains[f] <= best || moves_after(e, f) > max_moves) continue;
        best = gains[f];
        best_e = e;
        best_f = f;
      }
    }
    if (best_e < 0) return false;
    num_moved_ = moves_after(best_e, best_f);
    const auto a = load_.row(home_[best_e]);
    const auto b = load_.row(home_[best_f]);
    for (std::size_t m = 0; m < a.size(); ++m) {
      const float d = share_(best_e, m) - share_(best_f, m);
      a[m] -= d;
      b[m] += d;
    }
    std::swap(home_[best_e], home_[best_f]);
    weigh_pairs_of(home_[best_e], home_[best_f]);
    return true;
  }

  const LayerProblem& problem_;
  std::vector<int> home_;  // [expert], rank
  Array<float, 2> gain_;   // [expert][later expert], gain of exchanging the two
  Array<float, 2> share_;  // [expert][micro_step]
  Array<float, 2> load_;   // [rank][micro_step], shares
  int num_moved_ = 0;
};

}  // namespace

std::vector<int> rehome(const LayerProblem& problem, int max_moves) { return Rehoming(problem).run(max_moves); }

}  // namespace foremoe::planner
