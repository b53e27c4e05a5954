#include "foremoe/core/error.h"
#include "foremoe/runtime/mpi/mpi_communicator.h"
#include "foremoe/runtime/mpi/under_mpirun/world.h"
#include "foremoe/runtime/process_group.h"
#include "foremoe/testing/communicator_conformance.h"

namespace foremoe {
namespace {

Backend processes(const std::string& name, std::int64_t piece_bytes) {
  return {.name = name, .run = [piece_bytes](const RankStart& start, const RankBody& body) {
            MpiCommunicator communicator(world(),
                                         {.num_ranks = world().num_ranks(), .ranks_per_node = start.ranks_per_node},
                                         {.timeout = start.timeout, .piece_bytes = piece_bytes});
            body(communicator);
            MPI_Barrier(MPI_COMM_WORLD);  // ranks that failed or did not take part rejoin for the next test
          }};
}

// Large blocks are sent in pieces, since MPI counts in int. Small pieces test this path.
INSTANTIATE_TEST_SUITE_P(Mpi, CommunicatorConformance,
                         testing::Values(processes("whole_blocks", std::int64_t{1} << 30), processes("in_pieces", 100)),
                         [](const auto& parameter) { return parameter.param.name; });

TEST(Mpi, RejectsATopologyOfAnotherSize) {
  EXPECT_THROW(MpiCommunicator(world(), {.num_ranks = world().num_ranks() + 1}, {}), InputError);
}

TEST(Mpi, DoesNotMapMemoryOfAnotherNodeOnTheSameHost) {
  MpiCommunicator communicator(world(), {.num_ranks = world().num_ranks(), .ranks_per_node = 1}, {});
  const SharedMemory memory = SharedMemory::create("conformance", Bytes{64});
  const SharedRegion region{.bytes = memory.bytes(), .name = memory.name()};
  communicator.peers().share(std::span(&region, 1));
  std::vector<const std::byte*> theirs(static_cast<std::size_t>(world().num_ranks()));
  const std::byte* const mine = memory.bytes().data();
  communicator.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(theirs)));
  for (int r = 0; r < world().num_ranks(); ++r) {
    const std::byte* here = communicator.peers().local(RankId{r}, theirs[static_cast<std::size_t>(r)]);
    EXPECT_EQ(here, RankId{r} == world().rank() ? mine : nullptr);
  }
  communicator.peers().share({});
}

TEST(Mpi, AProcessCanJoinOnlyOnce) {
  EXPECT_TRUE(mpi_is_built());
  world();
  EXPECT_THROW(join_process_group(), InputError);
}

}  // namespace
}  // namespace foremoe
