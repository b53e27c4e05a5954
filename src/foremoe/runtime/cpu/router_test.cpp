#include "foremoe/runtime/cpu/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "foremoe/testing/arithmetic.h"

namespace foremoe::cpu {
namespace {

using namespace foremoe::test;

class Router : public Arithmetic {
 protected:
  RouterWorkspace workspace_;
  static constexpr std::size_t kExperts = 9;

  // Draws k distinct experts per token. `left_out`: removes every third entry, and all entries of the last token.
  std::vector<std::int32_t> choices(std::size_t tokens, std::size_t k, bool left_out) {
    std::vector<std::int32_t> all(kExperts), chosen;
    std::iota(all.begin(), all.end(), 0);
    for (std::size_t t = 0; t < tokens; ++t) {
      for (std::size_t i = kExperts - 1; i > 0; --i) std::swap(all[i], all[random().below(i + 1)]);
      chosen.insert(chosen.end(), all.begin(), all.begin() + static_cast<std::ptrdiff_t>(k));
    }
    for (std::size_t i = 0; left_out && i < chosen.size(); ++i) {
      if (i % 3 == 0 || i / k + 1 == tokens) chosen[i] = -1;
    }
    return chosen;
  }

  static std::vector<double> weights(const std::vector<double>& x, const std::vector<double>& router,
                                     const std::vector<std::int32_t>& expert, std::size_t k, std::size_t hidden) {
    std::vector<double> weight(expert.size());
    for (std::size_t first = 0; first < expert.size(); first += k) {
      double greatest = -1e300, sum = 0;
      for (std::size_t i = first; i < first + k; ++i) {
        if (expert[i] < 0) continue;
        weight[i] = inner_product(std::span(x).subspan(first / k * hidden, hidden),
                                  std::span(router).subspan(static_cast<std::size_t>(expert[i]) * hidden, hidden));
        greatest = std::max(greatest, weight[i]);
      }
      for (std::size_t i = first; i < first + k; ++i) sum += expert[i] < 0 ? 0 : std::exp(weight[i] - greatest);
      for (std::size_t i = first; i < first + k; ++i)
        weight[i] = expert[i] < 0 ? 0 : std::exp(weight[i] - greatest) / sum;
    }
    return weight;
  }
};

TEST_F(Router, WeightsAreTheSoftmaxOverChosenExperts) {
  for (const std::size_t hidden : {1, 5, 64, 200}) {
    for (const std::size_t k : {1, 2, 8}) {
      for (const std::size_t tokens : {0, 1, 70}) {
        for (const bool left_out : {false, true}) {
          const std::vector<float> x = random_values(tokens * hidden), router = random_values(kExperts * hidden);
          const auto expert = choices(tokens, k, left_out);
          float* weight = put(expert.size(), 9);
          router_forward({.x = put(x),
                          .router = put(router),
                          .expert = expert,
                          .k = static_cast<int>(k),
                          .hidden = static_cast<int>(hidden)},
                         weight, workspace_);
          const auto expected = weights(to_double(x), to_double(router), expert, k, hidden);
          EXPECT_LE(relative_error(get(weight, expert.size()), expected), kTolerance)
              << hidden << ' ' << k << ' ' << tokens;
        }
      }
    }
  }
}

TEST_F(Router, LargeLogitsDoNotOverflow) {
  const std::vector<float> x{1000}, router{1, -1, 0.999F};
  float* weight = put(3, 0);
  const std::vector<std::int32_t> expert{0, 1, 2};
  router_forward({.x = put(x), .router = put(router), .expert = expert, .k = 3, .hidden = 1}, weight, workspace_);
  const auto expected = weights(to_double(x), to_double(router), {0, 1, 2}, 3, 1);
  EXPECT_LE(relative_error(get(weight, 3), expected), kTolerance * 10);  // a logit of 1000 has few fractional digits
}

TEST_F(Router, BackwardMatchesFiniteDifferencesAndAccumulates) {
  for (const std::size_t k : {1, 3}) {
    constexpr std::size_t kHidden = 4, kTokens = 6;
    const std::vector<float> x = random_values(kTokens * kHidden), router = random_values(kExperts * kHidden);
    const auto expert = choices(kTokens, k, k > 1);
    const std::vector<float> d_weight = random_values(expert.size());
    const std::vector<float> dx_before = random_values(x.size()), d_router_before = random_values(router.size());
    float *weight = put(expert.size(), 0), *dx = put(dx_before), *d_router = put(d_router_before);
    const RoutedTokens tokens{
        .x = put(x), .router = put(router), .expert = expert, .k = static_cast<int>(k), .hidden = kHidden};
    router_forward(tokens, weight, workspace_);
    router_backward(tokens, {.weight = weight, .d_weight = put(d_weight), .dx = dx, .d_router = d_router}, workspace_);

    const auto loss = [&](const std::vector<double>& at_x, const std::vector<double>& at_router) {
      return inner_product(weights(at_x, at_router, expert, k, kHidden), to_double(d_weight));
    };
    auto by_x = slopes([&](const auto& v) { return loss(v, to_double(router)); }, to_double(x));
    auto by_router = slopes([&](const auto& v) { return loss(to_double(x), v); }, to_double(router));
    for (std::size_t i = 0; i < by_x.size(); ++i) by_x[i] += dx_before[i];
    for (std::size_t i = 0; i < by_router.size(); ++i) by_router[i] += d_router_before[i];
    EXPECT_LE(relative_error(get(dx, x.size()), by_x), kTolerance) << k;
    EXPECT_LE(relative_error(get(d_router, router.size()), by_router), kTolerance) << k;
  }
}

TEST_F(Router, GradientsOfManyTokensKeepTheirPrecision) {
  constexpr std::size_t kTokens = 20'000, kHidden = 8;
  const std::vector<float> x = random_values(kTokens * kHidden, 0), router = random_values(kExperts * kHidden);
  std::vector<std::int32_t> expert;
  for (std::size_t t = 0; t < kTokens; ++t) expert.insert(expert.end(), {0, static_cast<std::int32_t>(1 + t % 8)});
  std::vector<float> d_weight;
  for (std::size_t t = 0; t < kTokens; ++t) d_weight.insert(d_weight.end(), {1, 0});  // all terms are positive
  float *weight = put(expert.size(), 0), *dx = put(x.size(), 0), *d_router = put(router.size(), 0);
  const RoutedTokens tokens{.x = put(x), .router = put(router), .expert = expert, .k = 2, .hidden = kHidden};
  router_forward(tokens, weight, workspace_);
  router_backward(tokens, {.weight = weight, .d_weight = put(d_weight), .dx = dx, .d_router = d_router}, workspace_);

  const auto w = weights(to_double(x), to_double(router), expert, 2, kHidden);
  std::vector<double> expected(router.size());
  for (std::size_t i = 0; i < expert.size(); ++i) {
    const double d_logit = w[i] * (d_weight[i] - w[i / 2 * 2]);  // the mean gradient is the first expert's weight
    for (std::size_t h = 0; h < kHidden; ++h)
      expected[static_cast<std::size_t>(expert[i]) * kHidden + h] += d_logit * x[i / 2 * kHidden + h];
  }
  EXPECT_LE(relative_error(get(d_router, router.size()), expected), kTolerance);
}

TEST_F(Router, PicksTheLargestLogitsBestFirst) {
  constexpr std::size_t kHidden = 20, kTokens = 40;
  const std::vector<float> x = random_values(kTokens * kHidden), router = random_values(kExperts * kHidden);
  const std::vector<std::int32_t> token{3, 39, 0, 17, 17};
  const auto pick = [&](std::size_t k, std::span<const std::int32_t> of, std::span<std::int32_t> picked) {
    router_pick({.x = x.data(), .router = router.data(), .expert = {}, .k = static_cast<int>(k), .hidden = kHidden},
                {.experts = kExperts, .token = of, .picked = picked}, workspace_);
  };
  for (const std::size_t k : {std::size_t{1}, std::size_t{4}, kExperts}) {
    std::vector<std::int32_t> picked(token.size() * k), expected;
    pick(k, token, picked);
    for (const std::int32_t t : token) {
      std::vector<std::int32_t> all(kExperts);
      std::iota(all.begin(), all.end(), 0);
      const auto every = to_double(x), rows = to_double(router);
      const auto logit = [&](std::int32_t e) {
        return inner_product(std::span(every).subspan(static_cast<std::size_t>(t) * kHidden, kHidden),
                             std::span(rows).subspan(static_cast<std::size_t>(e) * kHidden, kHidden));
      };
      std::stable_sort(all.begin(), all.end(), [&](auto a, auto b) { return logit(a) > logit(b); });
      expected.insert(expected.end(), all.begin(), all.begin() + static_cast<std::ptrdiff_t>(k));
      std::vector<std::int32_t> alone(k);  // a token's result does not depend on others
      pick(k, std::span(&t, 1), alone);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin()));
    }
    EXPECT_EQ(picked, expected);
  }
  pick(2, {}, {});
}

TEST_F(Router, TiesGoToTheLowestExpert) {
  const std::vector<float> x{1, 2}, router{0, 0, 1, 1, 0, 0, 1, 1, 1, 1};  // logits 0 3 0 3 3
  std::vector<std::int32_t> picked(4);
  const std::int32_t token = 0;
  router_pick({.x = x.data(), .router = router.data(), .expert = {}, .k = 4, .hidden = 2},
              {.experts = 5, .token = {&token, 1}, .picked = picked}, workspace_);
  EXPECT_EQ(picked, (std::vector<std::int32_t>{1, 3, 4, 0}));
}

TEST_F(Router, NanLogitsStillPickDistinctExperts) {
  const float nan = std::nanf("");
  const std::vector<float> x{1}, router{nan, 1, nan, 2};
  std::vector<std::int32_t> picked(4);
  const std::int32_t token = 0;
  router_pick({.x = x.data(), .router = router.data(), .expert = {}, .k = 4, .hidden = 1},
              {.experts = 4, .token = {&token, 1}, .picked = picked}, workspace_);
  EXPECT_EQ(picked, (std::vector<std::int32_t>{3, 1, 0, 2}));
}

}  // namespace
}  // namespace foremoe::cpu
