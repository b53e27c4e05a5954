#include "foremoe/runtime/cpu/multiply.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "foremoe/core/random.h"

namespace foremoe::cpu {
namespace {

std::ptrdiff_t threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

template <class T>
std::vector<T> random_values(std::int64_t n, Random& random) {
  std::vector<T> values(static_cast<std::size_t>(n));
  for (T& v : values) v = static_cast<T>(2 * random.uniform() - 1);
  return values;
}

void multiply_by(const InstructionSet& set, const Product& p, const float* a, const float* b, float* c) {
  set.multiply_floats(p, a, b, c);
}
void multiply_by(const InstructionSet& set, const Product& p, const double* a, const double* b, double* c) {
  set.multiply_doubles(p, a, b, c);
}

// Returns the largest error of an element, relative to its sum's rounding error bound: at most 1 for correct results.
template <class T>
double relative_error(const InstructionSet& set, const Product& p, Random& random) {
  const std::vector<T> a = random_values<T>(p.rows * p.depth, random),
                       b = random_values<T>(p.depth * p.columns, random);
  const std::vector<T> before = random_values<T>(p.rows * p.columns, random);
  std::vector<T> c = before;
  multiply_by(set, p, a.data(), b.data(), c.data());
  double greatest = 0;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    for (std::int64_t j = 0; j < p.columns; ++j) {
      const auto at = static_cast<std::size_t>(i * p.columns + j);
      long double sum = p.add ? before[at] : 0, magnitude = std::abs(sum);
      for (std::int64_t k = 0; k < p.depth; ++k) {
        const long double term =
            static_cast<long double>(a[static_cast<std::size_t>(p.transpose_a ? k * p.rows + i : i * p.depth + k)]) *
            b[static_cast<std::size_t>(p.transpose_b ? j * p.depth + k : k * p.columns + j)];
        sum += term;
        magnitude += std::abs(term);
      }
      const long double permitted =
          magnitude * static_cast<long double>(p.depth + 1) * std::numeric_limits<T>::epsilon();
      greatest = std::max(greatest, static_cast<double>(std::abs(c[at] - sum) / permitted));
    }
  }
  return greatest;
}

constexpr std::int64_t kSizes[] = {1, 2, 7, 16, 33, 130};

TEST(Multiply, EqualsSumsInHigherPrecisionOnEveryInstructionSet) {
  Random random(1);
  for (const InstructionSet& set : supported_instruction_sets()) {
    for (const std::int64_t rows : kSizes) {
      for (const std::int64_t columns : kSizes) {
        for (const std::int64_t depth : kSizes) {
          for (int flags = 0; flags < 8; ++flags) {
            const Product p{.rows = rows,
                            .columns = columns,
                            .depth = depth,
                            .transpose_a = (flags & 1) != 0,
                            .transpose_b = (flags & 2) != 0,
                            .add = (flags & 4) != 0};
            ASSERT_LE(relative_error<float>(set, p, random), 1)
                << set.name << ' ' << rows << " × " << columns << " × " << depth << ' ' << flags;
            ASSERT_LE(relative_error<double>(set, p, random), 1)
                << set.name << ' ' << rows << " × " << columns << " × " << depth << ' ' << flags;
          }
        }
      }
    }
  }
}

TEST(Multiply, BitsDoNotDependOnOperandAddresses) {
  constexpr std::int64_t kPlaces = 17;
  Random random(1);
  for (const InstructionSet& set : supported_instruction_sets()) {
    for (const Product& p : {Product{.rows = 1, .columns = 67, .depth = 35, .transpose_b = true},
                             Product{.rows = 70, .columns = 1, .depth = 35},
                             Product{.rows = 5, .columns = 7, .depth = 6, .transpose_a = true},
                             Product{.rows = 70, .columns = 67, .depth = 35, .transpose_a = true, .add = true},
                             Product{.rows = 70, .columns = 67, .depth = 135, .transpose_b = true}}) {
      const std::vector<float> a = random_values<float>(p.rows * p.depth, random);
      const std::vector<float> b = random_values<float>(p.depth * p.columns, random);
      const auto at_place = [&](std::int64_t place) {
        const auto moved = [&](const std::vector<float>& values) {
          std::vector<float> there(values.size() + kPlaces);
          std::copy(values.begin(), values.end(), there.begin() + place);
          return there;
        };
        const std::vector<float> moved_a = moved(a), moved_b = moved(b);
        std::vector<float> c(static_cast<std::size_t>(p.rows * p.columns + kPlaces));
        set.multiply_floats(p, moved_a.data() + place, moved_b.data() + place, c.data() + place);
        return std::vector<float>(c.begin() + place, c.begin() + place + p.rows * p.columns);
      };
      const std::vector<float> expected = at_place(0);
      for (std::int64_t place = 1; place < kPlaces; ++place) {
        const std::vector<float> c = at_place(place);
        ASSERT_EQ(std::memcmp(c.data(), expected.data(), c.size() * sizeof(float)), 0) << set.name << ' ' << place;
      }
    }
  }
}

TEST(Multiply, UsesTheWidestInstructionsOfThisProcessor) {
  Random random(1);
  const Product p{.rows = 40, .columns = 40, .depth = 40};
  const std::vector<float> a = random_values<float>(1'600, random), b = random_values<float>(1'600, random);
  std::vector<float> c(1'600), expected(1'600);
  supported_instruction_sets().back().multiply_floats(p, a.data(), b.data(), expected.data());
  multiply(p, a.data(), b.data(), c.data());
  EXPECT_EQ(c, expected);
}

// Multiplies constant n·n matrices: every element of the product is n·a·b.
bool product_is_right(std::int64_t n, float a_value) {
  const auto size = static_cast<std::size_t>(n * n);
  const std::vector<float> a(size, a_value), b(size, 2);
  std::vector<float> c(size);
  multiply({.rows = n, .columns = n, .depth = n, .transpose_b = true}, a.data(), b.data(), c.data());
  return std::all_of(c.begin(), c.end(), [&](float v) { return v == 2 * a_value * static_cast<float>(n); });
}

TEST(Multiply, StartsNoThreads) {
  const auto before = threads_of_this_process();
  EXPECT_TRUE(product_is_right(300, 1));
  EXPECT_EQ(threads_of_this_process(), before);
}

TEST(Multiply, SupportsManyConcurrentThreads) {
  std::vector<int> wrong(300);
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < wrong.size(); ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 20; ++i) wrong[t] += product_is_right(64, static_cast<float>(t % 8 + 1)) ? 0 : 1;
      });
    }
  }
  EXPECT_EQ(wrong, std::vector<int>(300));
}

TEST(Multiply, ZeroDepthLeavesTheSumAndZeroRowsAreAccepted) {
  std::vector<double> c{5};
  multiply({.rows = 1, .columns = 1, .depth = 0}, c.data(), c.data(), c.data());
  EXPECT_EQ(c[0], 5);
  multiply({.rows = 0, .columns = 1, .depth = 1}, c.data(), c.data(), c.data());
  EXPECT_EQ(c[0], 5);
}

}  // namespace
}  // namespace foremoe::cpu
