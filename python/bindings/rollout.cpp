// Binds traces and loads.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "bindings.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe::python {

static RouteType route_type_of(const AnyArray& routes) {
  const nb::dlpack::dtype type = routes.dtype();
  if (type == nb::dtype<std::uint8_t>()) return RouteType::kU8;
  if (type == nb::dtype<std::uint16_t>()) return RouteType::kU16;
  if (type == nb::dtype<std::int16_t>()) return RouteType::kI16;
  if (type == nb::dtype<std::int32_t>()) return RouteType::kI32;
  throw InputError(
      {.field = "routed_experts"},
      fmt::format("is {}; expected uint8, uint16, int16 or int32 [tokens, layers, top_k]", describe(routes)));
}

void lend_routes(const AnyArray& routes, Trace& trace) {
  trace.type = route_type_of(routes);
  expect_layout(routes, "routed_experts", "[tokens, layers, top_k]", 3);
  trace.routes = static_cast<const std::byte*>(routes.data());
  trace.storage = std::shared_ptr<const void>(routes.data(), [kept = routes](const void*) mutable {
    const HeldGil gil;
    kept = AnyArray();
  });
  constexpr std::size_t kMost = std::numeric_limits<int>::max();
  trace.num_tokens = static_cast<std::int64_t>(routes.shape(0));
  trace.num_layers = static_cast<int>(std::min(routes.shape(1), kMost));
  trace.top_k = static_cast<int>(std::min(routes.shape(2), kMost));
}

std::pair<Int32s, Int32s> arrays_of(const Batching& batching) {
  std::vector<std::int32_t> micro_step;
  std::vector<std::int32_t> rank;
  for (const MicroStepId m : batching.micro_step) micro_step.push_back(m.value);
  for (const RankId r : batching.rank) rank.push_back(r.value);
  return {array_of(std::move(micro_step)), array_of(std::move(rank))};
}

Load load_of(LoadTable table) { return {std::make_shared<const Workload>(make_workload(std::move(table)))}; }

