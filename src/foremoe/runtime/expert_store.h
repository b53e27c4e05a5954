#pragma once

// Home experts of one rank, and their transfer to other ranks when homes change between two steps.
//
// Memory. Weights, gradients and optimizer moments are separate arrays with the same slot layout, so an optimizer step
//   is one call over each array. Weights are in shared memory if peers in other processes read them.
// Homes. The home slots of a layer contain a rank's experts in ascending order, so a move may shift the remaining
//   experts. An expert moves with its full state: weights and moments. Another expert overwrites the old slot.

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
  kShared,   // named; ranks in other processes can read it
  kPrivate,  // sufficient if all ranks are threads of one process
};

class ExpertStore {
 public:
  struct Size {
    int layers = 0;
    int slots = 0;        // homes per layer
    ExpertLayout layout;  // float32
  };
  // Zeroes all memory. Throws InputError with the required size if memory is insufficient.
  ExpertStore(Size size, HomeMemory memory);

  const Size& size() const { return size_; }
  const HomeExperts& homes() const { return homes_; }

  void zero_gradients();
  void zero_gradients(LayerId layer);
  void sgd(float rate);
  void adam(const cpu::Adam& options);  // the first call allocates the moments

  // All segments concatenated, without padding.
  std::vector<float> weights(LayerId layer, int slot) const;
  std::vector<float> gradient(LayerId layer, int slot) const;
  void set_weights(LayerId layer, int slot, std::span<const float> weights);

  // An expert's state is its weights and, after the first adam(), its moments, but not its gradients.
  Bytes state_bytes() const;
  void save_state(LayerId layer, int slot, std::span<std::byte> state) const;
  void load_state(LayerId layer, int slot, std::span<const std::byte> state);

 private:
  std::size_t slot_offset(LayerId layer, int slot) const;
  std::size_t floats() const;  // of all slots, including padding
  std::vector<std::byte*> state_parts() const;
  void read(std::span<std::byte> to, const std::byte* memory, LayerId layer, int slot) const;
  void write(std::byte* memory, LayerId layer, int slot, std::span<const std::byte> from);

  Size size_;
  std::int64_t elements_ = 0;  // of one expert, without padding
  SharedMemory shared_;
  Memory own_;
  std::span<std::byte> weights_;  // in shared_ or own_; [layer][slot]
  Memory gradients_;              // [layer][slot]
  Memory mean_, square_;          // [layer][slot]; empty before the first adam()
  HomeExperts homes_;
};

// Home experts of `rank`: [layer][home slot], ascending. Throws InputError unless every rank is home to E/R experts of
// each layer and every home is a valid rank.
Array<ExpertId, 2> homes_on(ArrayView<const RankId, 2> home, int num_ranks, RankId rank);

struct HomeMove {
  ArrayView<const RankId, 2> from;  // [layer][expert], current homes
  ArrayView<const RankId, 2> to;    // [layer][expert], new homes
};

// Collective, between steps. Zeroes the gradients of layers in which an expert moves. Moves one layer at a time, which
// limits extra memory to twice the homes of one layer. Returns the number of bytes that this rank sent.
Bytes move_homes(const HomeMove& move, ExpertStore& store, Communicator& communicator);

}  // namespace foremoe
