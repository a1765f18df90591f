"""Parameters of 8 bits, whose gradients and copies are in float32."""

import pytest
import torch

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE
from support.processes import run_ranks

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]


class _Weights(torch.nn.Module):
    def __init__(self, types):
        super().__init__()
        for index, kind in enumerate(types):
            values = torch.arange(64.0) / 32 + 0.5 + index
            self.register_parameter(f"w{index}", torch.nn.Parameter(values.to(kind)))

    def forward(self, x):
        return sum((parameter.float() * x).sum() for parameter in self.parameters())


def _steps(rank, world_size, order, sharded):
    torch.set_default_device(DEVICE)
    module = _Weights([KINDS[index] for index in order])
    copies = [parameter.detach().float() for parameter in module.parameters()]
    model = DistributedDataParallel(module, grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5), model)
    moved = 0.0
    for step in range(3):
        if step > 0:
            optimizer.zero_grad()
        for microbatch in range(2):
            if microbatch == 0:
                with model.no_sync():
                    model(torch.full((64,), rank + 1.0)).backward()
            else:
                model(torch.full((64,), rank + 1.0)).backward()
        optimizer.step()
        moved = 0.5 * moved + 2 * 1.5
        copies = [copy - 0.125 * moved for copy in copies]
        if sharded:
            model.start_param_sync(force_sync=True)
        for parameter, copy in zip(module.parameters(), copies, strict=True):
            assert torch.equal(parameter.detach().float(), copy.to(parameter.dtype).float()), step
    state = optimizer.full_state_dict()["state"]
    for (name, _), copy in zip(module.named_parameters(), copies, strict=True):
        assert torch.equal(state[name]["param"].reshape(-1), copy.cpu()), name


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("order", [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 1, 0)], ids=str)
def test_parameters_of_8_bits_of_several_types_are_trained(order, sharded):
    run_ranks(_steps, 2, "farandole", order=order, sharded=sharded)
