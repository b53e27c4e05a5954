#include "foremoe/policy/load_history.h"

#include <algorithm>
#include <cassert>
#include <functional>

#include "foremoe/core/error.h"

namespace foremoe {

const LoadTable* former_load(const PolicyInput& input) {
  const LoadTable* const former = input.previous_load;
  if (former != nullptr &&
      (former->num_layers() != input.load.num_layers() || former->num_experts() != input.load.num_experts())) {
    throw InputError({.file = former->name, .field = "load"},
                     "must be of as many layers and experts as the load that is planned");
  }
  return former;
}

std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load, std::size_t first,
                                               std::size_t count) {
  assert(first + count <= load.extent(0));
  std::vector<std::int64_t> sum(load.extent(1));
  for (std::size_t m = first; m < first + count; ++m) {
    std::ranges::transform(load.row(m), sum, sum.begin(), std::plus<>{});
  }
  return sum;
}

std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load) {
  return sum_over_micro_steps(load, 0, load.extent(0));
}

}  // namespace foremoe
