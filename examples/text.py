"""A file as bytes: random windows to train on, fixed windows to evaluate on."""

import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# The help text of the language reference (about 700 KB): real prose that every Python carries,
# so the example needs no download.
DEFAULT_TEXT = Path(pydoc_data.topics.__file__)
TRAIN_SHARE = 0.9


@dataclass(frozen=True)
class Text:
    """A contiguous 90/10 split of one file. train, held_out: (bytes,) uint8"""

    train: Tensor
    held_out: Tensor


def load_text(path: Path, seq: int) -> Text:
    """Read ``path`` whole, whatever it holds; ValueError if a window does not fit both parts."""
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    cut = int(TRAIN_SHARE * len(data))
    text = Text(train=data[:cut], held_out=data[cut:])
    if len(text.held_out) <= seq:
        raise ValueError(
            f"{path} has {len(data):,} bytes, so its held-out tenth has no window of {seq} bytes "
            f"and a target; give a file of more than {10 * (seq + 1):,} bytes or a smaller --seq"
        )
    return text


def windows(data: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Cut the windows at ``starts``: (batch,) -> inputs and next bytes, each (batch, seq) int64."""
    span = data[starts[:, None] + torch.arange(seq + 1)].long()  # (batch, seq + 1)
    return span[:, :-1].contiguous(), span[:, 1:].contiguous()


def random_batch(
    data: Tensor, batch: int, seq: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """``batch`` windows anywhere in ``data``."""
    starts = torch.randint(len(data) - seq, (batch,), generator=generator)
    return windows(data, starts, seq)


def fixed_batches(data: Tensor, batches: int, batch: int, seq: int) -> list[tuple[Tensor, Tensor]]:
    """The same evenly spread windows on every call, in batches of the training shape.

    One shape for both means that evaluating compiles no graph with dynamic sizes.
    """
    starts = torch.linspace(0, len(data) - seq - 1, batches * batch).long()
    return [windows(data, part, seq) for part in starts.split(batch)]
