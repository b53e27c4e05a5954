#include "console.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"

namespace foremoe::cli {
namespace {

bool quiet = false;

using Rows = std::vector<std::vector<std::string>>;

// fmt counts columns of UTF-8 text, so widths are also correct for ρ and ×.
std::string block(const Rows& rows, const std::vector<std::size_t>& shown, const std::vector<std::size_t>& width) {
  std::string out;
  for (const auto& cells : rows) {
    const bool runs_over = cells.size() < width.size();
    for (const std::size_t c : shown) {
      if (c >= cells.size()) break;
      if (c == 0) {
        out += fmt::format("  {:<{}}", cells[c], width[c]);
      } else if (runs_over && c + 1 == cells.size()) {
        out += "  " + cells[c];
      } else {
        out += fmt::format("  {:>{}}", cells[c], width[c]);
      }
    }
    out += '\n';
  }
  return out;
}

}  // namespace

void note(std::string_view text) {
  if (!quiet) fmt::print(stderr, "foremoe: {}\n", printable(text));
}

void note_all(const std::vector<std::string>& texts) {
  for (const std::string& text : texts) note(text);
}

void be_quiet() { quiet = true; }
bool is_quiet() { return quiet; }

bool is_terminal(std::FILE* stream) { return ::isatty(::fileno(stream)) == 1; }

int terminal_columns() {
  winsize size{};
  if (is_terminal(stdout) && ::ioctl(::fileno(stdout), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 100;
}

bool wants_color() {
  const auto is_set = [](const char* value) { return value != nullptr && *value != '\0'; };
  const char* const kind = std::getenv("TERM");  // NOLINT(concurrency-mt-unsafe): the environment is not modified
  const char* const no_color = std::getenv("NO_COLOR");  // NOLINT(concurrency-mt-unsafe)
  return is_terminal(stdout) && !is_set(no_color) && is_set(kind) && std::string_view(kind) != "dumb";
}

std::size_t text_columns(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

void TextTable::add(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = printable(cell);
  rows_.push_back(std::move(cells));
}

std::string TextTable::to_string() const {
  std::vector<std::size_t> width(rows_.front().size());
  for (const auto& cells : rows_) {
    const std::size_t aligned = cells.size() < width.size() ? cells.size() - 1 : cells.size();
    for (std::size_t c = 0; c < aligned; ++c) width[c] = std::max(width[c], text_columns(cells[c]));
  }
  const std::size_t screen = is_terminal(stdout) ? static_cast<std::size_t>(terminal_columns()) : std::string::npos;
  std::string out;
  std::size_t c = 1;
  do {  // a block has at least one column besides the first, if the table does
    std::vector<std::size_t> shown{0};
    std::size_t used = 2 + width[0];
    for (; c < width.size() && (shown.size() == 1 || used + 2 + width[c] <= screen); ++c) {
      used += 2 + width[c];
      shown.push_back(c);
    }
    if (!out.empty()) out += '\n';
    out += block(rows_, shown, width);
  } while (c < width.size());
  return out;
}

std::string FactList::to_string() const {
  std::size_t width = 0;
  for (const auto& [name, fact] : facts_) width = std::max(width, text_columns(name));
  std::string out;
  for (const auto& [name, fact] : facts_) out += fmt::format("  {:<{}}  {}\n", name, width, fact);
  return out;
}

void expect_output(const std::string& out, const std::vector<std::string>& inputs, const char* option) {
  if (out.empty()) return;
  if (out == "-") throw InputError({.field = option}, "'-', expected the name of a file");
  std::error_code absent;  // ignored: two missing files are not the same file
  for (const std::string& input : inputs) {
    if (std::filesystem::equivalent(out, input, absent)) {
      throw InputError({.field = option}, "is also an input");
    }
  }
  const std::string target = expect_writable(out);
  if (!target.empty() && target != out) note(fmt::format("{} is a link: writing {}", out, target));
}

}  // namespace foremoe::cli
