// Traces, loads, the collector, batching and importers.

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "bindings.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/importers/import_json.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/synthesis/synthesis_request.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe::python {
namespace {

using Trace = RoutingTrace;

RouteType route_type_of(const AnyArray& routes) {
  const nb::dlpack::dtype type = routes.dtype();
  if (type == nb::dtype<std::uint8_t>()) return RouteType::kU8;
  if (type == nb::dtype<std::uint16_t>()) return RouteType::kU16;
  if (type == nb::dtype<std::int16_t>()) return RouteType::kI16;
  if (type == nb::dtype<std::int32_t>()) return RouteType::kI32;
  throw InputError(
      {.field = "routed_experts"},
      fmt::format("is {}; expected uint8, uint16, int16 or int32 [tokens, layers, top_k]", describe(routes)));
}

// Data of routes that nobody copies: the trace keeps the array.
void lend_routes(const AnyArray& routes, Trace& trace) {
  trace.type = route_type_of(routes);
  expect_layout(routes, "routed_experts", "[tokens, layers, top_k]", 3);
  trace.routes = static_cast<const std::byte*>(routes.data());
  trace.storage = std::shared_ptr<const void>(routes.data(), [kept = routes](const void*) mutable {
    const nb::gil_scoped_acquire gil;
    kept = AnyArray();
  });
  constexpr std::size_t kMost = std::numeric_limits<int>::max();
  trace.num_tokens = static_cast<std::int64_t>(routes.shape(0));
  trace.num_layers = static_cast<int>(std::min(routes.shape(1), kMost));
  trace.top_k = static_cast<int>(std::min(routes.shape(2), kMost));
}

void expect_range(const char* argument, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  throw InputError({.field = argument}, fmt::format("{}; {}", value, must_be_integer(least, most)));
}

struct Sequences {
  std::optional<AnyArray> prompt_lengths, group_ids, micro_step, rank;
  std::optional<int> ranks, ranks_per_node;
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
  expect_valid(*trace);
  if (!trace->has_batching() && (of.ranks || of.ranks_per_node)) {
    throw InputError({.field = of.ranks ? "ranks" : "ranks_per_node"}, "is of a batching: give micro_step and rank");
  }
  infer_ranks(*trace);
  for (int l = 0; l < trace->num_layers; ++l) trace->layer_ids.push_back(l);
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

// A property: a view of what the trace has of each sequence, None where it has nothing.
auto per_sequence(std::vector<std::int32_t> Trace::*member) {
  return [member](const nb::object& self) -> std::optional<View<std::int32_t>> {
    const std::vector<std::int32_t>& values = nb::cast<const Trace&>(self).*member;
    if (values.empty()) return std::nullopt;
    return view_of<std::int32_t>(values, self);
  };
}

using Int32s = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

// (micro_step, rank), [sequences] each.
std::pair<Int32s, Int32s> arrays_of(const Batching& batching) {
  std::vector<std::int32_t> micro_step;
  std::vector<std::int32_t> rank;
  for (const MicroStepId m : batching.micro_step) micro_step.push_back(m.value);
  for (const RankId r : batching.rank) rank.push_back(r.value);
  return {array_of(std::move(micro_step)), array_of(std::move(rank))};
}

Load load_of(LoadTable table) { return {std::make_shared<const StepInput>(make_step_input(std::move(table)))}; }

Load load_from_array(const AnyArray& array, int top_k, int ranks_per_node, std::string name) {
  const std::int64_t* const data = data_of<std::int64_t>(array, "array", "[micro_steps, layers, ranks, experts]", 4);
  const std::array<std::size_t, 4> shape{array.shape(0), array.shape(1), array.shape(2), array.shape(3)};
  try {
    expect_load_shape(shape, "");
    LoadTable table{.load = Array<Tokens, 4>(shape), .top_k = top_k, .name = std::move(name)};
    std::copy_n(reinterpret_cast<const Tokens*>(data), table.load.size(), table.load.flat().begin());
    table.ranks_per_node = std::min(ranks_per_node, table.num_ranks());
    expect_valid(table, "");
    return load_of(std::move(table));
  } catch (const InputError& error) {
    if (error.where().field != "load") throw;
    throw InputError({.field = "array", .index = error.where().index}, error.problem());
  }
}

Load collect_trace(const std::shared_ptr<Trace>& trace, const nb::dict& keywords, int threads) {
  InputOptions options;
  std::vector<Option> all = options_of(options);
  std::erase_if(all, [](const Option& o) {
    return o.name != "ranks" && o.name != "ranks_per_node" && o.name != "tokens_per_rank";
  });
  set_options(std::move(all), keywords);
  const nb::gil_scoped_release release;
  ThreadPool pool(threads_of(threads));
  StepInput input{.trace = *trace};
  input.batching = batch(*input.trace, options, input.remarks);
  input.load = collect(*input.trace, *input.batching, pool);
  input.load.name = trace->name.empty() ? "trace" : trace->name;
  input.homes = contiguous_homes(input.load.num_layers(), input.load.num_experts(), input.load.num_ranks());
  return {std::make_shared<const StepInput>(std::move(input))};
}

// A file with all that options of input say: batched, cut, with homes and the former step.
Load read_input(const std::string& path, const nb::dict& keywords, int threads) {
  InputOptions options{.path = path};
  set_options(options_of(options), keywords);
  const nb::gil_scoped_release release;
  ThreadPool pool(threads_of(threads));
  return {std::make_shared<const StepInput>(read_step_input(options, pool))};
}

SynthesisRequest synthesis_of(const nb::dict& keywords) {
  SynthesisRequest request;
  set_options(options_of(request), keywords);
  return request;
}

// Sizes of the load that synthesize_load() would draw, of keywords that can be.
nb::dict check_synthesis(const nb::dict& keywords) {
  const SynthesisRequest request = synthesis_of(keywords);
  (void)routing_model(request);
  const SynthesisOptions options = synthesis_options(request);
  nb::dict d;
  d["micro_steps"] = options.num_micro_steps;
  d["layers"] = options.num_layers;
  d["ranks"] = options.num_ranks;
  d["experts"] = options.num_experts;
  d["top_k"] = options.top_k;
  return d;
}

nb::tuple import_paths(const std::vector<std::string>& paths, const nb::dict& keywords) {
  ImportOptions options;
  set_options(options_of(options), keywords);
  std::optional<Imported> imported;
  {
    const nb::gil_scoped_release release;
    imported = import_files(paths, options);
  }
  const nb::any report = parse_json(to_json(imported->report).dump());
  if (imported->trace() != nullptr) {
    return nb::make_tuple(std::make_shared<Trace>(std::get<RoutingTrace>(std::move(imported->value))), report);
  }
  return nb::make_tuple(load_of(std::get<LoadTable>(std::move(imported->value))), report);
}

// With its shape, which bytes alone do not tell.
struct Collector {
  Collector(int num_layers, int num_experts, int experts_per_token)
      : layers(num_layers),
        top_k(experts_per_token),
        counts({.num_layers = num_layers, .top_k = experts_per_token, .num_experts = num_experts}) {}

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
  const nb::gil_scoped_release release;
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
  const std::int64_t* const data = data_of<std::int64_t>(lengths, "lengths", "[sequences]", 1);
  expect_range("ranks", ranks, 1, kMaxRanks);
  expect_range("ranks_per_node", ranks_per_node, 1, kMaxRanks);
  expect_range("tokens_per_rank", tokens_per_rank, 1, std::int64_t{1} << 40);
  for (std::size_t s = 0; s < lengths.shape(0); ++s) {
    if (data[s] >= 0) continue;
    throw InputError({.field = "lengths", .index = fmt::format("[{}]", s)}, fmt::format("{} tokens", data[s]));
  }
  const BatchingOptions options{
      .num_ranks = ranks, .ranks_per_node = ranks_per_node, .tokens_per_rank = tokens_per_rank};
  Batching batching;
  {
    const nb::gil_scoped_release release;
    batching = balanced_batching({data, lengths.shape(0)}, options, "");
  }
  return arrays_of(batching);
}

}  // namespace

void bind_rollout(nb::module_& m) {
  nb::class_<Trace>(m, "Trace",
                    "What a rollout recorded: the experts of every token in every layer, sequence after sequence.")
      .def_static(
          "from_arrays",
          [](const AnyArray& routed_experts, const AnyArray& cu_seqlens, int num_experts,
             std::optional<AnyArray> prompt_lengths, std::optional<AnyArray> group_ids,
             std::optional<AnyArray> micro_step, std::optional<AnyArray> rank, std::optional<int> ranks,
             std::optional<int> ranks_per_node, const std::string& model) {
            return trace_from_arrays(routed_experts, cu_seqlens, num_experts,
                                     {std::move(prompt_lengths), std::move(group_ids), std::move(micro_step),
                                      std::move(rank), ranks, ranks_per_node},
                                     model);
          },
          "routed_experts"_a, "cu_seqlens"_a, nb::kw_only(), "num_experts"_a, "prompt_lengths"_a = nb::none(),
          "group_ids"_a = nb::none(), "micro_step"_a = nb::none(), "rank"_a = nb::none(), "ranks"_a = nb::none(),
          "ranks_per_node"_a = nb::none(), "model"_a = "",
          R"(A trace of arrays in memory, which are not copied: do not change them while it lives.

routed_experts: uint8, uint16, int16 or int32 [tokens, layers, top_k], expert ids; all top_k entries of a row without a
    route are −1, or the largest value of an unsigned type.
cu_seqlens: int64 [sequences + 1], first token of each sequence, then the number of tokens.
prompt_lengths, group_ids: int32 [sequences], tokens of the prompt and GRPO group.
micro_step, rank: int32 [sequences], the trainer's batching, both or none.
ranks, ranks_per_node: of that batching; None for the largest rank + 1, and 8 or all if fewer.

Raises InputError for another dtype, layout or shape, and for values out of range. Routes are checked by collect().)")
      .def_prop_ro("routed_experts", &routes_of,
                   nb::sig("def routed_experts(self) -> NDArray[numpy.integer[typing.Any]]"),
                   "[tokens, layers, top_k], as recorded; a view.")
      .def_prop_ro(
          "cu_seqlens",
          [](const nb::object& self) { return view_of<std::int64_t>(nb::cast<const Trace&>(self).cu_seqlens, self); },
          "int64 [sequences + 1], tokens; a view.")
      .def_prop_ro("prompt_lengths", per_sequence(&Trace::prompt_lengths),
                   "int32 [sequences], tokens; None when not recorded.")
      .def_prop_ro("group_ids", per_sequence(&Trace::group_ids), "int32 [sequences]; None when not recorded.")
      .def_prop_ro("micro_step", per_sequence(&Trace::micro_step),
                   "int32 [sequences]; None when no batching was recorded.")
      .def_prop_ro("rank", per_sequence(&Trace::rank), "int32 [sequences]; None when no batching was recorded.")
      .def_ro("num_tokens", &Trace::num_tokens)
      .def_ro("num_layers", &Trace::num_layers)
      .def_ro("num_experts", &Trace::num_experts)
      .def_ro("top_k", &Trace::top_k)
      .def_prop_ro("num_sequences", &Trace::num_sequences)
      .def_ro("model", &Trace::model)
      .def_ro("origin", &Trace::origin)
      .def(
          "save",
          [](const Trace& trace, const std::filesystem::path& path) {
            const nb::gil_scoped_release release;
            write_trace(trace, path.string());
          },
          "path"_a, "Writes a foremoe.trace/1 file, whole or not at all.")
      .def("__repr__", [](const Trace& t) {
        return fmt::format("<foremoe.Trace: {} tokens in {} sequences, {} layers, top-{} of {} experts>", t.num_tokens,
                           t.num_sequences(), t.num_layers, t.top_k, t.num_experts);
      });

  nb::class_<Load>(m, "Load", "Tokens that each source rank sends to each expert, per micro-step and layer.")
      .def_static("from_array", &load_from_array, "array"_a, nb::kw_only(), "top_k"_a = 1, "ranks_per_node"_a = 8,
                  "name"_a = "load",
                  R"(A load of counts: int64 [micro_steps, layers, ranks, experts], tokens, copied once.

A token counts once for each of its top_k experts. Raises InputError for another dtype, layout or shape, for negative
counts, and where the ranks do not divide the experts.)")
      .def_prop_ro(
          "array",
          [](const nb::object& self) { return view_of<std::int64_t>(nb::cast<const Load&>(self).table().load, self); },
          "int64 [micro_steps, layers, ranks, experts], tokens; a view.")
      .def_prop_ro("num_micro_steps", [](const Load& l) { return l.table().num_micro_steps(); })
      .def_prop_ro("num_layers", [](const Load& l) { return l.table().num_layers(); })
      .def_prop_ro("num_ranks", [](const Load& l) { return l.table().num_ranks(); })
      .def_prop_ro("num_experts", [](const Load& l) { return l.table().num_experts(); })
      .def_prop_ro("top_k", [](const Load& l) { return l.table().top_k; })
      .def_prop_ro("ranks_per_node", [](const Load& l) { return l.table().ranks_per_node; })
      .def_prop_ro("name", [](const Load& l) { return l.table().name; })
      .def_prop_ro(
          "digest", [](const Load& l) { return load_digest(l.table()); },
          "Hexadecimal SHA-256 of the counts, which plans record.")
      .def_prop_ro(
          "batching",
          [](const Load& l) -> std::optional<std::pair<Int32s, Int32s>> {
            if (!l.input->batching) return std::nullopt;
            return arrays_of(*l.input->batching);
          },
          nb::rv_policy::move,
          "(micro_step, rank), int32 [sequences] each, of a load that was collected from a trace; else None.")
      .def_prop_ro(
          "remarks", [](const Load& l) { return l.input->remarks; },
          "What was done in collecting it that nobody asked for, in sentences.")
      .def(
          "fold", [](const Load& l, int ranks) { return load_of(fold_ranks(l.table(), ranks)); }, "ranks"_a,
          "The same load on fewer ranks, a divisor: consecutive sources are added.")
      .def(
          "save",
          [](const Load& l, const std::filesystem::path& path) {
            const nb::gil_scoped_release release;
            write_load(l.table(), path.string());
          },
          "path"_a, "Writes a foremoe.load/1 file, whole or not at all.")
      .def("__str__", [](const Load& l) { return foremoe::describe(l.table()); })
      .def("__repr__", [](const Load& l) { return fmt::format("<foremoe.Load: {}>", foremoe::describe(l.table())); });

  nb::class_<Collector>(m, "Collector",
                        R"(Counts sequences as they finish, from any thread; routes may be forgotten after add().

Held per sequence: one counter for each (layer, expert), in the narrowest type that fits.)")
      .def(
          "__init__",
          [](Collector* self, int num_layers, int num_experts, int top_k) {
            expect_range("num_layers", num_layers, 1, kNoLimit);
            expect_range("num_experts", num_experts, 1, kMaxExperts);
            expect_range("top_k", top_k, 1, num_experts);
            new (self) Collector(num_layers, num_experts, top_k);
          },
          nb::kw_only(), "num_layers"_a, "num_experts"_a, "top_k"_a)
      .def("add", &add_sequence, "sequence"_a, "routes"_a,
           R"(One finished sequence, number 0, 1, …: routes [tokens, layers, top_k] as Trace.from_arrays takes them.

Raises InputError for a number that was used, and for a row that is no route; then nothing is kept.)")
      .def_prop_ro("num_sequences", [](const Collector& c) { return c.counts.num_sequences(); })
      .def(
          "lengths", [](const Collector& c) { return array_of(c.counts.sequence_lengths()); },
          "int64 [sequences], tokens. Raises InputError where a number is missing.")
      .def(
          "load",
          [](const Collector& c, const AnyArray& micro_step, const AnyArray& rank, int ranks, int ranks_per_node) {
            const Batching batching = batching_of(micro_step, rank, ranks, ranks_per_node);
            const nb::gil_scoped_release release;
            LoadTable table = c.counts.to_load_table(batching);
            expect_valid(table, "");
            return load_of(std::move(table));
          },
          "micro_step"_a, "rank"_a, nb::kw_only(), "ranks"_a, "ranks_per_node"_a = 8,
          "The load when sequence s runs in micro_step[s] on rank[s]; int32 [sequences] each.");

  m.def("batch", &batch_lengths, "lengths"_a, nb::kw_only(), "ranks"_a, "ranks_per_node"_a = 8,
        "tokens_per_rank"_a = BatchingOptions{}.tokens_per_rank,
        R"(Spreads sequences over micro-steps and ranks, balanced by tokens (Karmarkar and Karp).

lengths: int64 [sequences], tokens. Returns (micro_step, rank), int32 [sequences] each. No rank gets more than
tokens_per_rank tokens in a micro-step. Raises InputError for a sequence that is longer.)");
  m.def("_collect", &collect_trace, "trace"_a, "options"_a, "threads"_a);
  m.def("_import_files", &import_paths, "paths"_a, "options"_a,
        nb::sig("def _import_files(paths: Sequence[str], options: dict[str, typing.Any]) -> tuple[Trace | Load, "
                "dict[str, typing.Any]]"));
  m.def("_read_input", &read_input, "path"_a, "options"_a, "threads"_a);
  m.def("_check_synthesis", &check_synthesis, "options"_a,
        nb::sig("def _check_synthesis(options: dict[str, typing.Any]) -> dict[str, int]"));
  m.def("_synthesize_load", [](const nb::dict& keywords) {
    const SynthesisRequest request = synthesis_of(keywords);
    const nb::gil_scoped_release release;
    return load_of(synthesize_load(synthesis_options(request), routing_model(request)));
  });
  m.def("_synthesize_trace", [](const nb::dict& keywords) {
    const SynthesisRequest request = synthesis_of(keywords);
    const nb::gil_scoped_release release;
    auto trace = std::make_shared<Trace>(synthesize_trace(synthesis_options(request), routing_model(request)));
    trace->model = request.shape;
    return trace;
  });
  m.def("_read_trace", [](const std::filesystem::path& path) {
    const nb::gil_scoped_release release;
    return std::make_shared<Trace>(read_trace(path.string()));
  });
  m.def("_read_load", [](const std::filesystem::path& path) {
    const nb::gil_scoped_release release;
    return load_of(read_load(path.string()));
  });
}

}  // namespace foremoe::python
