"""Batches of flights as the model takes them."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import KeyedJaggedTensor

from recsys_model.flights import CATEGORIES, Part
from recsys_model.model import Batch


def batches(part: Part, size: int, steps: int, rank: int, ranks: int, seed: int) -> Iterator[Batch]:
    """This rank's `steps` batches of `size` flights: its share of random orders, one after the other."""
    count = len(part) // (size * ranks)
    for step in range(steps):
        epoch, place = divmod(step, count)
        if place == 0:
            order = np.random.default_rng((seed, epoch)).permutation(len(part))
        first = (place * ranks + rank) * size
        yield _batch(part, order[first : first + size])


def whole(part: Part, rank: int, ranks: int) -> Batch:
    """This rank's share of all; of a rest that ranks do not divide, nothing."""
    size = len(part) // ranks
    return _batch(part, np.arange(rank * size, (rank + 1) * size))


def _batch(part: Part, rows: NDArray[np.int64]) -> Batch:
    ids = torch.from_numpy(np.ascontiguousarray(part.categories[rows].T)).flatten()  # category by category
    categories = KeyedJaggedTensor.from_lengths_sync(list(CATEGORIES), ids, torch.ones(len(ids), dtype=torch.int32))
    return Batch(categories, torch.from_numpy(part.numbers[rows]), torch.from_numpy(part.late[rows]))
