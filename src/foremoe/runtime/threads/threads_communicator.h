#pragma once

// Ranks as threads of one process: the embedded default, and the way to have several ranks on one GPU. Blocks are
// copied once, from the sender's memory into the receiver's, by the receiver's device and in order with both streams;
// the sender's stream waits until its blocks were read. All memory is mapped: peers are read by the device's copy link.
//
// An all-to-all costs two meetings of the ranks, a sum four. A sum is taken slice by slice: rank r adds the r-th part
// of everybody's values, in rank order, and all copy it.

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/device.h"

namespace foremoe {

// One per rank, to be used by one thread each (ballots and links: by one more). `devices` [rank] are those whose memory
// and streams the ranks use; they must see each other's memory and outlive the communicators. Throws InputError when
// there are not as many as ranks.
std::vector<std::unique_ptr<Communicator>> make_threads_communicators(const Topology& topology,
                                                                      std::span<Device* const> devices,
                                                                      std::chrono::milliseconds timeout);

}  // namespace foremoe
