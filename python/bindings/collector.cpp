// Binds the collector and the batching of sequences.

#include "foremoe/rollout/collector.h"

#include <fmt/format.h>

#include "bindings.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/row_routes.h"

namespace foremoe::python {
namespace {

// A rollout collector and the shape of its routes.
struct Collector {
  explicit Collector(const RolloutCollector::Shape& shape)
      : layers(shape.num_layers), top_k(shape.top_k), counts(shape) {}

  int layers, top_k;
  RolloutCollector counts;
};

void add_sequence(Collector& collector, int sequence, const AnyArray& routes) {
  Trace lent;
  lend_routes(routes, lent);
  if (lent.num_layers != collector.layers || lent.top_k != collector.top_k) {
    throw InputError({.field = "routes"},
                     fmt::format("is {}; expected [tokens, {}, {}]", foremoe::python::describe(routes),
                                 collector.layers, collector.top_k));
  }
  const std::size_t bytes = routes.size() * size_of(lent.type);
  const ReleasedGil release;
  collector.counts.add(sequence, lent.type, {lent.routes, bytes});
}

Batching batching_of(const AnyArray& micro_step, const AnyArray& rank, int ranks, int ranks_per_node) {
  const std::vector<std::int32_t> steps = to_vector(micro_step, "micro_step", "[sequences]");
  const std::vector<std::int32_t> ranks_of = to_vector(rank, "rank", "[sequences]");
  if (steps.size() != ranks_of.size()) {
    throw InputError({.field = "rank"}, fmt::format("{} entries, micro_step has {}", ranks_of.size(), steps.size()));
  }
  expect_range("ranks", ranks, 1, kMaxRanks);
  expect_range("ranks_per_node", ranks_per_node, 1, kMaxRanks);
  Batching batching{.num_ranks = ranks, .ranks_per_node = std::min(ranks_per_node, ranks), .recorded = true};
  const auto expect = [](const char* field, std::size_t i, int value, std::int64_t end) {
    if (value >= 0 && value < end) return;
    throw InputError({.field = field, .index = fmt::format("[{}]", i)},
                     fmt::format("{}, expected 0 to {}", value, end - 1));
  };
  for (std::size_t s = 0; s < steps.size(); ++s) {
    expect("micro_step", s, steps[s], static_cast<std::int64_t>(steps.size()));
    expect("rank", s, ranks_of[s], ranks);
    batching.micro_step.emplace_back(steps[s]);
    batching.rank.emplace_back(ranks_of[s]);
    batching.num_micro_steps = std::max(batching.num_micro_steps, steps[s] + 1);
  }
  return batching;
}

std::pair<Int32s, Int32s> batch_lengths(const AnyArray& lengths, int ranks, int ranks_per_node,
                                        std::int64_t tokens_per_rank) {
  const std::int64_t* const given = data_of<std::int64_t>(lengths, "lengths", "[sequences]", 1);
  const std::vector<std::int64_t> data(given, given + lengths.shape(0));
  expect_range("ranks", ranks, 1, kMaxRanks);
  expect_range("ranks_per_node", ranks_per_node, 1, kMaxRanks);
  expect_range("tokens_per_rank", tokens_per_rank, 1, std::int64_t{1} << 40);
  for (std::size_t s = 0; s < data.size(); ++s) {
    if (data[s] >= 0) continue;
    throw InputError({.field = "lengths", .index = fmt::format("[{}]", s)}, fmt::format("{} tokens", data[s]));
  }
  const BatchingOptions options{
      .num_ranks = ranks, .ranks_per_node = ranks_per_node, .tokens_per_rank = tokens_per_rank};
  Batching batching;
  {
    const ReleasedGil release;
    batching = balanced_batching(data, options, "");
  }
  return arrays_of(batching);
}

// Returns the routes as int32 [tokens, layers, top_k] and their counts as int64 [layers, experts].
std::pair<nb::object, nb::object> count_routes(const AnyArray& routes, int num_experts, bool distinct) {
  constexpr const char* kExpected = "[tokens, layers, top_k]";
  expect_layout(routes, "routes", kExpected, 3);
  expect_range("num_experts", num_experts, 1, kMaxExperts);
  if (routes.shape(1) == 0 || routes.shape(2) == 0) {
    throw InputError({.field = "routes"},
                     fmt::format("is {}; expected {}", foremoe::python::describe(routes), kExpected));
  }
  const std::size_t layers = routes.shape(1);
  const RowShape shape{.num_tokens = static_cast<std::int64_t>(routes.shape(0)),
                       .num_layers = static_cast<int>(layers),
                       .top_k = static_cast<int>(routes.shape(2)),
                       .num_experts = num_experts};
  std::vector<std::int64_t> counts(layers * static_cast<std::size_t>(num_experts));
  std::unique_ptr<std::int32_t[]> converted;  // not initialised: writing it twice would dominate the cost
  const auto count = [&]<class Id>(std::type_identity<Id>) {
    if (routes.dtype() != nb::dtype<Id>()) return false;
    const ReleasedGil release;
    const std::span ids(static_cast<const Id*>(routes.data()), routes.size());
    if (distinct) {
      count_distinct(ids, shape, counts);
    } else if constexpr (std::is_same_v<Id, std::int32_t>) {
      count_rows(ids, shape, counts);
    } else {
      converted = std::make_unique_for_overwrite<std::int32_t[]>(ids.size());
      count_rows(ids, shape, std::span(converted.get(), ids.size()), counts);
    }
    return true;
  };
  if (!count(std::type_identity<std::int32_t>{}) && !count(std::type_identity<std::int64_t>{}) &&
      !count(std::type_identity<std::uint8_t>{}) && !count(std::type_identity<std::int16_t>{}) &&
      !count(std::type_identity<std::uint16_t>{})) {
    refuse_dtype(routes, "routes", "integers", kExpected);
  }
  nb::object int32_routes = nb::cast(routes);
  if (converted) {
    std::int32_t* const data = converted.release();
    const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::int32_t*>(p); });
    const std::size_t extents[] = {routes.shape(0), layers, routes.shape(2)};
    int32_routes = nb::cast(nb::ndarray<nb::numpy, std::int32_t, nb::ndim<3>>(data, 3, extents, owner));
  }
  return {int32_routes, nb::cast(array_of(std::move(counts))).attr("reshape")(layers, num_experts)};
}

}  // namespace

