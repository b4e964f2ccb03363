"""A small GPT with a memory of n-grams or without, and texts of phrases that come again and again.

Shape suffixes: B texts, T tokens of a text.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from recstore_ops import NGramMemory, SparseOptimizer, StagedRows

_PHRASES, _PHRASE = 3_000, 8


class Size(NamedTuple):
    """Sizes of a GPT and its batches."""

    width: int
    layers: int
    heads: int
    length: int
    texts: int
    vocab: int

    @property
    def name(self) -> str:
        """What a report calls it."""
        return f"{self.layers} layers of {self.width}, {self.texts} texts of {self.length} tokens"


class GPT(nn.Module):
    """Layers of attention, and below them the memory, if there is one; as in examples/ngram_memory.py."""

    def __init__(self, size: Size, memory: NGramMemory | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        width = size.width
        self.tokens, self.places = nn.Embedding(size.vocab, width), nn.Embedding(size.length, width)
        layer = nn.TransformerEncoderLayer(width, size.heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, size.vocab))
        mask = nn.Transformer.generate_square_subsequent_mask(size.length)
        self.register_buffer("mask", mask, persistent=False)
        self.memory = memory

    def forward(self, tokens_BT: Tensor, rows: Tensor | StagedRows) -> Tensor:
        """Returns logits; the memory takes `rows`: tokens, or rows that are staged."""
        hidden = self.tokens(tokens_BT) + self.places.weight
        if self.memory is not None:
            hidden = self.memory(hidden, rows)
        mask = self.get_buffer("mask")
        return self.head(self.layers(hidden, mask, is_causal=True))


class Training:
    """A GPT, its optimizers and its steps."""

    def __init__(self, size: Size, memory: NGramMemory | None, device: str = "cpu") -> None:
        self.device = device
        self.model = GPT(size, memory).to(device)
        rows = {id(each) for each in memory.table.parameters()} if memory else set()
        dense = [each for each in self.model.parameters() if id(each) not in rows]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=1e-3)]
        if memory:
            self.optimizers.append(SparseOptimizer(modules=[memory.table]))

    def step(self, texts_BT: Tensor, rows: StagedRows | None = None) -> Tensor:
        """Takes a step on texts of one token more than the model's length; returns the loss."""
        texts_BT = texts_BT.to(self.device, non_blocking=True)
        tokens_BT = texts_BT[:, :-1]
        logits = self.model(tokens_BT, tokens_BT if rows is None else rows)
        loss = functional.cross_entropy(logits.flatten(0, 1), texts_BT[:, 1:].flatten())
        self.optimizers[0].zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()


def texts_of(size: Size, number: int) -> Tensor:
    """Returns the texts of a batch, `[B, T + 1]`."""
    phrases = torch.randint(size.vocab, (_PHRASES, _PHRASE), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(number)
    chosen = torch.randint(_PHRASES, (size.texts, size.length // _PHRASE + 1), generator=generator)
    return phrases[chosen].flatten(1)[:, : size.length + 1]
