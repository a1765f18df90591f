"""What a batch leaves in the heap while it is in flight, beside the forward and backward of another one."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest

from farandole.sparse import TrainPipelineSparseDist
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import plain_loop

pytestmark = needs_torchrec


def follow(rank: int, world_size: int, seed: int) -> None:
    import torchrec_models as models

    from farandole.sparse._torchrec import UnsentSplits

    kind = models.Kind(("table", "row"), (), "plain", False, False, 1)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    batches, again = (models.make_batches(kind, seed, 6, is_even=True) for _ in range(2))
    made: list[Any] = []
    original = UnsentSplits.__init__

    def note(part: Any, all_to_all: Any, group: Any, features: Any) -> None:
        original(part, all_to_all, group, features)
        made.extend(map(weakref.ref, (features, *part.tensors())))

    def forward(batch: Any) -> Any:  # while the next one is in flight
        assert not [ref for ref in made if ref() is not None]
        return model(batch)

    UnsentSplits.__init__ = note
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, custom_model_fwd=forward, strict=True)
    iterator = iter(batches)
    outputs = []
    for step in range(len(batches)):
        before = len(made)
        outputs.append(pipeline.progress(iterator))
        assert len(made) > before or step == len(batches) - 1, f"step {step}: nothing was exchanged ahead"
    for output, expected in zip(outputs, plain_loop(plain, plain_optimizer, again), strict=True):
        assert output.equal(expected)


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_what_input_dist_made_is_freed_before_the_forward_of_the_batch_before(backend):
    seed = random.randrange(1000)
    print(f"seed {seed}")
    run_ranks(follow, 2, backend, timeout=60, seed=seed)
