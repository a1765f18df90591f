"""Megatron's forward-backward functions and exchanges on GPUs: gradients of one process, and no host that waits."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from farandole import megatron
from farandole.bench._gpus import Placement
from gpu.graphs import capture
from megatron_api import megatron_support as support
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]
COUNT = 5
WAYS = ["nccl", "ucx", "one queue", "torch's NCCL"]
GPU = "cuda"


def _run(fn, peers, way, **kwargs):
    env = {"ucx": {"FARANDOLE_CUDA_MESSAGES": "ucx"}, "one queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}.get(way, {})
    backend = "cpu:gloo,cuda:nccl" if way.startswith("torch") else "farandole"
    return run_on_gpus(fn, peers, backend=backend, timeout=100, env=env, **kwargs)


def _batches(seed, device, varies=False):
    for batch in support.batches(seed, COUNT, varies=varies):
        yield {name: tensor.to(device) for name, tensor in batch.items()}


def _sequential(num_stages, kind, seed, device, scale=1.0, varies=False):
    """All chunks in one process: what their gradients are, and what each loss function has returned."""
    chunks = [support.chunk_of(stage, num_stages).to(device) for stage in range(num_stages)]
    reduced, tokens = [], 0
    for batch in _batches(seed, device, varies):
        x = batch["x"]
        for chunk in chunks:
            chunk.set_input_tensor([None if chunk.is_first else x])
            x = chunk(x)
        loss, *counted, values = support.loss_func(kind, batch["weights"], x)
        tokens += int(counted[0]) if counted else 0
        reduced.append(values)
        (loss * scale / (1 if counted else COUNT)).backward()  # sums, or means
    return chunks, reduced, tokens


def _pipeline(rank, world_size, num_chunks, **options):
    """(function, chunks of this rank, their stages, the group's arguments)"""
    group = support.world()
    stages = range(rank, world_size * num_chunks, world_size)
    chunks = [support.chunk_of(stage, world_size * num_chunks, **options) for stage in stages]
    if world_size == 1:
        return megatron.get_forward_backward_func(1, None), chunks, stages, {}
    function = megatron.get_forward_backward_func(world_size, num_chunks if num_chunks > 1 else None)
    groups = support.collection_of()
    return (
        function,
        chunks,
        stages,
        dict(p2p_communicator=megatron.P2PCommunicator(group, chunks[0].config), pg_collection=groups),
    )


def _listed(values, num_chunks):
    return values if num_chunks > 1 else values[0]


def _train(rank, world_size, num_chunks=1, kind="mean", device=GPU, scaled=False, **options):
    """Three steps, with other numbers in each; then one without gradients."""
    varies = options.get("variable_seq_lengths", False)
    scale = 8.0 if scaled else 1.0
    if scaled:
        factor = torch.tensor([scale], dtype=torch.double, device=device)
        options["grad_scale_func"] = lambda loss: loss * factor
    if kind == "tokens":
        options["calculate_per_token_loss"] = True
        counted = []
        options["finalize_model_grads_func"] = lambda models, tokens, **_: counted.append(tokens)
    function, chunks, stages, groups = _pipeline(rank, world_size, num_chunks, **options)
    chunks = [chunk.to(device) for chunk in chunks]
    is_last = rank == world_size - 1
    for seed in range(4):
        trains = seed < 3
        for chunk in chunks:
            chunk.zero_grad()
        iterators = [_batches(seed, device, varies) for _ in chunks]
        given = dict(
            forward_step_func=partial(support.forward_step, kind, []),
            data_iterator=_listed(iterators, num_chunks),
            model=_listed(chunks, num_chunks),
            num_microbatches=COUNT,
            seq_length=support.SEQUENCE,
            micro_batch_size=support.BATCH,
            forward_only=not trains,
        )
        reduced = function(**given, **groups)
        alone, expected, tokens = _sequential(world_size * num_chunks, kind, seed, device, scale, varies)
        if trains:
            for chunk, stage in zip(chunks, stages):
                support.assert_gradients(chunk, alone[stage])
        else:
            assert all(p.grad is None for chunk in chunks for p in chunk.parameters())
        support.assert_equal(reduced, expected if is_last else [], (rank, seed))
        if trains and kind == "tokens":
            assert counted[-1].device == chunks[0].linear.weight.device
            assert not is_last or int(counted[-1]) == tokens


def _each(rank, world_size, each, cases):
    """In one group: processes that begin with CUDA take longer than what they compute."""
    for case in cases:
        each(rank, world_size, **case)
        dist.barrier()


CHUNKS = [dict(num_chunks=1), dict(num_chunks=2)]


@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_of_chunks_has_the_gradients_of_one_process(peers, way):
    _run(_each, peers, way, each=_train, cases=CHUNKS)


def test_what_a_config_asks_for_is_done_on_gpus_too(peers):
    options = [
        dict(kind="tokens", num_chunks=2),
        dict(scaled=True),
        dict(variable_seq_lengths=True),
        dict(deallocate_pipeline_outputs=True),
        dict(check_for_nan_in_loss_and_grad=True),
    ]
    _run(_each, peers, "nccl", each=_train, cases=options)


def test_without_a_pipeline_gradients_are_those_of_all_microbatches():
    run_on_gpus(_train, Placement(1), scaled=True)


class _Passing(support.Chunk):
    """Has no parameters, and so no device of its own."""

    def __init__(self, config, stage, num_stages):
        super().__init__(config, stage, num_stages)
        self.linear = torch.nn.Identity()


def _pass_on(rank, world_size):
    function, chunks, _, groups = _pipeline(rank, world_size, 1)
    chunk = _Passing(chunks[0].config, rank, world_size) if rank == world_size - 1 else chunks[0].cuda()
    for _ in range(3):
        chunk.zero_grad()
        function(
            forward_step_func=partial(support.forward_step, "mean", []),
            data_iterator=_batches(1, GPU),
            model=chunk,
            num_microbatches=COUNT,
            seq_length=support.SEQUENCE,
            micro_batch_size=support.BATCH,
            **groups,
        )
    if rank == 0:
        assert chunk.linear.weight.grad.isfinite().all() and chunk.linear.weight.grad.any()


def test_a_chunk_without_parameters_works_where_the_process_does(peers):
    run_on_gpus(_pass_on, peers)


def _steady_steps(rank, world_size, num_chunks):
    function, chunks, _, groups = _pipeline(rank, world_size, num_chunks)
    chunks = [chunk.to(GPU) for chunk in chunks]
    batches = list(_batches(1, GPU))

    def step():
        function(
            forward_step_func=partial(support.forward_step, "mean", []),
            data_iterator=_listed([iter(batches) for _ in chunks], num_chunks),
            model=_listed(chunks, num_chunks),
            num_microbatches=COUNT,
            seq_length=support.SEQUENCE,
            micro_batch_size=support.BATCH,
            **groups,
        )

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises
    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    dist.barrier()


def test_a_steady_step_waits_for_no_device(peers):
    _run(_each, peers, "nccl", each=_steady_steps, cases=CHUNKS)


def _replay(rank, world_size, num_chunks, device=GPU):
    function, chunks, stages, groups = _pipeline(rank, world_size, num_chunks)
    chunks = [chunk.to(device) for chunk in chunks]
    static = list(_batches(0, device))
    reduced = []

    def step():
        for chunk in chunks:
            chunk.zero_grad(set_to_none=False)
        reduced[:] = function(
            forward_step_func=partial(support.forward_step, "mean", []),
            data_iterator=_listed([iter(static) for _ in chunks], num_chunks),
            model=_listed(chunks, num_chunks),
            num_microbatches=COUNT,
            seq_length=support.SEQUENCE,
            micro_batch_size=support.BATCH,
            **groups,
        )

    graph = capture(step)
    shown = list(reduced) if device == GPU else reduced
    for seed in range(1, 4):
        for given, new in zip(static, _batches(seed, device)):
            for name, tensor in new.items():
                given[name].copy_(tensor)
        graph.replay()
        alone, expected, _ = _sequential(world_size * num_chunks, "mean", seed, device)
        for chunk, stage in zip(chunks, stages):
            support.assert_gradients(chunk, alone[stage])
        support.assert_equal(shown, expected if rank == world_size - 1 else [], (rank, seed))
    if device == GPU:
        torch.cuda.synchronize()
    dist.barrier()
    del graph


def test_a_step_captured_in_a_graph_is_replayed_with_new_batches(peers):
    _run(_each, peers, "nccl", each=_replay, cases=CHUNKS)


def _exchange(rank, world_size, variable, device=GPU):
    """Every helper, around a ring, with tensors that say whence and what."""
    config = megatron.ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=variable)
    p2p = megatron.P2PCommunicator(support.world(), config)
    assert p2p.device == torch.empty(0, device=device).device
    shape = None if variable else (300, 20)
    previous, following = (rank - 1) % world_size, (rank + 1) % world_size

    def made(by, what):
        return torch.full((300, 20), float(10 * by + what), device=device)

    def check(tensor, by, what):
        assert tensor.requires_grad and tensor.device == p2p.device
        assert torch.equal(tensor.detach(), made(by, what)), (rank, by, what, tensor)

    for _ in range(3):
        check(p2p.send_forward_recv_forward(made(rank, 1), True, shape), previous, 1)
        check(p2p.send_backward_recv_backward(made(rank, 2), True, shape), following, 2)
        both = p2p.send_forward_backward_recv_forward_backward(made(rank, 3), made(rank, 4), True, True, shape)
        check(both[0], previous, 3)
        check(both[1], following, 4)
        tensor, works = p2p.send_forward_recv_forward(made(rank, 5), True, shape, overlap_p2p_comm=True)
        other, more = p2p.send_backward_recv_backward(made(rank, 6), True, shape, overlap_p2p_comm=True)
        for work in (*more.values(), *works.values()):
            work.wait()
        check(tensor, previous, 5)
        check(other, following, 6)
        first, last = p2p.is_pp_first_stage, p2p.is_pp_last_stage
        received = p2p.recv_forward([(300, 20), (300, 20)], first)
        for i, tensor in enumerate(received):
            assert tensor is None if first else check(tensor, previous, 7 + i) is None
        p2p.send_forward([made(rank, 7), made(rank, 8)], last)
        grad = p2p.recv_backward((300, 20), last)
        assert grad is None if last else check(grad, following, 9) is None
        p2p.send_backward(made(rank, 9), first)
        if rank < world_size - 1 and rank % 2 == 0:
            check(p2p.send_forward_recv_backward(made(rank, 1), (300, 20), last), following, 2)
        elif rank % 2 == 1:
            check(p2p.send_backward_recv_forward(made(rank, 2), (300, 20), first), previous, 1)
    dist.barrier()


