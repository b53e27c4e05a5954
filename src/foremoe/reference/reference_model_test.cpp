#include "foremoe/reference/reference_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace foremoe {
namespace {

constexpr ModelSize kTiny{.layers = 2, .experts = 3, .top_k = 2, .shape = {.hidden = 3, .intermediate = 2}, .seed = 7};
constexpr int kMicroSteps = 2, kRanks = 2;

using Values = std::vector<double>;

constexpr double kSlopeTolerance = 1e-7;  // error of central differences

// [token·k + j]: tokens with two experts, one expert and none; one source has no tokens.
std::vector<ExpertId> tiny_routes(MicroStepId m, RankId r, LayerId l) {
  if (m.value == 1 && r.value == 1) return {};
  const auto e = [&](int i) { return ExpertId{(i + l.value + m.value) % 3}; };
  return {e(0), e(1), e(2), e(0), kUnassigned, e(1), kUnassigned, kUnassigned};
}

// Independent implementation of the model, one token at a time and without matrices.
struct PlainModel {
  std::vector<std::vector<Values>> gate_up, down;  // [layer][expert]
  std::vector<Values> router;                      // [layer]
  std::vector<std::vector<Values>> input, target;  // [micro_step][rank]

  static Values draw_values(Tensor tensor, int a, int b, std::size_t n) {
    std::vector<float> values(n);
    draw(kTiny, {.tensor = tensor, .a = a, .b = b}, values);
    return {values.begin(), values.end()};
  }

  PlainModel() {
    for (int l = 0; l < kTiny.layers; ++l) {
      gate_up.emplace_back();
      down.emplace_back();
      for (int e = 0; e < kTiny.experts; ++e) {
        gate_up.back().push_back(draw_values(Tensor::kGateUp, l, e, 12));
        down.back().push_back(draw_values(Tensor::kDown, l, e, 6));
      }
      router.push_back(draw_values(Tensor::kRouter, l, 0, 9));
    }
    for (int m = 0; m < kMicroSteps; ++m) {
      input.emplace_back();
      target.emplace_back();
      for (int r = 0; r < kRanks; ++r) {
        const std::size_t n = tiny_routes(MicroStepId{m}, RankId{r}, LayerId{0}).size() / 2 * 3;
        input.back().push_back(draw_values(Tensor::kInput, m, r, n));
        target.back().push_back(draw_values(Tensor::kTarget, m, r, n));
      }
    }
  }

  Values output(int m, int r) const {
    Values x = input[m][r];
    for (int l = 0; l < kTiny.layers; ++l) {
      const auto routes = tiny_routes(MicroStepId{m}, RankId{r}, LayerId{l});
      for (std::size_t t = 0; t < x.size() / 3; ++t) {
        const double in[3] = {x[t * 3], x[t * 3 + 1], x[t * 3 + 2]};
        const auto logit = [&](int e) {
          double sum = 0;
          for (int h = 0; h < 3; ++h) sum += in[h] * router[l][e * 3 + h];
          return sum;
        };
        double total = 0;
        for (int j = 0; j < 2; ++j) total += routes[t * 2 + j].value < 0 ? 0 : std::exp(logit(routes[t * 2 + j].value));
        for (int j = 0; j < 2; ++j) {
          const int e = routes[t * 2 + j].value;
          if (e < 0) continue;
          for (int i = 0; i < 2; ++i) {
            double g = 0, u = 0;
            for (int h = 0; h < 3; ++h) {
              g += in[h] * gate_up[l][e][i * 3 + h];
              u += in[h] * gate_up[l][e][(2 + i) * 3 + h];
            }
            for (int h = 0; h < 3; ++h) {
              x[t * 3 + h] += std::exp(logit(e)) / total * down[l][e][h * 2 + i] * u * g / (1 + std::exp(-g));
            }
          }
        }
      }
    }
    return x;
  }

