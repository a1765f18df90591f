"""Modules that run ahead, and are changed between two steps, while a batch has been through them: as the plain loop."""

from __future__ import annotations

import dataclasses
import io
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from farandole.sparse._ahead_run import AheadRun
from support.devices import DEVICE, only_on_cpu
from support.processes import await_all, run_ranks
from support.recommenders import ROWS, Batch, Recommender, assert_same, drain, made, make_batches, on_device, plain_loop

AT_ONCE = 12.0  # seconds, on a machine that does other things; groups time out after 60


@dataclasses.dataclass
class Config:
    step: int = 0


class Remap(torch.nn.Module):
    """Ids by a table of others, with settings; where it counts, by how many batches came before, too."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("others", torch.arange(ROWS))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: list[int] = []
        self.settings = {"shift": 0}
        self.config = Config()
        self.total = 1000

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
            self.total += 1
            self.config.step += 1
            self.seen.append(self.total)
        moved = ids + self.settings["shift"] + self.config.step + self.calls + self.total + len(self.seen)
        return self.others[moved % ROWS]


class Remapped(Recommender):
    def __init__(self, counts: bool) -> None:
        super().__init__(1)
        self.remap = Remap(counts).to(DEVICE)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.score(torch.cat([self.tables[0](self.remap(batch.ids)), batch.dense], 1), batch.labels)


def turned(remap: Any, by: int) -> torch.Tensor:
    return remap.others.roll(by)


def state_of(remap: Any, by: int) -> dict[str, torch.Tensor]:
    """With a count of its own, since that of the model has the batch ahead already."""
    return {"others": turned(remap, by), "calls": torch.tensor(100 + by, device=DEVICE)}


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "nothing": lambda remap, by: None,
    "a buffer is written to": lambda remap, by: remap.others.copy_(turned(remap, by)),
    "another buffer": lambda remap, by: setattr(remap, "others", turned(remap, by)),
    "a setting": lambda remap, by: setattr(remap, "total", 2000 + by),
    "a setting in a dict": lambda remap, by: remap.settings.update(shift=by),
    "a setting of an object": lambda remap, by: setattr(remap.config, "step", by),
    "a list": lambda remap, by: remap.seen.clear(),
    "a count": lambda remap, by: remap.calls.fill_(200 + by),
    "a state is loaded": lambda remap, by: remap.load_state_dict(state_of(remap, by)),
    "a state takes the place": lambda remap, by: remap.load_state_dict(state_of(remap, by), assign=True),
}


def change(rank: int, world_size: int, seed: int, counts: bool, threads: bool) -> None:
    pick = random.Random(seed)
    (model, optimizer), (plain, plain_optimizer) = made(Remapped(counts)), made(Remapped(counts))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True, load_on_thread=threads)
    batches = make_batches(seed, 24)
    iterator = iter(batches)
    for number, batch in enumerate(batches):
        name, by = pick.choice([*CHANGES]), 1000 * number + pick.randint(1, 9)
        looks = not counts and pick.random() < 0.3  # what others count counts for the batch ahead, too
        told = f"seed {seed}, batch {number}: {name}, a forward before {looks}"
        print(told)
        for each in (model, plain):
            if looks:
                with torch.no_grad():
                    each(on_device(batch))
            CHANGES[name](each.module.remap, by)
        output = pipeline.progress(iterator)
        [expected] = plain_loop(plain, plain_optimizer, [batch])
        assert torch.equal(output, expected), told
    remap, other = model.module.remap, plain.module.remap
    for name in ("seen", "total", "settings", "config"):
        assert getattr(remap, name) == getattr(other, name), f"seed {seed}, {name}"
    assert all(map(torch.equal, remap.buffers(), other.buffers())), f"seed {seed}"
    assert_same(model, plain)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_what_a_module_ahead_is_given_between_steps_goes_for_the_next_batch(counts, threads):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(change, 2, "farandole", seed=seed, counts=counts, threads=threads)


def leave(rank: int, world_size: int) -> None:
    """torch's DDP writes the buffers in each forward, with what they hold."""
    model, optimizer = made(Remapped(False))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    taken_back: list[AheadRun] = []
    original = AheadRun.take_back
    AheadRun.take_back = lambda run: taken_back.append(run) or original(run)
    assert len(drain(pipeline, iter(make_batches(1, 5)))) == 5 and not taken_back


