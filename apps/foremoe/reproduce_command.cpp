// foremoe reproduce: experiments of papers done again, our figures beside the published ones.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/sim/reproduce/columns.h"
#include "foremoe/sim/reproduce/experiment_file.h"
#include "foremoe/sim/reproduce/result_text.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples = R"(  foremoe reproduce --list
  foremoe reproduce ultraep-table
  foremoe reproduce all --json
  foremoe reproduce mine.toml --markdown     an experiment of your own: docs/formats.md lists the keys
)";

struct ReproduceArguments {
  std::string name;
  bool list = false;
  bool json = false;
  bool markdown = false;
  int threads = 0;  // 0: all processors
};

std::string meaning() {
  FactList columns;
  for (const Column& column : all_columns()) {
    columns.add(std::string(column.name), fmt::format("{} ({})", column.meaning, to_string(column.origin)));
  }
  return fmt::format(
      "Exact figures are counted in loads and plans, modelled ones come from a replay on a modelled cluster\n"
      "(docs/simulation.md), and what is measured here is time on the machine that runs this.\n\nColumns:\n{}",
      columns.to_string());
}

int print_list(bool json) {
  FactList list;
  nlohmann::ordered_json array = nlohmann::ordered_json::array();
  for (const std::string& name : experiment_names()) {
    const Experiment experiment = find_experiment(name);
    list.add(name, fmt::format("{} ({})", experiment.title, experiment.source));
    array.push_back({{"name", name}, {"title", experiment.title}, {"source", experiment.source}});
  }
  fmt::print("{}", json ? array.dump(2) + "\n" : list.to_string());
  return kOk;
}

ExperimentResult carried_out(const Experiment& experiment, ThreadPool& pool) {
  Progress progress;
  return run_experiment(experiment, pool, [&](const ExperimentInput& input, const ExperimentSystem& system) {
    progress(fmt::format("{}: {} on {}", experiment.name, system.label, input.label));
  });
}

void print_text(const ExperimentResult& result) {
  const Experiment& experiment = result.experiment;
  fmt::print("{}: {}\n{}\n\n", experiment.name, experiment.title, experiment.source);
  const auto rows = to_rows(result);
  TextTable table(rows.front());
  for (std::size_t r = 1; r < rows.size(); ++r) table.add(rows[r]);
  fmt::print("{}\n", table.to_string());
  for (const std::string& remark : remarks(result)) fmt::print("{}\n", remark);
  fmt::print("\n");
}

int run(const ReproduceArguments& arguments) {
  if (arguments.list) return print_list(arguments.json);
  if (arguments.name.empty()) {
    throw InputError({.field = "name"}, "is missing; --list lists the experiments");
  }
  const std::vector<std::string> names =
      arguments.name == "all" ? experiment_names() : std::vector<std::string>{arguments.name};
  ThreadPool pool(static_cast<std::size_t>(arguments.threads));
  nlohmann::ordered_json array = nlohmann::ordered_json::array();
  for (const std::string& name : names) {
    const ExperimentResult result = carried_out(find_experiment(name), pool);
    if (arguments.json) {
      array.push_back(to_json(result));
    } else if (arguments.markdown) {
      fmt::print("{}", to_markdown(result));
    } else {
      print_text(result);
    }
    std::fflush(stdout);
  }
  if (arguments.json) fmt::print("{}\n", (arguments.name == "all" ? array : array.front()).dump(2));
  return kOk;
}

}  // namespace

Command reproduce_command() {
  auto a = std::make_shared<ReproduceArguments>();
  return {
      .name = "reproduce",
      .summary = "Do experiments of papers again, our figures beside the published ones",
      .examples = std::string(kExamples),
      .meaning = meaning(),
      .options = {text_option({.name = "name",
                               .value = "NAME",
                               .help = "Experiment of --list, all, or a TOML file of your own",
                               .positional = true},
                              a->name),
                  flag_option({.name = "list", .help = "List the experiments", .main = true}, a->list),
                  json_option(a->json, "Print figures and aims as JSON"),
                  flag_option({.name = "markdown", .help = "Print a section as docs/results.md has it", .main = true},
                              a->markdown),
                  threads_option(a->threads)},
      .run = [a](const Given& given) {
        given.refuse_beside("json", {"markdown"});
        return cli::run(*a);
      }};
}

}  // namespace foremoe::cli
