#include "foremoe/testing/recorded_formats.h"

namespace foremoe::testing {

TEST(NpzImport, IsRefusedByNameWhereLibzipIsMissing) {
  EXPECT_EQ(error_of({{"a.npz", std::string("PK\x03\x04", 4)}}),
            "a.npz: is an .npz archive, and this foremoe was built without libzip");
}

}  // namespace foremoe::testing
