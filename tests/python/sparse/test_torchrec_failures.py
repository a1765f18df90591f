"""A rank that fails in an exchange of torchrec's modules costs all ranks that batch, and nothing else."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import Trouble, drain_with_errors, plain_loop

pytestmark = needs_torchrec

AT_ONCE = 8.0  # seconds, on a machine that does other things; groups time out after 120

STAGES = {
    "input_dist": r"input_dist of batch {batch}: Trouble: input_dist",
    "send": r"input_dist of batch {batch}: Trouble: send",
    "arrival": r"the wait for its inputs of batch {batch}: Trouble: arrival",
}


class Fault:
    """Raises once, in a call of a function that torchrec's modules or the exchange of their data go through."""

    def __init__(self, stage: str, module: Any) -> None:
        from farandole.sparse import _torchrec

        owner, self._name = {
            "input_dist": (type(module), "input_dist"),
            "send": (_torchrec, "send"),
            "arrival": (_torchrec.ExchangedTensors, "_wait_impl"),
        }[stage]
        self._original = getattr(owner, self._name)
        self.is_due = False

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_due:
                self.is_due = False
                raise Trouble(stage)
            return self._original(*args, **kwargs)

        setattr(owner, self._name, call)


class Watched:
    """An iterator: a fault is due when the input_dist of a batch is the next one."""

    def __init__(self, batches: list[Any], number: int, fault: Fault | None) -> None:
        self._batches, self._number, self._fault = batches, number, fault
        self._next = 0

    def __next__(self) -> Any:
        if self._next == len(self._batches):
            raise StopIteration
        self._next += 1
        return self._batches[self._next - 1]

    def before_step(self, step: int) -> None:
        # Batch i goes through its input_dist beside batch i-1, the first one on its own.
        if self._fault is not None and step == max(0, self._number - 1):
            self._fault.is_due = True


def fail_in_exchange(rank: int, world_size: int, seed: int, stage: str, threads: bool) -> None:
    import torchrec_models as models

    pick = random.Random(seed)
    kind = models.random_kind(pick)
    culprit, number = pick.randrange(world_size), pick.choice([0, 2, 3, 4])
    print(f"seed {seed}: {stage} of batch {number} fails on rank {culprit}, threads {threads}, {kind}")
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    plain.load_state_dict(model.state_dict())
    pipeline = TrainPipelineSparseDist(
        model, optimizer, models.CPU, load_on_thread=threads, dist_on_thread=threads, agree_on_inputs=True, strict=True
    )
    batches, again = (models.make_batches(kind, seed, 6, is_even=True) for _ in range(2))
    fault = Fault(stage, model.module.second) if rank == culprit else None
    iterator = Watched(batches, number, fault)
    seen: list[Any] = []
    began = time.monotonic()
    while len(seen) <= number:
        iterator.before_step(len(seen))
        try:
            seen.append(pipeline.progress(iterator))  # type: ignore[arg-type]
        except (Trouble, RuntimeError) as error:
            seen.append(error)
    assert time.monotonic() - began < AT_ONCE
    error = seen.pop(number)
    if rank == culprit:
        assert isinstance(error, Trouble)
    else:
        told = rf"^batch {number} is skipped on all ranks.*\nrank {culprit}, {STAGES[stage].format(batch=number)}"
        assert isinstance(error, RuntimeError) and re.search(told, str(error)), error
    seen += drain_with_errors(pipeline, iterator)  # type: ignore[arg-type]
    del again[number]
    expected = plain_loop(plain, plain_optimizer, again)
    assert len(seen) == len(expected) and all(map(torch.equal, seen, expected))
    theirs = models.weights(plain)
    for name, value in models.weights(model).items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_others_hear_at_once_and_all_go_on(stage, threads, backend):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(fail_in_exchange, 2, backend, timeout=120, seed=seed, stage=stage, threads=threads)


