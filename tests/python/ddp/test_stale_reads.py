"""A forward that reads parameters before they have come is an error that names one; what is right is none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import BACKENDS, fewer
from told_layers import ALL, STALE, Layers, Pair, batch_of, trained
from torch.utils.checkpoint import checkpoint

from support.processes import run_ranks


def _several_forwards(rank: int, world_size: int) -> None:
    for how in ("read", "reread", "through", "view"):
        for later in ([], ["call 2", "call 3"]):  # with them it calls what the first forward did
            for others in ([], [ALL], [["call 0", "call 1", "call 2"], ALL]):
                pair = trained(rank, world_size)
                pair.keep_views()
                with pytest.raises(RuntimeError, match=STALE):
                    pair.step(*((todo,) for todo in (["call 0", "call 1", f"{how} 2", *later], *others)))


def test_a_read_that_is_too_early_raises_whatever_forwards_follow():
    run_ranks(_several_forwards, 2, BACKENDS[-1], timeout=60)


def _learns_anew(rank: int, world_size: int) -> None:
    pair = trained(rank, world_size)
    departs = (["call 0", "read 2", "call 3"],)
    with pytest.raises(RuntimeError, match=STALE):
        pair.model(batch_of(0, rank), *departs)
    for _ in range(3):  # parameters have come by now, and the forward after the next step learns
        pair.step(departs, (ALL,))


def test_forwards_after_that_error_learn():
    run_ranks(_learns_anew, 2, BACKENDS[-1], timeout=60)


def _legal(rank: int, world_size: int) -> None:
    without = ["call 0", "call 1", "call 3"]
    for forwards in (
        [without, ALL],
        [["call 0", "read 0", "call 1", "call 2", "through 1", "view 0", "call 3", "reread 3"], ALL],
        [without, ["call 0", "read 2"]],
        [without, ["call 0", "hide 2"], ALL],
        [["reenter 0", "reenter 3"], ["reenter 0", "reenter 2", "hide 1"]],
        [["recall 0", "recall 3"], ["recall 0", "recall 2", "reread 1"]],
        [["call 2", "call 0", "read 2"]],  # it has been called by then
        [["call 2", "view 2"], ["view 1"]],
        [without, without, ["through 2"], ["read 2", "read 1"]],
    ):
        pair = trained(rank, world_size)
        pair.keep_views()
        for _ in range(2):
            pair.step(*((forward,) for forward in forwards), at_once=False)


@pytest.mark.filterwarnings("ignore:the forward of")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_later_forward_reads_is_right(backend):
    run_ranks(_legal, 2, backend, timeout=60)


def _hidden(rank: int, world_size: int) -> None:
    """What its graph does not show a forward to have read makes backward raise."""
    match = r"parameter 'layers\.2\.(weight|bias)' may have been read before .* that had not called 'layers\.2' by then"
    for other in (None, ALL, ["reenter 0", "hide 2"]):
        pair = trained(rank, world_size)
        pair.optimizer.zero_grad()
        output = pair.model(batch_of(8, rank), ["call 0", "call 1", "hide 2", "call 3"])
        if other is not None:
            with pair.model.no_sync():
                pair.model(batch_of(9, rank), other).square().mean().backward()  # reads what has come
        with pytest.raises(RuntimeError, match=match):
            output.square().mean().backward()
    pair = trained(rank, world_size)
    pair.optimizer.zero_grad()
    output = pair.model(batch_of(8, rank), ["keep 2", "call 0"])
    with pytest.raises(RuntimeError, match=match):
        (output.square().mean() + pair.model.module.aside).backward()


@pytest.mark.filterwarnings("ignore:the forward of")
def test_a_read_that_the_graph_hides_raises_in_backward():
    run_ranks(_hidden, 2, BACKENDS[-1], timeout=60)


def _random_forwards(rank: int, world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    begin = time.monotonic()
    counts = [0, 0]
    while time.monotonic() - begin < 60 and sum(counts) < fewer(60):
        forwards = [_random_forward(rng) for _ in range(rng.randint(1, 3))]
        # Only the first forward after a step can be early, and a call waits.
        called: list[str] = []
        stale = set()
        for how, index in (one.split() for one in forwards[0]):
            if how in ("call", "recall", "reenter"):
                called.append(index)
            elif index not in called:
                stale.add(f"'layers.{index}.")
        where = f"seed {seed}, forwards {forwards}"
        pair = trained(rank, world_size)
        error = ""
        try:
            pair.step(*((forward,) for forward in forwards), at_once=False)
        except RuntimeError as raised:
            error = str(raised)
        assert bool(error) == bool(stale), f"{where}: {error}"
        assert not stale or any(name in error for name in stale), f"{where}: {error}"
        if not stale:
            pair.step((ALL,))
        counts[bool(stale)] += 1
    assert min(counts) > fewer(5), (seed, counts)


def _random_forward(rng: random.Random) -> list[str]:
    if rng.random() < 0.3:  # calls what the first forward did
        todo = [*ALL]
        for _ in range(rng.randint(0, 2)):
            todo.insert(rng.randint(0, len(todo)), f"{rng.choice(['read', 'reread', 'through'])} {rng.randrange(4)}")
        return todo
    todo = []
    for index in [rng.randrange(4) for _ in range(rng.randint(1, 5))]:
        todo.append(f"{rng.choice(['call'] * 6 + ['recall', 'read', 'reread', 'through'])} {index}")
    for index in range(4):
        # A parameter of a reentrant checkpoint has no other use in that backward.
        if rng.random() < 0.3 and not any(one.endswith(str(index)) for one in todo):
            todo.insert(rng.randint(0, len(todo)), f"reenter {index}")
    return todo


@pytest.mark.filterwarnings("ignore:the forward of")
def test_random_forwards_raise_where_they_read_too_early_and_only_there():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(_random_forwards, 2, BACKENDS[-1], timeout=120, seed=seed)


class _Tied(torch.nn.Module):
    """A weight that two modules hold, and one that another module reads, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.other, self.last = (torch.nn.Linear(16, 16) for _ in range(3))
        self.last.weight = self.first.weight
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor, short: bool = False, out: bool = False) -> torch.Tensor:
        x = self.first(x) * self.other.weight.mean()
        if short:
            return x if not out else torch.nn.functional.linear(x, self.attention.out_proj.weight)
        y = self.last(self.other(x))[None]
        return self.attention(y, y, y)[0][0]


