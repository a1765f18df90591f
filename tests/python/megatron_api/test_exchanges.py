"""Megatron's exchanges with the neighbours of a rank."""

from __future__ import annotations

import pytest
import torch

from farandole import megatron
from megatron_api import megatron_support as support
from support.devices import DEVICE, ON_CPU
from support.processes import await_all, run_ranks


def _exchanges(rank: int, world_size: int, variable: bool, channel: str | None) -> None:
    """Every helper once, around a ring, with tensors that say whence and what."""
    group = support.world()
    config = megatron.ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=variable)
    p2p = megatron.P2PCommunicator(group, config)
    if channel is not None:
        p2p._channel = channel  # as if the backend matched messages so
    shape = None if variable else (3, 2)
    previous, following = (rank - 1) % world_size, (rank + 1) % world_size

    def made(by: int, what: int) -> torch.Tensor:
        return torch.full((3, 2), float(10 * by + what))

    def check(tensor: torch.Tensor | None, by: int, what: int) -> None:
        assert tensor is not None and tensor.requires_grad
        assert torch.equal(tensor.detach(), made(by, what)), (rank, by, what, tensor)

    check(p2p.send_forward_recv_forward(made(rank, 1), True, shape), previous, 1)
    check(p2p.send_backward_recv_backward(made(rank, 2), True, shape), following, 2)
    both = p2p.send_forward_backward_recv_forward_backward(made(rank, 3), made(rank, 4), True, True, shape)
    check(both[0], previous, 3)
    check(both[1], following, 4)
    if not variable:
        # Out of order on purpose: the direction tells them apart.
        tensor, works = p2p.send_backward_recv_backward(made(rank, 5), True, shape, overlap_p2p_comm=True)
        other, more = p2p.send_forward_recv_forward(made(rank, 6), True, shape, overlap_p2p_comm=True)
        assert set(works) == {"send_prev", "recv_next"} and set(more) == {"send_next", "recv_prev"}
        for work in (*more.values(), *works.values()):
            work.wait()
        check(tensor, following, 5)
        check(other, previous, 6)
    first, last = p2p.is_pp_first_stage, p2p.is_pp_last_stage
    assert (first, last, p2p.current_stage, p2p.total_stages) == (rank == 0, rank == world_size - 1, rank, world_size)
    # Down the chain and up again, as 1F1B does with one microbatch; two tensors on the way down.
    received = p2p.recv_forward([(3, 2), (3, 2)] if shape is None else [shape, shape], first)
    for i, tensor in enumerate(received):
        assert tensor is None if first else check(tensor, previous, 7 + i) is None
    p2p.send_forward([made(rank, 7), made(rank, 8)], last)
    grad = p2p.recv_backward((3, 2), last)
    assert grad is None if last else check(grad, following, 9) is None
    p2p.send_backward(made(rank, 9), first)
    # The fused ones: a pair of ranks at a time.
    if rank < world_size - 1 and rank % 2 == 0:
        check(p2p.send_forward_recv_backward(made(rank, 1), (3, 2), last), following, 2)
    elif rank % 2 == 1:
        check(p2p.send_backward_recv_forward(made(rank, 2), (3, 2), first), previous, 1)
    assert p2p.send_forward_recv_backward(made(0, 0), (3, 2), True) is None
    assert p2p.send_backward_recv_forward([made(0, 0)], [(3, 2)], True) == [None]
    await_all(rank, world_size)


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", ["gloo", "farandole"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("channel", ["tagged", "one_queue_per_rank"] if ON_CPU else [None])
def test_exchanges_bring_what_the_neighbours_sent(backend, size, variable, channel):
    run_ranks(_exchanges, size, backend, variable=variable, channel=channel)


def _send_from_elsewhere(rank: int, world_size: int) -> None:
    p2p = megatron.P2PCommunicator(support.world(), support.config_of())
    assert p2p.device == torch.empty(0).device and p2p.device.type == DEVICE
    with pytest.raises(ValueError, match=rf"a tensor on meta is sent, expected one on {p2p.device}: .*device='meta'"):
        p2p.send_forward(torch.empty(2, device="meta"), False)
    with pytest.raises(NotImplementedError, match="device is meta, expected cpu or cuda"):
        megatron.P2PCommunicator(support.world(), support.config_of(), device="meta")


def test_a_tensor_on_another_device_is_refused_before_anything_is_sent():
    run_ranks(_send_from_elsewhere, 1, "gloo")
