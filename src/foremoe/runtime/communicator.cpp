#include "foremoe/runtime/communicator.h"

#include <numeric>

namespace foremoe {
namespace {

template <class T>
std::vector<T> gather_values(Communicator& communicator, T value) {
  std::vector<T> values(static_cast<std::size_t>(communicator.num_ranks()));
  communicator.all_gather(std::as_bytes(std::span(&value, 1)), std::as_writable_bytes(std::span(values)));
  return values;
}

template <class T>
T sum_values(Communicator& communicator, T value) {
  const std::vector<T> values = gather_values(communicator, value);
  return std::accumulate(values.begin(), values.end(), T{});
}

}  // namespace

double sum(Communicator& communicator, double value) { return sum_values(communicator, value); }
std::int64_t sum(Communicator& communicator, std::int64_t value) { return sum_values(communicator, value); }

std::vector<std::vector<std::byte>> gather(Communicator& communicator, std::span<const std::byte> mine) {
  const std::vector<std::int64_t> bytes = gather_values(communicator, static_cast<std::int64_t>(mine.size()));
  const bool here = communicator.rank() == RankId{0};
  const std::vector<std::int64_t> nothing(bytes.size(), 0);
  std::vector<std::int64_t> to_first = nothing;
  to_first[0] = static_cast<std::int64_t>(mine.size());
  std::vector<std::byte> all(
      here ? static_cast<std::size_t>(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0})) : 0);
  communicator.exchange(
      {.send = mine.data(), .send_bytes = to_first, .receive = all.data(), .receive_bytes = here ? bytes : nothing});

  std::vector<std::vector<std::byte>> by_rank;
  auto block = all.begin();
  for (std::size_t r = 0; here && r < bytes.size(); ++r) {
    by_rank.emplace_back(block, block + bytes[r]);
    block += bytes[r];
  }
  return by_rank;
}

}  // namespace foremoe
