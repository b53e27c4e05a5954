#pragma once

// The figures that an experiment's table can have.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/sim/reproduce/run_experiment.h"

namespace foremoe {

enum class Origin : std::uint8_t {
  kExact,     // of loads and plans: integers counted
  kModelled,  // of the replay on a modelled cluster
  kMeasured   // time on the machine that runs this
};

std::string_view to_string(Origin origin);  // "exact", "modelled", "measured here"

struct Column {
  std::string_view name;   // in files
  std::string_view title;  // in tables
  std::string_view meaning;
  Origin origin = Origin::kExact;
  int digits = 3;
  bool simulated = false;  // needs a cluster and a model
  bool routed = false;     // needs to know which source's tokens go to which replica
  // Of a system beside the first one on the same input.
  std::function<double(const Measured& of, const Measured& first)> value;
};

const std::vector<Column>& all_columns();
const Column* find_column(std::string_view name);  // nullptr when there is none
std::string column_names();                        // between commas

}  // namespace foremoe