  double loss() const {
    double sum = 0;
    int tokens = 0;
    for (int m = 0; m < kMicroSteps; ++m) {
      for (int r = 0; r < kRanks; ++r) {
        const Values y = output(m, r);
        tokens += static_cast<int>(y.size()) / 3;
        for (std::size_t i = 0; i < y.size(); ++i) sum += 0.5 * (y[i] - target[m][r][i]) * (y[i] - target[m][r][i]);
      }
    }
    return sum / tokens;
  }

  // Central differences of the loss with respect to each element of `values`, a member of this object.
  Values differences(Values& values) const {
    constexpr double kStep = 1e-5;
    Values result;
    for (double& v : values) {
      const double before = v;
      v = before + kStep;
      const double above = loss();
      v = before - kStep;
      result.push_back((above - loss()) / (2 * kStep));
      v = before;
    }
    return result;
  }
};

// Expects errors within `tolerance`, relative to the largest element.
void expect_near(const Values& x, const Values& expected, double tolerance) {
  ASSERT_EQ(x.size(), expected.size());
  double norm = 0;
  for (const double v : expected) norm = std::max(norm, std::abs(v));
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], expected[i], tolerance * norm) << i;
}

ReferenceModel model_of(const ModelSize& size) {
  ThreadPool pool(1);
  return {size, pool};
}

void optimize(ReferenceModel& model, const ReferenceResult& gradients, const Optimizer& optimizer) {
  ThreadPool pool(1);
  model.optimize(gradients, optimizer, pool);
}

ReferenceResult run_tiny(const ReferenceModel& model, bool backward, std::size_t threads = 1) {
  ThreadPool pool(threads);
  return model.run({.micro_steps = kMicroSteps, .ranks = kRanks, .routes = tiny_routes, .backward = backward}, pool);
}

TEST(ReferenceModel, OutputsAndLossMatchAModelWithoutMatrices) {
  const PlainModel plain;
  const ReferenceResult result = run_tiny(model_of(kTiny), true);
  for (int m = 0; m < kMicroSteps; ++m) {
    for (int r = 0; r < kRanks; ++r) expect_near(result.output(m, r), plain.output(m, r), 1e-14);
  }
  EXPECT_NEAR(result.loss / plain.loss(), 1, 1e-14);
}

TEST(ReferenceModel, GradientsAreTheSlopesOfTheLoss) {
  PlainModel plain;
  const ReferenceResult result = run_tiny(model_of(kTiny), true);
  for (int l = 0; l < kTiny.layers; ++l) {
    for (int e = 0; e < kTiny.experts; ++e) {
      Values expected = plain.differences(plain.gate_up[l][e]);
      const Values down = plain.differences(plain.down[l][e]);
      expected.insert(expected.end(), down.begin(), down.end());
      expect_near(result.expert_gradient(l, e), expected, kSlopeTolerance);
    }
    expect_near(result.router_gradient[l], plain.differences(plain.router[l]), kSlopeTolerance);
  }
  for (int m = 0; m < kMicroSteps; ++m) {
    for (int r = 0; r < kRanks; ++r)
      expect_near(result.input_gradient(m, r), plain.differences(plain.input[m][r]), kSlopeTolerance);
  }
}

TEST(ReferenceModel, ForwardOnlyHasTheSameOutputsAndNoGradients) {
  const ReferenceModel model = model_of(kTiny);
  const ReferenceResult forward = run_tiny(model, false);
  EXPECT_EQ(forward.output, run_tiny(model, true).output);
  EXPECT_TRUE(forward.input_gradient.empty());
  EXPECT_TRUE(forward.expert_gradient.empty());
  EXPECT_EQ(forward.loss, 0);
}

TEST(ReferenceModelThread, ResultsDoNotDependOnTheNumberOfThreads) {
  const ReferenceModel model = model_of(kTiny);
  const ReferenceResult one = run_tiny(model, true, 1), three = run_tiny(model, true, 3);
  EXPECT_EQ(one.output, three.output);
  EXPECT_EQ(one.expert_gradient, three.expert_gradient);
  EXPECT_EQ(one.router_gradient, three.router_gradient);
}

