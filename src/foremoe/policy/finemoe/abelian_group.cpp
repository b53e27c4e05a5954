#include "foremoe/policy/finemoe/abelian_group.h"

#include <cstdint>

namespace foremoe::finemoe {

AbelianGroup::AbelianGroup(std::vector<int> factors) : factors_(std::move(factors)) {
  for (const int n : factors_) order_ *= n;
}

int AbelianGroup::add(int a, int b) const {
  int sum = 0;
  int place = 1;
  for (std::size_t i = factors_.size(); i-- > 0;) {
    const int n = factors_[i];
    sum += (a + b) % n * place;
    place *= n;
    a /= n;
    b /= n;
  }
  return sum;
}

int AbelianGroup::phase(int k, int x) const {
  std::int64_t phase = 0;
  for (std::size_t i = factors_.size(); i-- > 0;) {
    const int n = factors_[i];
    phase += static_cast<std::int64_t>(k % n) * (x % n) % n * (order_ / n);
    k /= n;
    x /= n;
  }
  return static_cast<int>(phase % order_);
}

std::vector<std::vector<int>> AbelianGroup::unit_blocks() const {
  std::vector<std::vector<int>> blocks;
  int place = 1;
  for (std::size_t i = factors_.size(); i-- > 0;) {
    blocks.push_back({0, place});
    place *= factors_[i];
  }
  return blocks;
}

static void factor(int order, int least, std::vector<int>& begun, std::vector<AbelianGroup>& groups) {
  for (int n = least; n * n <= order; ++n) {
    if (order % n != 0) continue;
    begun.push_back(n);
    factor(order / n, n, begun, groups);
    begun.pop_back();
  }
  begun.push_back(order);
  groups.emplace_back(begun);
  begun.pop_back();
}

std::vector<AbelianGroup> abelian_groups(int order) {
  std::vector<AbelianGroup> groups;
  std::vector<int> begun;
  factor(order, 2, begun, groups);
  return groups;
}

}  // namespace foremoe::finemoe
