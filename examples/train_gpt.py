#!/usr/bin/env python
"""Train a byte-level GPT with pipeline and data parallelism, and check it against plain training.

The processes that torchrun starts form a grid, replicas x stages. Each replica is a pipeline (schedule 1F1B over
farandole.pipelining); the replicas of a stage average their gradients while backward still runs
(farandole.ddp). At the end one process reports: the held-out loss beside that of a bigram model, the transport
between each pair of ranks, the pipeline bubble measured and predicted, a sample of generated text, and whether the
losses are those of the same training in one plain process.
"""

import argparse
import os
import pathlib
import sys

import torch
import torch.distributed as dist

from gpt import report, text
from gpt.model import Shape
from gpt.parallel import Pipeline
from gpt.recipe import Recipe

EXAMPLES = """
examples:
  torchrun --nproc-per-node 4 examples/train_gpt.py                        2 stages x 2 replicas
  torchrun --nproc-per-node 4 examples/train_gpt.py --backend gloo         the same over gloo
  torchrun --nproc-per-node 4 examples/train_gpt.py --stages 4             4 stages, 1 replica
  torchrun --nproc-per-node 2 examples/train_gpt.py --text book.txt --steps 2000 --width 256
"""


def parse() -> argparse.Namespace:
    def positive(value: str) -> int:
        number = int(value)
        if number < 1:
            raise argparse.ArgumentTypeError(f"{number}: expected at least 1")
        return number

    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        def _get_help_string(self, action: argparse.Action) -> str | None:
            return action.help if action.default is None else super()._get_help_string(action)

    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=Formatter)
    group = parser.add_argument_group("parallelism")
    group.add_argument("--backend", default="farandole", help="of torch.distributed: farandole or gloo")
    group.add_argument("--stages", type=positive, default=2, help="pipeline stages; processes / stages are replicas")
    group.add_argument("--microbatches", type=positive, default=4, help="of each replica in a step")
    group.add_argument("--threads", type=positive, default=None, help="of each process (default: cores / processes)")
    group = parser.add_argument_group("text")
    group.add_argument("--text", type=pathlib.Path, default=None, help="a file (default: Python's language reference)")
    group.add_argument("--prompt", default="The ", help="what the sample begins with")
    group.add_argument("--sample", type=int, default=400, help="bytes to generate")
    group = parser.add_argument_group("model")
    group.add_argument("--layers", type=positive, default=4, help="transformer blocks")
    group.add_argument("--width", type=positive, default=128, help="of the residual stream")
    group.add_argument("--heads", type=positive, default=4, help="attention heads; must divide the width")
    group.add_argument("--length", type=positive, default=128, help="bytes of context")
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=positive, default=600, help="optimizer steps")
    group.add_argument("--batch", type=positive, default=16, help="rows of a step, over all replicas")
    group.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak")
    group.add_argument("--warmup", type=positive, default=60, help="steps until the peak")
    group.add_argument("--seed", type=int, default=0, help="of weights, batches and sample")
    group = parser.add_argument_group("check against one plain process")
    group.add_argument("--check-steps", type=int, default=100, help="steps to repeat in one process; 0: none")
    group.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of a loss, in nats")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("this is one of several processes: start it with torchrun, or ./dev demo (see the examples)")
    processes = int(os.environ["WORLD_SIZE"])
    if processes % arguments.stages:
        parser.error(f"--stages {arguments.stages} does not divide the number of processes, {processes}")
    if arguments.layers < arguments.stages:
        parser.error(f"--layers {arguments.layers}: expected at least one for each of {arguments.stages} stages")
    rows = processes // arguments.stages * arguments.microbatches
    if arguments.batch % rows:
        parser.error(f"--batch {arguments.batch}: expected a multiple of replicas x microbatches, {rows}")
    if arguments.width % arguments.heads:
        parser.error(f"--heads {arguments.heads} does not divide --width {arguments.width}")
    return arguments


def main() -> int:
    arguments = parse()
    corpus = text.load(arguments.text)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(arguments.threads or max(1, cores // int(os.environ["WORLD_SIZE"])))
    shape = Shape(arguments.layers, arguments.width, arguments.heads, arguments.length)
    recipe = Recipe(shape, arguments.batch, arguments.steps, arguments.learning_rate, arguments.warmup, arguments.seed)

    dist.init_process_group(arguments.backend)
    pipeline = Pipeline(recipe, arguments.stages, arguments.microbatches)
    if pipeline.reports:
        report.opening(recipe, corpus, arguments.backend, pipeline.replicas, arguments.stages, arguments.microbatches)
    with report.Progress("training", recipe.steps, recipe.batch * shape.length, pipeline.reports) as progress:
        losses = pipeline.train(corpus, progress.tick)
    finding = pipeline.collect()
    dist.destroy_process_group()
    if finding is None:
        return 0

    report.transports(finding.transports)
    report.bubble(finding.bubble)
    report.held_out(finding.model, corpus, shape.length)
    report.generated(finding.model, arguments.prompt, arguments.sample, shape.length, arguments.seed)
    return report.check(recipe, corpus, losses, min(arguments.check_steps, recipe.steps), arguments.tolerance)


if __name__ == "__main__":
    sys.exit(main())
