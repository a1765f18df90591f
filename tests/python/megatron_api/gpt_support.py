"""GPTs of Megatron-core, and the same training of one by its functions and classes, or by ours."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from farandole import ddp, megatron
from support.devices import seeded

VOCABULARY, SEQUENCE, BATCH = 32, 8, 2


@dataclass
class Options:
    """Of a model, its wrappers and its optimizer."""

    pipeline: int
    virtual: int | None
    experts: int | None  # ranks that share experts
    tied: bool
    mtp: bool
    detaches: bool
    dtype: torch.dtype
    per_token: bool
    ddp: dict[str, Any]
    syncs: bool
    aligns: bool
    clip: float
    microbatches: int
    seed: int
    frozen: int | None = None  # the stage, of all virtual ones


def options_of(rng: random.Random, pipeline: int, experts: int | None, instances: int) -> Options:
    virtual = 2 if pipeline > 1 and rng.random() < 0.4 else None
    tied, mtp, detaches = rng.random() < 0.6, rng.random() < 0.4, rng.random() < 0.5
    sharded = instances > 1 or rng.random() < 0.8
    # On its last stage it then has an output layer, or an embedding, without gradient. With overlap that is an error
    # there and here, unless it is a bucket group of its own.
    leaves_out = mtp and pipeline > 1 and (tied or (detaches and not (sharded and virtual is None)))
    overlaps = rng.random() < 0.7 and not leaves_out
    per_token = rng.random() < 0.3
    return Options(
        pipeline=pipeline,
        virtual=virtual,
        experts=experts,
        tied=tied,
        mtp=mtp,
        detaches=detaches,
        dtype=rng.choice([torch.float32, torch.float32, torch.bfloat16]),
        per_token=per_token,
        ddp={
            "overlap_grad_reduce": overlaps,
            "grad_reduce_in_fp32": rng.random() < 0.5,
            "use_distributed_optimizer": sharded,
            "bucket_size": rng.choice([None, 1, 500, 2000]),
            "overlap_param_gather": sharded and overlaps and rng.random() < 0.6,
            "num_distributed_optimizer_instances": instances,
        },
        syncs=virtual is not None or rng.random() < 0.6,
        # Megatron's instances reduce once more, in the first step, what grad_sync_func has reduced: a sum is doubled.
        aligns=rng.random() < 0.5 and not (instances > 1 and per_token),
        clip=rng.choice([0.0, 0.1, 1.0]),
        microbatches=pipeline * rng.randint(1, 2) if virtual else rng.randint(1, 4),
        seed=rng.randrange(2**31),
    )


def chunks_of(options: Options) -> nn.ModuleList:
    """This rank's part of the model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(options.seed + parallel_state.get_pipeline_model_parallel_rank())
    count = options.virtual or 1
    moe: dict[str, Any] = {}
    if options.experts is not None:
        moe = {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 16,
            "expert_model_parallel_size": options.experts,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    config = TransformerConfig(
        num_layers=max(2, options.pipeline * count),
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        init_method_std=0.3,
        pipeline_model_parallel_size=options.pipeline,
        virtual_pipeline_model_parallel_size=options.virtual,
        pipeline_dtype=options.dtype,
        params_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        # Two ranks cannot batch messages of two virtual stages: what comes first would be taken for the other.
        batch_p2p_comm=options.virtual is None,
        overlap_p2p_comm=options.virtual is not None,
        deallocate_pipeline_outputs=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        calculate_per_token_loss=options.per_token,
        mtp_num_layers=1 if options.mtp else None,
        **moe,
    )
    if options.mtp and hasattr(config, "mtp_detach_heads"):  # 0.16 has none
        config.mtp_detach_heads = options.detaches
    layer = get_gpt_layer_local_spec(num_experts=moe.get("num_moe_experts"))
    chunks = nn.ModuleList()
    for index in range(count):
        stage = None if options.virtual is None else index
        is_first = parallel_state.is_pipeline_first_stage() and index == 0
        is_last = parallel_state.is_pipeline_last_stage() and index == count - 1
        mtp = None
        if options.mtp and is_last:
            mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=stage)
        chunk = GPTModel(
            config,
            layer,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=options.tied,
            position_embedding_type="rope",
            mtp_block_spec=mtp,
            vp_stage=stage,
        )
        rank = parallel_state.get_pipeline_model_parallel_rank()
        chunk.requires_grad_(options.frozen != index * options.pipeline + rank)
        chunks.append(chunk.to(options.dtype))
    return chunks


def batches(seed: int, count: int) -> Iterator[tuple[torch.Tensor, ...]]:
    generator = seeded(seed)
    positions = torch.arange(SEQUENCE)[None].expand(BATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), positions, mask, tokens[:, 1:].contiguous()