def die(rank: int, world_size: int, seed: int, threads: bool) -> str:
    """In the wait for its data, which the others have: they wait for it to say so."""
    import torchrec_models as models

    pick = random.Random(seed)
    kind = models.random_kind(pick)
    victim, number = pick.randrange(world_size), pick.choice([1, 2, 3])
    print(f"seed {seed}: rank {victim} dies in batch {number}, threads {threads}, {kind}")
    model, optimizer = models.made(kind)
    pipeline = TrainPipelineSparseDist(
        model, optimizer, models.CPU, load_on_thread=threads, dist_on_thread=threads, agree_on_inputs=True
    )
    batches = iter(models.make_batches(kind, seed, 6, is_even=True))
    for _ in range(number):
        pipeline.progress(batches)
    if rank == victim:
        from farandole.sparse import _torchrec

        _torchrec.ExchangedTensors._wait_impl = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank") as raised:
        for _ in range(3):
            pipeline.progress(batches)
    assert time.monotonic() - began < AT_ONCE
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank") as raised:
            pipeline.progress(batches)
    assert time.monotonic() - began < AT_ONCE
    return str(raised.value)


@pytest.mark.parametrize("threads", [False, True])
def test_a_rank_that_dies_in_an_exchange_ends_it_for_all(threads):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    pick = random.Random(seed)
    import torchrec_models as models

    models.random_kind(pick)
    victim = pick.randrange(3)
    told = run_ranks(die, 3, "farandole", timeout=120, may_die=[victim], seed=seed, threads=threads)
    for rank, text in enumerate(told):
        assert rank == victim or re.search(rf"cannot be used again: rank \d has failed in .*rank {victim}", text, re.S)


def other_form(features: Any, form: str) -> Any:
    """Features that no other rank has in this form, though with as much in them."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys, values, lengths = features.keys(), features.values(), features.lengths()
    if form == "strides":
        inverse = torch.arange(features.stride()).expand(len(keys), -1)
        strides = [[features.stride()] for _ in keys]
        more: Any = {"stride_per_key_per_rank": strides, "inverse_indices": (keys, inverse)}
        return KeyedJaggedTensor(keys, values, lengths=lengths, **more)
    if form == "weights":
        return KeyedJaggedTensor(keys, values, torch.ones(len(values)), lengths=lengths)
    return KeyedJaggedTensor(keys, values.int(), lengths=lengths)


FORMS = {"strides": "batch sizes of their own", "weights": "float32 weights", "types": "int32 values"}


def differ(rank: int, world_size: int, form: str, number: int) -> None:
    import torchrec_models as models

    kind = models.Kind(("table", "row"), (), "plain", False, False, 1)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
    batches, again = (models.make_batches(kind, 1, 5) for _ in range(2))
    if rank == 1:
        batches[number].first = other_form(batches[number].first, form)
    began = time.monotonic()
    seen: list[Any] = []
    iterator = iter(batches)
    for _ in batches:
        try:
            seen.append(pipeline.progress(iterator))
        except ValueError as error:
            seen.append(error)
    assert time.monotonic() - began < AT_ONCE
    said = r"^features for first have .* on rank 0, .*{} on rank 1: expected the same on all ranks"
    assert re.search(said.format(FORMS[form]), str(seen.pop(number)))
    del again[number]
    assert all(map(torch.equal, seen, plain_loop(plain, plain_optimizer, again)))


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_features_of_another_form_on_one_rank_are_refused_on_all(form, number):
    run_ranks(differ, 2, "farandole", timeout=60, form=form, number=number)


def expect_too_much(rank: int, world_size: int, number: int) -> None:
    """More of what this rank has for itself than it has."""
    import torchrec_models as models

    from farandole.sparse._torchrec import UnsentSplits

    kind = models.Kind(("table", "row"), (), "plain", False, False, 1)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True, agree_on_inputs=True)
    batches, again = (models.make_batches(kind, 1, 5, is_even=True) for _ in range(2))
    original, due = UnsentSplits.settle, []

    def settle(part: UnsentSplits, rows: list[list[int]]) -> None:
        original(part, rows)
        if due:
            part.output_splits[0][rank] += due.pop()

    UnsentSplits.settle = settle
    began = time.monotonic()
    seen: list[Any] = []
    iterator = iter(batches)
    for step in range(len(batches)):
        if rank == 1 and step == max(0, number - 1):
            due.append(1)
        try:
            seen.append(pipeline.progress(iterator))
        except RuntimeError as error:
            seen.append(error)
    assert time.monotonic() - began < AT_ONCE
    assert re.search(r"tensor 0 has splits .* that are sent and .* that come", str(seen.pop(number)))
    del again[number]
    assert all(map(torch.equal, seen, plain_loop(plain, plain_optimizer, again)))


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("number", [0, 2])
def test_an_exchange_that_is_refused_before_anything_is_sent_costs_that_batch_alone(number, backend):
    run_ranks(expect_too_much, 2, backend, timeout=60, number=number)
