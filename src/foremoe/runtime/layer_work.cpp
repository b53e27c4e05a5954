#include "foremoe/runtime/layer_work.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace foremoe {

LayerWork::LayerWork(const WorkOptions& options, int num_ranks)
    : options_(options), matrices_(static_cast<std::size_t>(num_ranks)) {}

// Computes c = a·b row by row, repeatedly, until the required number of operations is reached.
void LayerWork::multiply(Matrices& of_rank) const {
  if (of_rank.a.empty()) {
    of_rank.a.assign(kWidth * kWidth, 1.0F / static_cast<float>(kWidth));
    of_rank.b = of_rank.a;
    of_rank.c.assign(kWidth * kWidth, 0.0F);
  }
  const double flops_of_row = 2.0 * static_cast<double>(kWidth * kWidth);
  const auto rows = static_cast<std::int64_t>(std::ceil(options_.flops / flops_of_row));
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::size_t row = static_cast<std::size_t>(i) % kWidth * kWidth;
    float* const c = of_rank.c.data() + row;
    std::fill_n(c, kWidth, 0.0F);
    for (std::size_t k = 0; k < kWidth; ++k) {
      const float a = of_rank.a[row + k];
      const float* const b = of_rank.b.data() + k * kWidth;
      for (std::size_t j = 0; j < kWidth; ++j) c[j] += a * b[j];
    }
  }
}

void LayerWork::operator()(RankId rank) {
  if (options_.wait_ms > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(options_.wait_ms));
  } else {
    multiply(matrices_[rank.index()]);
  }
}

}  // namespace foremoe
