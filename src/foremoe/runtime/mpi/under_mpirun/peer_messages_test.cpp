// Peer path between processes, with and without shared memory.

#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "foremoe/runtime/mpi/mpi_communicator.h"
#include "foremoe/runtime/mpi/under_mpirun/world.h"

namespace foremoe {
namespace {

constexpr int kExpertsPerRank = 3;
constexpr int kLayers = 2;

std::byte weight(int layer, int expert, std::size_t segment, std::size_t i) {
  return std::byte((static_cast<std::size_t>(layer * 31 + expert * 7) + segment * 101 + i * 13 + i / 251) % 251);
}

// Every rank reads every expert of every other rank, each into its own buffer.
class Peers : public ExpertDirectory {
 public:
  explicit Peers(const Communicator& communicator) : rank_(communicator.rank()), layout_(swiglu_layout(24, 40)) {
    const int n = communicator.num_ranks();
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int expert = 0; expert < n * kExpertsPerRank; ++expert) {
        const RankId owner{expert / kExpertsPerRank};
        if (owner == rank_) fill(home_[{layer, expert}], layer, expert);
        for (int reader = 0; reader < n; ++reader) {
          if (RankId{reader} == owner) continue;
          schedule_.copies.push_back({.rank = RankId{reader},
                                      .layer = LayerId{layer},
                                      .expert = ExpertId{expert},
                                      .buffer = layer * n * kExpertsPerRank + expert,
                                      .path = Path::kPeer,
                                      .source = owner});
        }
      }
    }
    buffers_.resize(static_cast<std::size_t>(kLayers * n * kExpertsPerRank));
    for (Expert& buffer : buffers_) allocate(buffer);
  }

  std::span<std::byte* const> buffer(int buffer) const override {
    return buffers_[static_cast<std::size_t>(buffer)].pointers;
  }
  std::span<const std::byte* const> source(const ScheduledCopy& copy) const override {
    const auto home = home_.find({copy.layer.value, copy.expert.value});
    return home == home_.end() ? std::span<const std::byte* const>{}
                               : std::span<const std::byte* const>(home->second.read);
  }
  std::uint64_t published(RankId) const override { return version; }
  void put_in_place(TurnId) override {}
  bool in_place(RankId, TurnId) const override { return true; }

  std::vector<Chunk> chunks(const ScheduledCopy& copy) const {
    std::vector<Chunk> chunks;
    for (std::size_t s = 0; s < layout_.num_segments(); ++s) {
      const auto bytes = static_cast<std::size_t>(layout_.segments()[s].bytes().value);
      const std::size_t half = bytes / 2;  // tests several chunks per segment
      chunks.push_back({.to = buffer(copy.buffer)[s], .bytes = half});
      chunks.push_back({.to = buffer(copy.buffer)[s] + half, .bytes = bytes - half});
    }
    return chunks;
  }
  bool holds(int buffer, int layer, int expert) const {
    for (std::size_t s = 0; s < layout_.num_segments(); ++s) {
      const std::vector<std::byte>& bytes = buffers_[static_cast<std::size_t>(buffer)].segments[s];
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        if (bytes[i] != weight(layer, expert, s, i)) return false;
      }
    }
    return true;
  }
  bool untouched(int buffer) const {
    for (const std::vector<std::byte>& bytes : buffers_[static_cast<std::size_t>(buffer)].segments) {
      for (const std::byte byte : bytes) {
        if (byte != kUntouched) return false;
      }
    }
    return true;
  }

  const TransferSchedule& schedule() const { return schedule_; }
  const ExpertLayout& layout() const { return layout_; }
  std::uint64_t version = 1;

 private:
  static constexpr std::byte kUntouched{255};
  struct Expert {
    std::vector<std::vector<std::byte>> segments;
    std::vector<std::byte*> pointers;
    std::vector<const std::byte*> read;
  };
  void allocate(Expert& expert) const {
    for (const Segment& segment : layout_.segments()) {
      expert.segments.emplace_back(static_cast<std::size_t>(segment.bytes().value), kUntouched);
    }
    for (std::vector<std::byte>& segment : expert.segments) {
      expert.pointers.push_back(segment.data());
      expert.read.push_back(segment.data());
    }
  }
  void fill(Expert& expert, int layer, int id) const {
    allocate(expert);
    for (std::size_t s = 0; s < expert.segments.size(); ++s) {
      for (std::size_t i = 0; i < expert.segments[s].size(); ++i) expert.segments[s][i] = weight(layer, id, s, i);
    }
  }

  RankId rank_;
  ExpertLayout layout_;
  TransferSchedule schedule_;
  std::map<std::pair<int, int>, Expert> home_;
  std::vector<Expert> buffers_;
};

