"""A small GPT-2: learned positions, pre-norm blocks, GELU MLPs. It knows nothing of ranks.

Shape names used below: ``batch``, ``seq`` (tokens in a window), ``dim`` (residual width),
``vocab``.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02  # GPT-2 (Radford et al. 2019), section 2.3


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. ``seq`` is the longest window that has a position embedding."""

    layers: int
    dim: int
    heads: int
    seq: int
    vocab: int = 256
    tied: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} does not divide into {self.heads} heads")


# A byte vocabulary makes the embedding a rounding error, so the small presets have nothing to
# gain from tying it. gpt2 ties as the original does, with its vocabulary padded to a multiple
# of 128.
PRESETS = {
    "tiny": GPTConfig(layers=4, dim=128, heads=4, seq=64),  # 0.9M parameters
    "small": GPTConfig(layers=6, dim=384, heads=6, seq=128),  # 10.9M parameters
    "gpt2": GPTConfig(layers=12, dim=768, heads=12, seq=1024, vocab=50304, tied=True),  # 124.5M
}


class Attention(nn.Module):
    """Causal self-attention. (batch, seq, dim) -> (batch, seq, dim)"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, dim // heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))


class MLP(nn.Module):
    """Four times wider inside. (batch, seq, dim) -> (batch, seq, dim)"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.out = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and MLP. (batch, seq, dim) -> (batch, seq, dim)"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """``model(tokens)`` gives logits, ``model(tokens, targets)`` the mean loss in nats."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab, config.dim)
        self.position = nn.Embedding(config.seq, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.token.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal weights, zero biases; the last layer of each residual branch starts smaller.

        Each block adds two branches to the residual stream, so scaling them by
        ``1 / sqrt(2 * layers)`` keeps its variance independent of the depth.
        """
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                ends_branch = name.endswith(".out")
                std = INIT_STD / math.sqrt(2 * self.config.layers) if ends_branch else INIT_STD
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets: (batch, seq) int64 -> logits (batch, seq, vocab), or a 0-dim loss."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)  # (batch, seq, dim)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        # The softmax over the vocabulary needs more than bfloat16's 8 bits of mantissa.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
