#!/usr/bin/env python
"""Train a recommender's model on flights, by a plain loop, torchrec's pipeline and farandole's, and compare them.

The model predicts which flights from New York arrive more than 15 minutes late. It is of the kind of DLRM: tables of
embeddings, sharded by torchrec (large ones by rows, small ones whole), and perceptrons, which are replicated. Each
loop trains a copy of it from the same weights on the same batches; they take turns, so that all meet the same
machine. At the end rank 0 reports how well held-out flights are predicted, the steps per second of each loop, and
whether all had the same losses.
"""

import argparse
import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist

EXAMPLES = """
examples:
  python examples/recsys.py                                     2 ranks
  torchrun --nproc-per-node 4 examples/recsys.py --threads 1
  python examples/recsys.py --loops plain:gloo torchrec:gloo torchrec:farandole --epochs 0.5
"""
LOOPS = ["plain:gloo", "torchrec:gloo", "plain:farandole", "farandole:farandole"]


def parse() -> argparse.Namespace:
    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    def loop(value: str) -> str:
        kind, _, backend = value.partition(":")
        if kind not in ("plain", "torchrec", "farandole") or backend not in ("gloo", "farandole"):
            raise argparse.ArgumentTypeError(f"{value}: expected plain, torchrec or farandole, ':', gloo or farandole")
        return value

    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    parser.add_argument("--ranks", type=int, default=2, help="to start; torchrun decides where it started this")
    parser.add_argument(
        "--loops",
        type=loop,
        nargs="+",
        default=LOOPS,
        metavar="LOOP:BACKEND",
        help="which to compare; the first is what the losses of the others should be",
    )
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0: cores / processes")
    parser.add_argument("--epochs", type=float, default=2, help="passes over the training part")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each loop; the first is not timed")
    parser.add_argument("--batch", type=int, default=512, help="flights of a rank in a step")
    parser.add_argument("--width", type=int, default=16, help="of an embedding")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of perceptrons; tables have thrice that")
    parser.add_argument("--seed", type=int, default=0, help="of split, weights and batches")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of a loss between loops")
    return parser.parse_args()


def start_ranks(count: int) -> None:
    """Becomes torchrun, which starts this program again."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun says that it does that
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    os.execv(sys.executable, [*launch, "--nproc-per-node", str(count), *sys.argv])


def train(arguments: argparse.Namespace) -> int:
    from recsys_model import flights, report
    from recsys_model.batches import batches, whole
    from recsys_model.loops import Contestant, pipeline
    from recsys_model.model import Dlrm
    from recsys_model.sharding import shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = flights.load(arguments.seed)
    steps = int(arguments.epochs * len(data.train)) // (arguments.batch * ranks * arguments.rounds)
    if steps < 1:
        sys.exit(f"--epochs {arguments.epochs} have no step for each of {arguments.rounds} rounds")
    if rank == 0:
        report.opening(data, arguments.batch, ranks, steps, arguments.rounds)
    contestants = []
    for name in arguments.loops:
        kind, backend = name.split(":")
        group = dist.new_group(backend=backend)
        plain = Dlrm(data.rows, data.train.numbers.shape[1], arguments.width, arguments.seed)
        model, optimizer = shard(plain, group, arguments.learning_rate, arguments.seed)
        own = batches(data.train, arguments.batch, steps * arguments.rounds, rank, ranks, arguments.seed)
        contestants.append(Contestant(f"{kind} over {backend}", pipeline(kind, model, optimizer), own))
    for _ in range(arguments.rounds):
        for contestant in contestants:
            contestant.run(steps)

    results = []
    batch = whole(data.held_out, rank, ranks)
    for contestant in contestants:
        logits = contestant.predict(batch)
        if logits is not None:
            results.append(report.Result(contestant.name, contestant.speeds, contestant.losses, logits))
    if rank != 0:
        return 0
    late = torch.from_numpy(data.held_out.late)[: len(results[0].logits)]
    report.findings(results, late, float(data.train.late.mean()))
    return report.check(results, arguments.tolerance)


def main() -> int:
    arguments = parse()
    try:
        from farandole.sparse._requirements import require_torchrec

        require_torchrec()
    except ImportError as error:
        sys.exit(str(error))
    if "RANK" not in os.environ:
        start_ranks(arguments.ranks)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(arguments.threads or max(1, cores // int(os.environ["WORLD_SIZE"])))
    # Of torchrec to torch, which users can do nothing about.
    warnings.filterwarnings("ignore", category=UserWarning, module="torchrec")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    dist.init_process_group("farandole")
    status = train(arguments)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
