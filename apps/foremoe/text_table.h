#pragma once

// A table of text: the first column to the left, all others to the right, as wide as they need to be.

#include <string>
#include <vector>

namespace foremoe::cli {

class TextTable {
 public:
  explicit TextTable(std::vector<std::string> head) : rows_{std::move(head)} {}

  // Fewer cells than columns: the last one may run over the rest of the line.
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

  std::string to_string() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace foremoe::cli
