"""Point-to-point messages of CUDA tensors."""

import pytest
import torch
import torch.distributed as dist

import farandole
from gpu.data import MOVED, SIZES, part, same_bits
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(300)]


def _ring(rank, world_size):
    """To the next rank; with one rank to itself."""
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    for seed, dtype in enumerate(MOVED):
        outgoing = [part(seed, rank, numel, dtype).cuda() for numel in SIZES]
        incoming = [part(seed, 77, numel, dtype).cuda() for numel in SIZES]
        ops = [dist.P2POp(dist.isend, x, following) for x in outgoing]
        ops += [dist.P2POp(dist.irecv, x, previous) for x in incoming]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for numel, x in zip(SIZES, incoming):
            assert same_bits(x, part(seed, previous, numel, dtype)), f"{dtype}, {numel} elements"


def test_a_batch_passes_every_dtype_around_a_ring(world):
    run_on_gpus(_ring, world)


def _beside_nccl(rank, world_size):
    nccl = dist.new_group(backend="nccl")
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    results = []
    for group in (None, nccl):
        incoming = torch.zeros(100_000, device="cuda")
        outgoing = torch.full((100_000,), float(rank), device="cuda")
        ops = [dist.P2POp(dist.isend, outgoing, following, group), dist.P2POp(dist.irecv, incoming, previous, group)]
        works = dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
        results.append((len(works), incoming.sum().item()))
    return results


def test_a_batch_is_one_work_as_with_nccl(world):
    for ours, nccls in run_on_gpus(_beside_nccl, world):
        assert ours == nccls


def _send_and_receive(rank, world_size):
    for round_ in range(20):
        numel = SIZES[round_ % len(SIZES)]
        sender, receiver = round_ % world_size, (round_ + 1) % world_size
        if rank == sender:
            dist.send(part(round_, 0, numel, torch.float32).cuda(), receiver)
        elif rank == receiver:
            incoming = torch.zeros(numel, device="cuda")
            assert dist.recv(incoming, sender) == sender
            assert same_bits(incoming, part(round_, 0, numel, torch.float32)), round_


def test_a_message_goes_round_from_rank_to_rank(peers):
    run_on_gpus(_send_and_receive, peers)


def _both_ways(rank, world_size):
    if rank > 1:
        return 0.0
    peer = 1 - rank
    total = 0.0
    for round_ in range(20):
        incoming = torch.zeros(5000, device="cuda")
        # A receive that is posted first must not hold up what the same rank sends.
        receiving = dist.irecv(incoming, peer)
        sending = dist.isend(torch.full((5000,), float(rank + round_), device="cuda"), peer)
        receiving.wait()
        sending.wait()
        total += incoming.mean().item()
    return total


def test_receives_that_are_posted_first_do_not_hold_up_sends(peers):
    expected = sum(range(20))
    assert run_on_gpus(_both_ways, peers)[:2] == [expected + 20.0, float(expected)]


def _different_orders(rank, world_size):
    """Every rank lists its peers in an order of its own."""
    others = [(rank + step) % world_size for step in range(1, world_size)]
    if rank % 2:
        others.reverse()
    incoming = {peer: torch.zeros(300, device="cuda") for peer in others}
    ops = []
    for index, peer in enumerate(others):
        pair = [
            dist.P2POp(dist.isend, torch.full((300,), float(10 * rank + peer), device="cuda"), peer),
            dist.P2POp(dist.irecv, incoming[peer], peer),
        ]
        ops += pair if (rank + index) % 2 else reversed(pair)
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return {peer: x.mean().item() for peer, x in incoming.items()}


def test_a_batch_does_not_depend_on_the_order_of_its_list(peers):
    for rank, got in enumerate(run_on_gpus(_different_orders, peers)):
        assert got == {peer: float(10 * peer + rank) for peer in range(peers.size) if peer != rank}


def _objects(rank, world_size):
    if rank == 0:
        dist.send_object_list([{"a": 1}, "text"], dst=1, device=torch.device("cuda", torch.cuda.current_device()))
    elif rank == 1:
        box = [None, None]
        dist.recv_object_list(box, src=0, device=torch.device("cuda", torch.cuda.current_device()))
        return box


def test_objects_are_sent_from_rank_to_rank(peers):
    assert run_on_gpus(_objects, peers)[1] == [{"a": 1}, "text"]


def _tags_in_any_order(rank, world_size):
    if rank > 1:
        return []
    peer = 1 - rank
    farandole.connect_edges(send_to=[peer], recv_from=[peer])
    seen = []
    for _ in range(3):
        incoming = {tag: torch.zeros(300, device="cuda") for tag in (5, 2, 9)}
        order = [5, 2, 9] if rank == 0 else [9, 5, 2]
        ops = [dist.P2POp(dist.irecv, incoming[tag], peer, tag=tag) for tag in order]
        ops += [
            dist.P2POp(dist.isend, torch.full((300,), float(10 * rank + tag), device="cuda"), peer, tag=tag)
            for tag in reversed(order)
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        seen.append({tag: x.mean().item() for tag, x in incoming.items()})
    return seen


def test_tags_match_in_a_batch_that_each_rank_lists_in_another_order(peers):
    for rank, seen in enumerate(run_on_gpus(_tags_in_any_order, peers)[:2]):
        assert seen == [{tag: float(10 * (1 - rank) + tag) for tag in (5, 2, 9)}] * 3
