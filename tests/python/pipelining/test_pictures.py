"""Pictures of steps show what the steps are: read back from the SVG, the trace and the text."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import pytest

from farandole.pipelining import chrome_trace, draw_svg, draw_text, lower, memory_over_time, plan, simulate
from pipelining.step_support import is_compute, random_costs, random_memory, random_plans, receives, seeded_random
from support.devices import only_on_cpu

pytestmark = only_on_cpu("no tensors")


SVG = "{http://www.w3.org/2000/svg}"
PIXEL = 0.011  # positions are rounded to hundredths


def _bars(svg: str) -> list[dict[str, Any]]:
    """From top to bottom: the idle rectangle of a rank and step, its compute actions, its curve of memory."""
    bars: list[dict[str, Any]] = []
    for element in ElementTree.fromstring(svg):
        shown = element.get("class")
        if shown == "idle":
            bars.append({"idle": element, "compute": [], "communication": []})
        elif shown == "memory":
            bars[-1]["memory"] = element
        elif shown == "communication":
            bars[-1]["communication"].append(element)
        elif shown is not None:
            bars[-1]["compute"].append(element)
    return bars


def _action(box: ElementTree.Element) -> str:
    return box.find(SVG + "title").text.split(":")[0]


def _number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name))


def test_an_svg_shows_every_action_once_without_overlap_as_long_as_it_lasts() -> None:
    rng = seeded_random()
    for described, made in random_plans(rng, each=4):
        step = simulate(made, random_costs(rng, made.num_stages), transfer=0.25)
        memory = random_memory(rng, made.num_stages)
        svg = draw_svg(step, memory=memory)
        assert svg == draw_svg(step, memory=memory)
        bars = _bars(svg)
        assert len(bars) == made.num_ranks, described
        held = memory_over_time(step, memory)
        scale = _number(bars[0]["idle"], "width") / step.makespan
        for rank, bar in enumerate(bars):
            boxes = bar["compute"]
            assert [_action(box) for box in boxes] == [one for one in made.actions[rank] if is_compute(one)], described
            widths = sum(_number(box, "width") for box in boxes)
            assert widths == pytest.approx(step.ranks[rank].busy * scale, abs=PIXEL * (len(boxes) + 1)), described
            for box, following in itertools.pairwise(boxes):
                assert _number(box, "x") + _number(box, "width") <= _number(following, "x") + PIXEL, described
            arriving = [_action(box).split(" ")[0] for box in bar["communication"]]
            assert sorted(one for one in arriving if "RECV" in one) == sorted(receives(made.actions[rank])), described
            heights = [float(number) for number in re.findall(r"V(-?[\d.]+)", bar["memory"].get("d"))]
            most = max(curve.peak for curve in held)
            room = 24.0 if most > 0 else 0.0
            expected = room * held[rank].peak / max(most, 1.0)
            assert max(heights) - min(heights) == pytest.approx(expected, abs=2 * PIXEL), described


def test_a_trace_shows_every_action_and_message_once_and_the_memory_held() -> None:
    rng = seeded_random()
    for described, made in random_plans(rng, each=4):
        step = simulate(made, random_costs(rng, made.num_stages), transfer=0.25)
        memory = random_memory(rng, made.num_stages)
        events = json.loads(chrome_trace(step, memory=memory))["traceEvents"]
        tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        counters: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                tracks[event["pid"], event["tid"]].append(event)
            elif event["ph"] == "C":
                counters[event["pid"]].append(event)
        for track in tracks.values():
            for event, following in itertools.pairwise(track):
                assert event["ts"] + event["dur"] <= following["ts"] + 2e-3, described
        for rank, curve in enumerate(memory_over_time(step, memory)):
            compute = tracks[rank, 0]
            assert [one["name"] for one in compute] == [one for one in made.actions[rank] if is_compute(one)], described
            assert sum(one["dur"] for one in compute) == pytest.approx(step.ranks[rank].busy * 1e6), described
            others = [
                event for (process, thread), track in tracks.items() if process == rank and thread for event in track
            ]
            arriving = sorted(one["name"] for one in others if "RECV" in one["name"])
            assert arriving == sorted(receives(made.actions[rank])), described
            shown = [one["args"]["bytes"] for one in counters[rank]]
            assert (max(shown), shown[-1]) == (curve.peak, 0.0), described


def test_two_steps_are_on_one_scale_above_each_other_with_their_differences() -> None:
    made = lower(plan("1F1B", 3, 4))
    steps = {"predicted": simulate(made, [(1.0, 2.0, 0, 0)] * 3), "measured": simulate(made, [(1.5, 2.0, 0, 0)] * 3)}
    difference = "measured: step 21 s, bubble 33.3% (step +16.7%, bubble +0.0 points)"
    svg = draw_svg(steps, width=900)
    texts = [element.text for element in ElementTree.fromstring(svg).iter(SVG + "text")]
    assert texts[:2] == ["predicted: step 18 s, bubble 33.3%", difference]
    labels = [text for text in texts if text.startswith("rank")]
    assert labels == [f"rank {rank} {name}" for rank in range(3) for name in steps]
    bars = _bars(svg)
    for predicted, measured in zip(bars[::2], bars[1::2], strict=True):
        assert predicted["idle"].get("x") == measured["idle"].get("x")
        ratio = _number(measured["idle"], "width") / _number(predicted["idle"], "width")
        assert ratio == pytest.approx(21 / 18, rel=1e-3)
        assert _number(measured["idle"], "y") > _number(predicted["idle"], "y")

    document = json.loads(chrome_trace(steps))
    assert document["otherData"]["caption"] == texts[:2]
    processes = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert sorted(processes) == sorted(labels)

    lines = draw_text(steps, 42).splitlines()
    assert lines[:2] == texts[:2]
    assert lines[2].startswith("predicted rank 0 |F0") and lines[3].startswith("measured  rank 0 |F0-")
    assert (lines[2].rindex("|") - lines[2].index("|"), lines[3].rindex("|") - lines[3].index("|")) == (37, 43)


def test_memory_over_time_is_that_of_the_plan_by_hand() -> None:
    step = simulate(plan("ZB-H1", 1, 2), [(1.0, 0.0, 2.0, 3.0)])
    assert [action for action, _, _ in step.ranks[0].actions] == ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]
    (curve,) = memory_over_time(step, [(10.0, 4.0)])
    assert curve.points == ((0, 0), (0, 10), (3, 4), (6, 0), (6, 10), (9, 4), (12, 0))
    assert curve.peak == 10
    with pytest.raises(ValueError, match="expected one for each stage, and there is a stage 0"):
        memory_over_time(step, [])
    with pytest.raises(ValueError, match="memory has 3 numbers for a stage, expected 2"):
        memory_over_time(step, [(1.0, 2.0, 3.0)])


def test_a_step_that_takes_no_time_has_a_picture_too() -> None:
    step = simulate(plan("GPipe", 2, 2), [(0.0, 0.0, 0.0, 0.0)] * 2)
    assert len(_bars(draw_svg(step))) == 2
    assert json.loads(chrome_trace(step))["otherData"]["caption"] == ["step 0 s, bubble 0.0%"]
    assert draw_text({"a": step, "b": step}, 10).splitlines()[1] == "b: step 0 s, bubble 0.0% (bubble +0.0 points)"
    with pytest.raises(ValueError, match="steps is empty"):
        draw_svg({})
