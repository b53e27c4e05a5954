#pragma once

// Which expert is in which home slot, and how experts travel when between two steps their homes change.
//
// A rank's home slots of a layer hold its experts in ascending order, so a move may shift those that stay. An expert
// travels as its whole state: weights and optimizer moments. What is left behind is overwritten.

#include "foremoe/core/array.h"
#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/expert_store.h"

namespace foremoe {

// [layer][home slot], ascending, of one rank. Throws InputError unless every rank is home to E/R experts of each layer
// and all homes are ranks.
Array<ExpertId, 2> home_slots(ArrayView<const RankId, 2> home, int num_ranks, RankId rank);

struct HomeMove {
  ArrayView<const RankId, 2> from;  // [layer][expert], where they are
  ArrayView<const RankId, 2> to;    // likewise, where they are to be
};

// Collective, between steps: gradients of layers in which an expert moves are zeroed. One layer at a time bounds the
// memory to one layer's homes, twice. Returns the bytes that this rank sent.
Bytes move_homes(const HomeMove& move, ExpertStore& store, Communicator& communicator);

}  // namespace foremoe
