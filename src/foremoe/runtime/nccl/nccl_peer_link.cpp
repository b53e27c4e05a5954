#include "foremoe/runtime/nccl/nccl_peer_link.h"

#include <algorithm>

#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::nccl {

NcclPeerLink::OwnStream::OwnStream(int gpu) {
  const cuda::CurrentDevice here(gpu);
  FOREMOE_CUDA(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
}

NcclPeerLink::OwnStream::~OwnStream() { FOREMOE_CUDA_NOTHROW(cudaStreamDestroy(handle)); }

NcclPeerLink::NcclPeerLink(Parts parts)
    : parts_(std::move(parts)),
      mapped_(parts_.device.make_copy_link()),
      own_(parts_.gpu),
      stream_(own_.handle),
      turns_(parts_.schedule.order) {
  bool reads = false;
  for (const std::size_t copy : parts_.messages) {
    const bool sent_here = parts_.schedule.copies[copy].source == parts_.rank;
    messages_.push_back({.copy = copy, .sent_here = sent_here});
    reads |= !sent_here;
  }
  const std::size_t bytes = std::max<std::size_t>(messages_.size(), 1) * sizeof(std::uint64_t);
  versions_ = parts_.device.allocate(Bytes{bytes});
  if (reads) nobody_reads_ = parts_.device.allocate(parts_.layout.bytes());
  FOREMOE_CUDA(cudaMallocHost(reinterpret_cast<void**>(&told_versions_), bytes));
}

NcclPeerLink::~NcclPeerLink() {
  // Messages that were never enqueued leave the other side waiting, and the order of later ones broken.
  if (next_ < messages_.size()) parts_.group.break_off("a stage ended before its messages did");
  FOREMOE_CUDA_NOTHROW(cudaStreamSynchronize(own_.handle));  // bounded: the group ends what hangs
  FOREMOE_CUDA_NOTHROW(cudaFreeHost(told_versions_));
}

NcclPeerLink::Message* NcclPeerLink::find(std::int64_t copy) {
  const auto at = std::lower_bound(messages_.begin(), messages_.end(), static_cast<std::size_t>(copy),
                                   [](const Message& m, std::size_t c) { return m.copy < c; });
  return at != messages_.end() && at->copy == static_cast<std::size_t>(copy) ? &*at : nullptr;
}

void NcclPeerLink::submit(const CopyRequest& request) {
  if (request.message < 0) return mapped_->submit(request);
  Message* message = find(request.message);
  const bool first = message != nullptr && !message->sent_here && !message->launched && !message->given_up &&
                     !message->request && !parts_.group.aborted();
  copy_[request.id.value] = first ? static_cast<std::size_t>(message - messages_.data()) : messages_.size();
  if (!first) return;
  message->request = request;
  launch_next();
}

CopyState NcclPeerLink::poll(CopyId id) {
  const auto copy = copy_.find(id.value);
  if (copy == copy_.end()) return mapped_->poll(id);
  CopyState state = CopyState::kFailed;
  if (copy->second < messages_.size() && !parts_.group.aborted()) {
    const Message& message = messages_[copy->second];
    if (!message.launched || !happened(message.done)) return CopyState::kUnderWay;
    const bool current = told_versions_[copy->second] == parts_.directory.published(parts_.rank);
    if (current) state = CopyState::kDone;
  }
  copy_.erase(copy);
  return state;
}

void NcclPeerLink::cancel(CopyId id) {
  const auto copy = copy_.find(id.value);
  if (copy == copy_.end()) return mapped_->cancel(id);
  if (copy->second < messages_.size()) {
    Message& message = messages_[copy->second];
    message.request.reset();
    message.given_up = true;
    if (message.launched && !happened(message.done)) stream_.synchronize();  // bounded: the group ends what hangs
  }
  copy_.erase(copy);
}

void NcclPeerLink::progress() {
  mapped_->progress();
  launch_next();
}

bool NcclPeerLink::serves_others() const {
  const auto sent_here = [](const Message& m) { return m.sent_here; };
  return std::any_of(messages_.begin() + static_cast<std::ptrdiff_t>(next_), messages_.end(), sent_here);
}

bool NcclPeerLink::ready(const Message& message) const {
  if (message.sent_here) return parts_.directory.published(parts_.rank) != 0;
  return message.request.has_value() || message.given_up;
}

void NcclPeerLink::launch_next() {
  const cuda::CurrentDevice here(parts_.gpu);
  while (next_ < messages_.size() && !parts_.group.aborted() && ready(messages_[next_])) launch(next_++);
}

void NcclPeerLink::launch(std::size_t index) {
  Message& message = messages_[index];
  const ScheduledCopy& copy = parts_.schedule.copies[message.copy];
  auto* version = reinterpret_cast<std::uint64_t*>(versions_.data()) + index;
  ncclComm_t group = parts_.group.handle();
  if (message.request) cuda::wait_on(stream_.handle(), message.request->after);
  if (message.sent_here) {
    told_versions_[index] = parts_.directory.published(parts_.rank);
    FOREMOE_CUDA(
        cudaMemcpyAsync(version, &told_versions_[index], sizeof(*version), cudaMemcpyHostToDevice, own_.handle));
  }
  const std::span home =
      message.sent_here ? parts_.directory.home(copy.layer, copy.expert) : std::span<const std::byte* const>();
  std::size_t chunk = 0;  // a request's chunks are the segments that are needed, in order
  FOREMOE_NCCL(ncclGroupStart());
  for (std::size_t s = 0; s < parts_.layout.num_segments(); ++s) {
    const Segment& segment = parts_.layout.segments()[s];
    if (!turns_.needs(copy, segment)) continue;
    const auto bytes = static_cast<std::size_t>(segment.bytes().value);
    if (message.sent_here) {
      FOREMOE_NCCL(ncclSend(home[s], bytes, ncclUint8, copy.rank.value, group, own_.handle));
    } else {
      std::byte* to = message.request ? message.request->chunks[chunk++].to : nobody_reads_.data();
      FOREMOE_NCCL(ncclRecv(to, bytes, ncclUint8, copy.source.value, group, own_.handle));
    }
  }
  if (message.sent_here) {
    FOREMOE_NCCL(ncclSend(version, 1, ncclUint64, copy.rank.value, group, own_.handle));
  } else {
    FOREMOE_NCCL(ncclRecv(version, 1, ncclUint64, copy.source.value, group, own_.handle));
  }
  FOREMOE_NCCL(ncclGroupEnd());
  if (!message.sent_here) {
    FOREMOE_CUDA(
        cudaMemcpyAsync(&told_versions_[index], version, sizeof(*version), cudaMemcpyDeviceToHost, own_.handle));
  }
  message.launched = true;
  message.done = stream_.record();
  parts_.group.watch(message.done);
}

}  // namespace foremoe::nccl
