// A job in which the last rank stops before the first collective call, or is killed or gives up while the others wait
// for it. The job must end by itself.

#include <csignal>
#include <string_view>

#include "foremoe/runtime/process_group.h"

int main(int argc, char** argv) {
  using namespace foremoe;
  const std::string_view how = argc > 1 ? argv[1] : "";
  const std::unique_ptr<ProcessGroup> group = join_process_group();
  if (how == "stops") {
    if (group->rank().value == group->num_ranks() - 1) std::raise(SIGSTOP);
    try {
      group->make_communicator({.num_ranks = group->num_ranks(), .ranks_per_node = 8}, std::chrono::seconds{1});
    } catch (const PeerFailed&) {
      return 0;  // the destructor of the group gives up
    }
  }
  const std::unique_ptr<Communicator> communicator =
      group->make_communicator({.num_ranks = group->num_ranks(), .ranks_per_node = 8}, std::chrono::seconds{600});
  communicator->barrier();
  if (communicator->rank().value == communicator->num_ranks() - 1) {
    if (how == "killed") std::raise(SIGKILL);
    communicator->give_up("test");
  }
  communicator->barrier();
  return 0;
}
