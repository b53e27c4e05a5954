#pragma once

// Z_n1 × Z_n2 × …, the groups of FineMoE's Cayley graphs (appendix B.1). Elements are 0 … order − 1, written in mixed
// radix with the last factor as the lowest digit; 0 is the unit.

#include <vector>

namespace foremoe::finemoe {

class AbelianGroup {
 public:
  explicit AbelianGroup(std::vector<int> factors);

  int order() const { return order_; }
  const std::vector<int>& factors() const { return factors_; }

  int add(int a, int b) const;

  // Character k of element x is exp(2πi · phase ÷ order). In [0, order).
  int phase(int k, int x) const;

  // {0, unit vector} for every factor: the generators of a torus.
  std::vector<std::vector<int>> unit_blocks() const;

 private:
  std::vector<int> factors_;
  int order_ = 1;
};

// One for every way to write the order as a product of factors of at least 2, in lexicographic order of the factors
// ascending. Those with the same group twice are both there: they are few.
std::vector<AbelianGroup> abelian_groups(int order);

}  // namespace foremoe::finemoe
