#include "foremoe/runtime/cpu/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "foremoe/reference/reference_expert.h"
#include "foremoe/runtime/memory.h"
#include "foremoe/testing/arithmetic.h"

namespace foremoe::cpu {
namespace {

using namespace foremoe::test;

// Consecutive blocks of rows and their experts. Tests compare the experts' results with float64.
struct ExpertsCase {
  ExpertShape shape;
  std::vector<std::int64_t> rows;  // [block]
  std::vector<int> expert;         // [block]
  double low = -1;                 // x and dy are uniform in [low, low + 2)

  std::size_t hidden() const { return static_cast<std::size_t>(shape.hidden); }
  std::size_t gate_up_size() const { return 2 * hidden() * static_cast<std::size_t>(shape.intermediate); }
  std::size_t total_rows() const {
    std::size_t sum = 0;
    for (const std::int64_t n : rows) sum += static_cast<std::size_t>(n);
    return sum;
  }
  std::size_t num_experts() const {
    return expert.empty() ? 0 : static_cast<std::size_t>(*std::max_element(expert.begin(), expert.end())) + 1;
  }
};

class Experts : public Arithmetic {
 protected:
  struct Gradient {
    std::vector<float> before;  // gate_up, then down
    bool fresh = false;
    float* there = nullptr;
  };

  void draw(const ExpertsCase& c) {
    case_ = c;
    weights_.clear();
    gradients_.clear();
    std::vector<const float*> there;
    for (std::size_t e = 0; e < c.num_experts(); ++e) {
      weights_.push_back(random_values(c.gate_up_size() / 2 * 3));
      for (float& w : weights_.back()) w /= std::sqrt(static_cast<float>(c.hidden()));
      there.push_back(put(weights_.back()));
      Gradient gradient{.before = random_values(weights_.back().size()), .fresh = e % 2 == 1};
      gradient.there = put(gradient.before);
      gradients_.push_back(gradient);
    }
    blocks_.clear();
    std::vector<bool> seen(c.num_experts());
    std::int64_t row = 0;
    for (std::size_t b = 0; b < c.rows.size(); ++b) {
      const auto e = static_cast<std::size_t>(c.expert[b]);
      blocks_.push_back({.first_row = row,
                         .rows = c.rows[b],
                         .gate_up = there[e],
                         .down = there[e] + c.gate_up_size(),
                         .gate_up_gradient = gradients_[e].there,
                         .down_gradient = gradients_[e].there + c.gate_up_size(),
                         .fresh_gradient = gradients_[e].fresh && !seen[e]});
      seen[e] = seen[e] || c.rows[b] > 0;
      row += c.rows[b];
    }
    x_ = random_values(c.total_rows() * c.hidden(), c.low);
    dy_ = random_values(c.total_rows() * c.hidden(), c.low);
  }

  struct Result {
    std::vector<float> y, dx;
    std::vector<std::vector<float>> gradient;  // [expert]
    friend bool operator==(const Result&, const Result&) = default;
  };

  Result run() {
    const std::size_t n = x_.size(), rows = case_.total_rows();
    const float* x = put(x_);
    float *gate_up = put(rows * 2 * static_cast<std::size_t>(case_.shape.intermediate), 0), *y = put(n, 9),
          *dx = put(n, 9);
    for (const Gradient& g : gradients_) std::ranges::copy(g.before, g.there);
    ExpertsWorkspace workspace(case_.shape, position_independent_);
    experts_forward(blocks_, {.x = x, .gate_up = gate_up, .y = y}, workspace);
    experts_backward(blocks_, {.x = x, .gate_up = gate_up, .dy = put(dy_), .dx = dx}, workspace);
    Result result{.y = get(y, n), .dx = get(dx, n), .gradient = {}};
    for (const Gradient& g : gradients_) result.gradient.push_back(get(g.there, g.before.size()));
    return result;
  }