@pytest.mark.parametrize("way", WAYS)
def test_exchanges_bring_what_the_neighbours_sent(peers, way):
    _run(_each, peers, way, each=_exchange, cases=[dict(variable=False), dict(variable=True)])


def _receive_late(rank, world_size):
    """The last rank receives what is sent a while later."""
    config = megatron.ModelParallelConfig(pipeline_dtype=torch.float32)
    p2p = megatron.P2PCommunicator(support.world(), config)
    x = torch.ones(1000, device=GPU)
    for _ in range(2):  # ranks are connected
        p2p.send_forward_recv_forward(x, True, (1000,))
    assert ((x * 7).view(1000).detach() * 2).sum() == 14000  # kernels are loaded, for which CUDA may wait
    torch.cuda.synchronize()
    dist.barrier()
    start = time.monotonic()
    if p2p.is_pp_first_stage:
        torch.cuda._sleep(1_000_000_000)  # half a second, or more
        p2p.send_forward((x * 7).view(1000), False)
    waited, done, total = 0.0, 0.0, 0.0
    if rank == 1:
        received = p2p.recv_forward((1000,), False)
        doubled = received.detach() * 2
        waited = time.monotonic() - start
        total = doubled.sum().item()
        done = time.monotonic() - start
    dist.barrier()
    return SimpleNamespace(waited=waited, done=done, total=total)


def test_an_exchange_orders_the_stream_and_not_the_host(peers):
    late = run_on_gpus(_receive_late, peers)[1]
    assert late.total == 14_000
    assert late.waited < late.done / 2


def _send_from_the_host(rank, world_size):
    torch.cuda.synchronize()  # a process that uses its GPU
    p2p = megatron.P2PCommunicator(support.world(), support.config_of())
    with pytest.raises(ValueError, match=r"a tensor on cpu is sent, expected one on cuda:\d: .*device='cpu'"):
        p2p.send_forward(torch.ones(2), False)
    on_host = megatron.P2PCommunicator(support.world(), support.config_of(), device="cpu")
    x = torch.ones(2, dtype=torch.double)
    received = on_host.send_forward_recv_forward(x, True, (2,))
    assert received.device == x.device and torch.equal(received.detach(), x)


def test_exchanges_are_between_gpus_unless_the_cpu_is_asked_for(peers):
    run_on_gpus(_send_from_the_host, peers)
