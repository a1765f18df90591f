"""Megatron-core's forward-backward functions, run by the executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from farandole.megatron._calls import call_with_what_it_takes
from farandole.megatron._chunk import Call
from farandole.megatron._config import StepConfig
from farandole.megatron._losses import Collected
from farandole.megatron._models import get_attr_wrapped_model, get_model_config, is_encoder_and_decoder
from farandole.megatron._placement import device_of
from farandole.megatron._refusal import refusal_of_call, refused_on_all_ranks
from farandole.megatron._runs import Run, RunKey, run_for
from farandole.megatron._shapes import AdjustShapes, Lengths, declared_shapes
from farandole.megatron._sync import StepSync
from farandole.megatron._timing import timed
from farandole.megatron._topology import Topology, parallel_state, topology_of
from farandole.pipelining._captures import check_capturable, is_captured
from farandole.pipelining._devices import is_over_ucx


class ForwardBackward:
    """Runs all forwards and backwards of a batch; made by :func:`get_forward_backward_func`.

    Args:
        name: Megatron-core's for this kind.
        pipelined: over the ranks of a pipeline.
        interleaved: over several model chunks on each.
        config: instead of the models'.
    """

    def __init__(self, name: str, *, pipelined: bool, interleaved: bool, config: Any = None):
        self.__name__ = name
        self.pipelined = pipelined
        self._interleaved = interleaved
        self._config = config

    def with_config(self, config: Any) -> ForwardBackward:
        """The same for models that have no config."""
        return ForwardBackward(self.__name__, pipelined=self.pipelined, interleaved=self._interleaved, config=config)

    def __repr__(self) -> str:
        return f"farandole.megatron.{self.__name__}"

    @refused_on_all_ranks
    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: AdjustShapes | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """One step. All ranks of the pipeline call it; if any of them fails, all raise.

        Args:
            forward_step_func: ``(data_iterator, model)`` -> (output tensor, or on the last stage what its loss function
                takes; ``loss_func``), once per microbatch and chunk. ``loss_func(output)`` -> (loss, reduced) or (loss,
                num_tokens, reduced), see below. With
                ``config.num_microbatches_with_partial_activation_checkpoints`` it gets a third argument, whether to
                checkpoint this microbatch.
            data_iterator: given to it as it is; one for each chunk where there are several.
            model: with ``set_input_tensor(list of tensors)``, which is [None] on the first stage, and ``config``
                (see :class:`ModelParallelConfig`), here or in what it wraps; a list of chunks where they are virtual.
            num_microbatches: any number, which may be another one in every call.
            seq_length: of the batch, whole; of the encoder, where there are both.
            micro_batch_size: sequences in a microbatch.
            decoder_seq_length: of the decoder; ``seq_length`` if None.
            forward_only: no backward, no gradients.
            collect_non_loss_data: ``loss_func(output, non_loss_data=True)`` is called, and what it returns collected.
            first_val_step: whether the first microbatch of a forward-only step is announced to the model
                (``set_is_first_microbatch``), as that of every other step is.
            adjust_tensor_shapes_fn: (shapes received, shapes sent) -> the same, as this rank has them; not for chunks.
            p2p_communicator, pg_collection: both, or neither for the groups of ``parallel_state``.
            force_all_reduce: handed on to ``config.finalize_model_grads_func``.

        Returns:
            On ranks with the last stage, what ``loss_func`` returned last, for each microbatch; elsewhere [].

        Of (loss, reduced) the loss is divided by ``num_microbatches`` (and multiplied by the context-parallel size); of
        (loss, num_tokens, reduced) by the tokens of its microbatch, too, or, with ``config.calculate_per_token_loss``, by
        nothing: then ``config.finalize_model_grads_func`` gets the number of tokens of all microbatches, on the last
        stage, and divides.

        Raises:
            RuntimeError: a stage failed on some rank; it names rank, stage and microbatch. The gradients of the step
                are undefined, and the next step runs.
            ValueError, TypeError, NotImplementedError: this rank's arguments do not fit; other ranks raise RuntimeError.
        """
        with refusal_of_call(self.pipelined, p2p_communicator, pg_collection):
            if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
                raise ValueError(f"num_microbatches is {num_microbatches!r}, expected an int of at least 1")
            models = self._chunks(model, "model")
            iterators = self._chunks(data_iterator, "data_iterator", count=len(models))
            config = StepConfig(get_model_config(models[0]) if self._config is None else self._config)
            topology = topology_of(p2p_communicator, pg_collection, self.pipelined)
            if adjust_tensor_shapes_fn is not None and (self._interleaved or not self.pipelined):
                raise ValueError(f"adjust_tensor_shapes_fn was given, expected None: {self.__name__} does not take it")
            lengths = Lengths(seq_length, micro_batch_size, None if self._interleaved else decoder_seq_length)
            run = self._run(models, config, topology, num_microbatches, forward_only, lengths, adjust_tensor_shapes_fn)
            sync = StepSync(
                config, models, topology.pp_rank, topology.pp_size, run.forwards, run.backwards, num_microbatches
            )
            captured = is_captured(run.key.device)
            if captured:
                if run.key.shapes is None and topology.pp_size > 1:
                    raise NotImplementedError(
                        "shapes are exchanged in a step that is captured in a CUDA graph, expected "
                        "config.variable_seq_lengths to be False"
                    )
                if run.key.confirms:
                    raise NotImplementedError(
                        "config.barrier_with_L1_time is True, with config.timers, in a step that is captured in a CUDA "
                        "graph, expected False: the host waits in the timers' barriers"
                    )
                check_capturable(
                    checks_for_nan=run.key.checks_for_nan,
                    wrapped=sync.wrapped(),
                    over_ucx=is_over_ucx(topology.pp_group, run.key.device),
                )
            call = Call(
                forward_step_func=forward_step_func,
                iterators=iterators,
                models=models,
                config=config,
                sync=sync,
                collected=Collected([], torch.zeros([], dtype=torch.int, device=run.key.device)),
                num_microbatches=num_microbatches,
                cp_size=topology.cp_size,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
                max_outstanding=_max_outstanding(config, run),
                device=run.key.device,
            )
        if run.key.confirms:  # nobody waits in the timer's barrier for a rank that refuses
            run.confirm()
        with contextlib.ExitStack() as stack:
            with refusal_of_call(self.pipelined, p2p_communicator, pg_collection):
                stack.enter_context(timed(config, "forward-backward", 1, barrier=config.barrier_with_L1_time))
            try:
                with refusal_of_call(self.pipelined, p2p_communicator, pg_collection):
                    sync.begin()
                run.step(call, captured)
                sync.end()
            except BaseException as error:
                sync.fail(error)
                raise
            finally:
                sync.leave()
            if config.finalize_model_grads_func is not None and not forward_only:
                call_with_what_it_takes(
                    config.finalize_model_grads_func,
                    models,
                    call.collected.num_tokens if config.calculate_per_token_loss else None,
                    pg_collection=topology.pg_collection,
                    force_all_reduce=force_all_reduce,
                )
        if forward_only and not self.pipelined:
            _synchronize_param_gather(models[0])
        return call.collected.data

    def _run(
        self,
        models: list[nn.Module],
        config: StepConfig,
        topology: Topology,
        num_microbatches: int,
        forward_only: bool,
        lengths: Lengths,
        adjust: AdjustShapes | None,
    ) -> Run:
        both = self.pipelined and is_encoder_and_decoder(models[0])
        if both and (topology.split_rank is None or self._interleaved):
            raise ValueError(
                "model_type is encoder_and_decoder, expected pipeline_model_parallel_split_rank to be set and one chunk "
                "on each rank"
            )
        group = config.microbatch_group_size_per_vp_stage if self._interleaved else None
        if group is not None and (not isinstance(group, int) or group < topology.pp_size):
            raise ValueError(
                f"config.microbatch_group_size_per_vp_stage is {group!r}, expected None or an int of at least "
                f"{topology.pp_size}, the ranks of the pipeline"
            )
        shapes = declared_shapes(config, topology, lengths, both, adjust)
        part = (topology.tp_size if config.sequence_parallel else 1) * topology.cp_size
        key = RunKey(
            num_chunks=len(models) if self._interleaved else None,
            num_microbatches=num_microbatches,
            microbatch_group=group,
            forward_only=forward_only,
            both=both,
            confirms=config.timers is not None and bool(config.barrier_with_L1_time),
            checks_for_nan=bool(config.check_for_nan_in_loss_and_grad),
            shapes=None if shapes is None else (lengths, part, config.hidden_size, config.pipeline_dtype),
            device=device_of(models, topology.pp_group),
        )
        relays = both and topology.is_after_split(topology.pp_rank) and topology.pp_rank < topology.pp_size - 1
        if adjust is not None:  # what it says may change from call to call
            return Run(key, topology.pp_group, shapes, relays)
        return run_for(key, topology.pp_group, lambda: Run(key, topology.pp_group, shapes, relays))

    def _chunks(self, given: Any, name: str, count: int | None = None) -> list[Any]:
        """One entry for each chunk of this rank."""
        if self._interleaved:
            if not isinstance(given, list) or not given or (count is not None and len(given) != count):
                shown = f"a list of {len(given)}" if isinstance(given, list) else f"a {type(given).__name__}"
                expected = "at least one" if count is None else str(count)
                raise ValueError(f"{name} is {shown}, expected a list of {expected}: one for each model chunk")
            chunks = given
        else:
            if isinstance(given, list) and len(given) != 1:
                raise ValueError(
                    f"{name} is a list of {len(given)}, expected one: {self.__name__} runs one model chunk on a rank"
                )
            chunks = given if isinstance(given, list) else [given]
        if count is None:
            _check_models(chunks)
        return chunks


def _check_models(chunks: list[Any]) -> None:
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, nn.Module):
            raise TypeError(f"model is a {type(chunk).__name__}, expected a torch.nn.Module (chunk {number})")
        get_attr_wrapped_model(chunk, "set_input_tensor")
        stage = getattr(chunk, "vp_stage", None)
        if len(chunks) > 1 and stage is not None and stage != number:
            raise ValueError(f"model[{number}] has vp_stage {stage}, expected {number}")


def _synchronize_param_gather(model: Any) -> None:
    # Of Megatron's FSDP: what its own function does at this place.
    config = getattr(model, "ddp_config", None)
    if getattr(config, "use_megatron_fsdp", False) and getattr(config, "overlap_param_gather", False):
        model.synchronize_param_gather()


def _max_outstanding(config: StepConfig, run: Run) -> int | None:
    """Megatron's: one more than the forwards of the warm-up."""
    if config.num_microbatches_with_partial_activation_checkpoints is None or run.num_warmup is None:
        return None
    return run.num_warmup + 1


