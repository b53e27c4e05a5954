#pragma once

// Guests' gradients on their way home. A guest's gradient accumulates in its slot while it stays; when RankTurns says,
// it is sent to its home and added there. What a rank sends follows from the plan alone, so nobody asks: a guest whose
// turns all ran at homes sends zeros.
//
// Order. One exchange at a time per layer; a home adds what comes by ascending (expert, rank).

#include <span>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/slot_pool.h"

namespace foremoe {

class GradientReturns {
 public:
  GradientReturns(const PhaseParts& parts, const SlotPool& pool, Communicator& communicator);

  // A backward is about to add to the guest's gradient. True for the first since the slot's last gradient went home: it
  // overwrites what the slot holds.
  bool begins(LayerId layer, SlotId slot);

  // Collective: the gradients of `guests`, all ranks' by (expert, guest), are added to their homes'. Returns what this
  // rank sent.
  Bytes send_home(LayerId layer, std::span<const GradientReturn> guests);

 private:
  char& begun(LayerId layer, SlotId slot);
  void add_to_homes(LayerId layer, std::span<const GradientReturn> guests);

  PhaseParts parts_;
  const SlotPool& pool_;
  Communicator& communicator_;
  const std::int64_t expert_elements_;
  std::vector<char> begun_;  // [layer·G + guest slot]: a backward has added to it
  Memory sent_, received_;
  std::vector<std::int64_t> bytes_to_, bytes_from_;
};

}  // namespace foremoe
