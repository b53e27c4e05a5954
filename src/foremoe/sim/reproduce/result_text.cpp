#include "foremoe/sim/reproduce/result_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "foremoe/sim/reproduce/columns.h"

namespace foremoe {

namespace {

constexpr std::string_view kNotPublished = "–";

std::string shown(const Column& column, double value) {
  return std::isnan(value) ? std::string("–") : fmt::format("{:.{}f}", value, column.digits);
}

std::string shown(const Column& column, const std::variant<double, std::string>& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  const double number = std::get<double>(value);
  const std::string plain = fmt::format("{}", number);  // as many digits as were published
  return plain.size() > 12 ? shown(column, number) : plain;
}

const Published* published_at(const Experiment& experiment, std::string_view input, std::string_view system,
                              std::string_view column) {
  const auto at = std::ranges::find_if(experiment.published, [&](const Published& p) {
    return p.input == input && p.system == system && p.column == column;
  });
  return at == experiment.published.end() ? nullptr : &*at;
}

bool stands_in_table(const Published& p) { return !p.input.empty() && !p.system.empty(); }

bool any_published(const Experiment& experiment, std::string_view column) {
  return std::ranges::any_of(experiment.published,
                             [&](const Published& p) { return stands_in_table(p) && p.column == column; });
}

// A row per input and system, a column per figure, beside it what was published where anything was.
std::vector<std::vector<std::string>> long_table(const ExperimentResult& result) {
  const Experiment& experiment = result.experiment;
  std::vector<std::vector<std::string>> rows{{"input", "system"}};
  for (const std::string& name : experiment.columns) {
    rows[0].emplace_back(find_column(name)->title);
    if (any_published(experiment, name)) rows[0].emplace_back("published");
  }
  for (std::size_t i = 0; i < result.cells.size(); ++i) {
    for (std::size_t s = 0; s < result.cells[i].size(); ++s) {
      const Cell& cell = result.cells[i][s];
      std::vector<std::string>& row = rows.emplace_back();
      row = {experiment.inputs[i].label, experiment.systems[s].label};
      if (!cell.measured) {
        row.push_back("skipped: " + cell.skipped);
        continue;
      }
      for (std::size_t c = 0; c < experiment.columns.size(); ++c) {
        const Column& column = *find_column(experiment.columns[c]);
        row.push_back(shown(column, cell.of_columns[c]));
        if (!any_published(experiment, column.name)) continue;
        const Published* const p = published_at(experiment, row[0], row[1], column.name);
        row.push_back(p == nullptr ? std::string(kNotPublished) : shown(column, p->value));
      }
    }
  }
  return rows;
}

// A row per input, a column per system; several figures between slashes, what was published in brackets.
std::vector<std::vector<std::string>> wide_table(const ExperimentResult& result) {
  const Experiment& experiment = result.experiment;
  std::string titles;
  for (const std::string& name : experiment.columns) {
    titles += fmt::format("{}{}", titles.empty() ? "" : " / ", find_column(name)->title);
  }
  std::vector<std::vector<std::string>> rows{{titles}};
  for (const ExperimentSystem& system : experiment.systems) rows[0].push_back(system.label);
  for (std::size_t i = 0; i < result.cells.size(); ++i) {
    std::vector<std::string>& row = rows.emplace_back();
    row.push_back(experiment.inputs[i].label);
    for (std::size_t s = 0; s < result.cells[i].size(); ++s) {
      const Cell& cell = result.cells[i][s];
      std::string text;
      for (std::size_t c = 0; c < experiment.columns.size() && cell.measured; ++c) {
        const Column& column = *find_column(experiment.columns[c]);
        text += fmt::format("{}{}", text.empty() ? "" : " / ", shown(column, cell.of_columns[c]));
        const Published* const p = published_at(experiment, row[0], experiment.systems[s].label, column.name);
        if (p != nullptr) text += fmt::format(" [{}]", shown(column, p->value));
      }
      row.push_back(cell.measured ? text : "skipped");
    }
  }
  return rows;
}

std::string who(const std::string& input, const std::string& system) {
  if (input.empty()) return system;
  return system.empty() ? input : fmt::format("{}, {}", system, input);
}

std::string tell(const Published& p) {
  const Column& column = *find_column(p.column);
  std::string text = fmt::format("Published: {}", column.title);
  if (const std::string name = who(p.input, p.system); !name.empty()) text += fmt::format(" of {}", name);
  text += fmt::format(" {}", shown(column, p.value));
  return p.note.empty() ? text : fmt::format("{} ({})", text, p.note);
}

std::string tell(const AimResult& judged) {
  const Aim& aim = judged.aim;
  const Column& column = *find_column(aim.column);
  std::string text = fmt::format("Aim: {}", column.title);
  if (const std::string name = who(aim.input, aim.system); !name.empty()) text += fmt::format(" of {}", name);
  if (!aim.relative_to.empty()) text += fmt::format(" ÷ that of {}", aim.relative_to);
  if (aim.at_least) text += fmt::format(" ≥ {}", *aim.at_least);
  if (aim.at_least && aim.at_most) text += ",";
  if (aim.at_most) text += fmt::format(" ≤ {}", *aim.at_most);
  if (judged.figures == 0) return text + ": nothing to judge by";
  return fmt::format("{}: {}, {} {}", text, judged.met ? "met" : "missed",
                     judged.figures == 1 ? "it is" : "the worst is",
                     aim.relative_to.empty() ? shown(column, judged.worst) : fmt::format("{:.3f}", judged.worst));
}

std::string origins(const Experiment& experiment) {
  std::string text;
  for (const Origin origin : {Origin::kExact, Origin::kModelled, Origin::kMeasured}) {
    std::string titles;
    for (const std::string& name : experiment.columns) {
      const Column& column = *find_column(name);
      if (column.origin == origin) titles += fmt::format("{}{}", titles.empty() ? "" : "; ", column.title);
    }
    if (!titles.empty()) text += fmt::format("{}{}: {}.", text.empty() ? "" : " ", to_string(origin), titles);
  }
  return text;
}

}  // namespace

std::vector<std::vector<std::string>> to_rows(const ExperimentResult& result) {
  return result.experiment.across ? wide_table(result) : long_table(result);
}

std::vector<std::string> remarks(const ExperimentResult& result) {
  std::vector<std::string> all;
  for (const Published& p : result.experiment.published) {
    if (!stands_in_table(p) || !p.note.empty()) all.push_back(tell(p));
  }
  for (const AimResult& judged : judge(result)) all.push_back(tell(judged));
  return all;
}

std::string to_markdown(const ExperimentResult& result) {
  const Experiment& e = result.experiment;
  std::string text =
      fmt::format("## {}: {}\n\n*{}{}.* {}\n\n**What we assumed.** {}\n\n    foremoe reproduce {}\n\n", e.name, e.title,
                  e.source, e.secondary ? " (secondary)" : "", e.about, e.reading, e.file.empty() ? e.name : e.file);
  const auto rows = to_rows(result);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    text += "|";
    for (const std::string& cell : rows[r]) text += fmt::format(" {} |", cell);
    for (std::size_t c = rows[r].size(); c < rows[0].size(); ++c) text += " |";
    text += "\n";
    if (r > 0) continue;
    text += "|";
    for (std::size_t c = 0; c < rows[0].size(); ++c) text += "---|";
    text += "\n";
  }
  text += "\n";
  if (!e.across && std::ranges::any_of(e.published, stands_in_table)) {
    text += fmt::format("{} in a *published* column: not published to us. ", kNotPublished);
  } else if (e.published.empty()) {
    text += "Figures: not published to us. ";
  }
  std::string by_origin = origins(e);
  by_origin[0] = static_cast<char>(by_origin[0] - 'a' + 'A');
  text += by_origin + "\n\n";
  const auto told = remarks(result);
  for (const std::string& line : told) text += fmt::format("- {}\n", line);
  if (!told.empty()) text += "\n";
  if (!e.finding.empty()) text += fmt::format("**What came out.** {}\n\n", e.finding);
  return text;
}

