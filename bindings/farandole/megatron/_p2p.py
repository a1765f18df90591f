"""Megatron's exchanges with the pipeline's neighbours, for schedules of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from farandole._default_device import default_device
from farandole.megatron._config import StepConfig
from farandole.megatron._shapes import Shape
from farandole.megatron._timing import timed
from farandole.pipelining._devices import channel_of, stage_device

# Two ranks are each other's neighbours on both sides: only the tag tells an activation from a gradient.
_FORWARD, _BACKWARD = 0, 1
_MAX_DIMS = 15  # of tensors whose shapes are exchanged


@dataclass(frozen=True)
class _Message:
    name: str
    is_send: bool
    tensor: torch.Tensor
    peer: int
    tag: int

    @property
    def function(self) -> Callable[..., Any]:
        return dist.isend if self.is_send else dist.irecv


class P2PCommunicator:
    """Exchanges with the ranks before and after this one, with the names and arguments of Megatron-core 0.19's.

    Each call is one batch of sends and receives; those of an edge match by direction, in the order of the calls. The
    neighbours are those of a ring. Tensors that are received require a gradient.

    Args:
        pp_group: the ranks of the pipeline, in order.
        config: of which ``pipeline_dtype``, ``variable_seq_lengths``, ``timers`` and
            ``virtual_pipeline_model_parallel_size`` are read.
        device: of what is sent and received. By default the process's current GPU where it uses one and the group has a
            backend for CUDA tensors, as it is in the first exchange; else the CPU.

    Shapes are those of what is received, a shape or a list of shapes; what is sent or received is then a tensor or a
    list of tensors. With ``config.variable_seq_lengths`` they are not looked at: each shape comes before its tensor,
    between the hosts.

    On a GPU the host waits for nothing but shapes: the current stream waits for what was received. Over NCCL tags are
    not looked at, and with ``config.variable_seq_lengths`` an exchange begins when all shapes have come, as Megatron's
    does.

    Raises:
        ValueError: something is received without a shape or without ``config.pipeline_dtype``, or sent from another device.
        RuntimeError: on a GPU the group has no backend for it, or none for the CPU.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any, device: torch.device | str | None = None):
        self.pp_group = pp_group
        self.config = config
        self._config = StepConfig(config)
        size, rank = pp_group.size(), pp_group.rank()
        self.next_rank = dist.get_global_rank(pp_group, (rank + 1) % size)
        self.prev_rank = dist.get_global_rank(pp_group, (rank - 1) % size)
        self.virtual_pipeline_model_parallel_size = self._config.virtual_pipeline_model_parallel_size
        self._given_device = None if device is None else stage_device(device)

    @functools.cached_property
    def device(self) -> torch.device:
        """Of what is sent and received."""
        if self._given_device is not None:
            return self._given_device
        return default_device(self.pp_group)

    @functools.cached_property
    def _channel(self) -> str:
        return channel_of(self.pp_group, self.device)

    @property
    def is_pp_first_stage(self) -> bool:
        return self.pp_group.rank() == 0

    @property
    def is_pp_last_stage(self) -> bool:
        return self.pp_group.rank() == self.pp_group.size() - 1

    @property
    def total_stages(self) -> int:
        return self.pp_group.size()

    @property
    def current_stage(self) -> int:
        return self.pp_group.rank()

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Activations of the previous rank; None on the first stage."""
        return self._recv(tensor_shapes, is_first_stage, "forward-recv", previous=True)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Gradients from the next rank; None on the last stage."""
        return self._recv(tensor_shapes, is_last_stage, "backward-recv", previous=False)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Activations to the next rank; nothing on the last stage."""
        if not is_last_stage:
            with timed(self._config, "forward-send", 2):
                self._exchange(send_next=_listed(output_tensors))

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Gradients to the previous rank; nothing on the first stage."""
        if not is_first_stage:
            with timed(self._config, "backward-send", 2):
                self._exchange(send_prev=_listed(input_tensor_grads))

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Activations to the next rank, and gradients from it; None on the last stage."""
        outputs, is_list = _listed(output_tensors), isinstance(output_tensors, list)
        if is_last_stage:
            return [None] * len(outputs) if is_list else None
        with timed(self._config, "forward-send-backward-recv", 2):
            _, grads, _ = self._exchange(send_next=outputs, recv_next=_shapes(tensor_shapes, len(outputs)))
        return grads if is_list else grads[0]

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Gradients to the previous rank, and activations from it; None on the first stage."""
        grads, is_list = _listed(input_tensor_grads), isinstance(input_tensor_grads, list)
        if is_first_stage:
            return [None] * len(grads) if is_list else None
        with timed(self._config, "backward-send-forward-recv", 2):
            inputs, _, _ = self._exchange(send_prev=grads, recv_prev=_shapes(tensor_shapes, len(grads)))
        return inputs if is_list else inputs[0]

    def send_forward_recv_forward(
        self,
        output_tensor: torch.Tensor | None,
        recv_prev: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """An activation to the next rank (unless None), and one from the previous if ``recv_prev`` (else None).

        With ``overlap_p2p_comm`` it returns at once: (tensor, works by "send_next" and "recv_prev").
        """
        with timed(self._config, "forward-send-forward-recv", 2):
            inputs, _, works = self._exchange(
                send_next=_given(output_tensor),
                recv_prev=[tensor_shape] if recv_prev else [],
                wait=not overlap_p2p_comm,
            )
        tensor = inputs[0] if recv_prev else None
        return (tensor, works) if overlap_p2p_comm else tensor

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """A gradient to the previous rank (unless None), and one from the next if ``recv_next`` (else None).

        With ``overlap_p2p_comm`` it returns at once: (tensor, works by "send_prev" and "recv_next").
        """
        with timed(self._config, "backward-send-backward-recv", 2):
            _, grads, works = self._exchange(
                send_prev=_given(input_tensor_grad),
                recv_next=[tensor_shape] if recv_next else [],
                wait=not overlap_p2p_comm,
            )
        tensor = grads[0] if recv_next else None
        return (tensor, works) if overlap_p2p_comm else tensor

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """All four at once: (activation of the previous rank, gradient from the next one), None for what is not asked."""
        with timed(self._config, "forward-backward-send-forward-backward-recv", 2):
            inputs, grads, _ = self._exchange(
                send_next=_given(output_tensor),
                send_prev=_given(input_tensor_grad),
                recv_prev=[tensor_shape] if recv_prev else [],
                recv_next=[tensor_shape] if recv_next else [],
            )
        return inputs[0] if recv_prev else None, grads[0] if recv_next else None

    def _recv(self, tensor_shapes: Any, is_end: bool, timer: str, *, previous: bool) -> Any:
        is_single = _is_shape(tensor_shapes)
        shapes = [tensor_shapes] if is_single else list(tensor_shapes)
        tensors: list[Any] = [None] * len(shapes)
        if not is_end:
            with timed(self._config, timer, 2):
                inputs, grads, _ = self._exchange(recv_prev=shapes) if previous else self._exchange(recv_next=shapes)
            tensors = inputs if previous else grads
        return tensors[0] if is_single else tensors

    def _exchange(
        self,
        *,
        send_next: Sequence[torch.Tensor] = (),
        send_prev: Sequence[torch.Tensor] = (),
        recv_prev: Sequence[Any] = (),
        recv_next: Sequence[Any] = (),
        wait: bool = True,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
        """(received from the previous rank, from the next one, works by name)."""
        self._check_sent((*send_next, *send_prev))
        sends = [
            *(_Message("send_next", True, _bare(tensor), self.next_rank, _FORWARD) for tensor in send_next),
            *(_Message("send_prev", True, _bare(tensor), self.prev_rank, _BACKWARD) for tensor in send_prev),
        ]
        if self._config.variable_seq_lengths or self._config.mtp_standalone:
            return self._exchange_with_shapes(sends, len(recv_prev), len(recv_next))
        inputs = [self._empty(shape) for shape in recv_prev]
        grads = [self._empty(shape) for shape in recv_next]
        messages = [
            *(_Message("recv_prev", False, tensor.detach(), self.prev_rank, _FORWARD) for tensor in inputs),
            *(_Message("recv_next", False, tensor.detach(), self.next_rank, _BACKWARD) for tensor in grads),
            *sends,
        ]
        if not wait:
            return inputs, grads, self._post_apart(messages)
        self._exchange_together(messages)
        return inputs, grads, {}

    def _exchange_together(self, messages: list[_Message]) -> None:
        ops = [dist.P2POp(m.function, m.tensor, m.peer, self.pp_group, m.tag) for m in messages]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()

    def _post_apart(self, messages: list[_Message]) -> dict[str, Any]:
        """Each has to be waited for by itself."""
        if self._channel == "one_queue_per_rank" and self.pp_group.rank() % 2 == 0:
            messages = messages[::-1]  # sends first, where the neighbours receive first: no ring of ranks waits
        return {message.name: self._post(message) for message in messages}

    def _post(self, message: _Message) -> Any:
        return message.function(message.tensor, message.peer, self.pp_group, message.tag)

    def _exchange_with_shapes(
        self, sends: list[_Message], num_prev: int, num_next: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
        """Each tensor behind its shape. Whoever waits for one shape holds up no other tensor, unless there is one queue."""
        at_once = self._channel != "one_queue_per_rank"
        group = self.pp_group
        coming = [("recv_prev", self.prev_rank, _FORWARD)] * num_prev
        coming += [("recv_next", self.next_rank, _BACKWARD)] * num_next
        headers = [torch.empty(1 + _MAX_DIMS, dtype=torch.int64, device="cpu") for _ in coming]
        works = []
        for send in sends:
            works.append(dist.isend(_header_of(send.tensor), send.peer, group, send.tag))
            if at_once:
                works.append(self._post(send))
        received, late = [], []
        for header, (name, peer, tag) in zip(headers, coming, strict=True):
            dist.irecv(header, peer, group, tag).wait()
            received.append(self._empty(header[1 : 1 + int(header[0])].tolist()))
            late.append(_Message(name, False, received[-1].detach(), peer, tag))
            if at_once:
                works.append(self._post(late[-1]))
        if not at_once:
            self._exchange_together([*late, *sends])
        for work in works:
            work.wait()
        return received[:num_prev], received[num_prev:], {}

    def _check_sent(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device != self.device:
                raise ValueError(
                    f"a tensor on {tensor.device} is sent, expected one on {self.device}: or give P2PCommunicator "
                    f"device={str(tensor.device)!r}"
                )

    def _empty(self, shape: Any) -> torch.Tensor:
        dtype = self._config.pipeline_dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"config.pipeline_dtype is {dtype!r}, expected the torch.dtype of what is received")
        if shape is None:
            raise ValueError("tensor_shape is None, expected the shape of what is received")
        return torch.empty(tuple(shape), dtype=dtype, device=self.device, requires_grad=True)


def _is_shape(shapes: Any) -> bool:
    if isinstance(shapes, torch.Size):
        return True
    return isinstance(shapes, (list, tuple)) and len(shapes) > 0 and all(isinstance(size, int) for size in shapes)


def _listed(tensors: Any) -> list[Any]:
    return tensors if isinstance(tensors, list) else [tensors]


def _header_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() > _MAX_DIMS:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions is sent, expected at most {_MAX_DIMS}")
    return torch.tensor([tensor.dim(), *tensor.shape] + [0] * (_MAX_DIMS - tensor.dim()), device="cpu")


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _given(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if tensor is None else [tensor]


def _shapes(shapes: Any, count: int) -> list[Any]:
    listed = [shapes] if _is_shape(shapes) else list(shapes)
    if len(listed) != count:
        raise ValueError(f"tensor_shapes has {len(listed)} shapes, expected {count} as there are tensors")
    return listed
