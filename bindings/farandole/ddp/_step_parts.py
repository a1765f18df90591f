"""An optimizer's step in parts, so that parameters leave while others are still updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole.ddp._own_steps import step_held
from farandole.ddp._runs import Run
from farandole.ddp._settings import copy_settings, counters_of, settings_of
from farandole.ddp._wrapper import DistributedDataParallel


class StepParts:
    """Steps an optimizer once for each bucket group, in the order in which parameters are gathered.

    (Megatron-core's overlap_param_gather_with_optimizer_step steps the first virtual stage by itself, then all others.)
    To the optimizer it is one step all the same: each part begins with the settings and the counters that the first one
    found. Hooks of its own run with each part.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, runs: Sequence[Run], models: Sequence[DistributedDataParallel]
    ) -> None:
        self._optimizer = optimizer
        self._parts: list[tuple[Any, list[tuple[int, list[Run]]]]] = []  # by model: its gathers, the runs by group
        for model in models:
            sync = model._param_sync
            assert sync is not None
            group_of = sync.bucket_groups()
            by_group: dict[int, list[Run]] = {group: [] for group in sorted(set(group_of.values()), reverse=True)}
            for run in runs:
                if run.pieces[0].parameter in group_of:
                    by_group[group_of[run.pieces[0].parameter]].append(run)
            self._parts.append((sync, list(by_group.items())))

    def step(self) -> None:
        """Steps, brings the result to the model, and starts the gathers: a collective."""
        before = self._optimizer.param_groups
        settings = settings_of(before)
        counters = counters_of(self._optimizer)
        try:
            for sync, _ in self._parts:
                sync.begin_update()
            for sync, parts in self._parts:
                for bucket_group, runs in parts:
                    vars(self._optimizer).update(counters)
                    self._optimizer.param_groups = stepped = [
                        setting | {"params": [run.tensor for run in runs if run.group == index]}
                        for index, setting in enumerate(settings)
                    ]
                    step_held(self._optimizer)
                    for run in runs:
                        run.publish()
                    sync.updated_through(bucket_group)
        finally:
            self._optimizer.param_groups = before
        copy_settings(stepped, before)
        for sync, _ in self._parts:
            sync.end_update()
