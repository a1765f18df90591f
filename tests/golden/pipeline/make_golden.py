"""Writes the files beside it with torch's own classes (torch 2.15.0): run it again to renew them.

actions.txt               the text of every kind of action
<name>_p<p>_m<m>.csv      a schedule of compute actions, as _dump_csv writes it
<name>_p<p>_m<m>_comms.csv  the same with torch's communication
"""

import csv
import pathlib
import random
from types import SimpleNamespace

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action, _ComputationType

HERE = pathlib.Path(__file__).parent


def random_action(rng):
    kinds = [kind for kind in _ComputationType if kind is not _ComputationType.OVERLAP_F_B]
    kind = rng.choice(kinds)
    whole_stage = kind.value in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
    return _Action(rng.randrange(130), kind, None if whole_stage else rng.randrange(1200))


def random_overlap(rng):
    forward = _Action(rng.randrange(64), _ComputationType.FORWARD, rng.randrange(99))
    kind = rng.choice([_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT])
    backward = _Action(rng.randrange(64), kind, rng.randrange(99))
    return _Action(-1, _ComputationType.OVERLAP_F_B, None, (forward, backward))


def write_actions():
    rng = random.Random(7)
    actions = [random_action(rng) for _ in range(300)] + [random_overlap(rng) for _ in range(40)]
    for action in actions:
        assert _Action.from_str(str(action)) == action
    (HERE / "actions.txt").write_text("".join(f"{action}\n" for action in actions))


def write_csv(name, rows):
    with open(HERE / f"{name}.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)


def order_of(cls, p, m):
    """The compute actions of a schedule with one stage per rank."""
    order = cls._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
    if cls is schedules.Schedule1F1B:
        # torch numbers the forwards of the last rank, which has no warm-up, from 1.
        assert order[p - 1][0] == _Action(p - 1, _ComputationType.FORWARD, 1)
        order[p - 1] = [
            action._replace(microbatch_index=action.microbatch_index - 1)
            if action and action[1].value == "F"
            else action
            for action in order[p - 1]
        ]
    return order


def write_single(cls, name, p, m):
    order = order_of(cls, p, m)
    write_csv(f"{name}_p{p}_m{m}", order.values())
    compact = {rank: [action for action in actions if action is not None] for rank, actions in order.items()}
    messages = schedules._add_wait_send(schedules._add_send_recv(compact, lambda stage: stage, p))
    write_csv(f"{name}_p{p}_m{m}_comms", messages.values())


def write_multi(cls, name, p, m, stages_per_rank=2, with_messages=True):
    stages = [
        SimpleNamespace(num_stages=p * stages_per_rank, group_size=p, group_rank=0, stage_index=i, submod=None)
        for i in range(0, p * stages_per_rank, p)
    ]
    for stage in stages:
        stage.has_backward, stage.is_first, stage.is_last = True, stage.stage_index == 0, False
    schedule = cls(stages, m, loss_fn=lambda output, target: output)
    schedule._dump_csv(HERE / f"{name}_p{p}_m{m}.csv", format="compute_only")
    if with_messages:
        schedule._dump_csv(HERE / f"{name}_p{p}_m{m}_comms.csv", format="compute_comms")


write_actions()
for p, m in [(1, 3), (2, 4), (4, 4), (4, 9)]:
    write_single(schedules.ScheduleGPipe, "gpipe", p, m)
    write_single(schedules.Schedule1F1B, "1f1b", p, m)
for p, m, v in [(2, 4, 2), (4, 8, 2), (2, 6, 3), (4, 4, 1)]:
    for cls, name in [
        (schedules.ScheduleInterleaved1F1B, "interleaved1f1b"),
        (schedules.ScheduleInterleavedZeroBubble, "interleavedzerobubble"),
        (schedules.ScheduleLoopedBFS, "loopedbfs"),
    ]:
        write_multi(cls, name, p, m, v, with_messages=v == 2)
for p, m in [(2, 4), (4, 8), (4, 3)]:
    write_multi(schedules.ScheduleZBVZeroBubble, "zbv", p, m, with_messages=p == 2)
for p, m in [(2, 8), (4, 8)]:
    write_multi(schedules.ScheduleDualPipeV, "dualpipev", p, m, with_messages=p == 2)
