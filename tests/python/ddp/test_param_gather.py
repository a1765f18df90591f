"""Parameters that come while a forward runs are right whatever that forward does, or the error says why not."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from told_layers import CLOSE, watchers
from torch.utils.checkpoint import checkpoint

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import run_ranks


class _Layers(torch.nn.Module):
    """Layers that run in the order that ``order`` gives; ``read`` ones are read, and their forward is not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int], read: tuple[int, ...] = (), recompute: bool = False) -> Any:
        for index in order:
            layer = self.layers[index]
            if index in read:
                x = torch.nn.functional.linear(x, layer.weight, layer.bias)
            else:
                x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            x = torch.tanh(x)
        return x.square().mean()


def _make() -> tuple[DistributedDataParallel, DistributedOptimizer]:
    model = DistributedDataParallel(
        _Layers(),
        bucket_size=1,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        unused_parameters="zero_fill",
    )
    return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model)


def _train(model: Any, optimizer: Any, rank: int, calls: list[dict[str, Any]], world_size: int) -> list[torch.Tensor]:
    """Each call's output must be that of one process with the plain optimizer. Returns those of this model."""
    plain = _Layers()
    expected = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    outputs = []
    for step, call in enumerate(calls):
        inputs = [torch.randn(3, 16, generator=seeded(10 * step + r)) for r in range(world_size)]
        want = [plain(x, **call) for x in inputs]
        expected.zero_grad(set_to_none=False)
        (sum(want[1:], want[0]) / world_size).backward()
        expected.step()
        optimizer.zero_grad()
        output = model(inputs[rank], **call)
        torch.testing.assert_close(output, want[rank], **CLOSE, msg=f"step {step} {call}")
        output.backward()
        time.sleep(0.03 * rank)  # the other rank is in its next forward before this one's part has left
        optimizer.step()
        outputs.append(output)
    return outputs


IN_ORDER = {"order": [0, 1, 2, 3]}


def _any_forward(rank: int, world_size: int) -> None:
    for calls in (
        [IN_ORDER] * 4,
        [{"order": [3, 1, 0, 2]}] * 4,  # not as registered
        [IN_ORDER, {"order": [3, 2, 1, 0]}, {"order": [2, 0]}, IN_ORDER],  # another one each time
        [{"order": [0, 1, 2, 3], "read": (2,)}] * 4,  # a layer that is never called
        [{"order": [0, 1], "read": (1,)}, {"order": [0, 1, 2]}, {"order": [3]}, {"order": [0, 2, 3]}],
        [{"order": [0, 1, 2, 3], "recompute": True}] * 4,
    ):
        model, optimizer = _make()
        _train(model, optimizer, rank, calls, world_size)
    # Ranks whose forwards go different ways do not mismatch their gathers.
    model, optimizer = _make()
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 16), [step % 4, 1, 3] if rank == 0 else [3, 0, 2]).backward()
        optimizer.step()
    model.start_param_sync(force_sync=True)
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(copies, parameter.detach())
        assert all(map(copies[0].equal, copies))


@pytest.mark.filterwarnings("ignore:the forward of")
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_are_right_whatever_order_the_forward_has(backend):
    run_ranks(_any_forward, 2, backend, timeout=60)


def _departs(rank: int, world_size: int) -> None:
    model, optimizer = _make()
    _train(model, optimizer, rank, [IN_ORDER] * 3, world_size)
    optimizer.zero_grad()
    with pytest.raises(
        RuntimeError, match=r"parameter 'layers\.2\.(weight|bias)' was read .* had not called 'layers\.2' by then"
    ):
        model(torch.ones(3, 16), [0, 1, 2, 3], read=(2,))
    # The next forwards learn it.
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 16), [0, 1, 2, 3], read=(2,)).backward()
        optimizer.step()


def test_a_parameter_that_was_read_too_early_is_named():
    run_ranks(_departs, 2, BACKENDS[-1], timeout=60)


def _says_so_once(rank: int, world_size: int) -> list[str]:
    model, optimizer = _make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(model, optimizer, rank, [{"order": [3, 1, 0, 2]}] * 4, world_size)
    return [str(warning.message) for warning in caught if "needs parameters in another order" in str(warning.message)]


def test_a_forward_in_another_order_says_so_once():
    for said in run_ranks(_says_so_once, 2, BACKENDS[-1], timeout=60):
        assert len(said) == 1, said


