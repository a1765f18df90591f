"""A byte-level GPT, and the part of it that one pipeline stage owns."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    length: int  # bytes of context


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, both with the norm before them."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.perceptron_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.perceptron_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Stage `stage` of `stages`: its share of the blocks, the embedding in the first, the head in the last.

    int64 [rows, length] -> logits [rows, length, 256] as a whole; between stages float32 [rows, length, width].
    The weights depend on the seed only, not on the number of stages, and neither do their names.
    """

    def __init__(self, shape: Shape, seed: int, stage: int = 0, stages: int = 1):
        super().__init__()
        first, last = shape.layers * stage // stages, shape.layers * (stage + 1) // stages
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            embedding = nn.Embedding(VOCABULARY, shape.width)
            position = nn.Embedding(shape.length, shape.width)
            blocks = [Block(shape) for _ in range(shape.layers)]
            head = nn.Linear(shape.width, VOCABULARY, bias=False)
            for module in (embedding, position, head):
                nn.init.normal_(module.weight, std=0.02)
            for block in blocks:
                nn.init.normal_(block.out.weight, std=0.02 / (2 * shape.layers) ** 0.5)
                nn.init.normal_(block.down.weight, std=0.02 / (2 * shape.layers) ** 0.5)
        is_first, is_last = stage == 0, stage == stages - 1
        self.embedding = embedding if is_first else None
        self.position = position if is_first else None
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in range(first, last)})
        self.norm = nn.LayerNorm(shape.width) if is_last else None
        self.head = head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None and self.position is not None:
            x = self.embedding(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy, in nats for a byte."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@torch.no_grad()
def held_out_loss(model: Gpt, text: Tensor, length: int, rows: int = 64) -> float:
    """Over the whole of `text`, in rows that do not overlap."""
    count = (len(text) - 1) // length
    inputs = text[: count * length].view(count, length).long()
    targets = text[1 : count * length + 1].view(count, length).long()
    total = sum(
        loss_of(model(x), y).item() * len(x) for x, y in zip(inputs.split(rows), targets.split(rows), strict=True)
    )
    return total / count


@torch.no_grad()
def sample(model: Gpt, prompt: bytes, count: int, length: int, seed: int, temperature: float = 0.7) -> bytes:
    """`count` bytes that the model puts after the prompt."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text[-length:]]))[0, -1] / temperature
        text.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
    return bytes(text)
