#pragma once

// Ranks as threads of one process: the embedded default. A block is copied once, from the sender's memory into the
// receiver's, by the receiver; the sender returns when its blocks were read. All memory is mapped.
//
// An all-to-all costs two meetings of the ranks, a sum four. A sum is taken slice by slice: rank r adds the r-th part
// of everybody's values, in rank order, and all copy it.

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "foremoe/runtime/communicator.h"

namespace foremoe {

// One per rank, to be used by one thread each (ballots and links: by one more).
std::vector<std::unique_ptr<Communicator>> make_threads_communicators(const Topology& topology,
                                                                      std::chrono::milliseconds timeout);

// Runs f(rank) on n threads of its own and returns when all have ended. Of the exceptions that ended them it throws the
// lowest rank's, one that is not PeerFailed before one that is: the cause, not what followed from it. It is up to `f`
// to make the other ranks' waits end (Communicator::give_up). When not all threads can be started, none runs f:
// std::system_error.
void run_ranks(int n, const std::function<void(RankId)>& f);

}  // namespace foremoe
