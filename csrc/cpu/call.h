// What every call has besides its tensors: how scores are computed, and on what.
#pragma once

#include "layout.h"

namespace kvq {

// From q . k to a score. Filled by name, like Layout.
#define KVQ_SCORE_FIELDS(FIELD)                                  \
  FIELD(float, scale)                                            \
  FIELD(float, cap) /* the soft cap of scaled scores; 0: none */

struct Scores {
  KVQ_SCORE_FIELDS(KVQ_MEMBER)
};

// The threads that share a call, and their instruction set. Filled by name, like Layout.
#define KVQ_TEAM_FIELDS(FIELD)                     \
  FIELD(int32_t, threads) /* at most */            \
  FIELD(int32_t, isa)     /* see dispatch/isa.h */

struct Team {
  KVQ_TEAM_FIELDS(KVQ_MEMBER)
};

}  // namespace kvq
