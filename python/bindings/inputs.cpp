// Loads from traces, files with options, other programs' recordings, and models of routing.

#include <nlohmann/json.hpp>
#include <utility>

#include "bindings.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/importers/import_json.h"
#include "foremoe/rollout/importers/text.h"
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
  const nb::gil_scoped_release release;
  ThreadPool pool(threads_of(threads));
  StepInput input;
  input.trace = *trace;
  input.asked = options;
  input.batching = batch(*input.trace, options, input.remarks);
  input.load = collect(*input.trace, *input.batching, pool);
  input.load.name = options.path;
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

std::shared_ptr<Trace> import_named_payloads(const std::vector<std::pair<std::string, nb::bytes>>& named,
                                             const nb::dict& keywords) {
  ImportOptions options;
  set_options(options_of(options), keywords);
  std::vector<ImportSource> payloads;
  for (const auto& [name, bytes] : named) {
    payloads.push_back({name, {static_cast<const std::byte*>(bytes.data()), bytes.size()}});
  }
  const nb::gil_scoped_release release;
  return std::make_shared<Trace>(import_payloads(payloads, options));
}

// As Python's objects. The parser has bounded the depth.
nb::object to_python(const nlohmann::json& value) {
  using Type = nlohmann::json::value_t;
  switch (value.type()) {
    case Type::object: {
      nb::dict d;
      for (const auto& [key, member] : value.items()) d[nb::str(key.data(), key.size())] = to_python(member);
      return d;
    }
    case Type::array: {
      nb::list l;
      for (const nlohmann::json& entry : value) l.append(to_python(entry));
      return l;
    }
    case Type::string: {
      const auto& text = value.get_ref<const std::string&>();
      return nb::str(text.data(), text.size());
    }
    case Type::boolean:
      return nb::bool_(value.get<bool>());
    case Type::number_integer:
      return nb::int_(value.get<std::int64_t>());
    case Type::number_unsigned:
      return nb::int_(value.get<std::uint64_t>());
    case Type::number_float:
      return nb::float_(value.get<double>());
    default:
      return nb::none();
  }
}

// The body of an inference server's response, by the importers' parser.
nb::any parse_response(const nb::bytes& body) {
  const std::string_view text(body.c_str(), body.size());
  nlohmann::json value;
  {
    const nb::gil_scoped_release release;
    value = foremoe::parse_json(text, {.field = "response"});
  }
  return nb::steal<nb::any>(to_python(value).release());
}

}  // namespace

void bind_inputs(nb::module_& m) {
  m.def("_collect", &collect_trace, "trace"_a, "options"_a, "threads"_a);
  m.def("_import_files", &import_paths, "paths"_a, "options"_a,
        nb::sig("def _import_files(paths: Sequence[str], options: dict[str, typing.Any]) -> tuple[Trace | Load, "
                "dict[str, typing.Any]]"));
  m.def("_import_payloads", &import_named_payloads, "payloads"_a, "options"_a,
        nb::sig("def _import_payloads(payloads: Sequence[tuple[str, bytes]], options: dict[str, typing.Any]) -> "
                "Trace"));
  m.def("_parse_response", &parse_response, "body"_a);
  m.def("_read_input", &read_input, "path"_a, "options"_a, "threads"_a);
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
}

}  // namespace foremoe::python
