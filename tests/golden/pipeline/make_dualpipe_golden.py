"""Writes the dualpipe_*.csv beside it with the authors' own class: run it again to renew them.

It takes github.com/deepseek-ai/DualPipe (version 1.0.0) on the path, and needs no GPU: what computes and what
communicates is replaced by notes of what is called.
"""

import csv
import pathlib

import torch
from dualpipe import DualPipe, WeightGradStore, comm

HERE = pathlib.Path(__file__).parent


class Recorder(DualPipe):
    """One rank's calls, as actions. Stages from num_ranks on are the second copy's."""

    def __init__(self, rank, num_ranks, num_chunks):
        torch.nn.Module.__init__(self)
        self.rank, self.num_ranks, self.half = rank, num_ranks, num_chunks // 2
        self.batch_dim = 0
        self.is_first_rank, self.is_last_rank = rank == 0, rank == num_ranks - 1
        self.is_in_second_half = rank >= num_ranks // 2
        self.is_middle_rank = rank in (num_ranks // 2 - 1, num_ranks // 2)
        self.actions, self.counts, self.left = [], {}, []

    def _next(self, kind, phase):
        copy = phase ^ self.is_in_second_half
        count = self.counts.get((kind, copy), 0)
        self.counts[kind, copy] = count + 1
        stage = self.rank if copy == 0 else 2 * self.num_ranks - 1 - self.rank
        return stage, copy * self.half + count

    def _forward(self, phase):
        self.loss_chunks.append(torch.zeros(()))
        return "{}F{}".format(*self._next("F", phase))

    def _forward_compute_chunk(self, phase):
        self.actions.append(self._forward(phase))

    def _backward_compute_chunk(self, phase, enable_zb=False):
        stage, microbatch = self._next("B", phase)
        self.actions.append(f"{stage}{'I' if enable_zb else 'B'}{microbatch}")
        if enable_zb:
            WeightGradStore.put(lambda: self.actions.append(f"{stage}W{microbatch}"))
            WeightGradStore.flush()

    def _forward_backward_compute_chunk(self, phase0, phase1):
        forward = self._forward(phase0)
        self.actions.append("({};{}B{})OVERLAP_F_B".format(forward, *self._next("B", phase1)))

    def _nothing(self, *args):
        pass

    _recv_forward = _send_forward = _recv_backward = _send_backward = _commit_and_wait_comm = _nothing


def actions_of(rank, num_ranks, num_chunks):
    recorder = Recorder(rank, num_ranks, num_chunks)
    at_end = rank in (0, num_ranks - 1)
    recorder.step(num_chunks=num_chunks, criterion=torch.sum if at_end else None)
    return recorder.actions


comm.set_p2p_tensor_shapes([(1,)])
comm.set_p2p_tensor_dtype(torch.float32)
for p, m in [(2, 4), (4, 8), (4, 10), (6, 12), (8, 20)]:
    with open(HERE / f"dualpipe_p{p}_m{m}.csv", "w", newline="") as file:
        csv.writer(file).writerows(actions_of(rank, p, m) for rank in range(p))
