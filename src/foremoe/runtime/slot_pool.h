#pragma once

// Memory of a rank's slots: views of the caller's home weights and gradients, and owned guest and staging buffers.
// transfer_schedule.h defines the numbering of buffers. Guests' gradients are float32 in separate memory, one per guest
// slot and layer. Under `shared`, gradients return home after each turn, so all layers use the same memory.

#include <iterator>
#include <span>
#include <vector>

#include "foremoe/runtime/memory.h"
#include "foremoe/runtime/phase_executor.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

class SlotPool {
 public:
  // `parts` must have passed check_phase(). Keeps references. Throws InputError if memory is insufficient.
  SlotPool(const PhaseParts& parts, const HomeExperts& homes);

  int homes_per_rank() const { return homes_per_rank_; }
  std::span<std::byte* const> buffer(int buffer) const { return buffers_[static_cast<std::size_t>(buffer)]; }
  std::span<std::byte* const> weights(TurnId turn, SlotId slot) const;  // [segment]; valid during this turn
  std::span<float* const> gradients(LayerId layer, SlotId slot) const;  // [segment]
  std::span<std::byte* const> home_weights(LayerId layer, SlotId home_slot) const;
  // Memory of guest and staging buffers, for sharing with peers.
  SharedRegion region() const;
  Bytes guest_weights() const { return Bytes{std::ssize(region().bytes)}; }
  Bytes guest_gradients() const { return guest_gradients_.bytes(); }

 private:
  void lay_out_buffers(const HomeExperts& homes);
  void lay_out_gradients();

  PhaseParts parts_;
  const HomeExperts& homes_;
  int homes_per_rank_ = 0;
  Memory guest_weights_;        // private; unused if shared_guests_ is used
  SharedMemory shared_guests_;  // used if peers in other processes read guests
  Memory guest_gradients_;
  std::vector<SegmentPointers> buffers_;        // [buffer]
  std::vector<std::vector<float*>> gradients_;  // [layer·G + guest slot], under `shared` [guest slot]
};

}  // namespace foremoe
