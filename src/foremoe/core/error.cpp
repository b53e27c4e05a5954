#include "foremoe/core/error.h"

#include <utility>

namespace foremoe {

static std::string message(const Where& w, const std::string& what) {
  std::string place = w.file;
  if (!w.field.empty()) place += (place.empty() ? "" : ": ") + w.field;
  if (!w.index.empty()) place += (w.index.starts_with('[') || place.empty() ? "" : " ") + w.index;
  return place.empty() ? what : place + ": " + what;
}

InputError::InputError(Where where, const std::string& what)
    : std::runtime_error(message(where, what)), where_(std::move(where)) {}

}  // namespace foremoe