  void expect_float64(const Result& result, const std::string& what) {
    const auto width = static_cast<std::ptrdiff_t>(case_.hidden());
    std::vector<double> y, dx;
    std::vector<std::vector<double>> gradient;
    for (std::size_t e = 0; e < gradients_.size(); ++e) {
      bool has_rows = false;
      for (std::size_t b = 0; b < blocks_.size(); ++b)
        has_rows |= case_.expert[b] == static_cast<int>(e) && blocks_[b].rows > 0;
      gradient.push_back(to_double(gradients_[e].before));
      if (gradients_[e].fresh && has_rows) gradient.back().assign(gradient.back().size(), 0);
    }
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      const auto e = static_cast<std::size_t>(case_.expert[b]);
      const auto rows_of = [&](const std::vector<float>& values) {
        const auto first = values.begin() + blocks_[b].first_row * width;
        return std::vector<double>(first, first + blocks_[b].rows * width);
      };
      const std::vector<double> weights = to_double(weights_[e]);
      ReferenceExpert expert(case_.shape, weights);
      const std::vector<double>
          block_y = expert.forward({.value = rows_of(x_), .variance = {}}).value,
          block_dx =
              expert.backward({.value = rows_of(dy_), .variance = {}}, {.value = gradient[e], .variance = {}}).value;
      y.insert(y.end(), block_y.begin(), block_y.end());
      dx.insert(dx.end(), block_dx.begin(), block_dx.end());
    }
    EXPECT_LE(relative_error(result.y, y), kTolerance) << what;
    EXPECT_LE(relative_error(result.dx, dx), kTolerance) << what;
    for (std::size_t e = 0; e < gradient.size(); ++e) {
      const std::span<const float> g = result.gradient[e];
      const std::span<const double> expected = gradient[e];
      const std::size_t down = case_.gate_up_size();
      EXPECT_LE(relative_error(g.first(down), expected.first(down)), kTolerance) << what << ", gate_up of expert " << e;
      EXPECT_LE(relative_error(g.subspan(down), expected.subspan(down)), kTolerance)
          << what << ", down of expert " << e;
    }
  }

