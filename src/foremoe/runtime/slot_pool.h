#pragma once

// A rank's slots as memory: views on the caller's home weights and gradients, and guest and staging buffers of ours.
// Buffers are numbered as transfer_schedule.h says. Gradients of guests are float32 and lie apart: one per guest slot
// of each layer; under `shared`, where they go home at once, one per guest slot for all layers.

#include <iterator>
#include <span>
#include <vector>

#include "foremoe/runtime/memory.h"
#include "foremoe/runtime/phase_executor.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

class SlotPool {
 public:
  // Keeps references to parts that check_phase() accepts. Throws InputError when there is too little memory.
  SlotPool(const PhaseParts& parts, const HomeExperts& homes);

  int homes_per_rank() const { return homes_per_rank_; }
  std::span<std::byte* const> buffer(int buffer) const { return buffers_[static_cast<std::size_t>(buffer)]; }
  std::span<std::byte* const> weights(TurnId turn, SlotId slot) const;  // [segment], during this turn
  std::span<float* const> gradients(LayerId layer, SlotId slot) const;  // [segment]
  std::span<std::byte* const> home_weights(LayerId layer, SlotId home_slot) const;
  // Where guests and staging buffers lie, for peers.
  SharedRegion region() const;
  Bytes guest_weights() const { return Bytes{std::ssize(region().bytes)}; }
  Bytes guest_gradients() const { return guest_gradients_.bytes(); }

 private:
  void lay_out_buffers(const HomeExperts& homes);
  void lay_out_gradients();

  PhaseParts parts_;
  const HomeExperts& homes_;
  int homes_per_rank_ = 0;
  Memory guest_weights_;        // private, or
  SharedMemory shared_guests_;  // where peers of other processes read them
  Memory guest_gradients_;
  std::vector<SegmentPointers> buffers_;        // [buffer]
  std::vector<std::vector<float*>> gradients_;  // [layer·G + guest slot], under `shared` [guest slot]
};

}  // namespace foremoe
