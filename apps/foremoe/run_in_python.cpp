#include "run_in_python.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <system_error>

namespace foremoe::cli {

nlohmann::json texts_of(const std::vector<Option>& options, const Given& given) {
  nlohmann::json texts = nlohmann::json::object();
  for (const Option& option : options) {
    if (!given(option.name)) continue;
    if (option.type == "flag") {
      texts[option.name] = true;
    } else {
      texts[option.name] = given.texts().at(option.name);
    }
  }
  return texts;
}

void run_in_python(const char* command, const std::string& request, const std::vector<std::string>& files) {
  const char* const python = std::getenv("FOREMOE_PYTHON");  // NOLINT(concurrency-mt-unsafe): nobody sets it here
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
