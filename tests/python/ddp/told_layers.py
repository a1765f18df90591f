"""Layers that are told which of them a forward calls, and whose weights it reads; and a training beside a plain one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import ON_CPU, seeded

ALL = ["call 0", "call 1", "call 2", "call 3"]
# The same sums in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-6 if ON_CPU else 1e-5}
STALE = r"parameter 'layers\.2\.(weight|bias)' was read before .* by a forward that had not called 'layers\.2' by then"


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Layers(torch.nn.Module):
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
        return Through.apply(x, layer.weight)

    def _view(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ self.views[layer]

    def _hide(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: checkpoint(self._read, layer, x, use_reentrant=True), x, use_reentrant=True)

    def _keep(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        self.aside = self.aside + layer.weight.square().mean()
        return x


def watchers() -> int:
    """Modes that see torch's functions, beside that of the default device."""
    return torch._C._len_torch_function_stack() - (0 if ON_CPU else 1)


def wrapped(module: torch.nn.Module, **options: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
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


def batch_of(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 16, generator=seeded(100 * seed + rank))


class Pair:
    """A model, and the same one in one process, which has all ranks' inputs."""

    def __init__(self, make: Callable[[], torch.nn.Module], rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.seed = rank, world_size, 0
        self.model, self.optimizer = wrapped(make())
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
            want = [self.plain(batch_of(self.seed, rank), *forward) for rank in range(self.world_size)]
            with contextlib.nullcontext() if at_once else self.model.no_sync():
                output = self.model(batch_of(self.seed, self.rank), *forward)
            torch.testing.assert_close(output, want[self.rank], **CLOSE, msg=f"{forward} of {forwards}")
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


def trained(rank: int, world_size: int, make: Callable[[], torch.nn.Module] = Layers) -> Pair:
    """One that knows what its forward reads."""
    pair = Pair(make, rank, world_size)
    pair.step(())
    pair.step((), ())
    return pair