void bind_collector(nb::module_& m) {
  nb::class_<Collector>(m, "Collector",
                        R"(Counts the routes of sequences as they finish. Thread-safe.

add() keeps no reference to the routes. Memory per sequence: one counter per (layer, expert), in the narrowest type that
fits.)")
      .def(
          "__init__",
          [](Collector* self, int num_layers, int num_experts, int top_k, int weightless_experts,
             std::vector<int> experts_of_layer, std::vector<int> top_k_of_layer) {
            expect_range("num_layers", num_layers, 1, kNoLimit);
            expect_range("num_experts", num_experts, 1, kMaxExperts);
            expect_range("top_k", top_k, 1, num_experts);
            expect_range("weightless_experts", weightless_experts, 0, kMaxExperts - num_experts);
            const RolloutCollector::Shape shape{.num_layers = num_layers,
                                                .top_k = top_k,
                                                .num_experts = num_experts,
                                                .weightless_experts = weightless_experts,
                                                .experts_of_layer = std::move(experts_of_layer),
                                                .top_k_of_layer = std::move(top_k_of_layer)};
            expect_layers({.layers = static_cast<std::size_t>(num_layers),
                           .experts = num_experts,
                           .top_k = top_k,
                           .experts_of_layer = shape.experts_of_layer,
                           .top_k_of_layer = shape.top_k_of_layer},
                          "");
            new (self) Collector(shape);
          },
          nb::kw_only(), "num_layers"_a, "num_experts"_a, "top_k"_a, "weightless_experts"_a = 0,
          "experts_of_layer"_a = std::vector<int>{}, "top_k_of_layer"_a = std::vector<int>{})
      .def("add", &add_sequence, "sequence"_a, "routes"_a,
           R"(Counts one finished sequence.

Args:
    sequence: Number of the sequence, 0, 1, ….
    routes: [tokens, layers, top_k], as in Trace.from_arrays().

Raises:
    InputError: if the number was used before or a row is not a route. The sequence is then not counted.)")
      .def_prop_ro("num_sequences", [](const Collector& c) { return c.counts.num_sequences(); })
      .def(
          "lengths", [](const Collector& c) { return array_of(c.counts.sequence_lengths()); },
          "Returns int64 [sequences], tokens. Raises InputError if a sequence number is missing.")
      .def(
          "load",
          [](const Collector& c, const AnyArray& micro_step, const AnyArray& rank, int ranks, int ranks_per_node) {
            const Batching batching = batching_of(micro_step, rank, ranks, ranks_per_node);
            const ReleasedGil release;
            LoadTable table = c.counts.to_load_table(batching);
            expect_valid(table, "");
            return load_of(std::move(table));
          },
          "micro_step"_a, "rank"_a, nb::kw_only(), "ranks"_a, "ranks_per_node"_a = 8,
          "Returns the load if sequence s runs in micro_step[s] on rank[s]; int32 [sequences] each.");

  m.def("_count_routes", &count_routes, "routes"_a, "num_experts"_a, nb::kw_only(), "distinct"_a = false,
        nb::sig(
            "def _count_routes(routes: numpy.typing.NDArray[typing.Any], num_experts: int, *, distinct: bool = False) "
            "-> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int64]]"),
        R"(Checks and counts the routes of one rank's rows.

Args:
    routes: Integers [tokens, layers, top_k]; −1 in all entries of a row without a route.
    distinct: Every row has a route. An expert that occurs twice in a row counts once.

Returns:
    The routes as int32 (the same array if it was int32), and counts, int64 [layers, experts].

Raises:
    InputError: with index [token, layer, entry].)");

  m.def("batch", &batch_lengths, "lengths"_a, nb::kw_only(), "ranks"_a, "ranks_per_node"_a = 8,
        "tokens_per_rank"_a = BatchingOptions{}.tokens_per_rank,
        R"(Spreads sequences over micro-steps and ranks, balanced by tokens (Karmarkar and Karp).

Args:
    lengths: int64 [sequences], tokens.
    tokens_per_rank: Largest number of tokens of a rank in a micro-step.

Returns:
    (micro_step, rank), int32 [sequences] each.

Raises:
    InputError: if a sequence is longer than tokens_per_rank.)");
}

}  // namespace foremoe::python
