#include "foremoe/plan/homes_file.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/core/sha256.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/file_kind.h"

namespace foremoe {

Array<RankId, 2> read_home_tensor(const Safetensors& file, int num_ranks) {
  const TensorView& stored = file.tensor("home", {DType::kI32}, 2);
  const std::size_t num_experts = stored.shape[1];
  if (num_experts == 0 || num_experts > kMaxExperts || num_experts % num_ranks != 0) {
    file.fail("home", "", fmt::format("{} experts cannot be spread evenly over {} ranks", num_experts, num_ranks));
  }
  Array<RankId, 2> home({stored.shape[0], num_experts});
  stored.copy_to(home.flat());
  try {
    expect_homes(home, num_ranks);
  } catch (const InputError& error) {
    file.fail("home", error.where().index, error.problem());
  }
  return home;
}

Homes read_homes(const Safetensors& file) {
  expect_format(file, kHomesFormat);
  Homes homes;
  homes.num_ranks = static_cast<int>(file.integer("ranks", 1, kMaxRanks));
  homes.ranks_per_node = static_cast<int>(file.integer("ranks_per_node", 1, homes.num_ranks));
  homes.origin = file.text_or("origin", "");
  homes.home = read_home_tensor(file, homes.num_ranks);
  if (homes.home.empty()) file.fail("home", "", "has no layers");
  return homes;
}

Homes read_homes(const std::string& path) { return read_homes(open_input(path)); }

void write_homes(const Homes& homes, const std::string& path) {
  const std::vector<std::size_t> shape{homes.home.extent(0), homes.home.extent(1)};
  write_safetensors(path, {{"home", DType::kI32, shape, std::as_bytes(homes.home.flat())}},
                    {{"format", std::string(kHomesFormat)},
                     {"ranks", fmt::to_string(homes.num_ranks)},
                     {"ranks_per_node", fmt::to_string(homes.ranks_per_node)},
                     {"origin", homes.origin}});
}

std::string homes_digest(ArrayView<const RankId, 2> home) { return sha256_hex(std::as_bytes(home.flat())); }

}  // namespace foremoe