  bool position_independent_ = false;
  ExpertsCase case_;
  std::vector<std::vector<float>> weights_;  // [expert] → gate_up, then down
  std::vector<Gradient> gradients_;          // [expert]
  std::vector<ExpertRows> blocks_;
  std::vector<float> x_, dy_;
};

TEST_F(Experts, ForwardAndBackwardMatchFloat64) {
  const ExpertShape shapes[] = {{1, 1}, {5, 3}, {16, 16}, {20, 36}, {64, 32}, {96, 130}};
  for (const ExpertShape& shape : shapes) {
    draw({.shape = shape, .rows = {3, 0, 1, 64, 17, 0, 130}, .expert = {0, 1, 2, 3, 4, 5, 6}});
    expect_float64(run(), "hidden " + std::to_string(shape.hidden));
  }
}

TEST_F(Experts, AcceptsNoBlocksAndNoRows) {
  draw({.shape = {8, 8}, .rows = {}, .expert = {}});
  expect_float64(run(), "no blocks");
  draw({.shape = {8, 8}, .rows = {0, 0}, .expert = {0, 1}});
  expect_float64(run(), "no rows");
}

TEST_F(Experts, AnExpertMayHaveSeveralBlocks) {
  draw({.shape = {32, 16}, .rows = {5, 40, 7, 0, 9, 33}, .expert = {1, 0, 1, 1, 0, 2}});
  expect_float64(run(), "two places");
}

TEST_F(Experts, GradientsOfManyRowsKeepTheirPrecision) {
  draw({.shape = {32, 16}, .rows = {20'000}, .expert = {0}});
  expect_float64(run(), "both signs");
  draw({.shape = {32, 16}, .rows = {20'000}, .expert = {1}, .low = 0});  // all terms are positive
  expect_float64(run(), "one sign");
}

TEST_F(Experts, LargeActivationsNeitherOverflowNorVanish) {
  draw({.shape = {16, 8}, .rows = {50}, .expert = {0}});
  for (std::size_t i = 0; i < x_.size(); ++i) x_[i] *= std::pow(10.0F, static_cast<float>(i / 16 % 5));  // up to 10⁴
  expect_float64(run(), "great");
}

TEST_F(Experts, RunsRepeatBitForBit) {
  draw({.shape = {48, 40}, .rows = {600, 3, 77}, .expert = {0, 1, 2}});
  const Result first = run();
  EXPECT_EQ(first, run());
}

TEST_F(Experts, BackwardMatchesFiniteDifferences) {
  draw({.shape = {3, 2}, .rows = {4}, .expert = {1}});
  const Result result = run();
  const auto loss = [&](const std::vector<double>& weights, const std::vector<double>& x) {
    return inner_product(ReferenceExpert(case_.shape, weights).forward({.value = x, .variance = {}}).value,
                         to_double(dy_));
  };
  const auto by_x = slopes([&](const auto& x) { return loss(to_double(weights_[1]), x); }, to_double(x_));
  const auto by_weight = slopes([&](const auto& w) { return loss(w, to_double(x_)); }, to_double(weights_[1]));
  EXPECT_LE(relative_error(result.dx, by_x), kTolerance);
  EXPECT_LE(relative_error(result.gradient[1], by_weight), kTolerance);
}

// Splits the same rows into other blocks at other positions, as another plan would. The bits of y must not change.
TEST_F(Experts, PositionIndependentRowsKeepTheirBitsAtAnyPosition) {
  for (const ExpertShape shape : {ExpertShape{5, 3}, ExpertShape{16, 16}, ExpertShape{64, 48}}) {
    position_independent_ = true;
    draw({.shape = shape, .rows = {150}, .expert = {0}});
    const std::vector<float> x = x_;
    const Result whole = run();
    expect_float64(whole, "position-independent");
    const auto width = static_cast<std::ptrdiff_t>(case_.hidden());
    for (int trial = 0; trial < 6; ++trial) {
      std::vector<std::ptrdiff_t> from(150);  // [position] → row of `whole`
      for (std::size_t i = 0; i < from.size(); ++i) {
        from[i] = static_cast<std::ptrdiff_t>(i);
        std::swap(from[i], from[random().below(i + 1)]);
      }
      from.resize(1 + random().below(150));
      case_.rows = {static_cast<std::int64_t>(random().below(from.size() + 1))};
      case_.rows.push_back(static_cast<std::int64_t>(from.size()) - case_.rows[0]);
      ExpertRows block = blocks_[0];
      block.rows = case_.rows[0];
      blocks_.assign(2, block);
      blocks_[1].first_row = case_.rows[0];
      blocks_[1].rows = case_.rows[1];
      x_.resize(from.size() * case_.hidden());
      for (std::size_t i = 0; i < from.size(); ++i)
        std::copy_n(x.begin() + from[i] * width, width, x_.begin() + static_cast<std::ptrdiff_t>(i) * width);
      dy_.resize(x_.size());
      const Result part = run();
      for (std::size_t i = 0; i < from.size(); ++i) {
        const auto place = part.y.begin() + static_cast<std::ptrdiff_t>(i) * width;
        EXPECT_TRUE(std::equal(place, place + width, whole.y.begin() + from[i] * width))
            << "row " << from[i] << " at " << i;
      }
      blocks_.resize(1);
    }
  }
}

constexpr ExpertShape kShape{.hidden = 40, .intermediate = 24};
constexpr std::int64_t kRows = 700;

std::vector<float> values(std::size_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> result(n);
  for (float& v : result) v = static_cast<float>(2 * random.uniform() - 1);
  return result;
}

// Runs two experts with all operands `shift` floats after an aligned address. Returns y, dx and gradients.
std::vector<float> run_experts(std::size_t shift) {
  std::vector<Memory> memory;
  const auto place = [&](std::size_t n, std::uint64_t seed) {
    memory.push_back(allocate_memory(Bytes{(n + shift) * sizeof(float)}));
    if (seed > 0) std::ranges::copy(values(n, seed), memory.back().floats() + shift);
    return memory.back().floats() + shift;
  };
  constexpr std::size_t kHidden = kShape.hidden, kInner = kShape.intermediate, kMatrix = kHidden * kInner;
  const float *x = place(kRows * kHidden, 1), *dy = place(kRows * kHidden, 2);
  const float *gate_up = place(2 * kMatrix, 3), *down = place(kMatrix, 4);
  float *d_gate_up = place(2 * kMatrix, 5), *d_down = place(kMatrix, 6);
  float *kept = place(kRows * 2 * kInner, 0), *y = place(kRows * kHidden, 0), *dx = place(kRows * kHidden, 0);
  const std::vector<ExpertRows> experts{{0, 3, gate_up, down, d_gate_up, d_down, false},
                                        {3, kRows - 3, gate_up, down, d_gate_up, d_down, false}};
  ExpertsWorkspace workspace(kShape);
  experts_forward(experts, {.x = x, .gate_up = kept, .y = y}, workspace);
  experts_backward(experts, {.x = x, .gate_up = kept, .dy = dy, .dx = dx}, workspace);
  std::vector<float> result(y, y + kRows * kHidden);
  result.insert(result.end(), dx, dx + kRows * kHidden);
  result.insert(result.end(), d_gate_up, d_gate_up + 2 * kMatrix);
  result.insert(result.end(), d_down, d_down + kMatrix);
  return result;
}

TEST(ExpertsBits, BitsDoNotDependOnOperandAddresses) {
  const std::vector<float> aligned = run_experts(0);
  for (const std::size_t shift : {1, 2, 3, 5, 8, 15}) EXPECT_EQ(run_experts(shift), aligned) << shift;
}

TEST(ExpertsBitsThread, ConcurrentRanksProduceTheSameBits) {
  const std::vector<float> alone = run_experts(0);
  std::vector<std::vector<float>> results(16);
  {
    std::vector<std::jthread> ranks;
    for (auto& result : results) ranks.emplace_back([&result] { result = run_experts(0); });
  }
  for (const auto& result : results) EXPECT_EQ(result, alone);
}

TEST(RowTiles, HeightOfAShapeIsStable) {
  const int height = cpu::tile_height(48, 40);
  EXPECT_TRUE(std::ranges::find(cpu::kTileHeights, height) != std::end(cpu::kTileHeights));
  EXPECT_EQ(cpu::tile_height(48, 40), height);
}

}  // namespace
}  // namespace foremoe::cpu
