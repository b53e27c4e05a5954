#include "foremoe/runtime/mpi/mpi_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstring>
#include <memory>

#include "foremoe/core/error.h"
#include "foremoe/runtime/mpi/mpi_peer_link.h"
#include "foremoe/runtime/process_group.h"

namespace foremoe {
namespace {

const Topology& fitting(const Topology& topology, const MpiSession& session) {
  if (topology.num_ranks == session.num_ranks()) return topology;
  throw InputError({.file = "MPI"}, fmt::format("{} processes for {} ranks", session.num_ranks(), topology.num_ranks));
}

class MpiProcessGroup final : public ProcessGroup {
 public:
  RankId rank() const override { return session_.rank(); }
  int num_ranks() const override { return session_.num_ranks(); }
  std::unique_ptr<Communicator> make_communicator(const Topology& topology,
                                                  std::chrono::milliseconds timeout) override {
    try {
      return std::make_unique<MpiCommunicator>(session_, topology, MpiExchange::Options{.timeout = timeout});
    } catch (const PeerFailed&) {
      peer_missing_ = true;
      throw;
    }
  }
  void give_up() noexcept override { MpiSession::end_job(); }
  ~MpiProcessGroup() override {
    if (peer_missing_) give_up();
  }

 private:
  MpiSession session_;
  bool peer_missing_ = false;
};

using HostName = std::array<char, MPI_MAX_PROCESSOR_NAME>;

}  // namespace

MpiBallot::MpiBallot(const MpiSession& session, MPI_Comm group, std::uint64_t number)
    : session_(session), group_(group), tag_(static_cast<int>(number % kMaxTag)), box_(session.num_ranks()) {}

MpiBallot::~MpiBallot() {
  constexpr std::chrono::milliseconds kLongest{1'000};
  try {
    BoundedWait patience(kLongest);
    do {
      drop_delivered_votes();
    } while (!sent_.empty() && patience.pause());
  } catch (const PeerFailed&) {  // the job has failed too
  }
  // Leak memory that MPI may still read because a peer has not received the data. The job is about to end.
  // NOLINTBEGIN(clang-analyzer-cplusplus.NewDeleteLeaks)
  if (!sent_.empty()) static_cast<void>(std::make_unique<std::deque<Sent>>(std::move(sent_)).release());
}
// NOLINTEND(clang-analyzer-cplusplus.NewDeleteLeaks)

void MpiBallot::cast(std::uint64_t number, bool ok) {
  const std::lock_guard lock(mutex_);
  box_.cast(session_.rank(), number, ok);
  Sent& sent = sent_.emplace_back(
      Sent{.vote = {.number = number, .ok = ok ? std::uint64_t{1} : std::uint64_t{0}}, .requests = {}});
  for (int r = 0; r < session_.num_ranks(); ++r) {
    if (RankId{r} == session_.rank()) continue;
    MPI_Request& request = sent.requests.emplace_back(MPI_REQUEST_NULL);
    check_mpi(MPI_Isend(&sent.vote, sizeof(Vote), MPI_BYTE, r, tag_, group_, &request), "MPI_Isend");
  }
  drop_delivered_votes();
}

std::optional<bool> MpiBallot::outcome(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  drop_delivered_votes();
  receive_votes();
  return box_.outcome(number);
}

void MpiBallot::receive_votes() {
  while (true) {
    int there = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, tag_, group_, &there, &message, &status), "MPI_Improbe");
    if (there == 0) return;
    Vote vote;
    check_mpi(MPI_Mrecv(&vote, sizeof(vote), MPI_BYTE, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
    box_.cast(RankId{status.MPI_SOURCE}, vote.number, vote.ok != 0);
  }
}

void MpiBallot::drop_delivered_votes() {
  while (!sent_.empty()) {
    for (MPI_Request& request : sent_.front().requests) {
      if (!finished(request)) return;
    }
    sent_.pop_front();
  }
}

MpiCommunicator::MpiCommunicator(MpiSession& session, const Topology& topology, const MpiExchange::Options& options)
    : session_(session),
      topology_(fitting(topology, session)),
      timeout_(options.timeout),
      exchange_(session, options),
      ballot_group_(options.timeout),
      peer_group_(options.timeout),
      mapped_(static_cast<std::size_t>(topology.num_ranks)),
      sees_(mapped_.size() * mapped_.size()) {
  HostName mine{};
  int length = 0;
  check_mpi(MPI_Get_processor_name(mine.data(), &length), "MPI_Get_processor_name");
  std::vector<HostName> hosts(mapped_.size());
  all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(hosts)));
  for (const HostName& host : hosts) same_host_.push_back(host == mine ? 1 : 0);
}

