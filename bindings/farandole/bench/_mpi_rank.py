"""One rank of Intel MPI: run by another environment's Python under mpiexec, with numpy and mpi4py and nothing else.

usage: _mpi_rank.py SOCKET

It connects to the socket and says its rank and the library. Each line that it then reads, the same for all ranks, is one
measurement: "OPERATION BYTES WARM_UP COUNT SAMPLES". The answer is a line of JSON: [[median, mean], ...], seconds of
one operation for each sample. It sleeps in the kernel meanwhile, so that it takes nothing from its peers.
"""

import json
import socket
import statistics
import sys
from time import perf_counter

import numpy as np  # type: ignore[import-not-found, unused-ignore]
from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
TOTAL = float(sum(range(1, SIZE + 1)))


def all_reduce(numel):
    data = np.full(numel, RANK + 1, np.float32)
    COMM.Allreduce(MPI.IN_PLACE, data)
    check(data, [TOTAL] * SIZE)
    data.fill(0)  # stays what it is however often it is summed
    return lambda: COMM.Allreduce(MPI.IN_PLACE, data)


def all_to_all(numel):
    mine, others = np.full(numel, RANK + 1, np.float32), np.zeros(numel, np.float32)
    COMM.Alltoall(mine, others)
    check(others, range(1, SIZE + 1))
    return lambda: COMM.Alltoall(mine, others)


def all_gather(numel):
    mine, all_of_it = np.full(numel // SIZE, RANK + 1, np.float32), np.zeros(numel, np.float32)
    COMM.Allgather(mine, all_of_it)
    check(all_of_it, range(1, SIZE + 1))
    return lambda: COMM.Allgather(mine, all_of_it)


def reduce_scatter(numel):
    all_of_it, mine = np.full(numel, RANK + 1, np.float32), np.zeros(numel // SIZE, np.float32)
    COMM.Reduce_scatter_block(all_of_it, mine)
    check(mine, [TOTAL])
    return lambda: COMM.Reduce_scatter_block(all_of_it, mine)


OPERATIONS = {
    "all_reduce": all_reduce,
    "all_to_all_single": all_to_all,
    "all_gather_into_tensor": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
}


def check(data, values):
    """The array has equal parts, one for each value, and is that value all over it."""
    for part, value in zip(np.split(data, len(values)), values):  # noqa: B905 (any Python that has mpi4py)
        if not (part == value).all():
            raise RuntimeError(f"rank {RANK}: a collective of {data.nbytes} bytes gave {part[:4]}..., not {value}")


def measure(name, size, warm_up, count, samples):
    # As farandole.bench._timing does, which this environment cannot import.
    operation = OPERATIONS[name](size // np.dtype(np.float32).itemsize)
    for _ in range(warm_up):
        operation()
    result = []
    for _ in range(samples):
        ends = [perf_counter()]
        for _ in range(count):
            operation()
            ends.append(perf_counter())
        taken = [end - start for start, end in zip(ends, ends[1:])]  # noqa: B905
        result.append([statistics.median(taken), (ends[-1] - ends[0]) / count])
    return result


def main():
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        with connection.makefile("rw") as stream:
            stream.write(json.dumps([RANK, MPI.Get_library_version().strip("\0 \n")]) + "\n")
            stream.flush()
            for line in stream:
                name, *numbers = line.split()
                stream.write(json.dumps(measure(name, *map(int, numbers))) + "\n")
                stream.flush()


if __name__ == "__main__":
    main()
