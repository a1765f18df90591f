"""Buffers of every kind of tensor are rank 0's on all ranks, as with torch's DDP, or refused by name on all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel
from support.devices import only_on_cpu
from support.processes import await_all, run_ranks

pytestmark = only_on_cpu("some of these are for the CPU alone")


def _numbers(rank: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) + 10 * rank


def _complex(rank: int) -> torch.Tensor:
    return torch.complex(_numbers(rank), _numbers(rank) + 1)


TAKEN: dict[str, Callable[[int], torch.Tensor]] = {
    "complex": _complex,
    "conjugated": lambda rank: _complex(rank).conj(),
    "negated": lambda rank: _complex(rank).conj().imag,
    "strided": lambda rank: _numbers(rank).t(),
    "part": lambda rank: torch.cat([_numbers(rank)] * 2, 1)[:, ::2],
    "float8": lambda rank: _numbers(rank).to(torch.float8_e4m3fn),
    "bool": lambda rank: _numbers(rank) > 8,
}
REFUSED: dict[str, tuple[Callable[[int], torch.Tensor], str]] = {
    "coo": (lambda rank: _numbers(rank).to_sparse(), "has the layout Sparse"),
    "csr": (lambda rank: _numbers(rank).to_sparse_csr(), "has the layout SparseCsr"),
    "mkldnn": (lambda rank: _numbers(rank).to_mkldnn(), "has the layout Mkldnn"),
    "quantized": (lambda rank: torch.quantize_per_tensor(_numbers(rank), 0.5, 0, torch.quint8), "is quantized"),
    "nested": (lambda rank: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "is nested"),
    "expanded": (
        lambda rank: torch.full((1,), float(rank)).expand(4),
        r"has elements that share memory \(expand\(\)\)",
    ),
    "zero": (lambda rank: torch._efficientzerotensor((2, 3)), "has no memory of its own"),
}


class _Model(torch.nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("odd", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype == torch.float8_e4m3fn:
        a, b = a.float(), b.float()
    return torch.equal(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())


def _taken(rank: int, world_size: int) -> None:
    for name, make in TAKEN.items():
        model = DistributedDataParallel(_Model(make(rank)))
        assert _equal(model.module.odd, make(0)), (name, model.module.odd)
        model.module.odd.copy_(make(rank + 5))
        model(torch.ones(3)).backward()
        assert _equal(model.module.odd, make(5)), (name, model.module.odd)
    with pytest.raises(ValueError, match=r"first difference: rank 0 has buffer 'odd'.*; rank 1 has .*conjugated"):
        DistributedDataParallel(_Model(_complex(rank) if rank == 0 else _complex(rank).conj()))
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_is_that_of_rank_0_whatever_its_memory_stands_for(backend):
    run_ranks(_taken, 2, backend)


def _refused(rank: int, world_size: int) -> None:
    for make, why in REFUSED.values():
        with pytest.raises(ValueError, match=rf"rank 0: buffer 'odd' {why}, which other ranks' cannot be copied to"):
            DistributedDataParallel(_Model(make(rank)))
        with pytest.raises(ValueError, match=rf"rank 1: buffer 'odd' {why}"):  # of one rank alone
            DistributedDataParallel(_Model(make(rank) if rank == 1 else _numbers(rank)))
        # Each rank's own it may be.
        for how in ("ignored", "no broadcasts"):
            module = _Model(make(rank))
            if how == "ignored":
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["odd"])
            model = DistributedDataParallel(module, broadcast_buffers=how == "ignored")
            model(torch.ones(3)).backward()
            assert module.weight.grad.tolist() == [1.0] * 3
    await_all(rank, world_size)


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes and of what is to go
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_be_overwritten_is_refused_by_name(backend):
    run_ranks(_refused, 2, backend)


def _alone(rank: int, world_size: int) -> None:
    for make, _ in REFUSED.values():
        DistributedDataParallel(_Model(make(rank)))(torch.ones(3)).backward()


@pytest.mark.filterwarnings("ignore")
def test_one_rank_has_nothing_to_overwrite_it_with():
    run_ranks(_alone, 1, "gloo")
