"""What programs import from ``torch.distributed.pipelining.stage``, under the same names."""

from farandole.pipelining._forward_context import PipelineStageInfo
from farandole.pipelining._stage import PipelineStage
from farandole.pipelining._torch_stages import build_stage

__all__ = ["PipelineStage", "PipelineStageInfo", "build_stage"]