def _ties(rank: int, world_size: int) -> None:
    pair = trained(rank, world_size, _Tied)
    for _ in range(2):
        pair.step((True,))
        pair.step((True,), ())
    # A module that is never called itself goes with the one around it.
    with pytest.raises(
        RuntimeError, match=r"parameter 'attention\.out_proj\.weight' was read .* called 'attention' by"
    ):
        pair.step((True, True))


def test_weights_that_several_modules_read_are_right_if_one_is_called():
    run_ranks(_ties, 2, BACKENDS[-1], timeout=60)


def _other_ways(rank: int, world_size: int) -> None:
    """A gradient that comes from outside of the model's forward is none of a forward that left the module out."""
    uses: list[Callable[[Any, torch.Tensor], Any]] = [
        lambda model, x: model.module.layers[2](x),
        lambda model, x: checkpoint(model.module.layers[2], x, use_reentrant=False),
        lambda model, x: model.module(x),
        lambda model, x: [model.disable_forward_pre_hook(), model(x), model.enable_forward_pre_hook()][1],
    ]
    for use in uses:
        pair = trained(rank, world_size)
        pair.optimizer.zero_grad()
        output = pair.model(batch_of(5, rank), ["call 0", "call 1"])
        (output + use(pair.model, batch_of(6, rank))).square().mean().backward()
        pair.optimizer.step()


def test_gradients_from_elsewhere_are_taken():
    run_ranks(_other_ways, 2, BACKENDS[-1], timeout=60)


def _gathered_by_hand(rank: int, world_size: int) -> None:
    class Waits(Layers):
        sync: Any = None

        def _read(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
            if self.sync is not None:
                self.sync(force_sync=True)
            return super()._read(layer, x)

    pair = Pair(Waits, rank, world_size)
    pair.model.module.sync = pair.model.start_param_sync
    for forward in (ALL, ALL, ["call 0", "read 2", "call 3"]):
        pair.step((forward,))


def test_a_forward_may_wait_for_parameters_itself():
    run_ranks(_gathered_by_hand, 2, BACKENDS[-1], timeout=60)
