"""Replicas on a device: the same training in one process, what makes the device late, and streams.

Every function takes the device by name: what is checked on GPUs is the same program on the CPU, which has one stream and
is never late.
"""

import contextlib
import copy

import torch
from torch import nn

PAUSE = 100_000_000  # cycles: 50 ms or more


def pause(device):
    """The current stream of the device does nothing for a while; the host goes on."""
    if torch.device(device).type == "cuda":
        torch.cuda._sleep(PAUSE)


def new_stream(device):
    return torch.cuda.Stream() if torch.device(device).type == "cuda" else None


def on(stream):
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def current_stream(device):
    return torch.cuda.current_stream() if torch.device(device).type == "cuda" else None


def follow(stream, other):
    """What is put on ``stream`` from now on runs after what is on ``other``, where these are two."""
    if stream is not None and other is not None:
        stream.wait_stream(other)


class _LateGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        pause(grad.device)
        return grad * 1


class Late(nn.Module):
    """Its output's gradient comes late, unless it is told to be quick."""

    is_late = True

    def forward(self, x):
        return _LateGradient.apply(x) if self.is_late else x


def layers(device, dtype=torch.double, late=False):
    torch.manual_seed(11)
    parts = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)]
    return nn.Sequential(*parts, *([Late()] if late else [])).to(device, dtype)


def batches(step, world_size, device, dtype=torch.double, width=16):
    """By rank."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(6, width, generator=generator, dtype=torch.double).to(device, dtype) for _ in range(world_size)]


def loss_of(output):
    return (output.double() - 0.5).square().mean()


class Alone:
    """One process: the mean over all ranks' batches, and a plain optimizer."""

    def __init__(self, module, make):
        self.module = copy.deepcopy(module)
        for part in self.module.modules():
            if isinstance(part, Late):
                part.is_late = False
        self.optimizer = make(self.module.parameters())

    def backward(self, of_ranks, scale=1.0):
        self.optimizer.zero_grad()
        for batch in of_ranks:
            (loss_of(self.module(batch)) * (scale / len(of_ranks))).backward()

    def step(self, of_ranks):
        self.backward(of_ranks)
        self.optimizer.step()

    def check(self, module, where, tolerance=1e-9):
        for (name, want), got in zip(self.module.named_parameters(), module.parameters(), strict=True):
            assert_close(got, want, f"{where}, {name}", tolerance)

    def check_grads(self, module, where, tolerance=1e-9):
        for (name, want), got in zip(self.module.named_parameters(), module.parameters(), strict=True):
            assert_close(got.main_grad, want.grad, f"{where}, gradient of {name}", tolerance)


def assert_close(got, want, where, tolerance=1e-9):
    """Relative to the largest element."""
    error = (got.detach().double() - want.detach().double()).abs().max().item()
    assert error <= tolerance * max(want.detach().double().abs().max().item(), 1e-3), f"{where}: {error}"
