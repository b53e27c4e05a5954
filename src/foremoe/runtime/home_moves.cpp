#include "foremoe/runtime/home_moves.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <vector>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using States = std::vector<std::byte>;  // of several experts, one after the other

// One layer's move as one rank sees it.
class LayerMove {
 public:
  LayerMove(ExpertStore& store, Communicator& communicator, LayerId layer)
      : store_(store),
        communicator_(communicator),
        layer_(layer),
        bytes_(static_cast<std::size_t>(store.state_bytes().value)) {}

  Bytes run(std::span<const RankId> from, std::span<const RankId> to) {
    const RankId self = communicator_.rank();
    const auto num_ranks = static_cast<std::size_t>(communicator_.num_ranks());
    std::vector<States> leaving(num_ranks);  // [destination], experts ascending
    States staying;
    std::vector<std::int64_t> receive_bytes(num_ranks);
    int slot = 0;
    for (std::size_t e = 0; e < from.size(); ++e) {
      if (from[e] == self) save(slot++, to[e] == self ? staying : leaving[to[e].index()]);
      if (from[e] != self && to[e] == self) receive_bytes[from[e].index()] += static_cast<std::int64_t>(bytes_);
    }

    States send;
    std::vector<std::int64_t> send_bytes;
    for (const States& states : leaving) {
      send.insert(send.end(), states.begin(), states.end());
      send_bytes.push_back(static_cast<std::int64_t>(states.size()));
    }
    std::vector<std::size_t> next(num_ranks);  // of each sender, into what is received
    std::size_t received = 0;
    for (std::size_t r = 0; r < num_ranks; ++r) {
      next[r] = received;
      received += static_cast<std::size_t>(receive_bytes[r]);
    }
    States receive(received);
    communicator_.exchange(
        {.send = send.data(), .send_bytes = send_bytes, .receive = receive.data(), .receive_bytes = receive_bytes});

    slot = 0;
    std::size_t next_staying = 0;
    for (std::size_t e = 0; e < to.size(); ++e) {
      if (to[e] != self) continue;
      const bool stays = from[e] == self;
      std::size_t& at = stays ? next_staying : next[from[e].index()];
      store_.load_state(layer_, slot++, std::span(stays ? staying : receive).subspan(at, bytes_));
      at += bytes_;
    }
    return Bytes{send.size()};
  }

 private:
  void save(int slot, States& states) {
    states.resize(states.size() + bytes_);
    store_.save_state(layer_, slot, std::span(states).last(bytes_));
  }

  ExpertStore& store_;
  Communicator& communicator_;
  LayerId layer_;
  std::size_t bytes_;  // of an expert's state; the same on all ranks, which take the same steps
};

}  // namespace

Array<ExpertId, 2> home_slots(ArrayView<const RankId, 2> home, int num_ranks, RankId rank) {
  const std::size_t layers = home.extent(0);
  const std::size_t experts = home.extent(1);
  const auto ranks = static_cast<std::size_t>(num_ranks);
  if (experts % ranks != 0) {
    throw InputError({.field = "home"},
                     fmt::format("{} experts cannot be spread equally over {} ranks", experts, ranks));
  }
  const std::size_t slots = experts / ranks;
  Array<ExpertId, 2> here({layers, slots});
  for (std::size_t l = 0; l < layers; ++l) {
    std::vector<std::size_t> count(ranks);
    for (std::size_t e = 0; e < experts; ++e) {
      const RankId owner = home(l, e);
      if (owner.value < 0 || owner.value >= num_ranks) {
        throw InputError({.field = "home", .index = fmt::format("[{}, {}]", l, e)},
                         fmt::format("{} is none of {} ranks", owner.value, num_ranks));
      }
      const std::size_t slot = count[owner.index()]++;
      if (slot >= slots) {
        throw InputError({.field = "home", .index = fmt::format("[{}, {}]", l, e)},
                         fmt::format("rank {} would be home to more than {} experts", owner.value, slots));
      }
      if (owner == rank) here(l, slot) = ExpertId{e};
    }
  }
  return here;
}

Bytes move_homes(const HomeMove& move, ExpertStore& store, Communicator& communicator) {
  assert(move.from.shape() == move.to.shape());
  Bytes sent;
  for (std::size_t l = 0; l < move.from.extent(0); ++l) {
    if (std::ranges::equal(move.from.row(l), move.to.row(l))) continue;  // on all ranks alike
    sent += LayerMove(store, communicator, LayerId{l}).run(move.from.row(l), move.to.row(l));
    store.zero_gradients(LayerId{l});
  }
  return sent;
}

}  // namespace foremoe
