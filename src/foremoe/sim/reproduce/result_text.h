#pragma once

// An experiment's result as a page's section, and as JSON.

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "foremoe/sim/reproduce/run_experiment.h"

namespace foremoe {

// A heading, the prose of the file around a table, published figures and aims. Where times are measured it says so.
std::string to_markdown(const ExperimentResult& result);

// The table alone, [row][cell]; the first row are titles. For terminals.
std::vector<std::vector<std::string>> to_rows(const ExperimentResult& result);

// What is told below the table: published figures that belong to no one row, aims and whether they are met.
std::vector<std::string> remarks(const ExperimentResult& result);

nlohmann::ordered_json to_json(const ExperimentResult& result);  // keys as docs/formats.md lists them

}  // namespace foremoe
