#pragma once

// Collective calls between ranks, on buffers in host memory. Each rank owns one communicator, and all ranks make the
// same calls in the same order. Sums are taken in rank order, so every backend produces the same bits. Every wait has a
// timeout, set at creation. When a rank gives up, waits on the other ranks throw PeerFailed.

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

// Blocks are contiguous and in rank order. Both sides know the sizes in advance, so only data is exchanged.
struct AllToAll {
  const std::byte* send = nullptr;
  std::span<const std::int64_t> send_bytes;  // [rank]
  std::byte* receive = nullptr;
  std::span<const std::int64_t> receive_bytes;  // [rank]
};

// Memory of this rank that other ranks of its node may read. `name` is the shared-memory object that begins at `bytes`.
// `name` is empty for private memory, which is sufficient for threads.
struct SharedRegion {
  std::span<std::byte> bytes;
  std::string name;
};

// Access to other ranks' memory, and votes on the outcome of copies. The engine's thread uses ballots and links; the
// rank's thread uses everything else.
class PeerAccess {
 public:
  virtual ~PeerAccess() = default;

  virtual void share(std::span<const SharedRegion> regions) = 0;  // collective; replaces earlier regions
  // Stops sharing this rank's regions. Not collective. If peers map this memory directly, blocks until they have
  // stopped reading or the timeout expires. After a failure, pass `early`: the other ranks' waits then throw.
  virtual void stop_sharing(bool early) noexcept = 0;
  // Translates another rank's pointer into a shared region to this process. Returns null if the region is not mapped.
  virtual const std::byte* local(RankId owner, const std::byte* pointer) const = 0;

  virtual std::unique_ptr<Ballot> make_ballot() = 0;  // collective
  // Collective. Creates the link of the peer path, which copies from mapped memory. If the source of a scheduled copy
  // is not mapped, its owner sends the data. `directory`: addresses of this rank's homes.
  virtual std::unique_ptr<CopyLink> make_peer_link(const TransferSchedule& schedule, const ExpertLayout& layout,
                                                   const ExpertDirectory& directory) = 0;
};

// Base class of all backends. Every collective call is built on exchange_blocks().
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual RankId rank() const = 0;
  virtual const Topology& topology() const = 0;
  int num_ranks() const { return topology().num_ranks; }

  void exchange(const AllToAll& blocks);
  void all_reduce_sum(std::span<float> values);                                // in place; each rank sums one slice
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all);  // equal sizes, in rank order
  void broadcast(std::span<std::byte> bytes, RankId root);
  void barrier();
  virtual void give_up(const std::string& why) noexcept = 0;

  virtual PeerAccess& peers() = 0;

 protected:
  // Both arrays are [rank]. A rank's block to itself may be sent from and received into the same buffer. Throws
  // PhaseFailed, naming both ranks, if a block has an unexpected size.
  virtual void exchange_blocks(std::span<const SendBlock> send, std::span<const ReceiveBlock> receive) = 0;

 private:
  void prepare_blocks();
  void run(const char* call);  // adds the call's name to the message of a PhaseFailed

  std::vector<SendBlock> send_;        // [rank], of the current call
  std::vector<ReceiveBlock> receive_;  // [rank]
  std::vector<float> slices_;          // [rank] → its values in this rank's slice; grows to the largest sum
};

// Sums one value per rank, in rank order, for metrics.
double sum(Communicator& communicator, double value);
std::int64_t sum(Communicator& communicator, std::int64_t value);

// Gathers byte strings of any length at rank 0: [rank]; empty on other ranks.
std::vector<std::vector<std::byte>> gather(Communicator& communicator, std::span<const std::byte> mine);

}  // namespace foremoe
