#include "foremoe/core/error.h"

#include <utility>

namespace foremoe {

static std::string message(const Where& w, const std::string& problem) {
  std::string place = w.file;
  if (!w.field.empty()) place += (place.empty() ? "" : ": ") + w.field;
  if (!w.index.empty()) place += (w.index.starts_with('[') || place.empty() ? "" : " ") + w.index;
  return place.empty() ? problem : place + ": " + problem;
}

InputError::InputError(Where where, const std::string& problem)
    : std::runtime_error(message(where, problem)), where_(std::move(where)), problem_(problem) {}

std::string must_be_integer(long long low, long long high) {
  if (low == high) return "must be " + std::to_string(low);
  return "must be an integer from " + std::to_string(low) + " to " + std::to_string(high);
}

}  // namespace foremoe