forward_backward_no_pipelining = ForwardBackward("forward_backward_no_pipelining", pipelined=False, interleaved=False)
forward_backward_pipelining_without_interleaving = ForwardBackward(
    "forward_backward_pipelining_without_interleaving", pipelined=True, interleaved=False
)
forward_backward_pipelining_with_interleaving = ForwardBackward(
    "forward_backward_pipelining_with_interleaving", pipelined=True, interleaved=True
)


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
) -> ForwardBackward:
    """The function that runs a step for so many pipeline ranks and chunks on each, as Megatron-core 0.19's.

    Args:
        pp_size: pipeline ranks.
        vp_size: chunks on each rank; None for one that is not virtual.
        schedule_pg_collection: of a pipeline of several modules, which is not supported.

    With neither size, both come from ``megatron.core.parallel_state`` where that is initialized, else from
    :mod:`farandole.megatron.parallel_state`.

    Raises:
        RuntimeError: sizes are asked from a state that is not initialized.
        NotImplementedError: a pipeline of several modules.
    """
    if type(schedule_pg_collection).__name__.startswith("MultiModule"):
        raise NotImplementedError(
            f"schedule_pg_collection is a {type(schedule_pg_collection).__name__}, expected None: pipelines of several "
            "modules are not supported"
        )
    if pp_size is None and vp_size is None:
        state = parallel_state()
        if state is None:
            raise RuntimeError("model parallelism is not initialized, expected it to be, or pp_size and vp_size")
        pp_size = state.get_pipeline_model_parallel_world_size()
        vp_size = state.get_virtual_pipeline_model_parallel_world_size()
    if pp_size is None or pp_size == 1:
        return forward_backward_no_pipelining
    if vp_size is None:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving
