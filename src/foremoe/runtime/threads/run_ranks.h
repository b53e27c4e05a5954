#pragma once

// Ranks as threads, started and joined together.

#include <functional>

#include "foremoe/core/ids.h"

namespace foremoe {

// Runs f(rank) on n threads of its own and returns when all have ended. Of the exceptions that ended them it throws the
// lowest rank's, one that is not PeerFailed before one that is: the cause, not what followed from it. It is up to `f`
// to make the other ranks' waits end (Communicator::give_up).
void run_ranks(int n, const std::function<void(RankId)>& f);

}  // namespace foremoe
