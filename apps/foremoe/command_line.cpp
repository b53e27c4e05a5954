// Parses argv with CLI11 and runs a command. Also formats the help. No other file uses CLI11.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <sstream>
#include <system_error>

#include "command.h"
#include "console.h"
#include "foremoe/core/did_you_mean.h"
#include "foremoe/core/error.h"
#include "foremoe/core/launch.h"
#include "foremoe/core/memory_limit.h"
#include "foremoe/evaluate/workload.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kDescription =
    "ForeMoE reads the expert routes recorded during rollout. For every layer of every micro-step, it plans which\n"
    "experts to replicate on which rank and how many tokens each replica serves. It checks, executes and simulates "
    "plans.";

constexpr std::string_view kFooter = R"(
From a recorded rollout to a verified plan:

  foremoe import sample*.npy --experts 128 --out trace.safetensors       convert recorded routes
  foremoe collect trace.safetensors --ranks 8 --out load.safetensors     count them: the planner's input
  foremoe inspect load.safetensors                                       show the imbalance
  foremoe compare load.safetensors --guest-slots 1                       compare policies
  foremoe plan load.safetensors --guest-slots 1 --out plan.safetensors   plan replicas and their tokens
  foremoe verify load.safetensors plan.safetensors                       check the plan
  foremoe run trace.safetensors --guest-slots 1                          execute it with real experts
  foremoe simulate load.safetensors --cluster h100 --model qwen3-30b-a3b predict the speedup on a cluster

Without a recorded rollout, start with: foremoe synth --out load.safetensors

Vocabulary: a *rank* is one accelerator of the expert-parallel group. The *home* of an expert is the rank that owns it. A
*guest slot* is room on a rank for a copy of another rank's expert. A *micro-step* is one small batch. A *token* counts
once per expert that it chose. The imbalance ratio ρ is the busiest rank's tokens ÷ the mean rank's; 1 is perfect.

Exit codes: 0 success; 1 a check found errors; 2 wrong usage or unreadable input; 3 a run failed.
)";

constexpr std::size_t kWidth = 110;
constexpr std::size_t kTextColumn = 34;

// Formats two columns: a name, and wrapped text beside it, or below it if the name is long.
std::string entry(const std::string& name, const std::string& text) {
  std::string out = "  " + name;
  std::size_t at = text_columns(out);
  const auto to_text_column = [&] {
    if (at + 2 > kTextColumn) {
      out += '\n';
      at = 0;
    }
    out.append(kTextColumn - at, ' ');
    at = kTextColumn;
  };
  to_text_column();
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (at > kTextColumn && at + 1 + text_columns(word) > kWidth) to_text_column();
    if (at > kTextColumn) {
      out += ' ';
      ++at;
    }
    out += word;
    at += text_columns(word);
  }
  return out + '\n';
}

std::string entry(const Option& option) {
  if (option.positional) return entry(option.value, option.help);
  std::string name = option.letter != 0 ? fmt::format("-{},", option.letter) : std::string();
  name += command_line_name(option.name);
  if (!option.value.empty()) name += ' ' + option.value;
  std::string text = option.help;
  if (!option.initial.empty()) text += fmt::format(" (default {})", option.initial);
  if (option.required) text += " (required)";
  return entry(name, text);
}

std::string heading(const Option& option) {
  if (option.positional) return "Positionals";
  return option.group.empty() ? "Options" : option.group;
}

// Returns the help, either with the main options only, or with all options under headings.
std::string help(const Command& command, bool all) {
  std::string text = fmt::format("{}\n\nUsage: foremoe {} [OPTIONS]", command.summary, command.name);
  for (const Option& option : command.options) {
    if (option.positional) text += option.required ? " " + option.value : fmt::format(" [{}]", option.value);
  }
  text += '\n';
  std::vector<std::string> headings{"Positionals", "Options"};
  for (const Option& option : command.options) {
    if (std::ranges::find(headings, heading(option)) == headings.end()) headings.push_back(heading(option));
  }
  std::int64_t hidden = 0;
  const auto shown = [&](const Option& o) { return all || o.main || o.required || o.positional; };
  for (const std::string& name : headings) {
    std::string section;
    for (const Option& option : command.options) {
      if (heading(option) != name) continue;
      if (shown(option)) {
        section += entry(option);
      } else {
        ++hidden;
      }
    }
    if (name == "Options") {
      section.insert(0, entry("--help-all", "Print all options and explanations, and exit"));
      section.insert(0, entry("-h,--help", "Print this help and exit"));
    }
    if (!section.empty()) text += fmt::format("\n{}:\n{}", name, section);
  }
  text += fmt::format("\nExamples:\n{}", command.examples);
  if (all && !command.meaning.empty()) text += fmt::format("\n{}", command.meaning);
  if (hidden > 0)
    text += fmt::format("\n{} and explanations: foremoe {} --help-all\n", counted(hidden, "more option"), command.name);
  return text;
}

