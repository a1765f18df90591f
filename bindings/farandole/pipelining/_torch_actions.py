"""Plans in the actions of torch.distributed.pipelining."""

from __future__ import annotations

import re
from typing import Any

from farandole import _C

_NO_COMPUTE = re.compile("SEND|RECV|P2P|SHARD|REDUCE_GRAD")


def torchs_actions(plan: _C.Plan) -> dict[int, list[Any]]:
    """By rank what it computes."""
    from torch.distributed.pipelining.schedules import _Action

    computed = ([_Action.from_str(text) for text in row if not _NO_COMPUTE.search(text)] for row in plan.actions)
    return dict(enumerate(computed))
