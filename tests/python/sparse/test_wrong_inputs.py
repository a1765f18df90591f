"""What torchrec's modules cannot take is named with the module and the argument, and costs one batch: the first, too."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import plain_loop

pytestmark = needs_torchrec


def wrong(what: str) -> Any:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

    ones = torch.ones(3, dtype=torch.long)
    return {
        "none": lambda: None,
        "text": lambda: "ids",
        "tensor": lambda: ones,
        "dict": lambda: {"f0": JaggedTensor(ones, lengths=ones)},
        "fewer": lambda: KeyedJaggedTensor(["f0"], ones, lengths=ones),
        "empty": KeyedJaggedTensor.empty,
    }[what]()


SAID = {
    "none": r"is given None for its argument features: expected a KeyedJaggedTensor",
    "text": r"is given a str for its argument features: expected a KeyedJaggedTensor",
    "tensor": r"is given a Tensor for its argument features: expected a KeyedJaggedTensor",
    "dict": r"is given a dict for its argument features: expected a KeyedJaggedTensor",
    "fewer": r"is given features with the keys \['f0'\] for its argument features: expected '.\d'.* among them",
    "empty": r"is given features with the keys \[\] for its argument features: expected '.0', '.1' among them",
}


def give(rank: int, world_size: int, what: str, part: str, number: int, second: str) -> None:
    import torchrec_models as models

    kind = models.Kind(("table", "row"), ("row", "table"), second, False, False, 4)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
    batches, again = (models.make_batches(kind, 1, 5) for _ in range(2))
    if rank == 1:
        batches[number] = dataclasses.replace(batches[number], **{part: wrong(what)})
    seen: list[Any] = []
    iterator = iter(batches)
    for _ in batches:
        try:
            seen.append(pipeline.progress(iterator))
        except (TypeError, ValueError, RuntimeError) as error:
            seen.append(error)
    error = seen.pop(number)
    assert isinstance(error, (TypeError, ValueError) if rank == 1 else RuntimeError)
    assert re.search(f"{part} {SAID[what]}", str(error)), error
    del again[number]
    assert all(map(torch.equal, seen, plain_loop(plain, plain_optimizer, again)))


@pytest.mark.sample(6)
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize(("part", "second"), [("first", "plain"), ("second", "processors"), ("third", "plain")])
def test_a_wrong_part_of_a_batch_is_named_with_its_module(what, part, number, second):
    run_ranks(give, 2, "farandole", what=what, part=part, number=number, second=second)


def reorder(rank: int, world_size: int) -> None:
    """On one rank for good, which torchrec's modules take; and in one batch, which they would mix up."""
    import torchrec_models as models

    kind = models.Kind(("table", "row", "column"), ("row", "table"), "weighted", False, False, 4)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
    batches, again = (models.make_batches(kind, 1, 6, is_even=True) for _ in range(2))

    def reordered(batch: Any) -> Any:
        features = {part: getattr(batch, part) for part in ("first", "second", "third")}
        orders = {part: [*reversed(range(len(each.keys())))] for part, each in features.items()}
        return dataclasses.replace(batch, **{part: each.permute(orders[part]) for part, each in features.items()})

    batches = [
        reordered(batch) if (rank == 1) != (index == 3 and rank == 0) else batch for index, batch in enumerate(batches)
    ]
    seen: list[Any] = []
    iterator = iter(batches)
    for _ in batches:
        try:
            seen.append(pipeline.progress(iterator))
        except (ValueError, RuntimeError) as error:
            seen.append(error)
    error = seen.pop(3)
    assert isinstance(error, ValueError if rank == 0 else RuntimeError)
    assert re.search(
        r"is given features with the keys \['f2', 'f1', 'f0'\]: expected \['f0', 'f1', 'f2'\] in", str(error)
    )
    del again[3]
    assert all(map(torch.equal, seen, plain_loop(plain, plain_optimizer, again)))


def test_keys_in_another_order_than_at_first_are_refused():
    run_ranks(reorder, 2, "farandole")
