// Replaces libzip/npz.cpp in a build without libzip.

#include "foremoe/core/error.h"
#include "foremoe/rollout/importers/formats.h"

namespace foremoe {

void import_npz(const ImportSource& source, TraceAssembler&) {
  throw InputError({.file = source.name}, "is an .npz archive, and this foremoe was built without libzip");
}

}  // namespace foremoe
