"""A model of the kind of DLRM: embeddings of categories and a perceptron of numbers meet in dot products."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, Pipelineable


@dataclasses.dataclass
class Batch(Pipelineable):
    """Of one rank; torchrec's pipelines move it by the two methods."""

    categories: KeyedJaggedTensor  # one id for each category and flight
    numbers: Tensor  # float32 [flights, numbers]
    late: Tensor  # float32 [flights]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        parts = (self.categories, self.numbers, self.late)
        return Batch(*(part.to(device=device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.categories, self.numbers, self.late):
            part.record_stream(stream)


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """Batch -> the mean of its losses, and (that loss, logits [flights]) without gradients.

    https://arxiv.org/abs/1906.00091. The weights of the perceptrons depend on the seed only; tables get theirs, and
    their memory, when they are sharded.
    """

    pairs: Tensor

    def __init__(self, rows: dict[str, int], numbers: int, width: int, seed: int):
        super().__init__()
        self.categories, self.width = len(rows), width
        vectors = 1 + len(rows)
        tables = [
            EmbeddingBagConfig(
                name=name,
                feature_names=[name],
                num_embeddings=count,
                embedding_dim=width,
                init_fn=lambda weight: nn.init.normal_(weight, std=0.1),
            )
            for name, count in rows.items()
        ]
        self.tables = EmbeddingBagCollection(tables, device=torch.device("meta"))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.bottom = perceptron(numbers, 64, width)
            self.top = nn.Sequential(perceptron(width + vectors * (vectors - 1) // 2, 128, 64), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        embedded = self.tables(batch.categories).values().view(-1, self.categories, self.width)
        dense = self.bottom(batch.numbers)
        vectors = torch.cat([dense.unsqueeze(1), embedded], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([dense, products], dim=1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.late)
        return loss, (loss.detach(), logits.detach())
