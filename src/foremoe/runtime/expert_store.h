#pragma once

// The home experts of one rank, and how they travel when their homes change between two steps.
//
// Memory. Weights, gradients and the optimizer's moments all lie in slots of one layout, so that a step is one call
// over
//   each. Weights lie in shared memory where peers in other processes are to read them.
// Homes. A rank's home slots of a layer hold its experts in ascending order, so a move may shift those that stay. An
//   expert travels as its whole state: weights and moments. What is left behind is overwritten.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/cpu/optimizers.h"
#include "foremoe/runtime/memory.h"
#include "foremoe/runtime/phase_executor.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

enum class HomeMemory : std::uint8_t {
  kShared,   // named, so that ranks in other processes can read it
  kPrivate,  // enough where all ranks are threads of one process
};

class ExpertStore {
 public:
  struct Size {
    int layers = 0;
    int slots = 0;        // homes per layer
    ExpertLayout layout;  // float32
  };
  // Zeroed. Throws InputError naming how much when there is too little memory.
  ExpertStore(Size size, HomeMemory memory);

  const Size& size() const { return size_; }
  const HomeExperts& homes() const { return homes_; }

  void zero_gradients();
  void zero_gradients(LayerId layer);
  void sgd(float rate);
  void adam(const cpu::Adam& options);  // the moments are allocated at the first call

  // [segment after segment], without padding.
  std::vector<float> weights(LayerId layer, int slot) const;
  std::vector<float> gradient(LayerId layer, int slot) const;
  void set_weights(LayerId layer, int slot, std::span<const float> weights);

  // An expert's state is its weights and, once there are any, its moments; gradients are no part of it.
  Bytes state_bytes() const;
  void save_state(LayerId layer, int slot, std::span<std::byte> state) const;
  void load_state(LayerId layer, int slot, std::span<const std::byte> state);

 private:
  std::size_t slot_offset(LayerId layer, int slot) const;
  std::size_t floats() const;  // of all slots, padding included
  std::vector<std::byte*> state_parts() const;
  void read(std::span<std::byte> to, const std::byte* memory, LayerId layer, int slot) const;
  void write(std::byte* memory, LayerId layer, int slot, std::span<const std::byte> from);

  Size size_;
  std::int64_t elements_ = 0;  // of an expert, without padding
  SharedMemory shared_;
  Memory own_;
  std::span<std::byte> weights_;  // in one of the two; [layer][slot]
  Memory gradients_;              // likewise
  Memory mean_, square_;          // likewise, empty before the first adam()
  HomeExperts homes_;
};

// [layer][home slot], ascending, of one rank. Throws InputError unless every rank is home to E/R experts of each layer
// and all homes are ranks.
Array<ExpertId, 2> homes_on(ArrayView<const RankId, 2> home, int num_ranks, RankId rank);

struct HomeMove {
  ArrayView<const RankId, 2> from;  // [layer][expert], where they are
  ArrayView<const RankId, 2> to;    // likewise, where they are to be
};

// Collective, between steps: gradients of layers in which an expert moves are zeroed. One layer at a time bounds the
// memory to one layer's homes, twice. Returns the bytes that this rank sent.
Bytes move_homes(const HomeMove& move, ExpertStore& store, Communicator& communicator);

}  // namespace foremoe
