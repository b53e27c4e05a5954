#pragma once

// The JSON header of a safetensors file, as it stands there: grammar checked, meaning (safetensors.cpp) not yet.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace foremoe {

struct TensorEntry {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0;  // bytes from the start of the data
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, std::string, std::less<>> metadata;
  std::vector<TensorEntry> tensors;
};

// {"__metadata__": {string: string}, name: {"dtype": string, "shape": [n…], "data_offsets": [begin, end]}, …} and
// nothing else: no other key, no deeper nesting, no key twice. Throws InputError in the name of `file`.
SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& file);

}  // namespace foremoe
