#include "help_text.h"

#include <fmt/format.h>

#include <sstream>

namespace foremoe::cli {
namespace {

constexpr std::size_t kWidth = 110;
constexpr std::size_t kTextColumn = 34;

// Columns that UTF-8 text takes: its code points.
std::size_t columns(std::string_view text) {
  std::size_t n = 0;
  for (const char c : text) n += (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  return n;
}

// Two columns: a name, and words wrapped beside it.
std::string entry(const std::string& name, const std::string& text) {
  std::string out = "  " + name;
  std::size_t at = columns(out);
  const auto to_text_column = [&] {
    out.append(kTextColumn - at, ' ');
    at = kTextColumn;
  };
  const auto new_line = [&] {
    out += '\n';
    at = 0;
    to_text_column();
  };
  if (at + 2 > kTextColumn) {
    new_line();
  } else {
    to_text_column();
  }
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (at > kTextColumn && at + 1 + columns(word) > kWidth) new_line();
    if (at > kTextColumn) {
      out += ' ';
      ++at;
    }
    out += word;
    at += columns(word);
  }
  return out + '\n';
}

}  // namespace

std::string HelpText::make_option(const CLI::Option* option, bool is_positional) const {
  std::string name = make_option_name(option, is_positional);
  if (!is_positional && option->get_type_size() != 0 && !option->get_type_name().empty()) {
    name += ' ' + option->get_type_name();
  }
  std::string text = option->get_description();
  if (!option->get_default_str().empty()) text += fmt::format(" (default {})", option->get_default_str());
  if (option->get_required() && !is_positional) text += " (required)";
  return entry(name, text);
}

std::string HelpText::make_subcommand(const CLI::App* command) const {
  const std::string text = command->get_description();
  return entry(command->get_name(), text.substr(0, text.find('\n')));
}

std::string HelpText::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
  for (std::size_t at = 0; (at = text.find("\n\n\n", at)) != std::string::npos;) text.erase(at, 1);
  return text;
}

std::string HelpText::make_usage(const CLI::App* app, std::string name) const {
  return '\n' + CLI::Formatter::make_usage(app, std::move(name));
}

void teach(CLI::App& command, std::string_view examples, std::string_view meaning) {
  std::string text = fmt::format("Examples:\n{}", examples);
  if (!meaning.empty()) text += fmt::format("\n{}", meaning);
  command.footer(text);
}

}  // namespace foremoe::cli