namespace {

using Layers = std::optional<std::vector<int>>;  // [layers]; None: all layers are equal

struct Sequences {
  std::optional<AnyArray> prompt_lengths, group_ids, layer_ids, micro_step, rank;
  std::optional<int> ranks, ranks_per_node;
  int weightless_experts = 0;
  Layers experts_of_layer, top_k_of_layer;
};

std::shared_ptr<Trace> trace_from_arrays(const AnyArray& routed_experts, const AnyArray& cu_seqlens, int num_experts,
                                         const Sequences& of, const std::string& model) {
  auto trace = std::make_shared<Trace>();
  lend_routes(routed_experts, *trace);
  trace->num_experts = num_experts;
  const std::int64_t* const starts = data_of<std::int64_t>(cu_seqlens, "cu_seqlens", "[sequences + 1]", 1);
  trace->cu_seqlens.assign(starts, starts + cu_seqlens.shape(0));
  trace->prompt_lengths = to_vector(of.prompt_lengths, "prompt_lengths", "[sequences]");
  trace->group_ids = to_vector(of.group_ids, "group_ids", "[sequences]");
  trace->micro_step = to_vector(of.micro_step, "micro_step", "[sequences]");
  trace->rank = to_vector(of.rank, "rank", "[sequences]");
  if (of.ranks) expect_range("ranks", *of.ranks, 1, kMaxRanks);
  if (of.ranks_per_node) expect_range("ranks_per_node", *of.ranks_per_node, 1, kMaxRanks);
  trace->ranks = of.ranks.value_or(0);
  trace->ranks_per_node = of.ranks_per_node.value_or(0);
  trace->model = model;
  trace->weightless_experts = of.weightless_experts;
  trace->experts_of_layer = of.experts_of_layer.value_or(std::vector<int>{});
  trace->top_k_of_layer = of.top_k_of_layer.value_or(std::vector<int>{});
  expect_valid(*trace);
  if (!trace->has_batching() && (of.ranks || of.ranks_per_node)) {
    throw InputError({.field = of.ranks ? "ranks" : "ranks_per_node"},
                     "describes a batching: give micro_step and rank too");
  }
  infer_ranks(*trace);
  trace->layer_ids = to_vector(of.layer_ids, "layer_ids", "[layers]");
  if (!of.layer_ids) {
    for (int l = 0; l < trace->num_layers; ++l) trace->layer_ids.push_back(l);
  } else if (std::ssize(trace->layer_ids) != trace->num_layers) {
    throw InputError({.field = "layer_ids"},
                     fmt::format("has {} entries, expected {}", trace->layer_ids.size(), trace->num_layers));
  } else if (std::ranges::min(trace->layer_ids) < 0) {
    throw InputError({.field = "layer_ids"}, fmt::format("{}, expected 0 or more", std::ranges::min(trace->layer_ids)));
  }
  return trace;
}

nb::object routes_of(const nb::object& self) {
  const Trace& trace = nb::cast<const Trace&>(self);
  const std::vector<std::size_t> shape{static_cast<std::size_t>(trace.num_tokens),
                                       static_cast<std::size_t>(trace.num_layers),
                                       static_cast<std::size_t>(trace.top_k)};
  switch (trace.type) {
    case RouteType::kU8:
      return nb::cast(view_of(reinterpret_cast<const std::uint8_t*>(trace.routes), shape, self));
    case RouteType::kU16:
      return nb::cast(view_of(reinterpret_cast<const std::uint16_t*>(trace.routes), shape, self));
    case RouteType::kI16:
      return nb::cast(view_of(reinterpret_cast<const std::int16_t*>(trace.routes), shape, self));
    case RouteType::kI32:
      break;
  }
  return nb::cast(view_of(reinterpret_cast<const std::int32_t*>(trace.routes), shape, self));
}

// A property that returns a view of the trace's values per sequence; None if they were not recorded.
auto per_sequence(std::vector<std::int32_t> Trace::*member) {
  return [member](const nb::object& self) -> std::optional<View<std::int32_t>> {
    const std::vector<std::int32_t>& values = nb::cast<const Trace&>(self).*member;
    if (values.empty()) return std::nullopt;
    return view_of<std::int32_t>(values, self);
  };
}

// A property that returns the numbers of the layers, which are `all` unless the list says otherwise.
std::vector<int> of_layers(const std::vector<int>& values, int layers, int all) {
  return values.empty() ? std::vector<int>(static_cast<std::size_t>(layers), all) : values;
}

Load load_from_array(const AnyArray& array, int top_k, int ranks_per_node, std::string name,
                     const std::optional<AnyArray>& tokens, std::int64_t missing_rows, Layers experts_of_layer,
                     Layers top_k_of_layer) {
  const std::int64_t* const data = data_of<std::int64_t>(array, "array", "[micro_steps, layers, ranks, experts]", 4);
  const std::array<std::size_t, 4> shape{array.shape(0), array.shape(1), array.shape(2), array.shape(3)};
  try {
    expect_load_shape(shape, "");
    LoadTable table{.load = Array<Tokens, 4>(shape), .top_k = top_k, .name = std::move(name)};
    std::copy_n(reinterpret_cast<const Tokens*>(data), table.load.size(), table.load.flat().begin());
    table.ranks_per_node = std::min(ranks_per_node, table.num_ranks());
    if (tokens) {
      const std::int64_t* const values = data_of<std::int64_t>(*tokens, "tokens", "[micro_steps, ranks]", 2);
      table.tokens = Array<Tokens, 2>({tokens->shape(0), tokens->shape(1)});
      std::copy_n(reinterpret_cast<const Tokens*>(values), table.tokens.size(), table.tokens.flat().begin());
    }
    table.missing_rows = missing_rows;
    table.experts_of_layer = std::move(experts_of_layer).value_or(std::vector<int>{});
    table.top_k_of_layer = std::move(top_k_of_layer).value_or(std::vector<int>{});
    expect_valid(table, "");
    return load_of(std::move(table));
  } catch (const InputError& error) {
    if (error.where().field != "load") throw;
    throw InputError({.field = "array", .index = error.where().index}, error.problem());
  }
}

}  // namespace

