#include "run_in_python.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "foremoe/core/error.h"

namespace foremoe::cli {

nlohmann::json texts_of(const std::vector<Option>& options, const Given& given) {
  nlohmann::json texts = nlohmann::json::object();
  for (const Option& option : options) {
    if (!given(option.name)) continue;
    nlohmann::json text = given.texts().at(option.name);
    try {
      (void)text.dump();
    } catch (const nlohmann::json::type_error&) {
      throw InputError({.field = option.name}, "is not UTF-8 text");
    }
    texts[option.name] = option.type == "flag" ? nlohmann::json(true) : std::move(text);
  }
  return texts;
}

void run_in_python(const char* command, const std::string& request, const std::vector<std::string>& files) {
  const char* const python = std::getenv("FOREMOE_PYTHON");  // NOLINT(concurrency-mt-unsafe): never set here
  if (python == nullptr || *python == '\0') return;
  std::vector<std::string> words{python, "-m", "foremoe", command, request};
  words.insert(words.end(), files.begin(), files.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(python, arguments.data());
  throw std::system_error(errno, std::generic_category(), python);
}

}  // namespace foremoe::cli
