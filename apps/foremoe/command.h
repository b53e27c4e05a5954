#pragma once

// The subcommands of `foremoe`. Each subcommand declares its options and a function to run after parsing.

#include <functional>
#include <initializer_list>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/core/option.h"

namespace foremoe::cli {

inline constexpr int kOk = 0;
inline constexpr int kFoundWrong = 1;  // a check found errors
inline constexpr int kBadInput = 2;    // wrong usage or unreadable input
inline constexpr int kGaveUp = 3;      // a run failed

// Names of the options that the user gave, and the values of all options as text.
class Given {
 public:
  using Texts = std::map<std::string, std::string>;

  bool operator()(std::string_view name) const { return names_.contains(name); }
  void set_default(const Option& option) { texts_[option.name] = option.initial; }
  void add(const std::string& name, const std::string& text);
  const Texts& texts() const { return texts_; }  // by name: the given value or the default; "given" for a flag
  // Throws InputError if the user gave both `name` and any option of `others`.
  void refuse_beside(std::string_view name, std::initializer_list<std::string_view> others) const;

 private:
  std::set<std::string, std::less<>> names_;
  Texts texts_;
};

struct Command {
  std::string name;
  std::string summary;   // one line
  std::string examples;  // shown in the help
  std::string meaning;   // explains words and columns at the end of the full help
  std::vector<Option> options;
  std::function<int(const Given&)> run;  // the exit code; throws InputError
  // True if the command writes no file and reads its input once. Every process of mpirun or srun may then run it.
  bool any_process = false;
};

Command synth_command();
Command import_command();
Command routes_command();
Command collect_command();
Command pack_command();
Command inspect_command();
Command plan_command();
Command fit_command();
Command layout_command();
Command verify_command();
Command homes_command();
Command maps_command();
Command compare_command();
Command run_command();
Command simulate_command();
Command calibrate_command();
Command report_command();
Command options_command();

struct CommandEntry {
  std::string_view name;
  Command (*make)();
};
std::span<const CommandEntry>
command_entries();  // in the order of the help; constructing a command dominates the start-up time

// Adds the options that every command has.
Command with_shared_options(Command command);

// Parses and runs a command. Prints exceptions as one line on stderr and returns the exit code.
int run_command_line(int argc, char** argv);

// Options shared by several commands.
Option json_option(bool& json, std::string help);
Option out_option(std::string& out, std::string value, std::string help);
Option threads_option(int& threads);
Option align_option(int& align);
Option input_option(std::string& path, std::string help);
Option policies_option(std::vector<std::string>& policies);

// Returns the named options, in the order of `names`.
std::vector<Option> only(std::vector<Option> options, std::initializer_list<std::string_view> names);
std::vector<Option> without(std::vector<Option> options, std::initializer_list<std::string_view> names);
// Concatenates the lists.
std::vector<Option> joined(std::initializer_list<std::vector<Option>> lists);

// Returns one line per policy: "  vanilla  homes serve everything …".
std::string list_of_policies();

}  // namespace foremoe::cli
