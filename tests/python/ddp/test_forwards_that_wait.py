"""Forwards that wait for parameters end as others do: raised, interrupted, inside each other, compiled, freed."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from typing import Any

import pytest
import torch
from ddp_models import BACKENDS
from told_layers import ALL, CLOSE, STALE, Layers, Pair, batch_of, trained, watchers, wrapped

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
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
    assert sync._reads.awaited is not None
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
        assert pair.model._param_sync._reads.suspects is not None
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


def _finish_step(
    rank: int, output: Any, want: list[Any], expected: torch.optim.Optimizer, optimizer: DistributedOptimizer, step: int
) -> None:
    """Of a forward: compares it with the plain model's, of all ranks' batches, and trains both."""
    torch.testing.assert_close(output, want[rank], **CLOSE, msg=f"step {step}")
    sum(one.square().mean() / len(want) for one in want).backward()
    output.square().mean().backward()
    expected.step()
    time.sleep(0.03 * rank)  # the other rank is in its next forward before this one's part has left
    optimizer.step()


def _compiled(rank: int, world_size: int) -> None:
    """A compiled module waits for all that it holds, and so does a compiled wrapper."""
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
            output = model(batch_of(step, rank), todo)
            _finish_step(rank, output, want, expected, optimizer, step)


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_right():
    run_ranks(_compiled, 2, BACKENDS[-1], timeout=120)


class _Layer(torch.nn.Linear):  # torch 2.11 compiles none of its own
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class _Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList(_Layer(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _make_compiled(kind: str) -> tuple[Any, DistributedOptimizer]:
    """What to call, and its optimizer."""
    module = _Stack()
    parts = {"module": [module], "layers": module.layers}.get(kind, [])
    for part in parts:
        part.compile(backend="aot_eager")
    model = DistributedDataParallel(module, bucket_size=1, use_distributed_optimizer=True, overlap_param_gather=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model)
    return torch.compile(model, backend="aot_eager") if kind == "wrapper" else model, optimizer


def _compiled_beside_others(rank: int, world_size: int, kind: str) -> None:
    """torch.compile takes the code of another model of the same class, which has no hooks, for that of ours."""
    other: Any = _Stack()
    beside: Any = DistributedDataParallel(other, bucket_size=1)
    if kind == "wrapper":
        beside = torch.compile(beside, backend="aot_eager")
    else:
        beside = other
        for part in [other] if kind == "module" else other.layers:
            part.compile(backend="aot_eager")
    for _ in range(2):
        beside(torch.ones(3, 8)).sum().backward()
    call, optimizer = _make_compiled(kind)
    plain = _Stack()
    expected = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for step in range(5):
        xs = [torch.randn(3, 8, generator=seeded(10 * step + one)) for one in range(world_size)]
        if step % 2 == 1:
            beside(xs[rank]).sum().backward()
        optimizer.zero_grad()
        expected.zero_grad()
        want = [plain(x) for x in xs]
        output = call(xs[rank])
        _finish_step(rank, output, want, expected, optimizer, step)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["wrapper", "module", "layers"])
def test_code_that_was_compiled_for_another_model_waits(kind):
    run_ranks(_compiled_beside_others, 2, BACKENDS[-1], timeout=120, kind=kind)


def _compiled_once(rank: int, world_size: int, since: bool) -> None:
    """Layers of a class have one code, whose guards know nothing of ours."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    module = _Stack()
    model: Any = None
    for wraps in (since, not since):
        if wraps:
            model = DistributedDataParallel(
                module, bucket_size=1, use_distributed_optimizer=True, overlap_param_gather=True
            )
        else:
            for layer in module.layers:
                layer.compile(backend=backend, fullgraph=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 8, generator=seeded(step)).requires_grad_()).square().mean().backward()
        optimizer.step()
    assert len(compiled) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("since", [False, True])
def test_layers_that_are_compiled_in_place_are_compiled_once(since):
    run_ranks(_compiled_once, 2, BACKENDS[-1], timeout=120, since=since)


def _compiled_later(rank: int, world_size: int, whole: bool) -> None:
    """After the first forwards have learned who waits for what."""
    torch.manual_seed(1)
    module = _Stack()
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module, bucket_size=1, use_distributed_optimizer=True, overlap_param_gather=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(6):
        x = torch.randn(3, 8, generator=seeded(step)).requires_grad_()
        if step == 3 and whole:
            module.compile(backend="eager")
        for layer in module.layers if step == 3 and not whole else ():
            layer.compile(backend="eager", fullgraph=True)
        optimizer.zero_grad()
        output, expected = model(x), plain(x)
        torch.testing.assert_close(output, expected, msg=lambda text, step=step: f"step {step}: {text}")
        output.square().mean().backward()
        for parameter, grad in zip(
            plain.parameters(), torch.autograd.grad(expected.square().mean(), list(plain.parameters())), strict=True
        ):
            parameter.data.sub_(0.1 * grad)
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("whole", [False, True])
def test_what_is_compiled_in_place_after_the_first_steps_waits_for_its_parameters(whole):
    run_ranks(_compiled_later, 2, BACKENDS[-1], timeout=120, whole=whole)
