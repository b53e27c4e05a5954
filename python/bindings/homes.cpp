// Binds homes and their choice.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "bindings.h"
#include "foremoe/homes/choose_homes.h"
#include "foremoe/homes/homes_json.h"

namespace foremoe::python {
namespace {

// keywords: the options of `foremoe homes`, without the holdout.
std::pair<Homes, nb::any> choose(const std::vector<std::shared_ptr<Trace>>& traces, double fraction,
                                 const std::shared_ptr<Trace>& other, const nb::dict& keywords, int threads) {
  InputOptions input;
  HomesOptions options;
  std::vector<Option> all = options_of(input);
  std::erase_if(all, [](const Option& o) {
    return o.name != "ranks" && o.name != "ranks_per_node" && o.name != "tokens_per_rank";
  });
  for (Option& option : options_of(options)) all.push_back(std::move(option));
  set_options(std::move(all), keywords);
  ThreadPool pool(threads_of(threads));
  std::optional<ChosenHomes> chosen;
  run_interruptibly(pool, [&] {
    std::vector<std::string> remarks;
    const auto batched = [&](const Trace& trace) {
      return BatchedTrace{.trace = trace, .batching = batch(trace, input, remarks)};
    };
    std::vector<BatchedTrace> given;
    for (const auto& trace : traces) given.push_back(batched(*trace));
    std::optional<BatchedTrace> judge;
    if (other) judge = batched(*other);
    chosen = choose_homes(given, {.fraction = fraction, .trace = judge ? &*judge : nullptr}, options, pool);
  });
  return {std::move(chosen->homes), to_python(to_json(*chosen))};
}

}  // namespace

void bind_homes(nb::module_& m) {
  nb::class_<Homes>(m, "Homes", "The rank that owns each expert of each layer.")
      .def_prop_ro(
          "home", [](const nb::object& self) { return view_of<std::int32_t>(nb::cast<const Homes&>(self).home, self); },
          "int32 [layers, experts], rank that owns each expert; a view.")
      .def_ro("num_ranks", &Homes::num_ranks)
      .def_ro("ranks_per_node", &Homes::ranks_per_node, "Of the node size for which the homes were chosen.")
      .def_ro("origin", &Homes::origin, "The traces from which the homes were chosen.")
      .def_prop_ro(
          "digest", [](const Homes& h) { return homes_digest(h.home); },
          "Hexadecimal SHA-256 of the homes, which plans record.")
      .def(
          "save",
          [](const Homes& h, const std::filesystem::path& path) {
            const ReleasedGil release;
            write_homes(h, path.string());
          },
          "path"_a, "Writes a foremoe.homes/1 file atomically.")
      .def("__repr__", [](const Homes& h) {
        return fmt::format("<foremoe.Homes: {} layers × {} experts on {} ranks>", h.home.extent(0), h.home.extent(1),
                           h.num_ranks);
      });
  m.def("_read_homes", [](const std::filesystem::path& path) {
    const ReleasedGil release;
    return read_homes(path.string());
  });
  m.def("_choose_homes", &choose, "traces"_a, "fraction"_a, "other"_a.none(), "options"_a, "threads"_a,
        nb::sig("def _choose_homes(traces: Sequence[Trace], fraction: float, other: Trace | None, options: dict[str, "
                "typing.Any], threads: int) -> tuple[Homes, dict[str, typing.Any]]"));
}

}  // namespace foremoe::python
