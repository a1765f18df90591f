"""The layout in words and in the picture is the one that gradients have: read back from both."""

from __future__ import annotations

import random
import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from farandole.ddp import DistributedDataParallel
from support.processes import run_ranks

SVG = "{http://www.w3.org/2000/svg}"
PIXEL = 0.011  # positions are rounded to hundredths


def _module(rng: random.Random) -> torch.nn.Module:
    layers = []
    for _ in range(rng.randint(1, 5)):
        dtype = rng.choice([torch.float32, torch.bfloat16])
        layers.append(torch.nn.Linear(rng.randint(1, 40), rng.randint(1, 40), bias=rng.random() < 0.5, dtype=dtype))
        if rng.random() < 0.3:
            layers[-1].weight.allreduce = False  # an expert's
    module = torch.nn.Sequential(*layers)
    module.scalar = torch.nn.Parameter(torch.ones(()))
    return module


def _true_places(model: DistributedDataParallel) -> dict[str, tuple[int, int, int]]:
    """By parameter: its buffer's address, and its range there."""
    return {
        name: (
            parameter.main_grad.untyped_storage().data_ptr(),
            parameter.main_grad.storage_offset(),
            parameter.main_grad.storage_offset() + parameter.numel(),
        )
        for name, parameter in model.module.named_parameters()
    }


def _check_text(model: DistributedDataParallel, text: str, sharded: bool, where: str) -> None:
    true = _true_places(model)
    buffers: dict[str, set[int]] = {}
    ends: dict[str, list[tuple[int, int]]] = {}
    for index, line in enumerate(text.splitlines()):
        match = re.match(rf"bucket {index}: buffer (\d+) \(.*?\) \[(\d+), (\d+)\)", line)
        assert match, where
        buffer, begin, end = match[1], int(match[2]), int(match[3])
        ends.setdefault(buffer, []).append((begin, end))
        listed = line[line.rindex(": ") + 2 :]
        spans = [(name, int(a), int(b)) for name, a, b in re.findall(r"(\S+) \[(\d+), (\d+)\)", listed)]
        assert spans and all(begin <= a < b <= end for _, a, b in spans), where
        for name, a, b in spans:
            address, *place = true.pop(name)
            assert place == [a, b], where
            buffers.setdefault(buffer, set()).add(address)
        padding = end - begin - sum(b - a for _, a, b in spans)
        assert (f", {padding} of padding" in line) == (padding > 0), where
        if sharded and dist.get_world_size() > 1:
            size = (end - begin) // dist.get_world_size()
            mine = begin + size * dist.get_rank()
            assert f", this rank's part [{mine}, {mine + size}): " in line, where
    assert not true, where
    assert all(len(addresses) == 1 for addresses in buffers.values()), where
    for ranges in ends.values():  # buckets tile their buffer
        ranges.sort()
        assert [end for _, end in ranges[:-1]] == [begin for begin, _ in ranges[1:]] and ranges[0][0] == 0, where


def _check_picture(svg: str, text: str, width: int, where: str) -> None:
    """Every box is where the text says, in proportion."""
    rows: dict[int, dict[str, Any]] = {}
    for element in ElementTree.fromstring(svg):
        shown = element.get("class")
        if shown == "bucket":
            title = element.find(SVG + "title").text
            index, begin, end = map(int, re.match(r"bucket (\d+) \[(\d+), (\d+)\)", title).groups())
            row = rows[index] = {"whole": element, "range": (begin, end), "parameters": {}, "parts": []}
        elif shown == "parameter":
            name, begin, end = re.match(r"(\S+) \[(\d+), (\d+)\)", element.find(SVG + "title").text).groups()
            row["parameters"][name] = (int(begin), int(end), element)
        elif shown in ("mine", "part"):
            row["parts"].append((shown, element))
    scales = set()
    for index, line in enumerate(text.splitlines()):
        row = rows[index]
        begin, end = row["range"]
        left, across = _at(row["whole"])
        scale = across / (end - begin)
        scales.add(round(scale, 2))
        assert left >= 0 and left + across <= width, where
        listed = line[line.rindex(": ") + 2 :]
        spans = [(name, int(a), int(b)) for name, a, b in re.findall(r"(\S+) \[(\d+), (\d+)\)", listed)]
        assert {name: (a, b) for name, a, b in spans} == {n: one[:2] for n, one in row["parameters"].items()}, where
        for a, b, box in row["parameters"].values():
            assert _at(box) == pytest.approx((left + (a - begin) * scale, (b - a) * scale), abs=2 * PIXEL), where
        mine = [_at(box) for shown, box in row["parts"] if shown == "mine"]
        found = re.search(r"this rank's part \[(\d+), (\d+)\)", line)
        assert len(mine) == (found is not None), where
        if found is not None:
            a, b = int(found[1]), int(found[2])
            assert mine[0] == pytest.approx((left + (a - begin) * scale, (b - a) * scale), abs=2 * PIXEL), where
            assert sum(_at(box)[1] for _, box in row["parts"]) == pytest.approx(across, abs=0.1), where
    assert len(rows) == len(text.splitlines()), where
    assert max(scales) - min(scales) <= 0.02, where


def _at(box: ElementTree.Element) -> tuple[float, float]:
    return float(box.get("x")), float(box.get("width"))


def _layouts(rank: int, world_size: int, first: int) -> None:
    for seed in range(first, first + 15):
        rng = random.Random(seed)
        sharded = rng.random() < 0.6
        model = DistributedDataParallel(
            _module(rng),
            bucket_size=rng.choice([None, 1, 300]),
            use_distributed_optimizer=sharded,
            grad_reduce_in_fp32=rng.random() < 0.4,
        )
        where = f"seed {seed} rank {rank}"
        text = model.bucket_layout()
        _check_text(model, text, sharded, where)
        width = rng.choice([600, 1200])
        svg = model.draw_bucket_layout(width=width)
        assert svg == model.draw_bucket_layout(width=width)
        _check_picture(svg, text, width, where)
    for wrong in (0, -1, "wide"):
        with pytest.raises(ValueError, match=f"width={wrong!r}: expected pixels"):
            model.draw_bucket_layout(width=wrong)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_text_and_the_picture_show_where_gradients_lie(world_size):
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds {first} to {first + 14}")
    run_ranks(_layouts, world_size, "gloo", timeout=60, first=first)
