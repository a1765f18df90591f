#pragma once

#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Joins the messages that two ranks exchange at one point of both their plans
// into one BATCH_P2P on either side: those that a rank posts to the peer with
// nothing else than posts in between, and whose other ends the peer posts
// together as well. In the steady state of 1F1B these are the pairs send
// forward + receive backward and send backward + receive forward.
//
// Such a batch completes when both ranks have posted it, which is when its
// receives alone would have: to wait for all of it costs nothing. A batch that
// only one side posts as one would make a receive wait for strangers, up to a
// deadlock (interleaved schedules show it), so it is not made.
//
// Batches keep the order of their first messages, as far as the messages of each
// edge stay in theirs. Those that were there are regrouped. A malformed plan comes back as it is; validate() says why.
Plan fuseBatches(Plan plan);

}  // namespace farandole::pipeline
