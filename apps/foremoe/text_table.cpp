#include "text_table.h"

#include <fmt/format.h>

#include <algorithm>

namespace foremoe::cli {

static std::size_t columns(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

// fmt counts the columns of UTF-8 text, so its widths are right for ρ and × too.
std::string TextTable::to_string() const {
  std::vector<std::size_t> width(rows_.front().size());
  for (const auto& cells : rows_) {
    const std::size_t aligned = cells.size() < width.size() ? cells.size() - 1 : cells.size();
    for (std::size_t c = 0; c < aligned; ++c) width[c] = std::max(width[c], columns(cells[c]));
  }
  std::string out;
  for (const auto& cells : rows_) {
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const bool runs_over = cells.size() < width.size() && c + 1 == cells.size();
      if (c == 0) {
        out += fmt::format("  {:<{}}", cells[c], width[c]);
      } else if (runs_over) {
        out += "  " + cells[c];
      } else {
        out += fmt::format("  {:>{}}", cells[c], width[c]);
      }
    }
    out += '\n';
  }
  return out;
}

std::string FactList::to_string() const {
  std::size_t width = 0;
  for (const auto& [name, fact] : facts_) width = std::max(width, columns(name));
  std::string out;
  for (const auto& [name, fact] : facts_) out += fmt::format("  {:<{}}  {}\n", name, width, fact);
  return out;
}

}  // namespace foremoe::cli
