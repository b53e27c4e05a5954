#pragma once

// FineMoE's random placement (§3 solution 2; "FineMoE (random)" of figure 8): the further replicas of every expert are
// shuffled over the guest slots of all ranks.
//
// The paper shuffles the experts of all but no particular copy of the model; here homes are pinned, so that one copy is
// theirs and the d − 1 others are shuffled. Inferred: no rank holds an expert twice, which would be a slot without use.
//
// Method. Shuffle all, then exchange each replica that its rank holds already with one of another rank such that
// neither is held twice afterwards, the search beginning at a random slot. Where nothing can be exchanged, shuffle
// again; after kShuffles, which small groups may need when d is near R, give replica i of a rank's experts to the i-th
// next rank.

#include "foremoe/core/array.h"
#include "foremoe/core/random.h"
#include "foremoe/policy/finemoe/symmetric_placement.h"

namespace foremoe::finemoe {

// As symmetric_placement, for the same shapes.
Array<RankId, 3> random_placement(const SymmetricShape& shape, Random& random);

}  // namespace foremoe::finemoe
