#pragma once

// How `--help` looks: lines of at most 110 columns, an option's description beside it or, where the option is
// long, below it, its default in words.

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>

namespace foremoe::cli {

class HelpText : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
  std::string make_usage(const CLI::App* app, std::string name) const override;
};

// Under `--help` of every command: what it does in examples, then what its words mean.
void teach(CLI::App& command, std::string_view examples, std::string_view meaning = {});

}  // namespace foremoe::cli
