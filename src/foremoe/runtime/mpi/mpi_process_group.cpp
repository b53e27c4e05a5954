#include "foremoe/runtime/mpi/mpi_communicator.h"
#include "foremoe/runtime/process_group.h"

namespace foremoe {
namespace {

class MpiProcessGroup final : public ProcessGroup {
 public:
  RankId rank() const override { return session_.rank(); }
  int num_ranks() const override { return session_.num_ranks(); }
  std::unique_ptr<Communicator> make_communicator(const Topology& topology, Device& device,
                                                  std::chrono::milliseconds timeout) override {
    return std::make_unique<MpiCommunicator>(session_, topology, device, MpiExchange::Options{.timeout = timeout});
  }

 private:
  MpiSession session_;
};

}  // namespace

bool mpi_is_built() { return true; }

std::unique_ptr<ProcessGroup> join_process_group() { return std::make_unique<MpiProcessGroup>(); }

}  // namespace foremoe
