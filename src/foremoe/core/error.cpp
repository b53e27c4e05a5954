#include "foremoe/core/error.h"

#include <utility>

#include "foremoe/core/message_text.h"

namespace foremoe {

#ifdef _GLIBCXX_DEBUG  // the symbol that programs of the same kind need
const char this_library_was_not_compiled_with_GLIBCXX_DEBUG = 0;
#else
const char this_library_was_compiled_with_GLIBCXX_DEBUG = 0;
#endif

static std::string message(const Where& w, const std::string& problem) {
  std::string place = printable(w.file);
  if (!w.field.empty()) place += (place.empty() ? "" : ": ") + w.field;
  if (!w.index.empty()) place += (w.index.starts_with('[') || place.empty() ? "" : " ") + w.index;
  return place.empty() ? problem : place + ": " + problem;
}

static Where shortened(Where where) {
  where.field = shortened(std::move(where.field));
  where.index = shortened(std::move(where.index));
  return where;
}

InputError::InputError(Where where, const std::string& problem)
    : std::runtime_error(message(shortened(where), shortened(problem))),
      where_(shortened(std::move(where))),
      problem_(shortened(problem)) {}

std::string spell_arguments(std::string_view text, const std::function<std::string(std::string_view)>& spell_argument) {
  std::string spelt;
  while (!text.empty()) {
    const auto begin = text.find('`');
    const auto end = begin == std::string_view::npos ? std::string_view::npos : text.find('`', begin + 1);
    if (end == std::string_view::npos) break;
    spelt += text.substr(0, begin);
    spelt += spell_argument(text.substr(begin + 1, end - begin - 1));
    text.remove_prefix(end + 1);
  }
  return spelt.append(text);
}

std::string message_of(const InputError& error, const std::function<std::string(std::string_view)>& spell_argument) {
  Where where = error.where();
  if (where.file.empty() && !where.field.empty()) where.field = spell_argument(where.field);
  return message(where, spell_arguments(error.problem(), spell_argument));
}

std::string must_be_integer(long long low, long long high) {
  if (low == high) return "must be " + std::to_string(low);
  return "must be an integer from " + std::to_string(low) + " to " + std::to_string(high);
}

}  // namespace foremoe
