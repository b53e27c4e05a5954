// A job in which the last rank is killed, or gives up, while the others wait for it. It must end by itself.

#include <csignal>
#include <string_view>

#include "foremoe/runtime/process_group.h"

int main(int argc, char** argv) {
  using namespace foremoe;
  const std::string_view how = argc > 1 ? argv[1] : "";
  const std::unique_ptr<ProcessGroup> group = join_process_group();
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
