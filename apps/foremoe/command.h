#pragma once

// The subcommands of `foremoe`: each declares its options and says what to run once they are parsed.

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
inline constexpr int kFoundWrong = 1;  // checked, and it is not right
inline constexpr int kBadInput = 2;    // wrong usage, or input that cannot be read
inline constexpr int kGaveUp = 3;      // a run that could not go on

// The options that the user gave, by name, and the texts of all options.
class Given {
 public:
  using Texts = std::map<std::string, std::string>;

  bool operator()(std::string_view name) const { return names_.contains(name); }
  void set_default(const Option& option) { texts_[option.name] = option.initial; }
  void add(const std::string& name, const std::string& text);
  const Texts& texts() const { return texts_; }  // by name: as it was given, or the default; of a flag "given"
  // Throws InputError when one of them was given beside `name`.
  void refuse_beside(std::string_view name, std::initializer_list<std::string_view> others) const;

 private:
  std::set<std::string, std::less<>> names_;
  Texts texts_;
};

struct Command {
  std::string name;
  std::string summary;   // one line
  std::string examples;  // lines of the help
  std::string meaning;   // what words and columns mean: the end of the full help
  std::vector<Option> options;
  std::function<int(const Given&)> run;  // the exit code; throws InputError
  // May every process of mpirun or srun run it? True for commands that write no file and only read their input once.
  bool any_process = false;
};

Command synth_command();
Command import_command();
Command collect_command();
Command inspect_command();
Command plan_command();
Command verify_command();
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
std::span<const CommandEntry> command_entries();  // in the order of the help; constructing one costs most of a start

// Parses, runs, and turns what is thrown into one line on stderr and an exit code.
int run_command_line(int argc, char** argv);

// Options that several commands have.
Option json_option(bool& json, std::string help);
Option out_option(std::string& out, std::string value, std::string help);
Option threads_option(int& threads);
Option align_option(int& align);
Option input_option(std::string& path, std::string help);
Option policies_option(std::vector<std::string>& policies);

// Those of the names, in their order.
std::vector<Option> only(std::vector<Option> options, std::initializer_list<std::string_view> names);
std::vector<Option> without(std::vector<Option> options, std::initializer_list<std::string_view> names);
// All of them, one list after the other.
std::vector<Option> joined(std::initializer_list<std::vector<Option>> lists);

// "  vanilla  homes serve everything …", a line for each policy.
std::string list_of_policies();

}  // namespace foremoe::cli