def test_what_nobody_changes_is_not_made_anew():
    run_ranks(leave, 2, "farandole")


def follow(
    kind: Callable[[], Recommender], batches: list[Batch], change: Callable[..., None], threads: bool | None = None
) -> tuple[Any, Any]:
    """Steps as those of the plain loop; before each, ``change`` is called with its number, and the modules of both."""
    (model, optimizer), (plain, plain_optimizer) = made(kind()), made(kind())
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True, load_on_thread=threads)
    iterator = iter(batches)
    for number, batch in enumerate(batches):
        change(number, model.module.remap, plain.module.remap)
        output = pipeline.progress(iterator)
        [expected] = plain_loop(plain, plain_optimizer, [batch])
        assert torch.equal(output, expected), number
    assert_same(model, plain)
    return model.module.remap, plain.module.remap


def change_some(rank: int, world_size: int, threads: bool) -> None:
    """On all ranks, where only the batches of some have what was changed."""
    batches = make_batches(1, 12)
    for number, batch in enumerate(batches):
        batch.ids[:] = 2 * (batch.ids // 2) % ROWS + (rank + number) % 2

    def change(number: int, *remaps: Any) -> None:
        for remap in remaps:
            remap.others[(number // 3) % 2 :: 2] += 1
            remap.others %= ROWS

    follow(lambda: Remapped(False), batches, change, threads)


@pytest.mark.parametrize("threads", [False, True])
def test_a_change_that_gives_other_inputs_on_some_ranks(threads):
    run_ranks(change_some, 2, "farandole", timeout=60, threads=threads)


def change_alone(rank: int, world_size: int, culprit: int) -> None:
    model, optimizer = made(Remapped(False))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    iterator = iter(make_batches(1, 6))
    for _ in range(2):
        pipeline.progress(iterator)
    if rank == culprit:
        model.module.remap.total += 1
    began = time.monotonic()
    told = rf"rank {culprit} .*'remap'.* before the forward of batch 2.*expected the same change on all ranks"
    with pytest.raises(RuntimeError, match=told):
        for _ in range(2):
            pipeline.progress(iterator)
    with pytest.raises(RuntimeError, match=f"cannot be used again: .*{told}"):
        pipeline.progress(iterator)
    assert time.monotonic() - began < AT_ONCE
    await_all(rank, world_size)


@pytest.mark.parametrize("culprit", [0, 1])
@only_on_cpu("gives up groups of farandole's on CPU")
def test_a_change_on_one_rank_that_gives_other_inputs_is_told_to_all(culprit):
    run_ranks(change_alone, 2, "farandole", timeout=60, culprit=culprit)


def differ_by_nothing_given(rank: int, world_size: int) -> None:
    """On one rank something changes by which the module computes nothing: the others know nothing of it."""

    def change(number: int, remap: Any, other: Any) -> None:
        if rank == 0:
            remap.is_watched = number

    follow(lambda: Remapped(False), make_batches(1, 6), change)


def test_a_change_on_one_rank_that_gives_no_other_inputs_holds_up_nobody():
    run_ranks(differ_by_nothing_given, 2, "farandole", timeout=60)


class KeepsTheLast(torch.nn.Module):
    """Appends to what it then replaces, by a part of it or by something of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = self.total = 0
        self.seen: Any = []
        self.by_total: dict[int, int] = {}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.total += 1
        self.by_total[self.total] = 1
        self.by_total = {key: 1 for key in list(self.by_total)[-3:]}
        if isinstance(self.seen, dict):
            self.seen = [*self.seen]
        self.seen.append(self.total)
        self.seen = dict.fromkeys(self.seen[-3:]) if self.total % 5 == 0 else self.seen[-3:]
        return (ids + self.shift + sum(self.seen) + sum(self.by_total)) % ROWS


class KeptLast(Remapped):
    def __init__(self) -> None:
        super().__init__(False)
        self.remap: Any = KeepsTheLast()


def keep_the_last(rank: int, world_size: int) -> None:
    def change(number: int, *remaps: Any) -> None:
        for remap in remaps if number % 2 else ():
            remap.shift += 1

    remap, other = follow(KeptLast, make_batches(1, 24), change)
    assert (remap.total, remap.seen, remap.by_total) == (other.total, other.seen, other.by_total)


def test_containers_that_a_module_writes_to_and_replaces_are_taken_back():
    run_ranks(keep_the_last, 2, "farandole", timeout=60)


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("others", torch.arange(ROWS).flip(0).clone())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.others[(ids + self.calls) % self.others.shape[0]]


class Settings(torch.nn.Module):
    """Beside them, what it keeps of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.total, self.scale = 0, 1000, float("nan")
        self.seen, self.by_name = [1], {"others": 3}
        self.table = torch.arange(ROWS, device=DEVICE)  # no buffer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.total += 1
        self.seen.append(self.total)
        self.by_name["calls"] = len(self.seen)
        self.table.copy_(self.table.roll([1]))
        moved = ids + self.shift + self.total + len(self.seen) + self.by_name["calls"] + self.by_name["others"]
        return self.table[moved % self.table.shape[0]]


def loaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


def traced(inner: torch.nn.Module) -> Any:
    return torch.jit.trace(inner, torch.zeros((2, 3), dtype=torch.int64, device=DEVICE), check_trace=False)


COMPILERS: dict[str, Callable[[Any], Any]] = {
    "script": torch.jit.script,
    "a script of a part": lambda inner: torch.nn.Sequential(torch.jit.script(inner)),
    "a script of its whole": lambda inner: torch.jit.script(torch.nn.Sequential(inner)),
    "load": lambda inner: loaded(torch.jit.script(inner)),
    "trace": traced,
    "a trace of its whole": lambda inner: traced(torch.nn.Sequential(inner)),
    "the load of a trace": lambda inner: loaded(traced(inner)),
}


class Compiled(Remapped):
    def __init__(self, how: str, kind: type[torch.nn.Module]) -> None:
        super().__init__(False)
        self.remap: Any = COMPILERS[how](kind().to(DEVICE))


def inner(remap: Any) -> Any:
    return remap if hasattr(remap, "others") or hasattr(remap, "shift") else getattr(remap, "0")


def run_compiled(rank: int, world_size: int, how: str) -> None:
    def change(number: int, *remaps: Any) -> None:
        for remap in map(inner, remaps) if number % 3 == 2 else ():
            remap.others.copy_(remap.others.roll(3))

    follow(lambda: Compiled(how, Counted), make_batches(1, 12), change)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", COMPILERS)
def test_buffers_of_a_compiled_module_are_those_of_the_plain_loop(how):
    run_ranks(run_compiled, 2, "farandole", timeout=60, how=how)


def set_some(number: int, remap: Any) -> None:
    if number % 3 == 2:
        setattr(remap, *random.Random(number).choice([("shift", number), ("total", 2000 + number), ("seen", [number])]))
    if number % 7 == 3:
        remap.table = torch.arange(number, number + ROWS, device=DEVICE)
    if number % 7 == 5:
        remap.table.copy_(torch.arange(ROWS).flip(0))
    if number % 5 == 4:
        remap.by_name = {"others": number}


def run_settings(rank: int, world_size: int, how: str) -> None:
    def change(number: int, *remaps: Any) -> None:
        for remap in map(inner, remaps):
            set_some(number, remap)

    remap, other = map(inner, follow(lambda: Compiled(how, Settings), make_batches(1, 24), change))
    for name in ("shift", "total", "seen", "by_name"):
        assert getattr(remap, name) == getattr(other, name), name
    assert torch.equal(remap.table, other.table)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", [how for how in COMPILERS if "trace" not in how])
def test_attributes_of_a_scripted_module_are_those_of_the_plain_loop(how):
    run_ranks(run_settings, 2, "farandole", timeout=60, how=how)


def leave_compiled(rank: int, world_size: int) -> None:
    remap = torch.jit.script(Settings())
    run = AheadRun({"remap": remap}, None, lambda: 0)
    before = remap.total, remap.seen, remap.by_name, remap.table.clone()
    remap(torch.zeros((2, 3), dtype=torch.int64, device=DEVICE))
    run.has_run()
    assert not run.is_stale() and remap.total != before[0]
    assert run.take_back() is None
    assert (remap.total, remap.seen, remap.by_name) == before[:3] and torch.equal(remap.table, before[3])


def test_what_nobody_changes_in_a_scripted_module_is_not_made_anew():
    run_ranks(leave_compiled, 1, None)