std::string help() {
  std::string text = fmt::format("{}\n\nUsage: foremoe [OPTIONS] SUBCOMMAND\n\nOptions:\n", kDescription);
  text += entry("-h,--help", "Print this help and exit") + entry("-V,--version", "Print the version and exit");
  text += "\nSubcommands:\n";
  for (const CommandEntry& command : command_entries())
    text += entry(std::string(command.name), command.make().summary);
  return text + std::string(kFooter);
}

void bind(CLI::App& app, const Option& option, Given& given) {
  given.set_default(option);
  const auto set = [&option, &given](const std::string& text) {
    given.add(option.name, option.type == "flag" ? "given" : text);
    if ((option.type == "text" || option.type == "list") && text.empty())
      throw InputError({.field = option.name}, "is empty");
    option.set(text);
  };
  if (option.type == "flag") {
    app.add_flag_callback(command_line_name(option.name), [set] { set(""); });
    return;
  }
  std::string name = option.positional ? option.value : command_line_name(option.name);
  if (option.letter != 0) name = fmt::format("-{},{}", option.letter, name);
  CLI::Option* bound = nullptr;
  if (option.type == "values") {
    std::erase(name, '.');  // CLI11 accepts no dots in a name such as "FILE..."
    bound = app.add_option_function<std::vector<std::string>>(name, [set](const std::vector<std::string>& texts) {
      for (const std::string& text : texts) set(text);
    });
  } else {
    bound = app.add_option_function<std::string>(name, set);
  }
  if (option.type == "list") bound->multi_option_policy(CLI::MultiOptionPolicy::Join)->delimiter(',');
  bound->required(option.required);
  if (option.former.empty()) return;
  app.add_option_function<std::string>(command_line_name(option.former), [&option](const std::string&) {
    throw InputError(
        {}, fmt::format("{} is now called {}", command_line_name(option.former), command_line_name(option.name)));
  });
}

// Returns the first argument that is not an option, or an empty string.
std::string_view command_name(std::span<char* const> arguments) {
  const auto name = std::ranges::find_if(arguments, [](const char* argument) { return *argument != '-'; });
  return name == arguments.end() ? std::string_view() : *name;
}

// Sets the limit when it is parsed.
Option max_memory_option() {
  const auto gigabytes = std::make_shared<double>(0);
  Option option = number_option({.name = "max_memory",
                                 .value = "GB",
                                 .help = "Refuse input that needs more memory than this, for this process's data",
                                 .initial = "what is available"},
                                *gigabytes, {.above = true});
  option.set = [gigabytes, parse = option.set](const std::string& text) {
    parse(text);
    limit_memory(Bytes{static_cast<std::int64_t>(*gigabytes * kBytesPerGigabyte)});
  };
  return option;
}

// Constructs only the named command, since constructing all commands would slow every start.
std::optional<Command> named_command(std::string_view name) {
  const auto entry = std::ranges::find(command_entries(), name, &CommandEntry::name);
  return entry == command_entries().end() ? std::nullopt : std::optional(with_shared_options(entry->make()));
}

bool is_option(const std::string& argument) { return argument.size() > 1 && argument.front() == '-'; }

// Describes the first unknown option, or the first unexpected argument if all options are known.
std::string describe_unexpected(const Command& command, const std::vector<std::string>& arguments) {
  const auto unknown = std::ranges::find_if(arguments, is_option);
  if (unknown == arguments.end()) return fmt::format("unexpected argument '{}'", arguments.front());
  const std::string option = unknown->substr(0, unknown->find('='));
  std::vector<std::string> names;
  for (const Option& known : command.options) {
    if (!known.positional) names.push_back(command_line_name(known.name));
  }
  names.insert(names.end(), {"--help", "--help-all"});
  return fmt::format("'{}' is not an option{}", option, did_you_mean(option, names));
}

// Describes a first argument that is neither a subcommand nor an option of foremoe itself.
std::string describe_unknown(const std::string& argument) {
  if (!argument.starts_with('-')) {
    std::vector<std::string> names;
    for (const CommandEntry& entry : command_entries()) names.emplace_back(entry.name);
    return fmt::format("'{}' is not a subcommand{}", argument, did_you_mean(argument, names));
  }
  const std::string option = argument.substr(0, argument.find('='));
  const std::vector<std::string> names{"--help", "--version"};
  return fmt::format("'{}' is not an option that can precede a subcommand{}", option, did_you_mean(option, names));
}

// Names the value that an option lacks; CLI11 says "--plot: 1 required TEXT missing".
std::string describe_mistake(const CLI::ParseError& error, const Command& command) {
  const bool lacks = std::string_view(error.what()).ends_with("missing");
  if (!lacks || dynamic_cast<const CLI::ArgumentMismatch*>(&error) == nullptr) return error.what();
  const std::string name = std::string(error.what()).substr(0, std::string_view(error.what()).find(':'));
  const auto option =
      std::ranges::find(command.options, name, [](const Option& o) { return command_line_name(o.name); });
  return option == command.options.end() ? error.what() : fmt::format("{} requires a value: {}", name, option->value);
}

