#pragma once

// [[input]] and [[system]] of an experiment's file. What [every_input] and [every_system] say holds for each that does
// not say otherwise. A list in place of one value makes one input (or system) of each of its values, and {key} in the
// label becomes that value; one list per table.

#include <string>
#include <vector>

#include "foremoe/sim/reproduce/experiment.h"
#include "foremoe/sim/reproduce/toml_fields.h"

namespace foremoe {

std::vector<ExperimentInput> read_inputs(const toml::table& root, const std::string& file);
std::vector<ExperimentSystem> read_systems(const toml::table& root, const std::string& file);

}  // namespace foremoe
