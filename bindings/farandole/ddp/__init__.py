"""Data parallelism: gradients averaged over replicas while backward still runs, and an optimizer whose state they share."""

from farandole.ddp._optimizer import DistributedOptimizer
from farandole.ddp._timeline import Timeline, TimelineEvent
from farandole.ddp._wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "DistributedOptimizer", "Timeline", "TimelineEvent"]
