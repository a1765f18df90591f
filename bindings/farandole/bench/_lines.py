"""Programs that are asked by a line and answer by a line of JSON."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple


class Channel(NamedTuple):
    """To and from one process."""

    questions: IO[str]
    answers: IO[str]


def ask(name: str, channels: Sequence[Channel], line: str, timeout: float) -> list[Any]:
    """Sends the line to all ranks of a program and returns their answers, by rank.

    Raises:
        RuntimeError: a rank ended, or they took longer than ``timeout`` seconds; names the program and the rank.
    """
    deadline = time.monotonic() + timeout
    for rank, channel in enumerate(channels):
        try:
            channel.questions.write(line + "\n")
            channel.questions.flush()
        except OSError as error:
            raise RuntimeError(f"{name}, rank {rank}: it takes no more questions: {error}") from None
    answers = []
    for rank, channel in enumerate(channels):
        if not select.select([channel.answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise RuntimeError(f"{name}, rank {rank}: no answer in {timeout:.0f} s")
        answer = channel.answers.readline()
        if not answer:
            raise RuntimeError(f"{name}, rank {rank}: ended without an answer")
        answers.append(json.loads(answer))
    return answers
