"""Random plans that run, and what they become by chance: actions swapped, left out, done twice, moved, changed."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

from farandole.pipelining import Plan, auto_plan, lower, plan, schedule_names
from pipelining.graph_support import Pairs
from support.devices import ON_CPU

# What plans that run may be lowered for, the first being what schedules lower theirs for: NCCL is taken for one queue.
CHANNELS = ("tagged", "fifo_per_edge", "one_queue_per_rank") if ON_CPU else ("one_queue_per_rank",)
_PER_RANK = {"DualPipe": (2,), "DualPipeV": (2,), "ZBV": (2,), "V-Half": (2,), "V-Min": (2,)}
ONE_STAGE = ("GPipe", "1F1B", "ZB-H1", "ZB-H2")


def counts_for(rng: random.Random, name: str, num_ranks: int, most_microbatches: int = 6) -> tuple[int, int]:
    """Stages and microbatches that the schedule can run."""
    for _ in range(10_000):
        per_rank = 1 if name in ONE_STAGE else rng.choice(_PER_RANK.get(name, (1, 2, 3)))
        num_stages, count = num_ranks * per_rank, rng.randint(1, most_microbatches)
        try:
            plan(name, num_stages, count, num_ranks=num_ranks)
        except ValueError:
            continue
        return num_stages, count
    raise AssertionError(f"no counts were found that {name} can run on {num_ranks} ranks")


def random_order(rng: random.Random, owners: list[int], num_ranks: int, count: int, pairs: Pairs) -> Plan:
    """Any order in which the stages can run, with backwards whole or in halves."""
    num_stages = len(owners)
    into = [{begin for begin, end in pairs if end == stage} for stage in range(num_stages)]
    out_of = [{end for begin, end in pairs if begin == stage} for stage in range(num_stages)]
    left = {(stage, "F", i) for stage in range(num_stages) for i in range(count)}
    done: set[tuple[int, str, int]] = set()
    actions: list[list[str]] = [[] for _ in range(num_ranks)]
    eagerness = rng.uniform(0, 0.9)  # to take a backward

    def is_ready(stage: int, kind: str, i: int) -> bool:
        if kind == "F":
            return all((begin, "F", i) in done for begin in into[stage])
        return kind == "W" or all((end, "I", i) in done for end in out_of[stage])

    while left:
        ready = sorted(action for action in left if is_ready(*action))
        backwards = [action for action in ready if action[1] != "F"]
        stage, kind, i = rng.choice(backwards if backwards and rng.random() < eagerness else ready)
        left.remove((stage, kind, i))
        done.add((stage, kind, i))
        if kind == "F":
            left.add((stage, "I", i))
        is_whole = kind == "I" and rng.random() < 0.5
        if kind == "I" and not is_whole:
            left.add((stage, "W", i))
        actions[owners[stage]].append(f"{stage}{'B' if is_whole else kind}{i}")
    return Plan.from_actions(actions, owners, count, pairs)


def random_owners(rng: random.Random, num_stages: int, num_ranks: int) -> list[int]:
    """Any table in which every rank has a stage."""
    owners = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    rng.shuffle(owners)
    return owners


def random_plan(rng: random.Random, num_ranks: int, num_stages: int, count: int, pairs: Pairs) -> Plan:
    """With messages: a schedule that can run these counts, one that is searched for, or any order."""
    owners = random_owners(rng, num_stages, num_ranks)
    names = ["any order", "auto_plan", *schedule_names()]
    while True:
        name = rng.choice(names)
        if name == "any order":
            made = random_order(rng, owners, num_ranks, count, pairs)
        elif name == "auto_plan":
            costs = [(rng.random(), one + other, one, other) for one, other in _uniform_pairs(rng, num_stages)]
            made = auto_plan(
                num_stages, count, costs, num_ranks=num_ranks, transfer=rng.random(), rank_of_stage=owners, edges=pairs
            ).plan
        else:
            try:
                made = plan(name, num_stages, count, num_ranks=num_ranks, edges=pairs)
            except ValueError:
                continue
            if made.edges != pairs:  # two copies of another model
                continue
        return lower(made, rng.choice(CHANNELS))


def _uniform_pairs(rng: random.Random, count: int) -> list[tuple[float, float]]:
    return [(rng.random(), rng.random()) for _ in range(count)]


@dataclass
class Draft:
    """The parts of a plan, to be changed."""

    actions: list[list[str]]
    owners: list[int]
    count: int
    pairs: Pairs | None
    ranges: list[tuple[int, int]] | None
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, made: Plan) -> Draft:
        return cls(
            made.actions, list(made.rank_of_stage), made.num_microbatches, made.edges, made.microbatches_of_stage
        )

    def plan(self) -> Plan:
        """May refuse with ValueError what is no plan at all."""
        return Plan.from_actions(self.actions, self.owners, self.count, self.pairs, self.ranges)

    def is_a_plan(self) -> bool:
        """It may be one that cannot run."""
        try:
            self.plan()
        except ValueError:
            return False
        return True

    def text(self) -> str:
        rows = "\n".join(" ".join(row) for row in self.actions)
        return f"{', '.join(self.changes)}; owners {self.owners}, edges {self.pairs}, ranges {self.ranges}\n{rows}"


def mutated(rng: random.Random, made: Plan) -> Draft:
    """The plan after one to three changes."""
    draft = Draft.of(made)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(list(_CHANGES))
        if not any(draft.actions):
            break
        _CHANGES[name](rng, draft)
        draft = replace(draft, changes=(*draft.changes, name))
    return draft


def _any_row(rng: random.Random, draft: Draft) -> list[str]:
    return rng.choice([row for row in draft.actions if row])


def _swap(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    row[i], row[j] = row[j], row[i]


def _swap_neighbours(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    i = rng.randrange(len(row))
    row[i - 1], row[i] = row[i], row[i - 1]


def _drop(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    row.pop(rng.randrange(len(row)))


def _repeat(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    row.insert(rng.randint(0, len(row)), rng.choice(row))


def _move(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    action = row.pop(rng.randrange(len(row)))
    row.insert(rng.randint(0, len(row)), action)


def _move_messages(rng: random.Random, draft: Draft) -> None:
    """Each message a few places on or back: much of it can still run."""
    row = _any_row(rng, draft)
    for _ in range(rng.randint(1, 6)):
        i = rng.randrange(len(row))
        if "SEND" in row[i] or "RECV" in row[i] or "P2P" in row[i]:
            action = row.pop(i)
            row.insert(min(len(row), max(0, i + rng.randint(-4, 4))), action)


def _move_to_another_rank(rng: random.Random, draft: Draft) -> None:
    row, other = _any_row(rng, draft), rng.choice(draft.actions)
    action = row.pop(rng.randrange(len(row)))
    other.insert(rng.randint(0, len(other)), action)


def _change_microbatch(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    i = rng.randrange(len(row))
    count = max(1, draft.count)  # another change may have left none
    row[i] = re.sub(r"([A-Z])\d+", lambda found: f"{found[1]}{rng.randrange(count)}", row[i], count=1)


def _turn_message(rng: random.Random, draft: Draft) -> None:
    """A send becomes a receive, or a receive a send; or one of an activation one of a gradient."""
    row = _any_row(rng, draft)
    places = [i for i, action in enumerate(row) if "SEND_" in action or "RECV_" in action]
    if not places:
        return
    i = rng.choice(places)
    turns = rng.choice([{"SEND": "RECV", "RECV": "SEND"}, {"_F": "_B", "_B": "_F"}])
    row[i] = re.sub(
        "SEND|RECV" if "SEND" in turns else "_[FB](?=[0-9])", lambda found: turns[found[0]], row[i], count=1
    )


def _readdress(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    i = rng.randrange(len(row))
    stage = rng.randrange(len(draft.owners))
    row[i] = re.sub(
        r"(SEND_F|RECV_B)(\d+)(>\d+)?|(RECV_F|SEND_B)(\d+)(<\d+)?",
        lambda found: f"{found[1]}{found[2]}>{stage}" if found[1] else f"{found[4]}{found[5]}<{stage}",
        row[i],
        count=1,
    )


def _take_batches_apart(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    places = [i for i, action in enumerate(row) if "BATCH_P2P" in action]
    if not places:
        return
    i = rng.choice(places)
    parts = row[i].removesuffix("BATCH_P2P").strip("()").split(";")
    rng.shuffle(parts)
    row[i : i + 1] = parts


def _join(rng: random.Random, draft: Draft, pattern: str, kind: str) -> None:
    """Two neighbours that are such actions become one of this kind."""
    row = _any_row(rng, draft)
    fits = [bool(re.fullmatch(pattern, action)) for action in row]
    places = [i for i in range(len(row) - 1) if fits[i] and fits[i + 1]]
    if places:
        i = rng.choice(places)
        row[i : i + 2] = [f"({row[i]};{row[i + 1]}){kind}"]


def _make_batches(rng: random.Random, draft: Draft) -> None:
    _join(rng, draft, r"\d+(SEND|RECV)_[FB]\d+([<>]\d+)?", "BATCH_P2P")


def _overlap(rng: random.Random, draft: Draft) -> None:
    _join(rng, draft, r"\d+[FBIW]\d+", "OVERLAP_F_B")


def _block_on_sends(rng: random.Random, draft: Draft) -> None:
    """Sends before the receives beside them, and waited for at once, as with blocking sends."""
    row = _any_row(rng, draft)
    for i in reversed(range(len(row))):
        found = re.match(r"\(?(\d+)SEND_([FB])(\d+)", row[i])
        if found and rng.random() < 0.5:
            row.insert(i + 1, f"{found[1]}WAIT_SEND{rng.choice(['', '_' + found[2]])}{found[3]}")


def _split_or_join_backward(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    places = [i for i, action in enumerate(row) if re.fullmatch(r"\d+[BI]\d+", action)]
    if not places:
        return
    i = rng.choice(places)
    if "B" in row[i]:
        weights = row[i].replace("B", "W")
        row[i] = row[i].replace("B", "I")
        row.insert(rng.randint(i + 1, len(row)), weights)
    else:
        weights = row[i].replace("I", "W")
        row[i] = row[i].replace("I", "B")
        row[:] = [action for action in row if action != weights]


def _change_owner(rng: random.Random, draft: Draft) -> None:
    """Of a stage, and perhaps of its actions, too."""
    stage, to = rng.randrange(len(draft.owners)), rng.randrange(len(draft.actions))
    at = draft.owners[stage]
    if draft.owners.count(at) == 1:  # a rank without a stage has nothing to make a schedule with
        return
    draft.owners[stage] = to
    if rng.random() < 0.7 and to != at:
        mine = [action for action in draft.actions[at] if re.match(rf"\(?{stage}[A-Z]", action)]
        draft.actions[at] = [action for action in draft.actions[at] if action not in mine]
        draft.actions[to] += mine


def _exchange_rows(rng: random.Random, draft: Draft) -> None:
    a, b = rng.randrange(len(draft.actions)), rng.randrange(len(draft.actions))
    draft.actions[a], draft.actions[b] = draft.actions[b], draft.actions[a]
    if rng.random() < 0.6:  # the same plan on other ranks
        draft.owners = [{a: b, b: a}.get(owner, owner) for owner in draft.owners]


def _rewire(rng: random.Random, draft: Draft) -> None:
    if draft.pairs is None:
        return
    pairs = list(draft.pairs)
    if pairs and rng.random() < 0.5:
        pairs.remove(rng.choice(pairs))
    else:
        ends = sorted(rng.choices(range(len(draft.owners)), k=2), reverse=rng.random() < 0.2)
        pairs.append((ends[0], ends[1]))
    draft.pairs = pairs


def _change_count(rng: random.Random, draft: Draft) -> None:
    draft.count += rng.choice([-1, 1])


def _add_reductions(rng: random.Random, draft: Draft) -> None:
    row = _any_row(rng, draft)
    stage = rng.randrange(len(draft.owners))
    row.insert(rng.randint(0, len(row)), f"{stage}{rng.choice(['UNSHARD', 'RESHARD', 'REDUCE_GRAD'])}")


_CHANGES = {
    change.__name__.strip("_").replace("_", " "): change
    for change in (
        _swap,
        _swap_neighbours,
        _drop,
        _repeat,
        _move,
        _move_messages,
        _move_to_another_rank,
        _change_microbatch,
        _turn_message,
        _readdress,
        _take_batches_apart,
        _make_batches,
        _overlap,
        _block_on_sends,
        _split_or_join_backward,
        _change_owner,
        _exchange_rows,
        _rewire,
        _change_count,
        _add_reductions,
    )
}
