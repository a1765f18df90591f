"""Gradients of parameters that every pipeline stage has a copy of, where replicas share the optimizer's state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from farandole import megatron
from farandole.ddp import DistributedOptimizer
from farandole.megatron import parallel_state
from pipelining.pipeline_support import BACKENDS
from support.processes import run_ranks

WIDTH = 6


class _Stage(nn.Module):
    """The embedder is at one end of the first stage's buffer, and at the other end of the second's."""

    def __init__(self, config: SimpleNamespace, pp_rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        embedder = nn.Linear(WIDTH, WIDTH)
        for parameter in embedder.parameters():
            parameter.pipeline_parallel = True  # type: ignore[attr-defined]
        layer = nn.Linear(WIDTH, 200)
        self.parts = nn.ModuleList([embedder, layer][:: -1 if pp_rank == 1 else 1])
        self.embedder, self.layer = embedder, layer
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.embedder(x))).square().mean()


def _batch(replica: int, pp_rank: int) -> torch.Tensor:
    return torch.full((2, WIDTH), 0.3 + replica + 0.5 * pp_rank)


def _finalize(rank: int, world_size: int, sharded: bool) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    pp_rank, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    config = megatron.ModelParallelConfig()
    config.has_cond_embedder = True
    module = _Stage(config, pp_rank)
    ddp_config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    model = megatron.DistributedDataParallel(config, ddp_config, module)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    alone = [_Stage(config, stage) for stage in range(2)]
    total = sum(alone[stage](_batch(other, stage)) for other in range(2) for stage in range(2)) / 2
    total.backward()
    want = [
        a.grad + b.grad for a, b in zip(alone[0].embedder.parameters(), alone[1].embedder.parameters(), strict=True)
    ]
    model.zero_grad_buffer()
    model(_batch(replica, pp_rank)).backward()
    megatron.finalize_model_grads([model])
    before = [parameter.detach().clone() for parameter in module.embedder.parameters()]
    optimizer.step()
    for old, parameter, grad in zip(before, module.embedder.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.1 * grad)
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_all_stages_have_gets_the_sum_of_its_gradients(backend: str, sharded: bool) -> None:
    run_ranks(_finalize, 4, backend, sharded=sharded)
