#pragma once

// Return of guests' gradients to their homes. A guest's gradient accumulates in its slot. When RankTurns schedules the
// return, the guest's rank sends the gradient home, where it is added. The plan alone determines what each rank sends,
// so ranks exchange no requests. If all turns of a guest ran at homes, its rank sends zeros.
//
// Order. Each layer uses one exchange at a time; a home adds the received gradients in ascending (expert, rank) order.

#include <span>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/slot_pool.h"

namespace foremoe {

class GradientReturns {
 public:
  GradientReturns(const PhaseParts& parts, const SlotPool& pool, Communicator& communicator);

  // Called before a backward adds to the guest's gradient. Returns true for the first backward after the slot's last
  // gradient was sent home; that backward overwrites the slot's gradient.
  bool begins(LayerId layer, SlotId slot);

  // Collective. Adds the gradients of `guests` to the gradients of their homes. `guests` lists the guests of all ranks
  // in (expert, rank) order. Returns the number of bytes that this rank sent.
  Bytes send_home(LayerId layer, std::span<const GradientReturn> guests);

 private:
  char& begun(LayerId layer, SlotId slot);
  void add_to_homes(LayerId layer, std::span<const GradientReturn> guests);

  PhaseParts parts_;
  const SlotPool& pool_;
  Communicator& communicator_;
  const std::int64_t expert_elements_;
  std::vector<char> begun_;  // [layer·G + guest slot]: 1 after a backward added to it
  Memory sent_, received_;
  std::vector<std::int64_t> bytes_to_, bytes_from_;
};

}  // namespace foremoe
