#include "foremoe/runtime/communicator.h"

#include <fmt/format.h>

#include <cassert>
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

void Communicator::prepare_blocks() {
  send_.assign(static_cast<std::size_t>(num_ranks()), {});
  receive_.assign(send_.size(), {});
}

void Communicator::run(const char* call) {
  try {
    exchange_blocks(send_, receive_);
  } catch (const PhaseFailed& failed) {
    throw PhaseFailed(fmt::format("{}: {}", call, failed.what()));
  }
}

void Communicator::exchange(const AllToAll& blocks) {
  prepare_blocks();
  assert(blocks.send_bytes.size() == send_.size() && blocks.receive_bytes.size() == send_.size());
  const std::byte* from = blocks.send;
  std::byte* to = blocks.receive;
  for (std::size_t r = 0; r < send_.size(); ++r) {
    send_[r] = {from, blocks.send_bytes[r]};
    receive_[r] = {to, blocks.receive_bytes[r]};
    from += blocks.send_bytes[r];
    to += blocks.receive_bytes[r];
  }
  run("all-to-all");
}

void Communicator::all_reduce_sum(std::span<float> values) {
  prepare_blocks();
  const std::size_t num_ranks = send_.size();
  if (num_ranks == 1) return;
  const auto begin = [&](std::size_t r) { return values.size() * r / num_ranks; };
  const auto bytes = [](std::size_t n) { return static_cast<std::int64_t>(n * sizeof(float)); };
  const std::size_t mine = begin(rank().index() + 1) - begin(rank().index());

  if (slices_.size() < mine * num_ranks) slices_.resize(mine * num_ranks);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    send_[r] = {reinterpret_cast<const std::byte*>(values.data() + begin(r)), bytes(begin(r + 1) - begin(r))};
    receive_[r] = {reinterpret_cast<std::byte*>(slices_.data() + r * mine), bytes(mine)};
  }
  run("sum");
  for (std::size_t r = 1; r < num_ranks; ++r) {
    for (std::size_t i = 0; i < mine; ++i) slices_[i] += slices_[r * mine + i];
  }
  for (std::size_t r = 0; r < num_ranks; ++r) {
    send_[r] = {reinterpret_cast<const std::byte*>(slices_.data()), bytes(mine)};
    receive_[r] = {reinterpret_cast<std::byte*>(values.data() + begin(r)), bytes(begin(r + 1) - begin(r))};
  }
  run("sum");
}

void Communicator::all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
  prepare_blocks();
  assert(all.size() == mine.size() * send_.size());
  const auto bytes = static_cast<std::int64_t>(mine.size());
  for (std::size_t r = 0; r < send_.size(); ++r) {
    send_[r] = {mine.data(), bytes};
    receive_[r] = {all.data() + r * mine.size(), bytes};
  }
  run("all-gather");
}

void Communicator::broadcast(std::span<std::byte> bytes, RankId root) {
  prepare_blocks();
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (rank() == root) send_.assign(send_.size(), {bytes.data(), size});
  receive_[root.index()] = {bytes.data(), size};
  run("broadcast");
}

void Communicator::barrier() {
  prepare_blocks();
  run("barrier");
}

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
