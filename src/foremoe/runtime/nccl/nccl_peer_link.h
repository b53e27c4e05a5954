#pragma once

// The peer path over NCCL. What is mapped here is copied by the device's own link. What is not comes by ncclSend and
// ncclRecv, on a stream and a group of the link's own.
//
// Method. NCCL matches in order and its operations occupy their stream until the other side comes, so all ranks take
//   the schedule's messages in one order, that of the schedule: a rank's next message is enqueued when, as the owner,
//   it has published, or, as the reader, its copy has been submitted. A copy given up before is received all the same,
//   into memory of the link that nobody reads; a message travels once, so a second attempt fails at once.
// Why nobody waits for ever. Consider the first message that is not through. Its owner needs nobody; its reader submits
//   it at the latest at the turn that waits for it, before any that comes later in the order. What hangs nevertheless
//   is ended by the group's timeout.
// Versions. With each message goes the version that its owner had published.

#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "foremoe/runtime/cuda/cuda_stream.h"
#include "foremoe/runtime/device.h"
#include "foremoe/runtime/nccl/nccl_group.h"
#include "foremoe/transfer/layer_turns.h"

namespace foremoe::nccl {

class NcclPeerLink final : public CopyLink {
 public:
  struct Parts {
    RankId rank;
    int gpu = 0;
    Device& device;
    NcclGroup& group;
    const TransferSchedule& schedule;
    const ExpertLayout& layout;
    const ExpertDirectory& directory;
    std::vector<std::size_t> messages;  // of the schedule's copies, ascending: those that this rank sends or receives
  };
  explicit NcclPeerLink(Parts parts);
  ~NcclPeerLink() override;

  void submit(const CopyRequest& request) override;
  CopyState poll(CopyId id) override;
  void cancel(CopyId id) override;
  void progress() override;
  bool serves_others() const override;

 private:
  struct Message {
    std::size_t copy = 0;
    bool sent_here = false;
    std::optional<CopyRequest> request;  // submitted and wanted
    bool given_up = false;
    bool launched = false;
    Event done;
  };
  struct OwnStream {
    explicit OwnStream(int gpu);
    ~OwnStream();
    cudaStream_t handle = nullptr;
  };
  Message* find(std::int64_t copy);
  void launch_next();
  bool ready(const Message& message) const;
  void launch(std::size_t index);

  Parts parts_;
  std::unique_ptr<CopyLink> mapped_;
  OwnStream own_;
  cuda::CudaStream stream_;
  LayerTurns turns_;
  std::vector<Message> messages_;
  std::size_t next_ = 0;                                // of messages_: the first not launched
  std::unordered_map<std::int32_t, std::size_t> copy_;  // message of a CopyId; those of messages_.size() have failed
  DeviceMemory versions_;                               // [message]
  std::uint64_t* told_versions_ = nullptr;              // [message], pinned
  DeviceMemory nobody_reads_;                           // of one expert; where copies given up go
};

}  // namespace foremoe::nccl
