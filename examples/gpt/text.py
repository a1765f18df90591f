"""Text as bytes: the training and the held-out part, batches, and a bigram model to beat."""

import pathlib
import pydoc_data.topics

import torch
from torch import Tensor

CHUNK = 4096  # bytes; every tenth chunk is held out, so that both parts are alike


class Text:
    """A text cut into a training part and a held-out part (one tenth)."""

    def __init__(self, content: bytes):
        chunks = [content[i : i + CHUNK] for i in range(0, len(content), CHUNK)]
        if len(chunks) < 20:
            raise ValueError(f"the text has {len(content)} bytes: expected at least {20 * CHUNK}")
        self.train = _tensor(b"".join(chunk for i, chunk in enumerate(chunks) if i % 10 != 9))
        self.held_out = _tensor(b"".join(chunks[9::10]))

    def batch(self, step: int, size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, int64 [size, length]; the same on every rank that asks."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - length, (size, 1), generator=generator)
        rows = self.train[starts + torch.arange(length + 1)].long()
        return rows[:, :-1], rows[:, 1:]


def load(path: pathlib.Path | None) -> Text:
    """The file, or the language reference that is a part of every Python."""
    if path is not None:
        return Text(path.read_bytes())
    topics = pydoc_data.topics.topics
    return Text("\n".join(topics[name] for name in sorted(topics)).encode())


def bigram_loss(text: Text, smoothing: float = 0.1) -> float:
    """Held-out cross entropy, in nats for a byte, of next-byte counts in the training part."""
    counts = torch.zeros(256 * 256, dtype=torch.float64)
    train, held_out = text.train.long(), text.held_out.long()
    pairs = train[:-1] * 256 + train[1:]
    counts.index_add_(0, pairs, torch.ones(len(pairs), dtype=torch.float64))
    table = counts.view(256, 256) + smoothing
    log_probability = (table / table.sum(1, keepdim=True)).log()
    return -log_probability[held_out[:-1], held_out[1:]].mean().item()


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
