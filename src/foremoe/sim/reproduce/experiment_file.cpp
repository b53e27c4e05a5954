#include "foremoe/sim/reproduce/experiment_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>

#include "foremoe/core/error.h"
#include "foremoe/core/mapped_file.h"
#include "foremoe/sim/reproduce/columns.h"
#include "foremoe/sim/reproduce/experiment_tables.h"
#include "foremoe/sim/reproduce/toml_fields.h"

namespace foremoe {

std::span<const EmbeddedFile> embedded_experiments();  // reproduce/*.toml

namespace {

Published read_published(TomlFields fields) {
  Published published;
  published.input = fields.text("input").value_or("");
  published.system = fields.text("system").value_or("");
  published.column = fields.required_text("column");
  published.note = fields.text("note").value_or("");
  const auto value = fields.number_or_text("value");
  if (!value) fields.fail("value", "is missing");
  published.value = *value;
  fields.finish();
  return published;
}

Aim read_aim(TomlFields fields) {
  Aim aim;
  aim.column = fields.required_text("column");
  aim.input = fields.text("input").value_or("");
  aim.system = fields.text("system").value_or("");
  aim.relative_to = fields.text("relative_to").value_or("");
  aim.at_least = fields.number("at_least");
  aim.at_most = fields.number("at_most");
  if (!aim.at_least && !aim.at_most) fields.fail("at_least", "neither at_least nor at_most is there");
  fields.finish();
  return aim;
}

template <class Item>
bool labels(const std::vector<Item>& items, const std::string& label) {
  return std::ranges::any_of(items, [&](const Item& item) { return item.label == label; });
}

template <class Item>
void expect_different_labels(const TomlFields& fields, std::string_view key, const std::vector<Item>& items) {
  if (items.empty()) fields.fail(key, "is missing");
  for (std::size_t i = 0; i < items.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (items[i].label == items[j].label) fields.fail(key, fmt::format("'{}' twice", items[i].label));
    }
  }
}

// What published figures and aims speak of must be in the table.
void expect_known(const TomlFields& fields, const Experiment& experiment, std::string_view where,
                  const std::array<std::string_view, 2>& who, std::string_view column) {
  const std::string input(who[0]), system(who[1]);
  if (!input.empty() && !labels(experiment.inputs, input)) fields.fail(where, fmt::format("no input '{}'", input));
  if (!system.empty() && !labels(experiment.systems, system)) fields.fail(where, fmt::format("no system '{}'", system));
  if (std::ranges::find(experiment.columns, column) == experiment.columns.end()) {
    fields.fail(where, fmt::format("no column '{}' in columns", column));
  }
}

std::string stem(const std::string& file) { return std::filesystem::path(file).stem().string(); }

}  // namespace

Experiment parse_experiment(std::string_view text, const std::string& file) {
  toml::table root;
  try {
    root = toml::parse(text);
  } catch (const toml::parse_error& error) {
    throw InputError({.file = file, .field = {}, .index = fmt::format("line {}", error.source().begin.line)},
                     std::string(error.description()));
  }
  TomlFields fields(root, file, "");
  Experiment experiment;
  experiment.name = stem(file);
  experiment.title = fields.required_text("title");
  experiment.source = fields.required_text("source");
  experiment.secondary = fields.truth("secondary").value_or(false);
  experiment.about = fields.required_text("about");
  experiment.reading = fields.required_text("reading");
  experiment.finding = fields.text("finding").value_or("");
  experiment.across = fields.truth("across").value_or(false);
  experiment.columns = fields.texts("columns");
  if (experiment.columns.empty()) fields.fail("columns", "is missing");
  for (const std::string& name : experiment.columns) {
    const Column* const column = find_column(name);
    if (column == nullptr) fields.fail("columns", fmt::format("no column '{}'; there are {}", name, column_names()));
  }

  experiment.inputs = read_inputs(root, file);
  experiment.systems = read_systems(root, file);
  for (const char* key : {"input", "every_input", "system", "every_system", "shape"}) fields.has_been_read(key);
  expect_different_labels(fields, "input", experiment.inputs);
  expect_different_labels(fields, "system", experiment.systems);
  for (const std::string& name : experiment.columns) {
    for (const ExperimentInput& input : experiment.inputs) {
      if (find_column(name)->simulated && !input.on) {
        fields.fail("columns", fmt::format("'{}' needs cluster and model of input '{}'", name, input.label));
      }
    }
  }
  for (TomlFields& table : fields.tables("published")) {
    const Published& p = experiment.published.emplace_back(read_published(table));
    expect_known(fields, experiment, "published", {p.input, p.system}, p.column);
  }
  for (TomlFields& table : fields.tables("aim")) {
    const Aim& a = experiment.aims.emplace_back(read_aim(table));
    expect_known(fields, experiment, "aim", {a.input, a.system}, a.column);
    if (!a.relative_to.empty()) expect_known(fields, experiment, "aim", {"", a.relative_to}, a.column);
  }
  fields.finish();
  return experiment;
}

std::vector<std::string> experiment_names() {
  std::vector<std::string> names;
  for (const EmbeddedFile& file : embedded_experiments()) names.emplace_back(file.name);
  return names;
}

Experiment find_experiment(const std::string& name_or_path) {
  for (const EmbeddedFile& file : embedded_experiments()) {
    if (file.name == name_or_path) return parse_experiment(file.text, fmt::format("reproduce/{}.toml", file.name));
  }
  if (!name_or_path.ends_with(".toml")) {
    throw InputError({.file = {}, .field = {}, .index = {}},
                     fmt::format("'{}' is no experiment and no .toml file; there are {}", name_or_path,
                                 fmt::join(experiment_names(), ", ")));
  }
  const Where where{.file = name_or_path, .field = {}, .index = {}};
  std::error_code absent;
  if (std::filesystem::is_directory(name_or_path, absent)) throw InputError(where, "is a folder");
  std::ifstream in(name_or_path);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in.is_open() || in.bad()) throw InputError(where, "cannot be read");
  Experiment experiment = parse_experiment(text, name_or_path);
  experiment.file = name_or_path;
  return experiment;
}

}  // namespace foremoe
