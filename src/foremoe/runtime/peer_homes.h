#pragma once

// Where every expert's home weights are, as seen from this rank, and which version of them is there. Ranks tell each
// other their addresses once, at bind; what is not mapped here has none.

#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/phase_executor.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

class PeerHomes {
 public:
  // Collective. Shares the regions of `homes` for as long as this object lives.
  PeerHomes(const PhaseParts& parts, const HomeExperts& homes, Communicator& communicator);
  PeerHomes(const PeerHomes&) = delete;
  PeerHomes& operator=(const PeerHomes&) = delete;

  std::span<const std::byte* const> home(LayerId layer, ExpertId expert) const;  // [segment]; empty when not mapped
  bool reachable(RankId owner) const;

  // The homes of this rank have this version from now on (release: pairs with published()).
  void publish(std::uint64_t version);
  // Of an owner that is not reachable, what this rank itself has published: its messages carry their own version.
  std::uint64_t published(RankId owner) const;

 private:
  // As long as it lives, others may read this rank's homes. When it goes, nobody does.
  class Sharing {
   public:
    explicit Sharing(Communicator& communicator) : communicator_(communicator) {}
    ~Sharing() { communicator_.stop_sharing(std::uncaught_exceptions() > uncaught_); }
    Sharing(const Sharing&) = delete;
    Sharing& operator=(const Sharing&) = delete;

   private:
    Communicator& communicator_;
    int uncaught_ = std::uncaught_exceptions();
  };

  const StepPlan& plan_;
  std::size_t num_segments_;
  SharedMemory version_;                      // of this rank's homes
  std::vector<const std::byte*> version_of_;  // [rank], null when not reachable
  Sharing sharing_;                           // goes before version_
  std::vector<const std::byte*> segments_;    // [layer][expert][segment]
};

}  // namespace foremoe