class _Reads(torch.nn.Module):
    """Reads weights of layers before it calls them, by views, and in a hook that was there before the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = torch.nn.Linear(16, 16)
        self.inner = _Ties()
        self.last = torch.nn.Linear(16, 16)
        self.last.register_forward_pre_hook(lambda module, args: (args[0] * module.bias.sigmoid(),))
        self.gain = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = torch.cat([self.last.weight.flatten(), self.gain]).square().mean()
        x = x @ self.inner.down.weight.t()[:, :16]
        return self.last(self.inner(self.first(x))).square().mean() + penalty


class _Ties(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 16)
        self.down = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.linalg.vector_norm(self.down.weight)
        return self.down(torch.tanh(self.up(x)) * scale)


def _read_early(rank: int, world_size: int) -> None:
    plain = _Reads()
    expected = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    # One bucket a parameter: what is awaited for another reason does not bring it along.
    model = DistributedDataParallel(_Reads(), bucket_size=1, use_distributed_optimizer=True, overlap_param_gather=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), model)
    for step in range(8):
        inputs = [torch.randn(3, 16, generator=seeded(10 * step + r)) for r in range(world_size)]
        want = [plain(x) for x in inputs]
        expected.zero_grad()
        (sum(want[1:], want[0]) / world_size).backward()
        expected.step()
        optimizer.zero_grad()
        if step % 3 == 1:  # without gradients nothing is learned, and all is awaited
            with torch.no_grad():
                assert model(inputs[rank]).item() == pytest.approx(want[rank].item(), rel=1e-4)
        output = model(inputs[rank])
        torch.testing.assert_close(output, want[rank], **CLOSE, msg=f"step {step} rank {rank}")
        output.backward()
        time.sleep(0.03 * rank)  # the other rank is in its next forward before this one's part has left
        optimizer.step()
    assert watchers() == 0  # nothing watches later forwards


@pytest.mark.filterwarnings("ignore:the forward of")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_that_is_read_before_its_module_is_called_is_current(backend):
    run_ranks(_read_early, 2, backend, timeout=60)


def _compiled_parts(rank: int, world_size: int) -> None:
    """Compiled and scripted modules are not looked into, nor compiled again once nothing watches."""
    compiled, watched = [], []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            watched.append(watchers())
            return graph(*args)

        compiled.append(graph)
        return run

    def make(backend: Any) -> _Reads:
        module = _Reads()
        if backend is not None:
            module.inner = torch.compile(module.inner, backend=backend)  # type: ignore[assignment]
            module.first = torch.jit.script(module.first)
        return module

    plain = make(None)
    expected = torch.optim.SGD(plain.parameters(), lr=0.2)
    model = DistributedDataParallel(
        make(backend), bucket_size=1, use_distributed_optimizer=True, overlap_param_gather=True
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2), model)
    graphs = []
    for step in range(5):
        x = torch.randn(3, 16, generator=seeded(step))
        want = plain(x)
        expected.zero_grad()
        want.backward()
        expected.step()
        optimizer.zero_grad()
        output = model(x)
        torch.testing.assert_close(output, want, **CLOSE, msg=f"step {step}")
        output.backward()
        time.sleep(0.03 * rank)
        optimizer.step()
        graphs.append(len(compiled))
    assert graphs == [1] * 5
    assert len(watched) == 5
    assert max(watched) <= 0  # nor the default device, where it is compiled in


@pytest.mark.filterwarnings("ignore")
def test_compiled_modules_stay_as_they_are():
    run_ranks(_compiled_parts, 2, BACKENDS[-1], timeout=120)


def _fails_first(rank: int, world_size: int) -> None:
    """A first forward that raises teaches nothing, and leaves no mode or hook behind."""
    model, optimizer = _make()
    optimizer.zero_grad()
    model(torch.ones(3, 16), **IN_ORDER).backward()
    optimizer.step()
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    with pytest.raises(IndexError):
        model(torch.ones(3, 16), [0, 99])
    assert watchers() == 0
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    model.start_param_sync(force_sync=True)
    assert model._param_sync._reads.awaited is None


def test_a_first_forward_that_raises_teaches_nothing():
    run_ranks(_fails_first, 2, BACKENDS[-1], timeout=60)


def _parts(rank: int, world_size: int) -> None:
    """What is called or read outside of the model's forward is current, too."""
    uses: list[Callable[[DistributedDataParallel], torch.Tensor]] = [
        lambda model: model.module.layers[3](torch.ones(2, 16)),
        lambda model: model.eval()(torch.ones(2, 16), [1, 0]),
        lambda model: model.module(torch.ones(2, 16), [2, 3]),
    ]
    for use in uses:
        for is_differentiated in (False, True):
            model, optimizer = _make()
            twin, other = _make()
            for one, its_optimizer in ((model, optimizer), (twin, other)):
                for _ in range(2):
                    its_optimizer.zero_grad()
                    one(torch.full((3, 16), 1.0 + rank), **IN_ORDER).backward()
                    its_optimizer.step()
            twin.start_param_sync(force_sync=True)
            with torch.set_grad_enabled(is_differentiated):
                assert use(model).equal(use(twin))


