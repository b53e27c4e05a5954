#include "foremoe/runtime/expert_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstring>

#include "foremoe/core/error.h"

namespace foremoe {

ExpertStore::ExpertStore(Size size, HomeMemory memory) : size_(std::move(size)) {
  assert(std::ranges::all_of(size_.layout.segments(), [](const Segment& s) { return s.type == DataType::kFloat32; }));
  elements_ = size_.layout.elements();
  const Bytes bytes{std::int64_t{size_.layers} * size_.slots * size_.layout.bytes().value};
  if (memory == HomeMemory::kShared) {
    shared_ = SharedMemory::create("homes", bytes);
    weights_ = shared_.bytes();
  } else {
    own_ = allocate_memory(bytes);
    weights_ = {own_.data(), static_cast<std::size_t>(bytes.value)};
  }
  gradients_ = allocate_memory(bytes);

  homes_.experts =
      Array<HomeExpert, 2>({static_cast<std::size_t>(size_.layers), static_cast<std::size_t>(size_.slots)});
  for (int l = 0; l < size_.layers; ++l) {
    for (int s = 0; s < size_.slots; ++s) {
      const std::size_t slot = slot_offset(LayerId{l}, s);
      for (std::size_t i = 0; i < size_.layout.num_segments(); ++i) {
        const std::size_t at = slot + size_.layout.offset(i);
        homes_.experts(l, s).weights.push_back(weights_.data() + at);
        homes_.experts(l, s).gradients.push_back(reinterpret_cast<float*>(gradients_.data() + at));
      }
    }
  }
  homes_.regions = {{weights_, shared_.name()}};
}

std::size_t ExpertStore::slot_offset(LayerId layer, int slot) const {
  return (layer.index() * static_cast<std::size_t>(size_.slots) + static_cast<std::size_t>(slot)) *
         static_cast<std::size_t>(size_.layout.bytes().value);
}

std::size_t ExpertStore::floats() const { return weights_.size() / sizeof(float); }

void ExpertStore::zero_gradients() { std::memset(gradients_.data(), 0, weights_.size()); }

void ExpertStore::zero_gradients(LayerId layer) {
  const std::size_t begin = slot_offset(layer, 0);
  std::memset(gradients_.data() + begin, 0, slot_offset(layer, size_.slots) - begin);
}

// Padding has gradient 0 and stays 0 under SGD and Adam.
void ExpertStore::sgd(float rate) {
  cpu::sgd({reinterpret_cast<float*>(weights_.data()), floats()}, gradients_.floats(), rate);
}

void ExpertStore::adam(const cpu::Adam& options) {
  if (mean_.data() == nullptr) {
    mean_ = allocate_memory(gradients_.bytes());
    square_ = allocate_memory(gradients_.bytes());
  }
  cpu::adam({reinterpret_cast<float*>(weights_.data()), floats()}, gradients_.floats(),
            {.mean = mean_.floats(), .square = square_.floats()}, options);
}

void ExpertStore::read(std::span<std::byte> to, const std::byte* memory, LayerId layer, int slot) const {
  for (std::size_t i = 0; i < size_.layout.num_segments(); ++i) {
    const auto bytes = static_cast<std::size_t>(size_.layout.segments()[i].bytes().value);
    std::memcpy(to.data(), memory + slot_offset(layer, slot) + size_.layout.offset(i), bytes);
    to = to.subspan(bytes);
  }
}

void ExpertStore::write(std::byte* memory, LayerId layer, int slot, std::span<const std::byte> from) {
  for (std::size_t i = 0; i < size_.layout.num_segments(); ++i) {
    const auto bytes = static_cast<std::size_t>(size_.layout.segments()[i].bytes().value);
    std::memcpy(memory + slot_offset(layer, slot) + size_.layout.offset(i), from.data(), bytes);
    from = from.subspan(bytes);
  }
}

std::vector<float> ExpertStore::weights(LayerId layer, int slot) const {
  std::vector<float> values(static_cast<std::size_t>(elements_));
  read(std::as_writable_bytes(std::span(values)), weights_.data(), layer, slot);
  return values;
}

std::vector<float> ExpertStore::gradient(LayerId layer, int slot) const {
  std::vector<float> values(static_cast<std::size_t>(elements_));
  read(std::as_writable_bytes(std::span(values)), gradients_.data(), layer, slot);
  return values;
}

void ExpertStore::set_weights(LayerId layer, int slot, std::span<const float> weights) {
  assert(static_cast<std::int64_t>(weights.size()) == elements_);
  write(weights_.data(), layer, slot, std::as_bytes(weights));
}

std::vector<std::byte*> ExpertStore::state_parts() const {
  if (mean_.data() == nullptr) return {weights_.data()};
  return {weights_.data(), mean_.data(), square_.data()};
}

Bytes ExpertStore::state_bytes() const {
  return Bytes{static_cast<std::int64_t>(state_parts().size()) * elements_ * static_cast<std::int64_t>(sizeof(float))};
}

void ExpertStore::save_state(LayerId layer, int slot, std::span<std::byte> state) const {
  const std::size_t part_bytes = static_cast<std::size_t>(elements_) * sizeof(float);
  for (const std::byte* part : state_parts()) {
    read(state.first(part_bytes), part, layer, slot);
    state = state.subspan(part_bytes);
  }
}

void ExpertStore::load_state(LayerId layer, int slot, std::span<const std::byte> state) {
  const std::size_t part_bytes = static_cast<std::size_t>(elements_) * sizeof(float);
  for (std::byte* part : state_parts()) {
    write(part, layer, slot, state.first(part_bytes));
    state = state.subspan(part_bytes);
  }
}

namespace {

using States = std::vector<std::byte>;  // states of several experts, concatenated

// Moves the homes of one layer, from the perspective of one rank.
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
    const std::vector<SlotId> slots_before = home_slots(from);
    for (std::size_t e = 0; e < from.size(); ++e) {
      if (from[e] == self) save(slots_before[e].value, to[e] == self ? staying : leaving[to[e].index()]);
      if (from[e] != self && to[e] == self) receive_bytes[from[e].index()] += static_cast<std::int64_t>(bytes_);
    }