nlohmann::ordered_json to_json(const ExperimentResult& result) {
  const Experiment& e = result.experiment;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < result.cells.size(); ++i) {
    for (std::size_t s = 0; s < result.cells[i].size(); ++s) {
      const Cell& cell = result.cells[i][s];
      nlohmann::ordered_json row{{"input", e.inputs[i].label}, {"system", e.systems[s].label}};
      if (!cell.measured) row["skipped"] = cell.skipped;
      for (std::size_t c = 0; c < e.columns.size() && cell.measured; ++c) row[e.columns[c]] = cell.of_columns[c];
      rows.push_back(std::move(row));
    }
  }
  nlohmann::ordered_json published = nlohmann::ordered_json::array();
  for (const Published& p : e.published) {
    nlohmann::ordered_json one{{"input", p.input}, {"system", p.system}, {"column", p.column}};
    std::visit([&](const auto& value) { one["value"] = value; }, p.value);
    published.push_back(std::move(one));
  }
  nlohmann::ordered_json aims = nlohmann::ordered_json::array();
  for (const AimResult& judged : judge(result)) {
    aims.push_back({{"aim", tell(judged)}, {"met", judged.met}, {"worst", judged.worst}});
  }
  nlohmann::ordered_json columns;
  for (const std::string& name : e.columns) columns[name] = std::string(to_string(find_column(name)->origin));
  return {{"name", e.name},     {"title", e.title}, {"source", e.source},     {"secondary", e.secondary},
          {"columns", columns}, {"rows", rows},     {"published", published}, {"aims", aims}};
}

}  // namespace foremoe