def test_parts_of_the_model_can_be_called_by_themselves():
    run_ranks(_parts, 2, BACKENDS[-1], timeout=60)


def _reads_alone(rank: int, world_size: int) -> None:
    """One rank may read the state by itself, and steps may follow each other without a forward."""
    model, optimizer = _make()
    twin, other = _make()
    for one, its_optimizer in ((model, optimizer), (twin, other)):
        its_optimizer.zero_grad()
        one(torch.full((3, 16), 1.0 + rank), **IN_ORDER).backward()
        for _ in range(3):
            time.sleep(0.02 * rank)
            its_optimizer.step()
    twin.start_param_sync(force_sync=True)
    if rank == 0:
        want, got = twin.module.state_dict(), model.state_dict()
        assert all(tensor.equal(got["module." + name]) for name, tensor in want.items())
    model.start_param_sync(force_sync=True)  # whatever each rank has waited for before
    dist.barrier()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_may_read_the_state_by_itself(backend):
    run_ranks(_reads_alone, 2, backend, timeout=60)


def _loads(rank: int, world_size: int) -> None:
    """What is loaded stays, though gathers were under way."""
    model, optimizer = _make()
    optimizer.zero_grad()
    model(torch.ones(3, 16), **IN_ORDER).backward()
    time.sleep(0.05 * rank)
    optimizer.step()
    wanted = {name: torch.full_like(tensor, 7.0) for name, tensor in _Layers().state_dict().items()}
    model.module.load_state_dict(wanted)
    model._param_sync.finish()
    assert all(parameter.eq(7.0).all() for parameter in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gathers_under_way_do_not_overwrite_what_is_loaded(backend):
    run_ranks(_loads, 2, backend, timeout=60)


def _states_of_parts(rank: int, world_size: int) -> None:
    model, optimizer = _make()
    part = model.module.layers[0]
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(1, 16), order=[0, 1, 2, 3]).backward()
        if rank == 0:
            time.sleep(0.02)  # the others' gathers of its part are under way
        optimizer.step()
        if step % 2:
            got = {name: tensor.clone() for name, tensor in part.state_dict().items()}
        else:
            got = {name: torch.full_like(tensor, 0.1 * step) for name, tensor in part.named_parameters()}
            part.load_state_dict(got)
        model.start_param_sync(force_sync=True)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, got[name]), (step, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_of_a_part_is_current_and_stays_what_is_loaded(backend):
    run_ranks(_states_of_parts, 2, backend, timeout=60)


def _switches(rank: int, world_size: int) -> None:
    model, optimizer = _make()
    _train(model, optimizer, rank, [IN_ORDER] * 2, world_size)
    model.disable_forward_pre_hook()
    with pytest.raises(RuntimeError, match=r"disable_forward_pre_hook\(\): the hooks are not enabled"):
        model.disable_forward_pre_hook()
    _train(*_make(), rank, [IN_ORDER] * 2, world_size)
    model.enable_forward_pre_hook()
    with pytest.raises(RuntimeError, match=r"enable_forward_pre_hook\(\): the hooks are enabled already"):
        model.enable_forward_pre_hook()
    plain = DistributedDataParallel(_Layers(), use_distributed_optimizer=True)
    with pytest.raises(RuntimeError, match="expected overlap_param_gather=True"):
        plain.enable_forward_pre_hook()
    # Whoever updates its own part by hand brings it to all.
    for bucket in plain._reducer.buckets():
        part = bucket.parameters.chunk(world_size)[rank]
        part.fill_(rank)
    plain.start_param_sync()
    ranks = {value for parameter in plain.parameters() for value in parameter.flatten().tolist()}
    assert ranks == set(range(world_size))
    with pytest.raises(RuntimeError, match="nothing is sharded"):
        DistributedDataParallel(_Layers()).start_param_sync()


def test_hooks_can_be_switched_and_parameters_gathered_by_hand():
    run_ranks(_switches, 2, BACKENDS[-1], timeout=60)
