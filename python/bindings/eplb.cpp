// Binds the placement of replicas for inference engines.

#include <fmt/format.h>

#include <cmath>

#include "bindings.h"
#include "foremoe/core/error.h"
#include "foremoe/policy/next_window.h"

namespace foremoe::python {
namespace {

// Returns the expert of each replica, GPU by GPU: [layers, replicas].
auto place_replicas(const AnyArray& windows, int num_replicas, int num_groups, int num_nodes, int num_gpus,
                    bool distinct) {
  const double* const given = data_of<double>(windows, "weight", "[windows, layers, experts]", 3);
  const std::vector<double> tokens(given, given + windows.size());
  const std::size_t num_layers = windows.shape(1);
  const std::size_t num_experts = windows.shape(2);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (std::isfinite(tokens[i]) && tokens[i] >= 0) continue;
    throw InputError(
        {.field = "weight", .index = fmt::format("[{}, {}]", i / num_experts % num_layers, i % num_experts)},
        "must be finite and at least 0");
  }
  const EplbShape shape{.num_experts = static_cast<int>(num_experts),
                        .num_replicas = num_replicas,
                        .num_ranks = num_gpus,
                        .num_nodes = num_nodes,
                        .num_groups = num_groups};
  std::vector<std::int64_t> experts;
  {
    const ReleasedGil release;
    const EplbPlacement placement =
        place_for_next_window({tokens.data(), {windows.shape(0), num_layers, num_experts}}, shape, distinct);
    for (const ExpertId e : placement.slot_expert.flat()) experts.push_back(e.value);
  }
  return array_of(std::move(experts), {num_layers, static_cast<std::size_t>(num_replicas)});
}

}  // namespace

void bind_eplb(nb::module_& m) {
  m.def("_place_replicas", &place_replicas, "windows"_a, "num_replicas"_a, "num_groups"_a, "num_nodes"_a, "num_gpus"_a,
        "distinct"_a);
}

}  // namespace foremoe::python
