#include "run_in_python.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "foremoe/core/error.h"

namespace foremoe::cli {

// Returns null if the Python package did not start this process.
static const char* python_of_package() {
  const char* const python = std::getenv("FOREMOE_PYTHON");  // NOLINT(concurrency-mt-unsafe): never set here
  return python == nullptr || *python == '\0' ? nullptr : python;
}

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

void expect_in_python(const char* option, const char* package) {
  const char* const python = python_of_package();
  if (python == nullptr) {
    throw InputError({.field = option}, fmt::format("requires the Python package: pip install '.[{}]'", option));
  }
  std::string code =
      fmt::format("import importlib.util; raise SystemExit(not importlib.util.find_spec('{}'))", package);
  const std::array<char*, 4> words{const_cast<char*>(python), const_cast<char*>("-c"), code.data(), nullptr};
  pid_t child = 0;
  const int error = ::posix_spawn(&child, python, nullptr, nullptr, words.data(), environ);
  if (error != 0) throw std::system_error(error, std::generic_category(), python);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0) {
    throw InputError({.field = option}, fmt::format("requires {0}, which is not installed: pip install {0}", package));
  }
}

void run_in_python(const char* command, const std::string& request, const std::vector<std::string>& files) {
  const char* const python = python_of_package();
  if (python == nullptr) return;
  std::vector<std::string> words{python, "-m", "foremoe", command, request};
  words.insert(words.end(), files.begin(), files.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(python, arguments.data());
  throw std::system_error(errno, std::generic_category(), python);
}

}  // namespace foremoe::cli