// One token, one expert, hidden 1: y = x + silu(g·x)·(u·x)·d, computed by hand.
TEST(ReferenceModel, MatchesAScalarModelComputedByHand) {
  constexpr ModelSize kOne{.layers = 1, .experts = 1, .top_k = 1, .shape = {.hidden = 1, .intermediate = 1}, .seed = 3};
  const auto number = [&](Tensor tensor, std::size_t i = 0) {
    std::vector<float> values(i + 1);
    draw(kOne, {.tensor = tensor}, values);
    return double{values[i]};
  };
  const double g = number(Tensor::kGateUp, 0), u = number(Tensor::kGateUp, 1), d = number(Tensor::kDown);
  const double x = number(Tensor::kInput), t = number(Tensor::kTarget);
  const double s = 1 / (1 + std::exp(-g * x)), slope = s * (1 + g * x * (1 - s));
  const double y = x + g * x * s * u * x * d;

  ThreadPool pool(1);
  const auto routes = [](MicroStepId, RankId, LayerId) { return std::vector<ExpertId>{ExpertId{0}}; };
  const ReferenceResult result =
      model_of(kOne).run({.micro_steps = 1, .ranks = 1, .routes = routes, .backward = true}, pool);
  expect_near(result.output(0, 0), {y}, 1e-15);
  EXPECT_NEAR(result.loss, (y - t) * (y - t) / 2, 1e-15);
  const double dy = y - t;
  expect_near(result.expert_gradient(0, 0),
              {dy * d * u * x * slope * x, dy * d * g * x * s * x, dy * g * x * s * u * x}, 1e-14);
  expect_near(result.input_gradient(0, 0), {dy * (1 + d * u * x * slope * g + d * g * x * s * u)}, 1e-14);
  expect_near(result.router_gradient[0], {0}, 1e-15);  // the softmax over one expert is 1
}

TEST(ReferenceModel, GradientDescentReducesTheLossByRateTimesSquaredGradient) {
  ReferenceModel model = model_of(kTiny);
  const ReferenceResult before = run_tiny(model, true);
  double slope_squared = 0;
  for (const auto& gradient : before.expert_gradient.flat()) {
    for (const double v : gradient) slope_squared += v * v;
  }
  for (const auto& gradient : before.router_gradient) {
    for (const double v : gradient) slope_squared += v * v;
  }
  constexpr float kRate = 1e-7F;
  optimize(model, before, {.kind = Optimizer::Kind::kSgd, .rate = kRate});
  EXPECT_NEAR((before.loss - run_tiny(model, true).loss) / (kRate * slope_squared), 1, 1e-3);
}

// Adam's first step is rate·sign(gradient). Further steps with the same gradient equal the first.
TEST(ReferenceModel, AdamStepsByTheRateForAConstantGradient) {
  ReferenceModel model = model_of(kTiny), by_hand = model_of(kTiny);
  ReferenceResult gradients = run_tiny(model, true);
  for (auto& gradient : gradients.expert_gradient.flat()) gradient.assign(gradient.size(), 0.25);
  for (auto& gradient : gradients.router_gradient) gradient.assign(gradient.size(), -0.5);
  for (int step = 0; step < 3; ++step) optimize(model, gradients, {.kind = Optimizer::Kind::kAdam, .rate = 0.01F});

  for (auto& gradient : gradients.expert_gradient.flat()) gradient.assign(gradient.size(), 0.03);
  for (auto& gradient : gradients.router_gradient) gradient.assign(gradient.size(), -0.03);
  optimize(by_hand, gradients, {.kind = Optimizer::Kind::kSgd, .rate = 1});
  EXPECT_NEAR(run_tiny(model, true).loss / run_tiny(by_hand, true).loss, 1, 1e-7);
}

}  // namespace
}  // namespace foremoe
