"""Steps of farandole.megatron beside Megatron-core's own over gloo, called with the same arguments.

1F1B with one transformer layer on each of two ranks, and interleaved 1F1B with two; 16 microbatches of 2 sequences of 64
tokens.
"""

from __future__ import annotations

import importlib.util
import math

from farandole.bench import _pipeline_rank
from farandole.bench._megatron_rank import losses, run_steps
from farandole.bench._ranks import RANKS, RankPair
from farandole.bench._series import Measurement, Report, Sample, Series, Skipped, interleave, ratio
from farandole.bench._settings import Settings

_CASES = {"1F1B": 1, "interleaved 1F1B": 2}  # chunks on each rank
_WIDTHS = (256, 32)
_PEERS = {"farandole": "farandole", "megatron": "Megatron-core over gloo"}
_STEPS = 4  # per round
_WARM_UP = 2


def measure(settings: Settings, pair: RankPair) -> Report:
    if importlib.util.find_spec("megatron") is None:
        raise Skipped("megatron-core is not installed")
    report = Report("megatron", f"a forward-backward step on {RANKS} ranks, {_pipeline_rank.MICROBATCHES} microbatches")
    for case, chunks in _CASES.items():
        for width in _WIDTHS:
            series = {peer: Series(f"{case}, d={width}", label, quantity="step") for peer, label in _PEERS.items()}
            interleave(
                settings.rounds,
                [_measurement(settings, pair, chunks, width, peer, of_peer) for peer, of_peer in series.items()],
                settings.tick,
            )
            _check_losses(pair, case, chunks, width)
            report.series += list(series.values())
            report.ratios.append(ratio("step / farandole's", series["megatron"], series["farandole"]))
    return report


def _measurement(settings: Settings, pair: RankPair, chunks: int, width: int, peer: str, series: Series) -> Measurement:
    def one_round() -> list[list[Sample]]:
        count = settings.count(_STEPS)
        ranks = pair.call(run_steps, peer=peer, chunks=chunks, width=width, warm_up=_WARM_UP, count=count)
        steps = [max(end for _, end in step) - min(start for start, _ in step) for step in zip(*ranks, strict=True)]
        return [[Sample(step, step) for step in steps]]

    return [series], one_round


def _check_losses(pair: RankPair, case: str, chunks: int, width: int) -> None:
    ours, theirs = (
        [loss for of_rank in pair.call(losses, peer=peer, chunks=chunks, width=width) for loss in of_rank]
        for peer in _PEERS
    )
    close = [math.isclose(a, b, rel_tol=1e-5) for a, b in zip(ours, theirs, strict=False)]
    if not (len(ours) == len(theirs) == _pipeline_rank.MICROBATCHES and all(close)):
        raise RuntimeError(f"{case}, d={width}: the losses are {ours}; expected those of Megatron-core: {theirs}")
