// Creates loads and traces from files, recordings of other programs, and routing models.

#include <nlohmann/json.hpp>
#include <utility>

#include "bindings.h"
#include "foremoe/core/atomic_file.h"
#include "foremoe/core/mapped_file.h"
#include "foremoe/core/memory_limit.h"
#include "foremoe/evaluate/import_to_file.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/importers/import_json.h"
#include "foremoe/rollout/packing.h"
#include "foremoe/rollout/route_report.h"
#include "foremoe/rollout/synthesis/synthesis_request.h"

namespace foremoe::python {
namespace {

Load collect_trace(const std::shared_ptr<Trace>& trace, const nb::dict& keywords, int threads) {
  InputOptions options{.path = trace->name.empty() ? "trace" : trace->name};
  std::vector<Option> all = options_of(options);
  std::erase_if(all, [](const Option& o) {
    return o.name != "ranks" && o.name != "ranks_per_node" && o.name != "tokens_per_rank";
  });
  set_options(std::move(all), keywords);
  const ReleasedGil release;
  ThreadPool pool(threads_of(threads));
  std::vector<std::string> remarks;
  BatchedTrace tokens{.trace = *trace, .batching = batch(*trace, options, remarks)};
  const std::size_t bytes = static_cast<std::size_t>(trace->num_tokens) * shape_of(*trace).token_bytes();
  if (bytes <= MappedFile::kMostCopied) tokens = take_ranks(tokens, 0, tokens.batching.num_ranks);  // owns its routes
  LoadTable load = collect(tokens.trace, tokens.batching, pool);
  load.name = options.path;
  note_missing_rows(tokens.trace, load, remarks);
  Workload workload = make_workload(std::move(load));
  workload.tokens = std::move(tokens);
  workload.asked = options;
  workload.remarks = std::move(remarks);
  return {std::make_shared<const Workload>(std::move(workload))};
}

// Returns the packed trace, and remarks on the given one.
std::pair<std::shared_ptr<Trace>, std::vector<std::string>> pack_trace(const std::shared_ptr<Trace>& trace,
                                                                       const nb::dict& keywords, int threads) {
  PackingOptions options;
  set_options(options_of(options), keywords);
  const ReleasedGil release;
  ThreadPool pool(threads_of(threads));
  auto packed = std::make_shared<Trace>(*trace);
  if (packed->name.empty()) packed->name = "trace";
  const Batching batching = pack(*packed, options, pool).batching;
  std::vector<std::string> remarks;
  note_missing_rows(*packed, collect(*packed, batching, pool), remarks);
  record_batching(batching, *packed);
  return {std::move(packed), std::move(remarks)};
}

// Reads a file with all input options: batching, limits on layers and micro-steps, homes, and the previous step.
// Returns one load per group of `ep` ranks.
std::vector<Load> read_input(const std::string& path, const nb::dict& keywords, int threads) {
  InputOptions options{.path = path};
  std::vector<Option> all = options_of(options);
  all.push_back(ep_option(options));
  set_options(std::move(all), keywords);
  const ReleasedGil release;
  ThreadPool pool(threads_of(threads));
  std::vector<Load> loads;
  for (Workload& group : read_groups(options, pool)) {
    loads.push_back({std::make_shared<const Workload>(std::move(group))});
  }
  return loads;
}

SynthesisRequest synthesis_of(const nb::dict& keywords) {
  SynthesisRequest request;
  set_options(options_of(request), keywords);
  return request;
}

ImportOptions import_options(const nb::dict& keywords) {
  ImportOptions options;
  set_options(options_of(options), keywords);
  return options;
}

// Keeps the Python object that owns a sequence's memory alive. The deleter acquires the GIL.
std::shared_ptr<const void> owner_of(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* held) {
            const HeldGil gil;
            delete held;
          }};
}

// Decodes (file, field, index, bytes of an .npy file or C-ordered integers, prompt tokens or −1, tokens or None, weight
// versions, where tokens were counted, omitted rows, prompt, problem, forward pass or None).
DecodedSequence decoded(const nb::tuple& t) {
  DecodedSequence sequence{.where = {.file = nb::cast<std::string>(t[0]),
                                     .field = nb::cast<std::string>(t[1]),
                                     .index = nb::cast<std::string>(t[2])},
                           .prompt_length = nb::cast<std::int32_t>(t[4]),
                           .counted_in = nb::cast<std::string>(t[7]),
                           .omitted_rows = nb::cast<std::int64_t>(t[8]),
                           .prompt = nb::cast<std::string>(t[9]),
                           .problem = nb::cast<std::string>(t[10]),
                           .weight_versions = nb::cast<std::vector<std::string>>(t[6]),
                           .owner = owner_of(t[3])};
  if (!t[5].is_none()) sequence.num_tokens = nb::cast<std::int64_t>(t[5]);
  if (!t[11].is_none()) sequence.forward_pass = nb::cast<std::int64_t>(t[11]);
  if (nb::isinstance<nb::bytes>(t[3])) {
    const auto bytes = nb::cast<nb::bytes>(t[3]);
    sequence.content = std::span(static_cast<const std::byte*>(bytes.data()), bytes.size());
    return sequence;
  }
  const auto array = nb::cast<AnyArray>(t[3]);
  expect_layout(array, "routed_experts", "tokens, layers, top_k", 3);
  sequence.content =
      IntegerArray{.bytes = {static_cast<const std::byte*>(array.data()), array.nbytes()},
                   .type_bytes = array.dtype().bits / 8,
                   .is_signed = array.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int),
                   .shape = {array.shape(0), array.shape(1), array.shape(2)}};
  return sequence;
}

std::vector<DecodedSequence> decoded(const nb::list& list) {
  std::vector<DecodedSequence> sequences;
  for (const nb::handle& entry : list) sequences.push_back(decoded(nb::cast<nb::tuple>(entry)));
  return sequences;
}

// Wraps decode(format, file name, bytes), which returns a list of the tuples that decoded() expects.
Decode decoder(const nb::callable& decode) {
  return [decode = decode.ptr()](ImportFormat format, const ImportSource& source) {
    expect_memory(2.0 * static_cast<double>(source.bytes.size()),
                  {.file = source.name});  // a copy, and at least its contents
    const HeldGil gil;
    const nb::bytes bytes(source.bytes.data(), source.bytes.size());
    return decoded(
        nb::cast<nb::list>(call_python(decode, nb::make_tuple(std::string(name_of(format)), source.name, bytes))));
  };
}

nb::tuple import_paths(const std::vector<std::string>& paths, const nb::dict& keywords, const nb::callable& decode) {
  const ImportOptions options = import_options(keywords);
  std::optional<Imported> imported;
  {
    const ReleasedGil release;
    imported = import_files(paths, options, decoder(decode));
  }
  const nb::any report = to_python(to_json(imported->report));
  if (imported->trace() != nullptr) {
    return nb::make_tuple(std::make_shared<Trace>(std::get<RoutingTrace>(std::move(imported->value))), report);
  }
  return nb::make_tuple(load_of(std::get<LoadTable>(std::move(imported->value))), report);
}

// Returns the report as lines of text and as JSON.
std::pair<std::vector<std::string>, std::string> import_paths_to_file(const std::vector<std::string>& paths,
                                                                      const nb::dict& keywords, const std::string& out,
                                                                      const nb::callable& decode) {
  const ImportOptions options = import_options(keywords);
  const ReleasedGil release;
  const Imported imported = import_to_file(paths, options, out, decoder(decode));
  return {describe(imported, out), to_json(imported, out).dump(2)};
}

// Returns the report as lines of text and as JSON.
std::pair<std::vector<std::string>, std::string> check_captured_files(const std::vector<std::string>& paths,
                                                                      const nb::dict& keywords,
                                                                      const nb::callable& decode) {
  RouteCheckOptions options;
  set_options(options_of(options), keywords);
  const ReleasedGil release;
  const RouteReport report = check_route_files(paths, options, decoder(decode));
  return {describe(report), to_json(report).dump(2)};
}

nb::any check_trace(const std::shared_ptr<Trace>& trace, int experts, int layers, int dense_layers, int top_k,
                    std::vector<std::int64_t> lengths, std::vector<std::uint8_t> attention_mask,
                    std::vector<std::vector<std::string>> weight_versions) {
  RouteReport report;
  {
    const ReleasedGil release;
    report = find_route_faults(*trace, {experts, top_k, layers, dense_layers, std::move(lengths),
                                        std::move(attention_mask), std::move(weight_versions)});
  }
  return to_python(to_json(report));
}

std::shared_ptr<Trace> import_decoded(const nb::list& list, const nb::dict& keywords) {
  const ImportOptions options = import_options(keywords);
  const std::vector<DecodedSequence> sequences = decoded(list);
  const ReleasedGil release;
  return std::make_shared<Trace>(import_sequences(sequences, options));
}

}  // namespace

Load load_from_counts(const nb::object& counts, int ranks, int top_k, std::optional<int> ranks_per_node,
                      std::string name) {
  if (ranks_per_node) expect_range("ranks_per_node", *ranks_per_node, 1, kMaxRanks);
  expect_range("ranks", ranks, 1, kMaxRanks);
  expect_range("top_k", top_k, 1, kMaxExperts);
  const auto parts = decoded(nb::cast<nb::list>(nb::module_::import_("foremoe._counts").attr("decode_counts")(counts)));
  const ReleasedGil release;
  Imported imported =
      import_counts(parts, {.top_k = top_k, .ranks = ranks, .ranks_per_node = ranks_per_node.value_or(0)});
  LoadTable& table = std::get<LoadTable>(imported.value);
  table.name = std::move(name);
  Workload workload = make_workload(std::move(table));
  workload.remarks = std::move(imported.report.notes);
  return {std::make_shared<const Workload>(std::move(workload))};
}

void bind_inputs(nb::module_& m) {
  m.def("_collect", &collect_trace, "trace"_a, "options"_a, "threads"_a);
  m.def("_pack", &pack_trace, "trace"_a, "options"_a, "threads"_a);
  m.def("_import_files", &import_paths, "paths"_a, "options"_a, "decode"_a,
        nb::sig("def _import_files(paths: Sequence[str], options: dict[str, typing.Any], decode: typing.Any) -> "
                "tuple[Trace | Load, dict[str, typing.Any]]"));
  m.def("_import_to_file", &import_paths_to_file, "paths"_a, "options"_a, "out"_a, "decode"_a);
  m.def(
      "_write_file",
      [](const std::string& path, const nb::bytes& data) {
        const std::string_view text(data.c_str(), data.size());
        const ReleasedGil release;
        write_file(path, text);
      },
      "path"_a, "data"_a, "Replaces a file. Raises InputError if that fails.");
  m.def(
      "_expect_writable",
      [](const std::string& path) {
        const ReleasedGil release;
        expect_writable(path);
      },
      "path"_a, "Raises InputError if the file cannot be written.");
  m.def(
      "_expect_memory", [](double bytes, const std::string& file) { expect_memory(bytes, {.file = file}); }, "bytes"_a,
      "file"_a);
  m.def(
      "limit_memory",
      [](std::optional<double> max_memory) {
        if (!max_memory) return limit_memory(std::nullopt);
        if (!(*max_memory > 0 && *max_memory <= 1e9)) {
          throw InputError({.field = "max_memory"}, "must be a number above 0, up to 1e9");
        }
        limit_memory(Bytes{static_cast<std::int64_t>(*max_memory * kBytesPerGigabyte)});
      },
      "max_memory"_a.none(), nb::sig("def limit_memory(max_memory: float | None) -> None"),
      "Limits what this process allocates from now on (RLIMIT_DATA).\n\nArgs:\n    max_memory: GB; None for no limit.");
  m.def("_check_route_files", &check_captured_files, "paths"_a, "options"_a, "decode"_a);
  m.def("_check_trace", &check_trace, "trace"_a, nb::kw_only(), "experts"_a, "layers"_a, "dense_layers"_a, "top_k"_a,
        "lengths"_a, "attention_mask"_a, "weight_versions"_a);
  m.def("_import_sequences", &import_decoded, "sequences"_a, "options"_a);
  m.def("_read_input", &read_input, "path"_a, "options"_a, "threads"_a);
  m.def("_synthesize_load", [](const nb::dict& keywords) {
    const SynthesisRequest request = synthesis_of(keywords);
    const ReleasedGil release;
    return load_of(synthesize_load(synthesis_options(request), routing_model(request)));
  });
  m.def("_synthesize_trace", [](const nb::dict& keywords) {
    const SynthesisRequest request = synthesis_of(keywords);
    const ReleasedGil release;
    auto trace = std::make_shared<Trace>(synthesize_trace(synthesis_options(request), routing_model(request)));
    trace->model = request.shape;
    return trace;
  });
}

}  // namespace foremoe::python
