"""The benchmark's model, a GPT-2, in three sizes, and its data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02  # GPT-2's standard deviation for weights
SEED = 1234


@dataclass(frozen=True)
class Shape:
    """Sizes of one model and of one rank's batch."""

    layers: int
    width: int
    heads: int
    vocab: int
    seq: int = 128  # tokens in one sequence
    batch: int = 2  # sequences per rank and step


SHAPES: dict[str, Shape] = {
    "tiny": Shape(layers=4, width=128, heads=4, vocab=1024),  # 0.9M parameters
    "small": Shape(layers=6, width=320, heads=5, vocab=8192),  # 10.1M
    "gpt2": Shape(layers=12, width=768, heads=12, vocab=50304),  # 123.8M
}


class Block(nn.Module):
    """Attention and MLP with pre-norm residuals; x: (batch, seq, width) -> same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention; x: (batch, seq, width) -> same."""
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, seq, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, seq, width))


class GPT(nn.Module):
    """GPT-2 with learned positions; the embedding and the head share one weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_init)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy; idx, targets: (batch, seq) int64 -> () fp32."""
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        # fp32 logits: autocast does the same by itself, systems with bf16 parameters do not.
        logits = self.head(self.norm(x)).float()  # (batch, seq, vocab)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _init(module: nn.Module) -> None:
    """GPT-2's initial values."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(size: str) -> GPT:
    """The model of this size, with the same values on every rank and in every system."""
    torch.manual_seed(SEED)
    return GPT(SHAPES[size])


def count_parameters(size: str) -> int:
    """Parameters of this size, each tied weight once; allocates nothing."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(SHAPES[size]).parameters())


def batch(size: str, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's (idx, targets), each (batch, seq) int64.

    Every step trains on it again: the loss then falls quickly, and by how much depends on
    whose gradients were averaged, so an equal last loss means more than it would on new noise.
    """
    shape = SHAPES[size]
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
