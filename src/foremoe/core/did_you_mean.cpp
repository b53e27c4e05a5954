#include "foremoe/core/did_you_mean.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace foremoe {
namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last(b.size() + 1);
  std::vector<std::size_t> last(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    std::swap(before_last, last);
    std::swap(last, row);
  }
  return last.back();
}

std::string lowered(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return lower;
}

}  // namespace

std::string did_you_mean(std::string_view given, std::span<const std::string> names) {
  const std::string word = lowered(given);
  const std::string* near = nullptr;
  std::size_t least = std::max<std::size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : names) {
    const std::size_t distance = edit_distance(word, lowered(name));
    if (distance >= least) continue;
    least = distance;
    near = &name;
  }
  const std::size_t start = std::min(word.find_first_not_of('-'), word.size());
  if (near == nullptr && word.size() - start >= 4) {
    for (const std::string& name : names) {
      if (lowered(name).starts_with(word) && (near == nullptr || name.size() < near->size())) near = &name;
    }
  }
  return near == nullptr ? "" : fmt::format("; did you mean {}?", *near);
}

}  // namespace foremoe
