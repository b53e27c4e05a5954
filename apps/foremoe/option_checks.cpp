#include "option_checks.h"

#include <fmt/format.h>

#include <cmath>

namespace foremoe::cli {
namespace {

// A check that shows nothing in the help: the description of the option says what values mean.
CLI::Validator check(std::function<std::string(const std::string&)> test) {
  return {[test = std::move(test)](std::string& value) { return test(value); }, std::string{}};
}

}  // namespace

CLI::Validator in_range(std::int64_t least, std::int64_t most) {
  return check([=](const std::string& text) -> std::string {
    std::int64_t value = 0;
    if (!CLI::detail::lexical_cast(text, value)) return fmt::format("'{}' is not a whole number", text);
    if (value < least) return fmt::format("{} is less than {}", value, least);
    if (value > most) return fmt::format("{} is more than {}", value, most);
    return {};
  });
}

CLI::Validator at_least(std::int64_t least) { return in_range(least, std::numeric_limits<std::int32_t>::max()); }

CLI::Validator fraction(double most) {
  return check([=](const std::string& text) -> std::string {
    double value = 0;
    if (!CLI::detail::lexical_cast(text, value) || !std::isfinite(value)) return fmt::format("'{}' is no number", text);
    if (value < 0 || value > most) return fmt::format("{} is not in [0, {}]", value, most);
    return {};
  });
}

}  // namespace foremoe::cli