def forward_step(iterator: Any, model: Any) -> Any:
    tokens, positions, mask, labels = next(iterator)
    output = model(tokens, positions, mask, labels=labels)

    def mean(output: torch.Tensor) -> Any:
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    def total(output: torch.Tensor) -> Any:
        loss = output.float().sum()
        return loss, torch.tensor(output.numel(), dtype=torch.int), {"loss": loss.detach()}

    return output, total if model.config.calculate_per_token_loss else mean


class Side:
    """A model that is trained by Megatron-core's functions and classes, or by ours."""

    def __init__(self, chunks: nn.ModuleList, options: Options, api: Any):
        """``api``: what has ``DistributedDataParallel`` and the rest."""
        self.chunks, self.options, self._api = chunks, options, api
        self.config = chunks[0].config
        ddp_config = api.DistributedDataParallelConfig(**options.ddp)
        self.models = [
            api.DistributedDataParallel(self.config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        for model in self.models:
            model.broadcast_params()
        self.config.finalize_model_grads_func = api.finalize_model_grads
        if options.ddp["overlap_grad_reduce"] and options.syncs:
            one = lambda functions: functions[0] if len(functions) == 1 else functions  # noqa: E731
            self.config.no_sync_func = one([model.no_sync for model in self.models])
            if options.aligns:
                self.config.grad_sync_func = one([model.start_grad_sync for model in self.models])
                if options.ddp["overlap_param_gather"]:
                    self.config.param_sync_func = one([model.start_param_sync for model in self.models])

    def train(self, seed: int) -> list[torch.Tensor]:
        """A step's forwards and backwards; the losses."""
        self.begin()
        losses = self._api.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[batches(seed, self.options.microbatches) for _ in self.models],
            model=self.models,
            num_microbatches=self.options.microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        return [loss["loss"] for loss in losses]

    def begin(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Of all chunks, whole."""
        if self.options.ddp["overlap_param_gather"]:
            for model in self.models:
                model.start_param_sync(force_sync=True)
        return list(self.chunks.named_parameters())


class Theirs(Side):
    def __init__(self, chunks: nn.ModuleList, options: Options):
        from megatron.core import distributed, optimizer
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        api = SimpleNamespace(
            DistributedDataParallel=distributed.DistributedDataParallel,
            DistributedDataParallelConfig=distributed.DistributedDataParallelConfig,
            finalize_model_grads=finalize_model_grads,
            get_forward_backward_func=get_forward_backward_func,
        )
        super().__init__(chunks, options, api)
        config = optimizer_config(options)
        self.optimizer = optimizer.get_megatron_optimizer(config, self.models, use_gloo_process_groups=False)

    def step(self) -> tuple[float, int]:
        """The norm of the gradients, and their zeros."""
        is_done, norm, zeros = self.optimizer.step()
        assert is_done
        return norm, zeros

    def begin(self) -> None:
        super().begin()
        self.optimizer.zero_grad()


class Ours(Side):
    def __init__(self, chunks: nn.ModuleList, options: Options):
        from megatron.core import optimizer, parallel_state

        super().__init__(chunks, options, megatron)
        config = optimizer_config(options)
        adam = torch.optim.AdamW(
            optimizer._get_param_groups(self.models, config, {}),
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )
        self.optimizer = ddp.DistributedOptimizer(
            adam,
            self.models,
            model_parallel_group=parallel_state.get_model_parallel_group(),
            tensor_parallel_group=parallel_state.get_tensor_model_parallel_group(),
        )

    def step(self) -> tuple[float, int]:
        clip = self.options.clip
        norm = self.optimizer.clip_grad_norm_(clip) if clip > 0 else self.optimizer.grad_norm()
        zeros = self.optimizer.count_zeros()
        self.optimizer.step()
        return norm.item(), zeros

    def begin(self) -> None:
        super().begin()
        self.optimizer.zero_grad()


def optimizer_config(options: Options) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        weight_decay=0.1,
        adam_eps=1e-5,
        clip_grad=options.clip,
        bf16=options.dtype == torch.bfloat16,
        params_dtype=options.dtype,
        use_distributed_optimizer=options.ddp["use_distributed_optimizer"],
        overlap_param_gather=options.ddp["overlap_param_gather"],
        log_num_zeros_in_grad=True,
    )


def sides(options: Options) -> tuple[Theirs, Ours]:
    """With equal weights."""
    theirs, ours = chunks_of(options), chunks_of(options)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.copy_(other)
    return Theirs(theirs, options), Ours(ours, options)
