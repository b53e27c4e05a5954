// foremoe options: lists every option of every command, from the declarations that the parser uses.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"

namespace foremoe::cli {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const Option& option) {
  Json json{{"name", option.name},
            {"option", option.positional ? option.value : command_line_name(option.name)},
            {"type", option.type}};
  if (!option.range.empty()) json["range"] = option.range;
  if (!option.words.empty()) json["words"] = option.words;
  if (!option.initial.empty()) json["default"] = option.initial;
  json["required"] = option.required;
  json["help"] = option.help;
  return json;
}

int run(bool as_json) {
  Json all = Json::object();
  for (const CommandEntry& entry : command_entries()) {
    if (entry.make == options_command) continue;
    const Command command = with_shared_options(entry.make());
    if (!as_json) fmt::print("{}\n", command.name);
    for (const Option& option : command.options) {
      all[command.name].push_back(to_json(option));
      if (as_json) continue;
      std::string what = option.type;
      if (!option.range.empty()) what += ' ' + option.range;
      if (!option.words.empty()) what += fmt::format(" ({})", fmt::join(option.words, ", "));
      if (!option.initial.empty()) what += fmt::format(", default {}", option.initial);
      fmt::print("  {:<26} {}\n", option.positional ? option.value : command_line_name(option.name), what);
    }
  }
  if (as_json) fmt::print("{}\n", all.dump(2));
  return kOk;
}

}  // namespace

Command options_command() {
  auto json = std::make_shared<bool>(false);
  return {.name = "options",
          .summary = "List every option of every command: name, type, range, default",
          .examples = "  foremoe options\n  foremoe options --json\n",
          .options = {json_option(*json, "Print a JSON object that maps each command to a list of options")},
          .run = [json](const Given&) { return cli::run(*json); },
          .any_process = true};
}

}  // namespace foremoe::cli
