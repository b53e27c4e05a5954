#include <fmt/format.h>

#include "foremoe/core/did_you_mean.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/importers/importer.h"

namespace foremoe {

std::vector<Option> options_of(ImportOptions& o) {
  const auto count = [](const char* name, int& value, std::int64_t most, const char* help, const char* initial) {
    return integer_option({.name = name, .value = "N", .help = help, .initial = initial, .main = true}, value,
                          {1, most});
  };
  Option format{.name = "format",
                .value = "NAME",
                .help = "Format; see --help-all",
                .initial = "detected",
                .main = true,
                .type = "text"};
  format.set = [&o](const std::string& name) {
    o.format = import_format_named(name);
    if (!o.format) {
      const std::vector<std::string> names = import_format_names();
      throw InputError({.field = "format"}, fmt::format("'{}', expected one of {}{}", name, fmt::join(names, ", "),
                                                        did_you_mean(name, names)));
    }
  };
  Option counts = flag_option({.name = "counts",
                               .help = "The files contain tokens per expert [steps, layers, experts] or [layers, "
                                       "experts], not routes; needs --ranks and --top-k. Dumps of engines are detected",
                               .main = true},
                              o.counts);
  return {
      std::move(format),
      std::move(counts),
      text_option({.name = "model",
                   .value = "NAME|FILE",
                   .help = "Name of the model, for the trace's metadata. The routes must be those of a known model or "
                           "config.json, which also says which layers have experts",
                   .main = true},
                  o.model),
      count("experts", o.num_experts, kMaxExperts, "Experts of a layer, with weights", "the largest id + 1"),
      integer_option({.name = "weightless_experts",
                      .value = "N",
                      .help = "Ids from --experts on without weights, such as LongCat's zero-computation experts",
                      .main = true},
                     o.weightless_experts, {0, kMaxExperts}),
      count("layers", o.num_layers, 65535, "Layers of headerless arrays; other formats are checked against it",
            "as recorded"),
      count("top_k", o.top_k, 65535, "Experts per token, for headerless arrays and counts", "as recorded"),
      count("ranks", o.ranks, kMaxRanks, "Ranks of the load, for counts without source ranks", "none"),
      count("ranks_per_node", o.ranks_per_node, kMaxRanks, "Ranks per node, for formats that record ranks",
            "8, or all if fewer"),
      count("pipeline_stages", o.pipeline_stages, kMaxRanks,
            "Megatron: number of pipeline stages; ascending ranks are split evenly among them", "1"),
      flag_option({.name = "drop_recomputed",
                   .help = "Megatron trace: drop calls that repeat an earlier call of their layer (activation "
                           "recomputation)"},
                  o.drop_recomputed),
      flag_option(
          {.name = "drop_repeating_rows",
           .help = "Accept that more than 1 % of the rows repeat an id, and are imported as rows without a route"},
          o.drop_repeating_rows),
      flag_option({.name = "drop_empty_layers",
                   .help = "Omit layers without any route (dense layers), including those whose rows are all 0, 1, …"},
                  o.drop_empty_layers),
      flag_option({.name = "fill_prefixes",
                   .help = "If first tokens have no route, as of a cached prompt, take their routes from a sequence "
                           "with the same prompt"},
                  o.fill_prefixes),
      flag_option({.name = "strict", .help = "End at the first sample that cannot be read, instead of skipping it"},
                  o.strict),
      word_option<CountsAt>(
          {.name = "counts_at",
           .value = "auto|source|received",
           .help =
               "Megatron counts. source: a rank counts its own tokens. received: a rank counts its experts' tokens"},
          o.counts_at, {{"auto", CountsAt::kAuto}, {"source", CountsAt::kSource}, {"received", CountsAt::kReceived}}),
  };
}

}  // namespace foremoe
