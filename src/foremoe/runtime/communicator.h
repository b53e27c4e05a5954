#pragma once

// Collective calls between ranks, in host memory. Each rank has one communicator, and all ranks make the same calls in
// the same order. Sums are taken in rank order, so every backend gives the same bits. Each wait ends after a timeout
// that is given at creation. When a rank gives up, the waits of the others throw PeerFailed.

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/ids.h"
#include "foremoe/transfer/copy_link.h"
#include "foremoe/transfer/transfer_engine.h"

namespace foremoe {

class PeerFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct SendBlock {
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;
};
struct ReceiveBlock {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

// Blocks lie one after the other in rank order. Both sides know the sizes beforehand: only data is exchanged.
struct AllToAll {
  const std::byte* send = nullptr;
  std::span<const std::int64_t> send_bytes;  // [rank]
  std::byte* receive = nullptr;
  std::span<const std::int64_t> receive_bytes;  // [rank]
};

// Memory of this rank that ranks of its node may read. `name` is that of the shared memory whose beginning it is; empty
// where there is none (threads need none).
struct SharedRegion {
  std::span<std::byte> bytes;
  std::string name;
};

// How a rank reads the memory of others, and agrees with them, while copies travel. Ballots and links are used by the
// engine's thread, everything else by the rank's.
class PeerAccess {
 public:
  virtual ~PeerAccess() = default;

  virtual void share(std::span<const SharedRegion> regions) = 0;  // collective; replaces what was shared before
  // Stops sharing this rank's regions. Not collective. Where peers map this memory directly, blocks until they have
  // stopped reading, or the timeout expires. `early`: after a failure; the others' waits then throw PeerFailed.
  virtual void stop_sharing(bool early) noexcept = 0;
  // Another rank's pointer into a region that it shared, as seen from here; null when it is not mapped here.
  virtual const std::byte* local(RankId owner, const std::byte* pointer) const = 0;

  virtual std::unique_ptr<Ballot> make_ballot() = 0;  // collective
  // Collective. The peer path: reads mapped memory by copying it, and where the schedule's source is not mapped, takes
  // what its owner sends. `directory` says where this rank's homes are.
  virtual std::unique_ptr<CopyLink> make_peer_link(const TransferSchedule& schedule, const ExpertLayout& layout,
                                                   const ExpertDirectory& directory) = 0;
};

// Every collective call is an exchange of blocks, which is all that a backend implements.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual RankId rank() const = 0;
  virtual const Topology& topology() const = 0;
  int num_ranks() const { return topology().num_ranks; }

  void exchange(const AllToAll& blocks);
  void all_reduce_sum(std::span<float> values);                                // slice by slice, in rank order
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all);  // equal sizes, rank order
  void broadcast(std::span<std::byte> bytes, RankId root);
  void barrier();
  virtual void give_up(const std::string& why) noexcept = 0;

  virtual PeerAccess& peers() = 0;

 protected:
  // [rank] each. A block may be received where it was sent from. Throws PhaseFailed, naming both ranks, where a block
  // is not of the expected size.
  virtual void exchange_blocks(std::span<const SendBlock> send, std::span<const ReceiveBlock> receive) = 0;

 private:
  void prepare_blocks();
  void run(const char* call);  // names the call in a PhaseFailed

  std::vector<SendBlock> send_;        // [rank], of the call under way
  std::vector<ReceiveBlock> receive_;  // [rank]
  std::vector<float> slices_;          // [rank] of a sum, this rank's part of each; grows to the largest
};

// The sums of a value of every rank, in rank order, for figures.
double sum(Communicator& communicator, double value);
std::int64_t sum(Communicator& communicator, std::int64_t value);

// Every rank's bytes at rank 0, of whatever length: [rank]; empty elsewhere.
std::vector<std::vector<std::byte>> gather(Communicator& communicator, std::span<const std::byte> mine);

}  // namespace foremoe
