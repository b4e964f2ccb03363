"""A small GPT with a memory of n-grams and without, on a text of phrases that come again and again.

    python examples/ngram_memory.py

A row for each n-gram knows which token follows it, which the layers alone have to learn by heart. A run that goes on
from its checkpoint half way ends as one that was not stopped, to the bit.
"""

import copy
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional

from recstore_ops import NGramMemory, SparseOptimizer, checkpoint, table_statistics

VOCAB, PHRASES, LENGTH = 1_000, 3_000, 8
WIDTH, LAYERS, TEXT, BATCH, STEPS = 128, 2, 64, 16, 120

phrases = torch.randint(VOCAB, (PHRASES, LENGTH), generator=torch.Generator().manual_seed(0))


class GPT(nn.Module):
    """Layers of attention, and below them the memory, if there is one."""

    def __init__(self, memory: NGramMemory | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))
        self.memory = memory

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight
        if self.memory is not None:
            hidden = self.memory(hidden, tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(TEXT)
        return self.head(self.layers(hidden, mask, is_causal=True))


def memory() -> NGramMemory:
    return NGramMemory(WIDTH, 1_000_000, 32, "ngrams", optimizer={"kind": "adagrad", "lr": 0.1}, on_existing="reset")


class Run:
    """A model, its optimizers and its steps."""

    def __init__(self, with_memory: bool) -> None:
        self.memory = memory() if with_memory else None
        self.model = GPT(self.memory)
        rows = {id(each) for each in self.memory.table.parameters()} if self.memory else set()
        dense = [each for each in self.model.parameters() if id(each) not in rows]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=3e-3)]
        if self.memory:
            self.optimizers.append(SparseOptimizer(modules=[self.memory.table]))

    def go(self, steps: range) -> list[float]:
        return [self.step(number) for number in steps]

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        tokens = phrases[torch.randint(PHRASES, (BATCH, TEXT // LENGTH + 1), generator=generator)].flatten(1)
        logits = self.model(tokens[:, :TEXT])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : TEXT + 1].flatten())
        self.model.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()


def main() -> None:
    without = Run(with_memory=False).go(range(STEPS))
    remembering = Run(with_memory=True).go(range(STEPS))
    print("step   loss without memory   with memory")
    for step in [*range(0, STEPS, STEPS // 5), STEPS - 1]:
        print(f"{step:4}   {without[step]:19.4f}   {remembering[step]:11.4f}")

    half, rest = range(STEPS // 2), range(STEPS // 2, STEPS)
    run = Run(with_memory=True)
    losses = run.go(half)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder)
        dense = copy.deepcopy([part.state_dict() for part in (run.model, run.optimizers[0])])
        run.go(half)  # Steps that are lost.
        checkpoint.load(folder)
        for part, state in zip((run.model, run.optimizers[0]), dense, strict=True):
            part.load_state_dict(state)
    losses += run.go(rest)
    print(f"{table_statistics('ngrams')['rows']:,} n-grams have a row")
    assert losses == remembering, "a run that goes on from a checkpoint has the same losses"
    assert remembering[-1] < without[-1] - 0.5, "the memory helps"


if __name__ == "__main__":
    main()
