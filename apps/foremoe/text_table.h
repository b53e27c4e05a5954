#pragma once

// Text in columns.

#include <string>
#include <utility>
#include <vector>

namespace foremoe::cli {

// Columns as wide as they need to be, the first to the left, all others to the right.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> head) : rows_{std::move(head)} {}

  // Fewer cells than columns: the last one may run over the rest of the line.
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

  std::string to_string() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Two columns, both to the left: what it is, and what there is to say of it.
class FactList {
 public:
  void add(std::string name, std::string fact) { facts_.emplace_back(std::move(name), std::move(fact)); }
  std::string to_string() const;

 private:
  std::vector<std::pair<std::string, std::string>> facts_;
};

}  // namespace foremoe::cli
