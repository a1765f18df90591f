"""Stages that torch.distributed.pipelining made: of a manual split, or of a traced model with the graph between them."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining._refusal import PATIENCE, refusal
from farandole.pipelining._stage import PipelineStage
from farandole.pipelining._stage_edges import Edge

Source = tuple[int, int] | None
"""Of an argument: the stage that returns it, and its place in what that one returns; None for an input of the model."""


class TracedArguments:
    """Brings what the stages before a traced one return into the order of its parameters.

    Inputs of the model are the first stage's arguments; other stages are given them by name, by keyword arguments of
    the step on their rank, as torch has it. Each stage of a rank is given those that it takes.
    """

    def __init__(self, stage_index: int, sources: list[Source]):
        self._is_first = stage_index == 0
        arriving = sorted({source for source in sources if source is not None})
        self._places = [None if source is None else arriving.index(source) for source in sources]

    def of(self, module: nn.Module) -> Callable[..., Any]:
        """The module as the executor calls it."""
        names = list(inspect.signature(_graph_module(module).forward).parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = {name: value for name, value in kwargs.items() if name in names}
            if self._is_first:
                return module(*args, **given)
            if None not in self._places:
                return module(*(args[place] for place in self._places if place is not None), **given)
            arrived = zip(names, self._places, strict=True)
            return module(**{name: args[place] for name, place in arrived if place is not None}, **given)

        return call


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: Any,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
) -> PipelineStage:
    """A stage of a traced model, as torch.distributed.pipelining.build_stage makes one.

        pipe = pipeline(model, mb_args=(x,), split_spec={"layers.4": SplitPoint.BEGINNING})
        stage = build_stage(pipe.get_stage_module(rank), rank, pipe.info(), "cpu")

    What ``pipe.build_stage()`` returns serves as well: schedules take torch's stages, too. Outputs may go to any later
    stages, several of them and not only the next one. Inputs of the model that a later stage takes are given to its
    rank, by keyword.

    Args:
        stage_module: ``pipe.get_stage_module(stage_index)``; it may be wrapped for data parallelism.
        pipe_info: ``pipe.info()``.

    Raises:
        TypeError, ValueError, NotImplementedError: the module is not one of a traced model, or the graph is none that
            stages can be run by.
    """
    with refusal(dist.group.WORLD if group is None and dist.is_initialized() else group, PATIENCE):
        _graph_module(stage_module)
        sources = _sources(pipe_info)
        stage = PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)
        stage.edges = _edges(sources)
        stage.arguments = TracedArguments(stage_index, sources[stage_index])
        return stage


def as_stage(stage: Any) -> Any:
    """A stage of torch's as one of ours; anything else as it is."""
    theirs: Any = sys.modules.get("torch.distributed.pipelining.stage")  # whoever has such a stage has imported it
    if theirs is None or not isinstance(stage, theirs._PipelineStageBase):
        return stage
    if isinstance(stage, theirs._PipelineStage):
        ours = build_stage(stage.submod, stage.stage_index, stage.pipe_info, stage.device, stage.group)
    else:
        ours = PipelineStage(
            stage.submod,
            stage.stage_index,
            stage.num_stages,
            stage.device,
            group=stage.group,
            dw_builder=stage.dw_builder,
            get_mesh=getattr(getattr(stage, "_mesh_cache", None), "_get_mesh_cb", None),
        )
    contexts: Any = getattr(stage, "_forward_contexts", ours.forward_contexts)
    ours.forward_contexts = contexts
    return ours


def edges_between(stages: Sequence[Any], given: Sequence[Edge] | None) -> Sequence[Edge] | None:
    """Those of the traced model that the stages are of, or the ones that were given."""
    traced = next((stage.edges for stage in stages if getattr(stage, "edges", None) is not None), None)
    if traced is not None and given is not None:
        raise ValueError("edges was given, expected None: the stages are of a traced model, whose edges are known")
    return given if traced is None else traced


def _graph_module(module: nn.Module) -> nn.Module:
    while not isinstance(module, torch.fx.GraphModule):
        inner = getattr(module, "module", None)  # of a wrapper for data parallelism
        if not isinstance(inner, nn.Module):
            raise TypeError(f"stage_module is a {type(module).__name__}, expected a module of torch's pipeline()")
        module = inner
    return module


def _sources(pipe_info: Any) -> list[list[Source]]:
    """By stage, where its arguments come from."""
    nodes = [node for node in pipe_info.graph.nodes if node.op == "call_module"]
    if len(nodes) != pipe_info.num_stages:
        raise ValueError(
            f"pipe_info has {len(nodes)} modules, expected one for each of its {pipe_info.num_stages} stages"
        )
    index = {node: i for i, node in enumerate(nodes)}
    return [[_source(arg, index, stage) for arg in node.args] for stage, node in enumerate(nodes)]


def _source(arg: Any, index: dict[Any, int], stage: int) -> Source:
    if getattr(arg, "op", None) == "placeholder":
        return None
    node, place = arg.args if getattr(arg, "target", None) is operator.getitem else (arg, 0)
    if node not in index:
        raise NotImplementedError(f"stage {stage} takes {arg} in pipe_info, expected an input or what a stage returns")
    return index[node], place


def _edges(sources: list[list[Source]]) -> list[Edge] | None:
    """None for a chain in which each stage takes the one thing that the stage before returns."""
    taken: dict[tuple[int, int], set[int]] = {}
    for stage, arguments in enumerate(sources):
        for source in arguments:
            if source is not None:
                taken.setdefault((source[0], stage), set()).add(source[1])
    chain = [(stage, stage + 1) for stage in range(len(sources) - 1)]
    if list(taken) == chain and all(places == {0} for places in taken.values()):
        return None
    return [(begin, end, sorted(places)) for (begin, end), places in taken.items()]
