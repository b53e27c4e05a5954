#pragma once

// Ranks as threads of one process: the default. The receiver copies each block once, from the sender's memory into its
// own; the sender returns when all its blocks have been read. All memory is mapped.
//
// An all-to-all needs two meetings of the ranks; a sum needs four. In a sum, rank r adds the r-th slice of all ranks'
// values in rank order, and all ranks copy the result.

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "foremoe/runtime/communicator.h"

namespace foremoe {

// Creates one communicator per rank, each for use by one thread (ballots and links: one additional thread).
std::vector<std::unique_ptr<Communicator>> make_threads_communicators(const Topology& topology,
                                                                      std::chrono::milliseconds timeout);

// Runs f(rank) on n new threads and returns when all have ended. Rethrows the lowest rank's exception other than
// PeerFailed, since that is the cause; otherwise, the lowest rank's PeerFailed. A failing `f` must end the waits of
// other ranks (Communicator::give_up). Throws std::system_error, and runs no f, if not all threads can be started.
void run_ranks(int n, const std::function<void(RankId)>& f);

}  // namespace foremoe
