#pragma once

// Compares facts that must be equal on all processes of a run.

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace foremoe::cli {

using Facts = std::map<std::string, std::string>;  // by name; arguments and digests of files, as text

struct Difference {
  std::string name;
  std::string who;  // "3 on rank 2, 2 on ranks 0, 1, 3"
};

// Returns the alphabetically first name with different texts on different ranks. facts: [rank].
std::optional<Difference> first_difference(const std::vector<Facts>& facts);

std::string to_bytes(const Facts& facts);
Facts facts_from(const std::vector<std::byte>& bytes);

}  // namespace foremoe::cli