struct Asked {
  std::size_t message;
  CopyId id;
  std::vector<Chunk> chunks;
};

// Requests all experts that this rank reads. The addresses of chunks remain valid.
std::vector<Asked> ask_for_all(CopyLink& link, const Peers& peers, RankId rank) {
  std::vector<Asked> asked;
  const std::vector<ScheduledCopy>& copies = peers.schedule().copies;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].rank == rank) asked.push_back({i, CopyId{i}, peers.chunks(copies[i])});
  }
  for (const Asked& a : asked) {
    link.submit({.id = a.id,
                 .chunks = a.chunks,
                 .source = copies[a.message].source,
                 .message = static_cast<std::int64_t>(a.message)});
  }
  return asked;
}

CopyState settled(CopyLink& link, CopyId id) {
  CopyState state = CopyState::kUnderWay;
  while ((state = link.poll(id)) == CopyState::kUnderWay) link.progress();
  return state;
}

// Serves requests until every rank has finished.
void serve_until_all_finished(Communicator& communicator, CopyLink& link) {
  const std::unique_ptr<Ballot> ballot = communicator.peers().make_ballot();
  ballot->cast(0, true);
  while (!ballot->outcome(0)) link.progress();
}

void with_peers(const std::function<void(Communicator&, Peers&, CopyLink&)>& body) {
  MpiCommunicator communicator(world(), {.num_ranks = world().num_ranks(), .ranks_per_node = 1}, {});
  Peers peers(communicator);
  const std::unique_ptr<CopyLink> link = communicator.peers().make_peer_link(peers.schedule(), peers.layout(), peers);
  EXPECT_EQ(link->serves_others(), communicator.num_ranks() > 1);
  body(communicator, peers, *link);
}

TEST(PeerMessages, DeliverEveryExpertIntact) {
  with_peers([](Communicator& communicator, Peers& peers, CopyLink& link) {
    for (const Asked& asked : ask_for_all(link, peers, communicator.rank())) {
      const ScheduledCopy& copy = peers.schedule().copies[asked.message];
      EXPECT_EQ(settled(link, asked.id), CopyState::kDone);
      EXPECT_TRUE(peers.holds(copy.buffer, copy.layer.value, copy.expert.value)) << asked.message;
    }
    serve_until_all_finished(communicator, link);
  });
}

TEST(PeerMessages, RefuseAnotherVersion) {
  with_peers([](Communicator& communicator, Peers& peers, CopyLink& link) {
    if (communicator.rank() == RankId{0}) peers.version = 2;
    for (const Asked& asked : ask_for_all(link, peers, communicator.rank())) {
      const ScheduledCopy& copy = peers.schedule().copies[asked.message];
      const bool stale = communicator.rank() == RankId{0} || copy.source == RankId{0};
      EXPECT_EQ(settled(link, asked.id), stale ? CopyState::kFailed : CopyState::kDone);
      EXPECT_EQ(peers.untouched(copy.buffer), stale);
    }
    serve_until_all_finished(communicator, link);
  });
}

TEST(PeerMessages, LeaveTheBufferOfACancelledCopyUntouchedAndAllowARetry) {
  with_peers([](Communicator& communicator, Peers& peers, CopyLink& link) {
    const std::vector<Asked> first = ask_for_all(link, peers, communicator.rank());
    for (const Asked& asked : first) link.cancel(asked.id);
    communicator.barrier();
    for (int i = 0; i < 200; ++i) link.progress();
    for (const Asked& asked : first) EXPECT_TRUE(peers.untouched(peers.schedule().copies[asked.message].buffer));
    for (const Asked& asked : ask_for_all(link, peers, communicator.rank())) {
      const ScheduledCopy& copy = peers.schedule().copies[asked.message];
      EXPECT_EQ(settled(link, asked.id), CopyState::kDone);
      EXPECT_TRUE(peers.holds(copy.buffer, copy.layer.value, copy.expert.value));
    }
    serve_until_all_finished(communicator, link);
  });
}

TEST(PeerMessages, LinkCopiesMappedMemoryItself) {
  with_peers([](Communicator& communicator, Peers&, CopyLink& link) {
    const std::vector<std::byte> from(100, std::byte{7});
    std::vector<std::byte> to(100);
    const std::vector<Chunk> chunks = {{.from = from.data(), .to = to.data(), .bytes = to.size()}};
    link.submit({.id = CopyId{1}, .chunks = chunks, .source = communicator.rank()});
    EXPECT_EQ(settled(link, CopyId{1}), CopyState::kDone);
    EXPECT_EQ(to, from);
    communicator.barrier();
  });
}

}  // namespace
}  // namespace foremoe
