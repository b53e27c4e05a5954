#pragma once

// Guests' gradients on their way home. A guest's gradient accumulates in its slot while it stays; when it leaves, or
// at a drain, it is sent to its home and added there. All ranks know from plan and fallbacks which slots hold
// gradients, so nobody asks.
//
// Invariant. A slot is dirty from the first backward that added to it until its return; a return cleans it: every
//   gradient goes home exactly once.
// Order. One exchange at a time per layer; a home adds what comes by ascending (expert, rank).

#include <span>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/slot_pool.h"

namespace foremoe {

// Which guest slots of all ranks hold gradients, in one layer each.
class GuestGradients {
 public:
  explicit GuestGradients(const StepPlan& plan);

  struct Guest {
    ExpertId expert;
    RankId rank;
    SlotId slot;
    friend auto operator<=>(const Guest&, const Guest&) = default;
  };

  bool dirty(LayerId layer, RankId rank, SlotId slot) const;
  // A backward of this event ran as planned: guests with quota now hold gradients.
  void ran_backward(EventId event, LayerId layer);
  // What is to go home when this event's last turn is over: dirty guests that the next event does not keep in their
  // slot; under `shared` all. Ascending. They are clean from now on.
  std::vector<Guest> take_leaving(EventId event, LayerId layer);
  std::vector<Guest> take_all(LayerId layer);  // for a drain

 private:
  template <class Goes>
  std::vector<Guest> take(LayerId layer, Goes goes);
  std::size_t index(LayerId layer, RankId rank, SlotId slot) const;

  const StepPlan& plan_;
  int homes_per_rank_;
  std::vector<ExpertId> dirty_;  // [layer][rank][guest slot], kNoExpert: clean
};

// Collective: these guests' gradients are added to their homes'. Returns what this rank sent.
class GradientReturns {
 public:
  GradientReturns(const PhaseParts& parts, const SlotPool& pool, Communicator& communicator);
  Bytes send_home(LayerId layer, std::span<const GuestGradients::Guest> guests);

 private:
  void add_to_homes(LayerId layer, std::span<const GuestGradients::Guest> guests, const float* received);

  PhaseParts parts_;
  const SlotPool& pool_;
  Communicator& communicator_;
  std::int64_t expert_elements_ = 0;
  Memory sent_, received_;
  std::vector<std::int64_t> bytes_to_, bytes_from_;
};

}  // namespace foremoe
