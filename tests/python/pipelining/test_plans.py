"""Plans from Python: made by name, lowered, proven, simulated, read and written."""

from __future__ import annotations

import random
import time

import pytest

from farandole.pipelining import Plan, auto_plan, lower, plan, schedule_names, simulate, validate
from support.devices import only_on_cpu

pytestmark = only_on_cpu("no tensors")


def test_plans_are_made_by_name() -> None:
    assert {"GPipe", "1F1B"} <= set(schedule_names())
    made = plan("1f1b", num_stages=2, n_microbatches=3)
    assert made.actions == [["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]
    assert plan("GPipe", 2, 2, forward_only=True).actions == [["0F0", "0F1"], ["1F0", "1F1"]]
    with pytest.raises(ValueError, match="1F1B"):
        plan("no such schedule", 2, 2)


def test_csv_and_action_texts_round_trip() -> None:
    made = plan("GPipe", 3, 4)
    assert Plan.from_csv(made.to_csv(), made.rank_of_stage) == made
    assert Plan.from_actions(made.actions, made.rank_of_stage, made.num_microbatches) == made
    with pytest.raises(ValueError, match="0X1"):
        Plan.from_actions([["0X1"]], [0], 2)


def test_stages_form_any_graph_that_goes_up() -> None:
    made = plan("1F1B", 3, 4, edges=[(0, 1), (1, 2), (0, 2)])
    assert made.edges == [(0, 1), (1, 2), (0, 2)]
    assert plan("1F1B", 3, 4).edges is None
    lowered = lower(made, "fifo_per_edge")
    assert "0SEND_F0>2" in lowered.actions[0]
    assert Plan.from_csv(lowered.to_csv(), lowered.rank_of_stage, lowered.edges) == lowered
    with pytest.raises(ValueError, match="edge 2 -> 1; expected edges from lower to higher stages"):
        plan("1F1B", 3, 4, edges=[(2, 1)])


def test_csv_names_the_graph_of_stages_which_may_also_be_given_beside_it() -> None:
    edges = [(0, 1), (0, 2), (1, 2)]
    made = lower(plan("1F1B", 3, 4, edges=edges))
    text = made.to_csv()
    bare = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("edges"))
    assert Plan.from_csv(text) == made
    assert Plan.from_csv(bare, edges=edges) == made
    assert Plan.from_csv(text, edges=edges[::-1]).edges == edges[::-1], "the same ones in another order"
    with pytest.raises(
        ValueError, match=r"edges is \[\(0, 1\)\], expected None or those that the text names, \[\(0, 1\), "
    ):
        Plan.from_csv(text, edges=[(0, 1)])
    with pytest.raises(ValueError, match="0SEND_F0>2"):
        validate(Plan.from_csv(bare))
    both = plan("DualPipe", 4, 4, num_ranks=2)
    assert Plan.from_csv(both.to_csv()) == both
    with pytest.raises(ValueError, match=r"microbatches_of_stage is .*, expected None or those that the text names, "):
        Plan.from_csv(both.to_csv(), microbatches_of_stage=[(0, 4)] * 4)


def test_torch_refuses_a_csv_of_a_graph_rather_than_running_it_as_a_chain() -> None:
    from torch.distributed.pipelining.schedules import _Action

    made = plan("1F1B", 2, 2)
    assert [_Action.from_str(cell) for cell in made.to_csv().splitlines()[0].split(",")]
    graph = plan("1F1B", 2, 2, edges=[(0, 1)]).to_csv().splitlines()[-1]
    with pytest.raises(RuntimeError, match="Invalid action string: edges"):
        _Action.from_str(graph.split(",")[0])


def test_dual_pipe_gives_each_copy_half_of_the_microbatches() -> None:
    made = plan("DualPipe", 4, 4, num_ranks=2)
    assert made.edges == [(0, 1), (2, 3)]
    assert made.microbatches_of_stage == [(0, 2), (0, 2), (2, 4), (2, 4)]
    lowered = lower(made, "tagged")
    validate(Plan.from_actions(lowered.actions, lowered.rank_of_stage, 4, lowered.edges, lowered.microbatches_of_stage))


def test_lowered_plans_validate_and_a_deadlock_is_refused() -> None:
    lowered = lower(plan("1F1B", 4, 8), "one_queue_per_rank")
    for channel in ("tagged", "fifo_per_edge", "one_queue_per_rank"):
        validate(lowered, channel)
    actions = lowered.actions
    actions[0].insert(0, actions[0].pop(actions[0].index("0B0")))
    with pytest.raises(ValueError, match="0B0"):
        validate(Plan.from_actions(actions, lowered.rank_of_stage, 8))
    with pytest.raises(ValueError, match="channel is 'pigeon', expected one of"):
        validate(lowered, "pigeon")


def test_simulation_meets_the_closed_form_and_names_a_missing_duration() -> None:
    made = plan("1F1B", 4, 8)
    result = simulate(made, [(1.0, 2.0, 0.0, 0.0)] * 4)
    assert result.makespan == pytest.approx((8 + 4 - 1) * 3)
    assert result.bubble == pytest.approx(3 / 11)
    assert [rank.peak_live_activations for rank in result.ranks] == [4, 3, 2, 1]
    seconds = {action: 1.0 if "F" in action else 2.0 for rank in made.actions for action in rank}
    assert simulate(made, seconds).makespan == result.makespan
    del seconds["2B3"]
    with pytest.raises(ValueError, match="no entry for action 2B3"):
        simulate(made, seconds)
    assert len(result.draw(40).splitlines()) >= 4


def test_options_of_a_schedule_reach_it():
    deep = plan("1F1B", 3, 6, warmup_per_stage=2)
    assert deep.actions[0][:6] == ["0F0", "0F1", "0F2", "0F3", "0F4", "0B0"]
    grouped = plan("Interleaved1F1B", 4, 8, num_ranks=2, microbatch_group=4)
    assert grouped.actions[1][:6] == ["1F0", "1F1", "1F2", "1F3", "3F0", "3B0"]
    with pytest.raises(ValueError, match="microbatchGroup is 1; expected 0"):
        plan("Interleaved1F1B", 4, 8, num_ranks=2, microbatch_group=1)


def test_the_fastest_plan_within_the_memory_is_found_and_says_why() -> None:
    even = [(1.0, 2.0, 1.0, 1.0)] * 8
    free = auto_plan(8, 16, even, num_ranks=4)
    assert free.chosen.makespan == min(one.makespan for one in free.candidates)
    assert simulate(free.plan, even).makespan == free.chosen.makespan
    validate(lower(free.plan, "tagged"), "tagged")

    tight = auto_plan(8, 16, even, num_ranks=4, memory=[(1e9, 0.5e9)] * 8, memory_limit=5e9)
    assert tight.chosen.fits and tight.chosen.peak_memory <= 5e9
    assert "that hold 5000 MB or less" in tight.reason
    with pytest.raises(ValueError, match="memoryLimit is 1000 MB; expected as much as a plan needs"):
        auto_plan(8, 16, even, num_ranks=4, memory=[(1e9, 0.5e9)] * 8, memory_limit=1e9)
    with pytest.raises(ValueError, match="seconds has 3 numbers for a stage, expected 4"):
        auto_plan(1, 1, [(1.0, 2.0, 1.0)])
    with pytest.raises(ValueError, match=r"costs\.memory has 1 entries; expected one for each stage, 8"):
        auto_plan(8, 16, even, num_ranks=4, memory=[(1.0, 1.0)])


def _random_edges(rng: random.Random, num_stages: int) -> list[tuple[int, int]]:
    pairs = [(begin, end) for begin in range(num_stages) for end in range(begin + 1, num_stages)]
    share = rng.random()
    return [pair for pair in pairs if rng.random() < (0.8 if pair[1] == pair[0] + 1 else share / 2)]


def _held_at_most(actions: list[str], memory: list[tuple[float, float]]) -> float:
    """Counted apart from the library: what has begun and not ended, after each action."""
    held: dict[tuple[int, int], float] = {}
    most = 0.0
    for action in actions:
        for text in action.removesuffix("OVERLAP_F_B").strip("()").split(";"):
            kind = next(kind for kind in "FBIW" if kind in text)
            stage, microbatch = (int(number) for number in text.split(kind))
            if kind == "F":
                held[stage, microbatch] = memory[stage][0]
                most = max(most, sum(held.values()))
            elif kind == "I":
                held[stage, microbatch] = memory[stage][1]
            else:
                del held[stage, microbatch]
    return most


def test_auto_plan_takes_any_graph_and_is_never_slower_than_a_schedule() -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    rng = random.Random(seed)
    searched = refused = 0
    for case in range(60):
        num_ranks = rng.randint(1, 4)
        num_stages, count = num_ranks * rng.randint(1, 3), rng.randint(1, 10)
        edges = _random_edges(rng, num_stages)
        seconds = [
            (rng.random(), one + other, one, other)
            for one, other in ((rng.random(), rng.random()) for _ in range(num_stages))
        ]
        memory = [(held, held * rng.random()) for held in (rng.uniform(1, 10) for _ in range(num_stages))]
        transfer, limit = rng.uniform(0, 0.3), rng.uniform(5, 80)
        where = f"seed {seed}, case {case}: {num_stages} stages on {num_ranks}, {count} microbatches, edges {edges}"
        best = float("inf")
        for name in schedule_names():
            try:
                fixed = plan(name, num_stages, count, num_ranks=num_ranks, edges=edges)
            except ValueError:
                continue
            if fixed.edges != edges:
                continue  # DualPipe's two copies are another model
            if max(_held_at_most(actions, memory) for actions in fixed.actions) <= limit:
                best = min(best, simulate(lower(fixed), seconds, transfer).makespan)
        options = {"num_ranks": num_ranks, "transfer": transfer, "memory": memory, "memory_limit": limit}
        try:
            made = auto_plan(num_stages, count, seconds, edges=edges, **options)
        except ValueError as error:
            reason = str(error)
            refused += 1
        else:
            reason = ""
        if reason:
            assert best == float("inf") and "memoryLimit is" in reason, where
            continue
        assert made.plan.edges == edges, where
        assert made.chosen.makespan <= best, where
        assert simulate(lower(made.plan), seconds, transfer).makespan == pytest.approx(made.chosen.makespan), where
        assert max(_held_at_most(actions, memory) for actions in made.plan.actions) <= limit * (1 + 1e-9), where
        for channel in ("tagged", "fifo_per_edge", "one_queue_per_rank"):
            validate(lower(made.plan, channel), channel)
        searched += made.chosen.name.startswith("list")
    assert searched > 5 and refused > 0, f"seed {seed}: {searched} searched, {refused} refused"


def test_edges_of_auto_plan_are_checked_and_may_name_outputs() -> None:
    even = [(1.0, 2.0, 1.0, 1.0)] * 3
    named = auto_plan(3, 4, even, edges=[(0, 1, [0]), (0, 2, [1]), (1, 2)])
    assert named.plan.edges == [(0, 1), (0, 2), (1, 2)]
    assert auto_plan(3, 4, even).plan.edges is None
    with pytest.raises(ValueError, match="edge 2 -> 1; expected edges from lower to higher stages"):
        auto_plan(3, 4, even, edges=[(2, 1)])
    with pytest.raises(ValueError, match="edge 0 -> 3: expected two different stages of 0 to 2"):
        auto_plan(3, 4, even, edges=[(0, 3)])
    with pytest.raises(ValueError, match=r"edges\[1\] is \(1,\), expected \(from, to\) or \(from, to, outputs\)"):
        auto_plan(3, 4, even, edges=[(0, 1), (1,)])  # type: ignore[list-item]


def test_counts_that_are_no_int_are_named() -> None:
    with pytest.raises(TypeError, match=r"num_stages is 2\.0, expected an int"):
        plan("1F1B", 2.0, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="n_microbatches is '4', expected an int"):
        plan("1F1B", 2, "4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"num_ranks is 1\.5, expected an int"):
        plan("1F1B", 2, 4, num_ranks=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"microbatch_group is 2\.0, expected an int"):
        plan("Interleaved1F1B", 4, 4, num_ranks=2, microbatch_group=2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name is 1, expected one of"):
        plan(1, 2, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"n_microbatches is 4\.0, expected an int"):
        auto_plan(2, 4.0, [(1.0, 2.0, 1.0, 1.0)] * 2)  # type: ignore[arg-type]
