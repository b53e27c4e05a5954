#include "foremoe/runtime/cpu/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace foremoe::cpu {
namespace {

constexpr double kUnit = 0x1.0p-24;  // half a float32 ULP, relative

std::vector<float> sweep() {
  std::vector<float> g;
  for (float v = -80; v <= 80; v += 0.00731F) g.push_back(v);
  for (float v = 1e-30F; v < 1; v *= 3) g.insert(g.end(), {v, -v});
  g.insert(g.end(), {0.0F, -0.0F});
  return g;
}

// Returns one row: g, then u.
std::vector<float> gate_up(const std::vector<float>& g, float u) {
  std::vector<float> row = g;
  row.resize(2 * g.size(), u);
  return row;
}

double sigmoid(double g) { return 1 / (1 + std::exp(-g)); }

TEST(Swiglu, IsWithinAFewUnitsOfTheLastPlace) {
  const std::vector<float> g = sweep(), row = gate_up(g, 1);
  std::vector<float> h(g.size());
  swiglu(row.data(), 1, static_cast<int>(g.size()), h.data());
  for (std::size_t i = 0; i < g.size(); ++i) {
    const double expected = g[i] * sigmoid(g[i]);
    EXPECT_LE(std::abs(h[i] - expected), 2 * kSwigluUnits * kUnit * std::abs(expected)) << g[i];
  }
}

TEST(Swiglu, SlopesAreWithinAFewUnitsOfTheLastPlace) {
  const std::vector<float> g = sweep(), row = gate_up(g, 3), dh(g.size(), 1);
  std::vector<float> h(g.size()), d(row.size());
  swiglu_backward(row.data(), dh.data(), 1, static_cast<int>(g.size()), {.h = h.data(), .d_gate_up = d.data()});
  for (std::size_t i = 0; i < g.size(); ++i) {
    const double s = sigmoid(g[i]), silu = g[i] * s;
    EXPECT_LE(std::abs(d[g.size() + i] - silu), 2 * kSwigluUnits * kUnit * std::abs(silu)) << g[i];
    // 1 + g·(1 − s) has a zero near −1.28, so the error bound uses the magnitude of its terms.
    EXPECT_LE(std::abs(d[i] - 3 * s * (1 + g[i] * sigmoid(-g[i]))),
              2 * kSwigluSlopeUnits * kUnit * 3 * s * (1 + std::abs(g[i] * sigmoid(-g[i]))))
        << g[i];
    EXPECT_EQ(h[i], d[g.size() + i] * 3);
  }
}

TEST(Swiglu, IsZeroOrTheIdentityBeyondTheRangeOfTheExponential) {
  const std::vector<float> g{-1e30F, -1000, -89, 89, 1000, 1e30F}, row = gate_up(g, 1);
  std::vector<float> h(g.size()), d(row.size());
  swiglu_backward(row.data(), std::vector<float>(g.size(), 1).data(), 1, 6, {.h = h.data(), .d_gate_up = d.data()});
  for (std::size_t i = 0; i < g.size(); ++i) {
    EXPECT_NEAR(h[i], std::max(g[i], 0.0F), 1e-35 * std::abs(g[i]));
    EXPECT_NEAR(d[i], g[i] < 0 ? 0 : 1, std::abs(g[i]) * 1e-35);
  }
}

TEST(Swiglu, PropagatesNan) {
  const std::vector<float> row{std::nanf(""), 1, 1, std::nanf("")};
  std::vector<float> h(2);
  swiglu(row.data(), 1, 2, h.data());
  EXPECT_TRUE(std::isnan(h[0]));
  EXPECT_TRUE(std::isnan(h[1]));
}

TEST(Swiglu, BitsOfAnElementDoNotDependOnItsPosition) {
  for (int width = 1; width < 12; ++width) {
    for (int place = 0; place < width; ++place) {
      std::vector<float> row(static_cast<std::size_t>(2 * width), 0.25F), h(static_cast<std::size_t>(width));
      row[static_cast<std::size_t>(place)] = 1.2345F;
      row[static_cast<std::size_t>(width + place)] = -0.777F;
      swiglu(row.data(), 1, width, h.data());
      const std::vector<float> alone{1.2345F, -0.777F};
      float expected = 0;
      swiglu(alone.data(), 1, 1, &expected);
      EXPECT_EQ(h[static_cast<std::size_t>(place)], expected) << width << ' ' << place;
    }
  }
}

}  // namespace
}  // namespace foremoe::cpu
