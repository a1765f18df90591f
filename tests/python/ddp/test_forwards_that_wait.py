"""Forwards that wait for parameters end as others do: raised, interrupted, inside each other, compiled, freed."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from ddp_models import BACKENDS
from told_layers import ALL, CLOSE, STALE, Layers, Pair, batch_of, trained, watchers, wrapped

from support.processes import run_ranks


def _in_except_clause(rank: int, world_size: int) -> None:
    pair = Pair(Layers, rank, world_size)
    pair.step((ALL,))
    for _ in range(2):
        try:
            raise ValueError("what the step before ran into")
        except ValueError:
            pair.step((ALL,))
    sync = pair.model._param_sync
    assert sync is not None
    assert sync._awaited is not None
    try:
        raise ValueError("what the step before ran into")
    except ValueError:
        with pytest.raises(RuntimeError, match=STALE):
            pair.step((["call 0", "read 2"],), (ALL,))


def test_forwards_inside_an_except_clause_are_as_others():
    run_ranks(_in_except_clause, 2, BACKENDS[-1], timeout=60)


def _freed(rank: int, world_size: int) -> None:
    for keeps_graph in (False, True):
        pair = trained(rank, world_size)
        loss = pair.model(batch_of(5, rank), ["call 0", "reenter 1", "keep 2"])
        if not keeps_graph:
            pair.model.module.aside = torch.zeros(())
        gone = [weakref.ref(one) for one in (pair.model, pair.model.module)]
        assert pair.model._param_sync is not None
        assert pair.model._param_sync._suspects is not None
        del pair, loss
        gc.collect()
        assert [one() for one in gone] == [None] * 2, keeps_graph


def test_a_model_that_nobody_has_is_freed():
    run_ranks(_freed, 2, BACKENDS[-1], timeout=60)


class _Tree(torch.nn.Module):
    """Calls itself for what is below."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.leaf, self.join, self.top = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, depth: int = 2, is_top: bool = True) -> torch.Tensor:
        if depth == 0:
            return torch.tanh(self.leaf(x))
        x = self.join(self(x, depth - 1, False) + self(x.neg(), depth - 1, False))
        return self.top(x) if is_top else torch.tanh(x)


def _recursive(rank: int, world_size: int) -> None:
    pair = Pair(_Tree, rank, world_size)
    for _ in range(4):
        pair.step((), (1,))
        assert watchers() == 0


@pytest.mark.filterwarnings("ignore:the forward of")
def test_a_model_may_call_itself():
    run_ranks(_recursive, 2, BACKENDS[-1], timeout=60)


def _interrupted(rank: int, world_size: int) -> None:
    """What no hook is told of, as Ctrl-C, leaves nothing behind that later forwards would not put right."""

    class Interrupts(Layers):
        def _stop(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    for is_learned in (False, True):
        pair = Pair(Interrupts, rank, world_size)
        pair.step((ALL,))
        if is_learned:
            pair.step((ALL,))
        with pytest.raises(KeyboardInterrupt):
            pair.model(batch_of(5, rank), ["call 0", "stop 0"])
        hooks = 0
        for forwards in ([ALL], [ALL], [["call 0", "call 3"], ALL], [ALL]):
            pair.step(*((forward,) for forward in forwards))
            assert watchers() == 0
            hooks = hooks or sum(len(module._forward_hooks) for module in pair.model.modules())
            assert sum(len(module._forward_hooks) for module in pair.model.modules()) == hooks
        with pytest.raises(RuntimeError, match=STALE):
            pair.step((["call 0", "read 2"],), (ALL,))


def test_an_interrupted_forward_leaves_nothing_behind():
    run_ranks(_interrupted, 2, BACKENDS[-1], timeout=60)


def _compiled(rank: int, world_size: int) -> None:
    """A compiled module waits for all that it holds; what a compiled wrapper calls waits for itself, as without."""
    for is_wrapper in (False, True):
        torch._dynamo.reset()
        compiled: Any = Layers() if is_wrapper else torch.compile(Layers(), backend="aot_eager")
        model: Any
        model, optimizer = wrapped(compiled)
        if is_wrapper:
            model = torch.compile(model, backend="aot_eager")
        plain = Layers()
        expected = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
        for step, todo in enumerate([ALL, ALL, ["call 0", "call 1"], ALL, ["call 0", "read 2"]]):
            optimizer.zero_grad()
            expected.zero_grad(set_to_none=False)
            want = [plain(batch_of(step, r), todo) for r in range(world_size)]
            if "read 2" in todo and is_wrapper:
                with pytest.raises(RuntimeError, match=STALE):
                    model(batch_of(step, rank), todo)
                break
            output = model(batch_of(step, rank), todo)
            torch.testing.assert_close(output, want[rank], **CLOSE, msg=f"step {step}")
            sum(one.square().mean() / world_size for one in want).backward()
            output.square().mean().backward()
            expected.step()
            time.sleep(0.03 * rank)
            optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_right_or_raise():
    run_ranks(_compiled, 2, BACKENDS[-1], timeout=120)
