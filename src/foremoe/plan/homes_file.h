#pragma once

// foremoe.homes/1: the rank that owns each expert, as a safetensors file (docs/users/formats.md).
//
//   home   [layers, experts]   I32; each rank is home to E/R experts of every layer
//   metadata: ranks, ranks_per_node, origin

#include <string>

#include "foremoe/core/array.h"
#include "foremoe/core/ids.h"
#include "foremoe/core/safetensors.h"

namespace foremoe {

struct Homes {
  Array<RankId, 2> home;  // [layer][expert]
  int num_ranks = 1;
  int ranks_per_node = 1;  // for which the homes were chosen
  std::string origin;      // the traces that they were chosen from

  friend bool operator==(const Homes&, const Homes&) = default;
};

// Throw InputError, with file, field and index, if the file contains no homes.
Homes read_homes(const Safetensors& file);
Homes read_homes(const std::string& path);

// Equal homes give equal bytes.
void write_homes(const Homes& homes, const std::string& path);

// Hex SHA-256 of the homes as little-endian I32.
std::string homes_digest(ArrayView<const RankId, 2> home);

// The tensor `home` of a plan or homes file: ranks in range, E/R experts on each rank in every layer.
Array<RankId, 2> read_home_tensor(const Safetensors& file, int num_ranks);

}  // namespace foremoe