void bind_rollout(nb::module_& m) {
  nb::class_<Trace>(m, "Trace", "Recorded routes of a rollout: the experts of every token in every layer, by sequence.")
      .def_static(
          "from_arrays",
          [](const AnyArray& routed_experts, const AnyArray& cu_seqlens, int num_experts,
             std::optional<AnyArray> prompt_lengths, std::optional<AnyArray> group_ids,
             std::optional<AnyArray> layer_ids, std::optional<AnyArray> micro_step, std::optional<AnyArray> rank,
             std::optional<int> ranks, std::optional<int> ranks_per_node, const std::string& model,
             int weightless_experts, Layers experts_of_layer, Layers top_k_of_layer) {
            return trace_from_arrays(routed_experts, cu_seqlens, num_experts,
                                     {std::move(prompt_lengths), std::move(group_ids), std::move(layer_ids),
                                      std::move(micro_step), std::move(rank), ranks, ranks_per_node, weightless_experts,
                                      std::move(experts_of_layer), std::move(top_k_of_layer)},
                                     model);
          },
          "routed_experts"_a, "cu_seqlens"_a, nb::kw_only(), "num_experts"_a, "prompt_lengths"_a = nb::none(),
          "group_ids"_a = nb::none(), "layer_ids"_a = nb::none(), "micro_step"_a = nb::none(), "rank"_a = nb::none(),
          "ranks"_a = nb::none(), "ranks_per_node"_a = nb::none(), "model"_a = "", "weightless_experts"_a = 0,
          "experts_of_layer"_a = nb::none(), "top_k_of_layer"_a = nb::none(),
          R"(Creates a trace from arrays without copying them. Do not modify the arrays while the trace is alive.

A load that is collected from up to 64 MiB of routes owns a copy of them. The load of a larger trace keeps the array
alive, and raises InputError if it needs routes that were modified.

Args:
    routed_experts: uint8, uint16, int16 or int32 [tokens, layers, top_k], expert ids. In a row without a route, all
        top_k entries are −1, or the largest value of an unsigned type; in a row of fewer experts, some are.
    cu_seqlens: int64 [sequences + 1], first token of each sequence, then the number of tokens.
    prompt_lengths: int32 [sequences], tokens of the prompt.
    group_ids: int32 [sequences], GRPO group.
    layer_ids: int32 [layers], layer numbers in the model; None for 0, 1, ….
    micro_step, rank: int32 [sequences], the trainer's batching; both or neither.
    ranks, ranks_per_node: Sizes of that batching; None for the largest rank + 1, and 8 or all if fewer.
    weightless_experts: Ids from num_experts on that need no expert.
    experts_of_layer, top_k_of_layer: Numbers per layer; None for num_experts and top_k in all.

Raises:
    InputError: for a wrong dtype, layout or shape, and for values out of range. collect() checks the routes.)")
      .def_prop_ro("routed_experts", &routes_of,
                   nb::sig("def routed_experts(self) -> NDArray[numpy.integer[typing.Any]]"),
                   "[tokens, layers, top_k], as recorded; a view.")
      .def_prop_ro(
          "cu_seqlens",
          [](const nb::object& self) { return view_of<std::int64_t>(nb::cast<const Trace&>(self).cu_seqlens, self); },
          "int64 [sequences + 1], tokens; a view.")
      .def_prop_ro("prompt_lengths", per_sequence(&Trace::prompt_lengths),
                   "int32 [sequences], tokens; None if not recorded.")
      .def_prop_ro("group_ids", per_sequence(&Trace::group_ids), "int32 [sequences]; None if not recorded.")
      .def_prop_ro("micro_step", per_sequence(&Trace::micro_step),
                   "int32 [sequences]; None if no batching was recorded.")
      .def_prop_ro("rank", per_sequence(&Trace::rank), "int32 [sequences]; None if no batching was recorded.")
      .def_prop_ro(
          "layer_ids",
          [](const nb::object& self) { return view_of<std::int32_t>(nb::cast<const Trace&>(self).layer_ids, self); },
          "int32 [layers], layer numbers in the model; a view.")
      .def_ro("num_tokens", &Trace::num_tokens)
      .def_ro("num_layers", &Trace::num_layers)
      .def_ro("num_experts", &Trace::num_experts)
      .def_ro("top_k", &Trace::top_k)
      .def_ro("weightless_experts", &Trace::weightless_experts, "Ids from num_experts on that need no expert.")
      .def_prop_ro(
          "experts_of_layer", [](const Trace& t) { return of_layers(t.experts_of_layer, t.num_layers, t.num_experts); },
          "[layers].")
      .def_prop_ro(
          "top_k_of_layer", [](const Trace& t) { return of_layers(t.top_k_of_layer, t.num_layers, t.top_k); },
          "[layers], the most experts of a token.")
      .def_prop_ro("num_sequences", &Trace::num_sequences)
      .def_ro("model", &Trace::model)
      .def_ro("origin", &Trace::origin)
      .def(
          "save",
          [](const Trace& trace, const std::filesystem::path& path) {
            const ReleasedGil release;
            write_trace(trace, path.string());
          },
          "path"_a, "Writes a foremoe.trace file atomically.")
      .def("__repr__", [](const Trace& t) {
        return fmt::format("<foremoe.Trace: {} tokens in {} sequences, {} layers, top-{} of {} experts>", t.num_tokens,
                           t.num_sequences(), t.num_layers, t.top_k, t.num_experts);
      });

  nb::class_<Load>(m, "Load", "Tokens that each source rank sends to each expert, per micro-step and layer.")
      .def_static("from_array", &load_from_array, "array"_a, nb::kw_only(), "top_k"_a = 1, "ranks_per_node"_a = 8,
                  "name"_a = "load", "tokens"_a = nb::none(), "missing_rows"_a = 0, "experts_of_layer"_a = nb::none(),
                  "top_k_of_layer"_a = nb::none(),
                  R"(Creates a load from counts, int64 [micro_steps, layers, ranks, experts], tokens. Copies the array.

A token counts once for each of its top_k experts.

Args:
    tokens: int64 [micro_steps, ranks], with and without routes; needed if tokens have fewer than top_k experts.
    missing_rows: (token, layer) pairs without a route.
    experts_of_layer, top_k_of_layer: Numbers per layer; None for those of the array and top_k in all.

Raises:
    InputError: for a wrong dtype, layout or shape, for negative counts, or if the ranks do not divide the experts.)")
      .def_static("from_counts", &load_from_counts, "counts"_a, nb::kw_only(), "ranks"_a, "top_k"_a,
                  "ranks_per_node"_a = nb::none(), "name"_a = "load",
                  nb::sig("def from_counts(counts: typing.Any, *, ranks: int, top_k: int, ranks_per_node: int | None = "
                          "None, name: str = 'load') -> Load"),
                  R"(Creates a load from tokens per expert without source ranks, such as those that engines report.

Every rank sends an even part of each expert's tokens, so loads of experts and ranks are exact; traffic between ranks is
not. Layers and steps without tokens are dropped; `remarks` names them.

Args:
    counts: [steps, layers, experts] or [layers, experts]: an array of numpy or torch, or nested lists. Floats must be
        whole numbers.
    ranks: Ranks of the expert-parallel group, a divisor of the experts.
    top_k: Experts per token.
    ranks_per_node: None for 8, or all ranks if fewer.
    name: Name for display.

Raises:
    InputError: for a wrong shape, and with its index for the first number that is no count.)")
      .def_prop_ro(
          "array",
          [](const nb::object& self) { return view_of<std::int64_t>(nb::cast<const Load&>(self).table().load, self); },
          "int64 [micro_steps, layers, ranks, experts], tokens; a view.")
      .def_prop_ro("num_micro_steps", [](const Load& l) { return l.table().num_micro_steps(); })
      .def_prop_ro("num_layers", [](const Load& l) { return l.table().num_layers(); })
      .def_prop_ro("num_ranks", [](const Load& l) { return l.table().num_ranks(); })
      .def_prop_ro("num_experts", [](const Load& l) { return l.table().num_experts(); })
      .def_prop_ro("top_k", [](const Load& l) { return l.table().top_k; })
      .def_prop_ro(
          "experts_of_layer",
          [](const Load& l) {
            return of_layers(l.table().experts_of_layer, l.table().num_layers(), l.table().num_experts());
          },
          "[layers].")
      .def_prop_ro(
          "top_k_of_layer",
          [](const Load& l) { return of_layers(l.table().top_k_of_layer, l.table().num_layers(), l.table().top_k); },
          "[layers], the most experts of a token.")
      .def_prop_ro(
          "tokens",
          [](const nb::object& self) -> std::optional<View<std::int64_t>> {
            const LoadTable& table = nb::cast<const Load&>(self).table();
            if (table.tokens.size() == 0) return std::nullopt;
            return view_of<std::int64_t>(table.tokens, self);
          },
          "int64 [micro_steps, ranks], with and without routes; a view, or None if unknown.")
      .def_prop_ro(
          "missing_rows", [](const Load& l) { return l.table().missing_rows; },
          "(token, layer) pairs without a route; 0 if unknown.")
      .def_prop_ro("ranks_per_node", [](const Load& l) { return l.table().ranks_per_node; })
      .def_prop_ro("name", [](const Load& l) { return l.table().name; })
      .def_prop_ro(
          "digest", [](const Load& l) { return load_digest(l.table()); },
          "Hexadecimal SHA-256 of the counts. Plans record it.")
      .def_prop_ro(
          "batching",
          [](const Load& l) -> std::optional<std::pair<Int32s, Int32s>> {
            if (!l.input->tokens) return std::nullopt;
            return arrays_of(l.input->tokens->batching);
          },
          nb::rv_policy::move,
          "(micro_step, rank), int32 [sequences] each, if the load was collected from a trace; else None.")
      .def_prop_ro(
          "remarks", [](const Load& l) { return l.input->remarks; },
          "Choices that collecting made by default, as sentences.")
      .def(
          "fold",
          [](const Load& l, int ranks) {
            Workload folded = make_workload(fold_ranks(l.table(), ranks));
            folded.asked.fold = true;  // for the options of its plans
            return Load{std::make_shared<const Workload>(std::move(folded))};
          },
          "ranks"_a,
          "Returns the load on fewer ranks, a divisor of their number, by adding consecutive sources. This is another "
          "experiment than groups().")
      .def(
          "groups",
          [](const Load& l, int ep) {
            std::vector<Load> groups;
            for (Workload& group : split_groups(*l.input, ep)) {
              groups.push_back({std::make_shared<const Workload>(std::move(group))});
            }
            return groups;
          },
          "ep"_a,
          "Returns the loads of the job's expert-parallel groups of `ep` consecutive ranks, with their tokens. Homes "
          "are contiguous. A group must lie within a node or begin at a node's boundary.")
      .def(
          "save",
          [](const Load& l, const std::filesystem::path& path) {
            const ReleasedGil release;
            write_load(l.table(), path.string());
          },
          "path"_a, "Writes a foremoe.load file atomically.")
      .def("__str__", [](const Load& l) { return foremoe::describe(l.table()); })
      .def("__repr__", [](const Load& l) { return fmt::format("<foremoe.Load: {}>", foremoe::describe(l.table())); });

  m.def("_read_trace", [](const std::filesystem::path& path) {
    const ReleasedGil release;
    return std::make_shared<Trace>(read_trace(open_input(path.string())));
  });
  m.def("_read_load", [](const std::filesystem::path& path) {
    const ReleasedGil release;
    return load_of(read_load(open_input(path.string())));
  });
}

}  // namespace foremoe::python
