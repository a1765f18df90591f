"""Random models whose stages form any graph and hand over anything, and what one process makes of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from farandole.pipelining import Plan
from pipelining.pipeline_support import assert_same_gradients

Pairs = list[tuple[int, int]]

# What a stage may return: tensors, of which some may be chosen, with the places of those that have a gradient,
TENSORS = {
    "one": [0],
    "two": [0, 1],
    "integers": [0],
    "strided": [0, 1],
    "without gradient": [0],
    "first input": [1],
}
ANYTHING = ("mixed", "dict")  # and what is only handed on as it is.


class Mix(nn.Module):
    """Takes whatever the stages before it give, and makes what `returns` says of it."""

    def __init__(self, in_features: int, width: int, returns: str):
        super().__init__()
        self.linear = nn.Linear(in_features, width, dtype=torch.double)
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.double))  # the one that stages may share
        self.returns = returns

    def forward(self, *given: Any, scale: torch.Tensor | None = None, offset: float = 0.0) -> Any:
        tensors, factor = taken(given)
        h = self.linear(torch.cat(tensors, dim=1)) + offset
        y = torch.tanh(h) * factor * self.gain
        if scale is not None:
            y = y * scale
        match self.returns:
            case "one":
                return y
            case "two":
                return y, torch.sin(h)
            case "integers":
                return y, torch.arange(len(y))
            case "strided":
                return torch.tanh(h.t()).t()[:, ::2], y
            case "without gradient":
                return y, y.detach() * 2
            case "first input":
                return tensors[0], y
            case "mixed":
                return y, None, {"half": y / 2, "factor": 1.5, "flags": y > 0}, [3, "text"]
            case "dict":
                return {"list": [y, None], "number": 2, "again": y, "counts": torch.arange(len(y)), "name": "dict"}
        raise AssertionError(self.returns)


def taken(given: Any) -> tuple[list[torch.Tensor], Any]:
    """The floating-point tensors among what a stage was given, and what the rest multiplies its output with."""
    tensors, factor = [], torch.ones((), dtype=torch.double)
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            tensors.append(leaf)
        elif isinstance(leaf, torch.Tensor):  # flags have a dimension more than numbers of rows
            numbers = leaf.double() if leaf.dim() == 1 else leaf.double().mean(dim=1)
            factor = factor * (1 + 0.01 * numbers[:, None])
        elif isinstance(leaf, (int, float)):
            factor = factor * (1 + 0.1 * leaf)
        else:
            assert leaf is None or leaf in ("text", "dict"), leaf
    return tensors, factor


@dataclass
class GraphModel:
    """One module for each stage; the same on every rank for the same seed."""

    modules: list[nn.Module]
    pairs: Pairs
    selected: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    in_features: int = 4
    takes_kwargs: bool = False
    tied: tuple[int, int] | None = None  # two stages whose gain is one weight

    @property
    def edges(self) -> list[Any]:
        """As schedules take them."""
        return [(*pair, self.selected[pair]) if pair in self.selected else pair for pair in self.pairs]

    def into(self, stage: int) -> list[int]:
        return sorted(begin for begin, end in self.pairs if end == stage)

    def call(self, stage: int, made: dict[int, Any], batch: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """What the stage returns, given what the stages before it have made."""
        given: list[Any] = []
        for begin in self.into(stage):
            items = list(made[begin]) if isinstance(made[begin], (tuple, list)) else [made[begin]]
            chosen = self.selected.get((begin, stage))
            given += items if chosen is None else [items[i] for i in chosen]
        return self.modules[stage](*given if self.into(stage) else [batch], **kwargs)

    def of_one_copy(self) -> GraphModel:
        """Of two."""
        half = len(self.modules) // 2
        selected = {pair: places for pair, places in self.selected.items() if pair[1] < half}
        return GraphModel(self.modules[:half], [pair for pair in self.pairs if pair[1] < half], selected)

    def order(self) -> list[int]:
        """The stages, each after all that lead to it."""
        order: list[int] = []
        while len(order) < len(self.modules):
            left = [stage for stage in range(len(self.modules)) if stage not in order]
            order.append(next(stage for stage in left if set(self.into(stage)) <= set(order)))
        return order

    def is_last(self, stage: int) -> bool:
        return all(begin != stage for begin, _ in self.pairs)


def chain(num_stages: int) -> Pairs:
    return [(stage, stage + 1) for stage in range(num_stages - 1)]


def random_pairs(rng: random.Random, num_stages: int) -> Pairs:
    """From lower to higher stages, and all to the last one: chains, skips, encoder and decoder, fans."""
    if rng.random() < 0.25:
        return chain(num_stages)
    pairs = set()
    for begin in range(num_stages - 1):
        ends = list(range(begin + 1, num_stages))
        nearest = begin + 1 if rng.random() < 0.7 else rng.choice(ends)
        pairs |= {(begin, end) for end in ends if end == nearest or rng.random() < 0.8 / num_stages}
    return sorted(pairs)


def random_model(rng: random.Random, num_stages: int, pairs: Pairs, only_tensors: bool = False) -> GraphModel:
    """Over every edge goes something that has a gradient: what has none would get None here, and zeros in a pipeline."""
    torch.manual_seed(rng.randrange(2**31))
    model = GraphModel([], pairs, takes_kwargs=rng.random() < 0.3)
    kinds = [*TENSORS] if only_tensors else [*TENSORS, *ANYTHING]
    rows = 3
    batch, kwargs = torch.randn(rows, model.in_features, dtype=torch.double), random_kwargs(rng, model, rows)
    made: dict[int, Any] = {}
    model.modules = [nn.Identity() for _ in range(num_stages)]
    for stage in model.order():
        for begin in model.into(stage):
            returns = model.modules[begin].returns
            if returns in TENSORS and rng.random() < 0.4:
                places = list(range(len(made[begin]) if isinstance(made[begin], tuple) else 1))
                kept = {rng.choice(TENSORS[returns]), *(place for place in places if rng.random() < 0.5)}
                model.selected[begin, stage] = rng.sample(sorted(kept), len(kept))
        model.modules[stage] = _Widths()
        in_features = model.call(stage, made, batch, {})
        returns = "one" if model.is_last(stage) else rng.choice(kinds)
        model.modules[stage] = Mix(in_features, rng.randint(1, 5), returns)
        made[stage] = model.call(stage, made, batch, kwargs)
    return model


def two_copies(model: GraphModel) -> GraphModel:
    """As DualPipe runs them: of the stages n and more, which are equal to those below n."""
    count = len(model.modules)
    pairs = [*model.pairs, *((begin + count, end + count) for begin, end in model.pairs)]
    selected = {(begin + count, end + count): places for (begin, end), places in model.selected.items()}
    return GraphModel(
        [*model.modules, *copy.deepcopy(model.modules)],
        pairs,
        model.selected | selected,
        model.in_features,
        model.takes_kwargs,
    )


class _Widths(nn.Module):
    def forward(self, *given: Any) -> int:
        return sum(tensor.shape[1] for tensor in taken(given)[0])


def random_kwargs(rng: random.Random, model: GraphModel, rows: int) -> dict[str, Any]:
    if not model.takes_kwargs:
        return {}
    return {"scale": torch.rand(rows, 1, dtype=torch.double) + 0.5, "offset": rng.random()}


@dataclass
class Trained:
    modules: list[nn.Module]  # with gradients
    losses: dict[int, torch.Tensor]  # by microbatch
    outputs: dict[int, torch.Tensor]


def train_graph_alone(
    model: GraphModel, plan: Plan, batch: torch.Tensor, target: torch.Tensor, kwargs: dict[str, Any]
) -> Trained:
    """One process, microbatch after microbatch, each stage only those that the plan has it run."""
    count = plan.num_microbatches
    ranges = plan.microbatches_of_stage or [(0, count)] * plan.num_stages
    alone = GraphModel(copy.deepcopy(model.modules), model.pairs, model.selected)
    if model.tied is not None:
        alone.modules[model.tied[1]].gain = alone.modules[model.tied[0]].gain
    for module in alone.modules:
        module.zero_grad()
    copies = count // max(end - begin for begin, end in ranges)
    scales = kwargs["scale"].tensor_split(count) if kwargs else [None] * count
    trained = Trained(alone.modules, {}, {})
    for i, (x, y) in enumerate(zip(batch.tensor_split(count), target.tensor_split(count), strict=True)):
        made: dict[int, Any] = {}
        for stage in (stage for stage in alone.order() if i in range(*ranges[stage])):
            given = {"scale": scales[i], "offset": kwargs["offset"]} if kwargs else {}
            made[stage] = alone.call(stage, made, x, given)
            if model.is_last(stage):
                loss = nn.functional.mse_loss(made[stage], y)
                loss.backward(torch.full_like(loss, copies / count))
                trained.losses[i], trained.outputs[i] = loss.detach(), made[stage].detach()
    return trained


def step_and_compare(
    schedule: Any,
    model: GraphModel,
    plan: Plan,
    rank: int,
    rng: random.Random,
    context: str,
    steps: int = 2,
    after_step: Callable[[], None] | None = None,
) -> None:
    """Steps of a schedule on all ranks, each with the gradients, losses and outputs of one process.

    Steps learn shapes, know them, and from the third on have others. Messages are of all sizes, so that some are still
    on their way when their send is waited for.
    """
    torch.manual_seed(rng.randrange(2**31))  # the same batches on all ranks
    count = plan.num_microbatches
    mine = [stage for stage, owner in enumerate(plan.rank_of_stage) if owner == rank]
    rows = 0
    for step in range(steps):
        if step != 1:
            rows = rng.choice([rng.randint(count, 3 * count), rng.randint(300, 600) * count])
        batch = torch.randn(rows, model.in_features, dtype=torch.double)
        width = next(model.modules[i].linear.out_features for i in range(plan.num_stages) if model.is_last(i))
        target = torch.randn(rows, width, dtype=torch.double)
        kwargs = random_kwargs(rng, model, rows)
        trained = train_graph_alone(model, plan, batch, target, kwargs)
        for stage in mine:
            model.modules[stage].zero_grad()
        losses: list[Any] = []
        output = schedule.step(batch, target=target, losses=losses, **kwargs)
        if after_step is not None:
            after_step()
        where = f"{context}, step {step}, rank {rank}"
        compare(model, trained, mine, where)
        ended = _ended_in(model, plan, mine)
        if not ended:
            assert output is None and losses == [], where
            continue
        torch.testing.assert_close(torch.stack(losses), torch.stack([trained.losses[i] for i in ended]), msg=where)
        torch.testing.assert_close(output, torch.cat([trained.outputs[i] for i in ended]), msg=where)


def compare(model: GraphModel, trained: Trained, stages: list[int], where: str) -> None:
    for stage in stages:
        # Weights' gradients may come in another order of microbatches, and tensors in another layout.
        assert_same_gradients(model.modules[stage], trained.modules[stage], f"{where}, stage {stage}", tolerance=1e-9)


def _ended_in(model: GraphModel, plan: Plan, stages: list[int]) -> list[int]:
    ranges = plan.microbatches_of_stage or [(0, plan.num_microbatches)] * plan.num_stages
    return sorted(i for stage in stages if model.is_last(stage) for i in range(*ranges[stage]))