int fail(const std::string& command, const std::string& message, bool usage, int code = kBadInput) {
  std::string line = fmt::format("{}: {}", command, message);
  std::ranges::replace(line, '\n', ' ');
  fmt::print(stderr, "{}{}\n", printable(line), usage ? fmt::format(" (see {} --help)", command) : "");
  return code;
}

int fail_for_stdout(const std::string& command) {
  return fail(command, "standard output cannot be written", /*usage=*/false);
}

int finish(const std::string& command, int code) {
  return std::fflush(stdout) != 0 || std::ferror(stdout) != 0 ? fail_for_stdout(command) : code;
}

// Rejects a command under mpirun or srun if all processes would do the same work and write the same files. Accepts `run
// --comm mpi`, which divides the work among processes.
void expect_one_process(const Command& command, const Given& given) {
  const auto comm = given.texts().find("comm");
  if (command.any_process || (comm != given.texts().end() && comm->second == "mpi")) return;
  const Launch started = launch();
  if (started.processes <= 1) return;
  throw InputError({}, fmt::format("mpirun or srun has started {} processes ({}), and each would do all of the work; "
                                   "start one process, or unset that variable if this process runs alone. Only foremoe "
                                   "run --comm mpi supports several processes",
                                   started.processes, started.variable));
}

// Returns the error's message with option names in place of the library's field names.
std::string message_for_user(const Command& command, const InputError& error) {
  return message_of(error, [&](std::string_view field) -> std::string {
    for (const Option& option : command.options) {
      if (option.name == field) {
        return option.positional ? option.value : command_line_name(option.name);
      }
    }
    return std::string(field);
  });
}

}  // namespace

Command with_shared_options(Command command) {
  command.options.push_back(max_memory_option());
  return command;
}

void Given::add(const std::string& name, const std::string& text) {
  const bool again = !names_.insert(name).second;
  texts_[name] = again ? fmt::format("{}, {}", texts_[name], text) : text;
}

void Given::refuse_beside(std::string_view name, std::initializer_list<std::string_view> others) const {
  for (const std::string_view other : others) {
    if (!(*this)(name) || !(*this)(other)) continue;
    throw InputError({.field = std::string(other)}, fmt::format("cannot be combined with {}", command_line_name(name)));
  }
}

int run_command_line(int argc, char** argv) {
  const std::string_view first = command_name(std::span(argv, static_cast<std::size_t>(argc)).subspan(1));
  CLI::App app;
  app.set_version_flag("-V,--version", "foremoe " FOREMOE_VERSION);
  app.set_help_flag("-h,--help");
  app.set_help_all_flag("--help-all");
  app.require_subcommand(1);
  Given given;
  const std::optional<Command> command = named_command(first);
  CLI::App* parser = nullptr;
  if (command) {
    parser = app.add_subcommand(command->name);
    for (const Option& option : command->options) bind(*parser, option, given);
  }
  const auto called = [&] { return parser != nullptr && parser->parsed() ? &*command : nullptr; };
  std::string name = "foremoe";
  bool usage = true;
  try {
    try {
      app.parse(argc, argv);
    } catch (const CLI::CallForVersion& version) {
      fmt::print("{}\n", version.what());
      return finish(name, kOk);
    } catch (const CLI::CallForHelp&) {
      fmt::print("{}", called() != nullptr ? help(*called(), /*all=*/false) : help());
      return finish(name, kOk);
    } catch (const CLI::CallForAllHelp&) {
      fmt::print("{}", called() != nullptr ? help(*called(), /*all=*/true) : help());
      return finish(name, kOk);
    }
    name += ' ' + called()->name;
    usage = false;
    expect_one_process(*called(), given);
    return finish(name, called()->run(given));
  } catch (const CLI::ParseError& error) {
    if (called() != nullptr) {
      const std::vector<std::string> unexpected = parser->remaining();
      // An unknown option may be the reason why a required one is missing.
      const bool is_extra = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr
                                ? !unexpected.empty()
                                : std::ranges::any_of(unexpected, is_option);
      return fail("foremoe " + called()->name,
                  is_extra ? describe_unexpected(*called(), unexpected) : describe_mistake(error, *called()), usage);
    }
    return fail(name, argc < 2 ? "a subcommand is required" : describe_unknown(argv[1]), usage);
  } catch (const InputError& error) {
    if (called() == nullptr) return fail(name, error.what(), usage);
    return fail("foremoe " + called()->name, message_for_user(*called(), error), usage);
  } catch (const std::bad_alloc&) {
    return fail(name, "not enough memory for an input of this size", usage, kGaveUp);
  } catch (const std::system_error& error) {
    if (std::ferror(stdout) != 0) return fail_for_stdout(name);  // fmt throws when the buffer is full
    return fail(name, fmt::format("system error: {}", error.what()), usage, kGaveUp);
  }
}

}  // namespace foremoe::cli