void MpiCommunicator::share(std::span<const SharedRegion> regions) {
  // Encoding of a region: address, bytes, length of the name, the name.
  std::vector<std::byte> told;
  const auto tell = [&](std::uint64_t word) {
    const auto bytes = std::as_bytes(std::span(&word, 1));
    told.insert(told.end(), bytes.begin(), bytes.end());
  };
  for (const SharedRegion& region : regions) {
    tell(std::bit_cast<std::uintptr_t>(region.bytes.data()));
    tell(region.bytes.size());
    tell(region.name.size());
    const auto name = std::as_bytes(std::span(region.name));
    told.insert(told.end(), name.begin(), name.end());
  }
  const auto size = static_cast<std::int64_t>(told.size());
  const std::size_t num_ranks = mapped_.size();
  std::vector<std::int64_t> sizes(num_ranks);
  all_gather(std::as_bytes(std::span(&size, 1)), std::as_writable_bytes(std::span(sizes)));
  const std::vector<SendBlock> send(num_ranks, {told.data(), size});
  std::vector<ReceiveBlock> receive;
  std::vector<std::vector<std::byte>> heard(num_ranks);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    heard[r].resize(static_cast<std::size_t>(sizes[r]));
    receive.push_back({heard[r].data(), sizes[r]});
  }
  exchange_blocks(send, receive);
  std::vector<char> sees(num_ranks);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    mapped_[r].clear();
    sees[r] = RankId{r} == rank() || (can_map(RankId{r}) && map(RankId{r}, heard[r])) ? 1 : 0;
  }
  // All ranks learn which regions each rank mapped. Afterwards no rank opens regions by name or reads earlier regions.
  all_gather(std::as_bytes(std::span(sees)), std::as_writable_bytes(std::span(sees_)));
}

// Each process has its own mapping: memory that an owner unmaps remains readable here until this call.
void MpiCommunicator::stop_sharing(bool) noexcept {
  for (auto& regions : mapped_) regions.clear();
}

bool MpiCommunicator::map(RankId owner, std::span<const std::byte> told) {
  bool all = !told.empty();
  while (!told.empty()) {
    std::uint64_t words[3];
    std::memcpy(words, told.data(), sizeof(words));
    const std::string name(reinterpret_cast<const char*>(told.data() + sizeof(words)), words[2]);
    told = told.subspan(sizeof(words) + words[2]);
    try {
      Mapping mapping{.owners_address = words[0], .bytes = words[1], .memory = SharedMemory::open(name)};
      mapped_[owner.index()].push_back(std::move(mapping));
    } catch (const InputError&) {  // no name, or memory of another container on the same host
      all = false;
    }
  }
  return all;
}

const std::byte* MpiCommunicator::local(RankId owner, const std::byte* pointer) const {
  if (owner == rank()) return pointer;
  const auto address = std::bit_cast<std::uintptr_t>(pointer);
  for (const Mapping& mapping : mapped_[owner.index()]) {
    if (address < mapping.owners_address || address - mapping.owners_address >= mapping.bytes) continue;
    return mapping.memory.bytes().data() + (address - mapping.owners_address);
  }
  return nullptr;
}

std::unique_ptr<Ballot> MpiCommunicator::make_ballot() {
  return std::make_unique<MpiBallot>(session_, ballot_group_, ballots_++);
}

std::unique_ptr<CopyLink> MpiCommunicator::make_peer_link(const TransferSchedule& schedule, const ExpertLayout& layout,
                                                          const ExpertDirectory& directory) {
  const int tag = 2 * static_cast<int>(links_++ % (kMaxTag / 2));
  MpiPeerLink::Parts parts{.server = {.rank = rank(),
                                      .group = peer_group_,
                                      .tags = {.request = tag, .answer = tag + 1},
                                      .schedule = schedule,
                                      .layout = layout,
                                      .directory = directory},
                           .mapped = std::make_unique<MemcpyLink>(),
                           .timeout = timeout_};
  for (const ScheduledCopy& copy : schedule.copies) {
    if (copy.path != Path::kPeer || sees_[copy.rank.index() * mapped_.size() + copy.source.index()] != 0) continue;
    parts.reads_messages |= copy.rank == rank();
    parts.sends_messages |= copy.source == rank();
  }
  return std::make_unique<MpiPeerLink>(std::move(parts));
}

void MpiCommunicator::give_up(const std::string&) noexcept { MpiSession::end_job(); }

bool mpi_is_built() { return true; }

std::unique_ptr<ProcessGroup> join_process_group() { return std::make_unique<MpiProcessGroup>(); }

}  // namespace foremoe
