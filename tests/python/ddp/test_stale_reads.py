"""A forward that reads parameters before they have come is an error that names one; what is right is none."""

from __future__ import annotations

import contextlib
import gc
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import BACKENDS
from torch.utils.checkpoint import checkpoint

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.processes import run_ranks

ALL = ["call 0", "call 1", "call 2", "call 3"]
STALE = r"parameter 'layers\.2\.(weight|bias)' was read before .* by a forward that had not called 'layers\.2' by then"


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class _Layers(torch.nn.Module):
    """Does to its layers what it is told: "call 2" calls the third one, the others read its weight."""

    def __init__(self, width: int = 16, todo: list[str] | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self.todo = todo
        self.aside = torch.zeros(())
        self.views: dict[torch.nn.Module, torch.Tensor] = {}

    def keep_views(self) -> None:
        self.views = {layer: layer.weight.t() for layer in self.layers}

    def forward(self, x: torch.Tensor, todo: list[str] | None = None) -> torch.Tensor:
        self.aside = torch.zeros(())
        for how, index in (one.split() for one in todo or self.todo or ALL):
            x = torch.tanh(getattr(self, "_" + how)(self.layers[int(index)], x))
        return x

    def _call(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    def _recall(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    def _reenter(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)

    def _read(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, layer.bias)

    def _reread(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._read, layer, x, use_reentrant=False)

    def _through(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return _Through.apply(x, layer.weight)

    def _view(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ self.views[layer]

    def _hide(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: checkpoint(self._read, layer, x, use_reentrant=True), x, use_reentrant=True)

    def _keep(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        self.aside = self.aside + layer.weight.square().mean()
        return x


def _make(module: torch.nn.Module, **options: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    # One bucket a parameter: what is awaited for another reason does not bring it along.
    model = DistributedDataParallel(
        module,
        bucket_size=1,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        unused_parameters="zero_fill",
        **options,
    )
    return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model)


def _input(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(100 * seed + rank))


class _Pair:
    """A model, and the same one in one process, which has all ranks' inputs."""

    def __init__(self, make: Callable[[], torch.nn.Module], rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.seed = rank, world_size, 0
        self.model, self.optimizer = _make(make())
        self.plain = make()
        self.expected = torch.optim.SGD(self.plain.parameters(), lr=0.5, momentum=0.9)

    def keep_views(self) -> None:
        for module in (self.model.module, self.plain):
            module.keep_views()

    def step(self, *forwards: Any, at_once: bool = True) -> None:
        """Runs all of these on their own microbatches, then one backward of all, or one for each."""
        self.optimizer.zero_grad()
        self.expected.zero_grad(set_to_none=False)
        losses: list[torch.Tensor] = []
        for forward in forwards:
            self.seed += 1
            want = [self.plain(_input(self.seed, rank), *forward) for rank in range(self.world_size)]
            with contextlib.nullcontext() if at_once else self.model.no_sync():
                output = self.model(_input(self.seed, self.rank), *forward)
            torch.testing.assert_close(output, want[self.rank], rtol=1e-4, atol=1e-6, msg=f"{forward} of {forwards}")
            losses.append(output.square().mean())
            sum(one.square().mean() / self.world_size for one in want).backward()
        for loss in [sum(losses[1:], losses[0])] if at_once else losses:
            loss.backward()
        if not at_once:
            self.model.start_grad_sync()
            self.model.finish_grad_sync()
        self.expected.step()
        time.sleep(0.03 * self.rank)  # the other rank is in its next forward before this one's part has left
        self.optimizer.step()


def _trained(rank: int, world_size: int, make: Callable[[], torch.nn.Module] = _Layers) -> _Pair:
    """One that knows what its forward reads."""
    pair = _Pair(make, rank, world_size)
    pair.step(())
    pair.step((), ())
    return pair


def _several_forwards(rank: int, world_size: int) -> None:
    for how in ("read", "reread", "through", "view"):
        for others in ([], [ALL], [["call 0", "call 1", "call 2"], ALL]):
            pair = _trained(rank, world_size)
            pair.keep_views()
            with pytest.raises(RuntimeError, match=STALE):
                pair.step(*((todo,) for todo in (["call 0", "call 1", f"{how} 2"], *others)))


def test_a_read_that_is_too_early_raises_whatever_forwards_follow():
    run_ranks(_several_forwards, 2, BACKENDS[-1], timeout=60)


def _learns_anew(rank: int, world_size: int) -> None:
    pair = _trained(rank, world_size)
    departs = (["call 0", "read 2", "call 3"],)
    with pytest.raises(RuntimeError, match=STALE):
        pair.model(_input(0, rank), *departs)
    for _ in range(3):  # parameters have come by now, and the forward after the next step learns
        pair.step(departs, (ALL,))


def test_forwards_after_that_error_learn():
    run_ranks(_learns_anew, 2, BACKENDS[-1], timeout=60)


def _legal(rank: int, world_size: int) -> None:
    without = ["call 0", "call 1", "call 3"]
    for forwards in (
        [without, ALL],
        [without, ["call 0", "read 2"]],
        [without, ["call 0", "hide 2"], ALL],
        [["reenter 0", "reenter 3"], ["reenter 0", "reenter 2", "hide 1"]],
        [["recall 0", "recall 3"], ["recall 0", "recall 2", "reread 1"]],
        [["call 2", "call 0", "read 2"]],  # it has been called by then
        [["call 2", "view 2"], ["view 1"]],
        [without, without, ["through 2"], ["read 2", "read 1"]],
    ):
        pair = _trained(rank, world_size)
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
        pair = _trained(rank, world_size)
        pair.optimizer.zero_grad()
        output = pair.model(_input(8, rank), ["call 0", "call 1", "hide 2", "call 3"])
        if other is not None:
            with pair.model.no_sync():
                pair.model(_input(9, rank), other).square().mean().backward()  # reads what has come
        with pytest.raises(RuntimeError, match=match):
            output.square().mean().backward()
    pair = _trained(rank, world_size)
    pair.optimizer.zero_grad()
    output = pair.model(_input(8, rank), ["keep 2", "call 0"])
    with pytest.raises(RuntimeError, match=match):
        (output.square().mean() + pair.model.module.aside).backward()


@pytest.mark.filterwarnings("ignore:the forward of")
def test_a_read_that_the_graph_hides_raises_in_backward():
    run_ranks(_hidden, 2, BACKENDS[-1], timeout=60)


def _random_forwards(rank: int, world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    begin = time.monotonic()
    counts = [0, 0]
    while time.monotonic() - begin < 60 and sum(counts) < 60:
        forwards = [_random_forward(rng) for _ in range(rng.randint(1, 3))]
        # Only the first forward after a step can be early, and a call waits.
        called: set[str] = set()
        stale = set()
        for how, index in (one.split() for one in forwards[0]):
            if how in ("call", "recall", "reenter"):
                called.add(index)
            elif index not in called:
                stale.add(f"'layers.{index}.")
        if [one for one in forwards[0] if one.split()[0] not in ("read", "reread", "through")] == ALL:
            continue  # calls what the first forward did
        where = f"seed {seed}, forwards {forwards}"
        pair = _trained(rank, world_size)
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
    assert min(counts) > 5, (seed, counts)


def _random_forward(rng: random.Random) -> list[str]:
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
    pair = _trained(rank, world_size, _Tied)
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
        pair = _trained(rank, world_size)
        pair.optimizer.zero_grad()
        output = pair.model(_input(5, rank), ["call 0", "call 1"])
        (output + use(pair.model, _input(6, rank))).square().mean().backward()
        pair.optimizer.step()


def test_gradients_from_elsewhere_are_taken():
    run_ranks(_other_ways, 2, BACKENDS[-1], timeout=60)


def _gathered_by_hand(rank: int, world_size: int) -> None:
    class Waits(_Layers):
        sync: Any = None

        def _read(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
            if self.sync is not None:
                self.sync(force_sync=True)
            return super()._read(layer, x)

    pair = _Pair(Waits, rank, world_size)
    pair.model.module.sync = pair.model.start_param_sync
    for forward in (ALL, ALL, ["call 0", "read 2", "call 3"]):
        pair.step((forward,))


def test_a_forward_may_wait_for_parameters_itself():
    run_ranks(_gathered_by_hand, 2, BACKENDS[-1], timeout=60)


def _in_except_clause(rank: int, world_size: int) -> None:
    pair = _Pair(_Layers, rank, world_size)
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
        pair = _trained(rank, world_size)
        loss = pair.model(_input(5, rank), ["call 0", "reenter 1", "keep 2"])
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
    pair = _Pair(_Tree, rank, world_size)
    for _ in range(4):
        pair.step((), (1,))
        assert torch._C._len_torch_function_stack() == 0


@pytest.mark.filterwarnings("ignore:the forward of")
def test_a_model_may_call_itself():
    run_ranks(_recursive, 2, BACKENDS[-1], timeout=60)


def _interrupted(rank: int, world_size: int) -> None:
    """What no hook is told of, as Ctrl-C, leaves nothing behind that later forwards would not put right."""

    class Interrupts(_Layers):
        def _stop(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    for is_learned in (False, True):
        pair = _Pair(Interrupts, rank, world_size)
        pair.step((ALL,))
        if is_learned:
            pair.step((ALL,))
        with pytest.raises(KeyboardInterrupt):
            pair.model(_input(5, rank), ["call 0", "stop 0"])
        hooks = 0
        for forwards in ([ALL], [ALL], [["call 0", "call 3"], ALL], [ALL]):
            pair.step(*((forward,) for forward in forwards))
            assert torch._C._len_torch_function_stack() == 0
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
        compiled: Any = _Layers() if is_wrapper else torch.compile(_Layers(), backend="aot_eager")
        model: Any
        model, optimizer = _make(compiled)
        if is_wrapper:
            model = torch.compile(model, backend="aot_eager")
        plain = _Layers()
        expected = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
        for step, todo in enumerate([ALL, ALL, ["call 0", "call 1"], ALL, ["call 0", "read 2"]]):
            optimizer.zero_grad()
            expected.zero_grad(set_to_none=False)
            want = [plain(_input(step, r), todo) for r in range(world_size)]
            if "read 2" in todo and is_wrapper:
                with pytest.raises(RuntimeError, match=STALE):
                    model(_input(step, rank), todo)
                break
            output = model(_input(step, rank), todo)
            torch.testing.assert_close(output, want[rank], rtol=1e-4, atol=1e-6, msg=f"step {step}")
            sum(one.square().mean() / world_size for one in want).backward()
            output.square().mean().backward()
            expected.step()
            time.sleep(0.03 * rank)
            optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_right_or_raise():
    run_ranks(_compiled, 2, BACKENDS[-1], timeout=120)
