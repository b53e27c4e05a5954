#include <fmt/format.h>
#include <zip.h>

#include "foremoe/testing/recorded_formats.h"

namespace foremoe::testing {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string npz(const std::vector<NamedText>& members, zip_int32_t method = ZIP_CM_DEFLATE) {
  zip_error_t error;
  zip_error_init(&error);
  zip_source_t* out = zip_source_buffer_create(nullptr, 0, 0, &error);
  zip_source_keep(out);
  zip_t* archive = zip_open_from_source(out, ZIP_CREATE | ZIP_TRUNCATE, &error);
  for (const NamedText& member : members) {
    zip_source_t* in = zip_source_buffer(archive, member.text.data(), member.text.size(), 0);
    const auto index = zip_file_add(archive, member.name.c_str(), in, ZIP_FL_ENC_UTF_8);
    zip_set_file_compression(archive, static_cast<zip_uint64_t>(index), method, 0);
  }
  zip_close(archive);
  zip_source_open(out);
  zip_stat_t stat;
  zip_source_stat(out, &stat);
  std::string bytes(stat.size, '\0');
  bytes.resize(static_cast<std::size_t>(zip_source_read(out, bytes.data(), bytes.size())));
  zip_source_close(out);
  zip_source_free(out);
  return bytes;
}

TEST(NpzImport, EveryMemberIsASequenceInTheArchivesOrder) {
  const std::string one = npy("|u1", "(1, 1, 2)", raw({4, 1}, 1));
  const std::string two = npy("<u2", "(2, 1, 2)", raw({5, 6, 7, 8}, 2));
  for (const zip_int32_t method : {ZIP_CM_STORE, ZIP_CM_DEFLATE}) {
    EXPECT_THAT(routes_of(import_text(npz({{"z.npy", one}, {"a.npy", two}}, method))), ElementsAre(4, 1, 5, 6, 7, 8));
  }
}

TEST(NpzImport, MembersCalledRoutedExpertsAreTakenAlone) {
  const std::string routes = npy("|u1", "(1, 1, 2)", raw({4, 1}, 1));
  const std::string tokens = npy("<i8", "(2,)", raw({40, 41}, 8));
  EXPECT_THAT(routes_of(import_text(npz({{"tokens.npy", tokens}, {"routed_experts.npy", routes}}))), ElementsAre(4, 1));
}

TEST(NpzImport, ErrorsNameTheMember) {
  const std::string good = npy("|u1", "(1, 1, 2)", raw({4, 1}, 1));
  EXPECT_THAT(error_of(npz({{"good.npy", good}, {"bad.npy", npy("<f8", "(1, 1, 2)", "")}})),
              HasSubstr("in: bad.npy: descr: <f8"));
  EXPECT_THAT(error_of(npz({{"text.npy", "hello"}})), HasSubstr("in: text.npy: does not begin like an .npy file"));
  std::string archive = npz({{"good.npy", good}}, ZIP_CM_STORE);
  archive[archive.find("NUMPY")] ^= 1;  // the checksum no longer holds
  EXPECT_THAT(error_of(archive), HasSubstr("good.npy: is damaged"));
  EXPECT_THAT(error_of(std::string("PK\x03\x04 and nothing else")), HasSubstr("is no readable zip archive"));
}

// [tokens, 1, 2] of one route, repeated.
std::string same_routes(std::size_t mebibytes) {
  const std::size_t tokens = mebibytes << 16;
  std::string bytes = npy("<i8", fmt::format("({}, 1, 2)", tokens), "");
  const std::string route = raw({4, 1}, 8);
  for (std::size_t t = 0; t < tokens; ++t) bytes += route;
  return bytes;
}

TEST(NpzImport, AnArchiveThatInflatesToFarMoreThanRoutesDoIsRefusedBeforeItIsInflated) {
  const std::string bomb = npz({{"a.npy", same_routes(40)}, {"b.npy", same_routes(40)}});
  ASSERT_LT(bomb.size(), std::size_t{1} << 20);
  EXPECT_THAT(error_of(bomb), HasSubstr("more than 100 to one, which routes never are; if it is right, unpack it"));
  EXPECT_EQ(error_of(npz({{"a.npy", same_routes(16)}})), "");
  EXPECT_EQ(error_of(npz({{"a.npy", same_routes(40)}, {"b.npy", same_routes(40)}}, ZIP_CM_STORE)), "");
}

TEST(NpzImport, AnArrayOfAnotherSizeThanItsMemberIsRefusedByItsHeader) {
  const std::string routes = same_routes(16);
  std::string archive = npz({{"a.npy", npy("|u1", "(3, 1, 2)", routes)}}, ZIP_CM_STORE);
  archive[archive.size() / 2] ^= 1;  // behind the header: what is read up to here would be called damaged
  EXPECT_THAT(error_of(archive), HasSubstr("a.npy: [3, 1, 2] of 1 bytes each was claimed, but there are"));
}

TEST(NpzImport, CutAndAlteredArchivesNeverCrash) {
  const std::string archive = npz({{"a.npy", npy("|u1", "(1, 1, 2)", raw({4, 1}, 1))}});
  for (std::size_t cut = 4; cut < archive.size(); ++cut) EXPECT_NE(error_of(archive.substr(0, cut)), "");
  for (std::size_t at = 4; at < archive.size(); ++at) {
    for (const char c : {'\0', '\xff', '\x08'}) {
      std::string altered = archive;
      altered[at] = c;
      error_of(altered);
    }
  }
}

TEST(NpzImport, AnArchiveWithoutAnySequenceIsRefusedByItsNameAlsoAmongOthers) {
  const std::string one_token = npy("|u1", "(1, 1, 2)", raw({0, 1}, 1));
  const std::string empty_zip = std::string("PK\x05\x06", 4) + std::string(18, '\0');
  EXPECT_EQ(error_of({{"empty.npz", empty_zip}}), "empty.npz: holds no sequence");
  EXPECT_EQ(error_of({{"full.npy", one_token}, {"empty.npz", empty_zip}}), "empty.npz: holds no sequence");
}

}  // namespace foremoe::testing