    States send;
    std::vector<std::int64_t> send_bytes;
    for (const States& states : leaving) {
      send.insert(send.end(), states.begin(), states.end());
      send_bytes.push_back(static_cast<std::int64_t>(states.size()));
    }
    std::vector<std::size_t> next(num_ranks);  // [source] → offset of its next state in `receive`
    std::size_t received = 0;
    for (std::size_t r = 0; r < num_ranks; ++r) {
      next[r] = received;
      received += static_cast<std::size_t>(receive_bytes[r]);
    }
    States receive(received);
    communicator_.exchange(
        {.send = send.data(), .send_bytes = send_bytes, .receive = receive.data(), .receive_bytes = receive_bytes});

    const std::vector<SlotId> slots = home_slots(to);
    std::size_t next_staying = 0;
    for (std::size_t e = 0; e < to.size(); ++e) {
      if (to[e] != self) continue;
      const bool stays = from[e] == self;
      std::size_t& at = stays ? next_staying : next[from[e].index()];
      store_.load_state(layer_, slots[e].value, std::span(stays ? staying : receive).subspan(at, bytes_));
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
  std::size_t bytes_;  // size of one expert's state; equal on all ranks, since all have run the same steps
};

}  // namespace

Array<ExpertId, 2> homes_on(ArrayView<const RankId, 2> home, int num_ranks, RankId rank) {
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
    for (std::size_t e = 0; e < experts; ++e) {
      const RankId owner = home(l, e);
      if (owner.value < 0 || owner.value >= num_ranks) {
        throw InputError({.field = "home", .index = fmt::format("[{}, {}]", l, e)},
                         fmt::format("{} is not one of {} ranks", owner.value, num_ranks));
      }
    }
    const std::vector<SlotId> slot = home_slots(home.row(l));
    for (std::size_t e = 0; e < experts; ++e) {
      if (slot[e].index() >= slots) {
        throw InputError({.field = "home", .index = fmt::format("[{}, {}]", l, e)},
                         fmt::format("rank {} would be home to more than {} experts", home(l, e).value, slots));
      }
      if (home(l, e) == rank) here(l, slot[e]) = ExpertId{e};
    }
  }
  return here;
}

Bytes move_homes(const HomeMove& move, ExpertStore& store, Communicator& communicator) {
  assert(move.from.shape() == move.to.shape());
  Bytes sent;
  for (std::size_t l = 0; l < move.from.extent(0); ++l) {
    if (std::ranges::equal(move.from.row(l), move.to.row(l))) continue;  // all ranks skip the same layers
    sent += LayerMove(store, communicator, LayerId{l}).run(move.from.row(l), move.to.row(l));
    store.zero_gradients(LayerId{l});
  }
  return sent;
}

}  // namespace foremoe
