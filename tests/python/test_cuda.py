"""Tables below models on a GPU: what the CPU gives, and with staging what comes without it, to the bit.

It needs torch and pytest only, for machines with little else: `pytest --noconftest tests/python/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from own_draws import fresh_name
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    NGramMemory,
    SparseOptimizer,
    StagedRows,
    StagingDataLoader,
)

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA here"),
]

DEVICE = "cuda"
DIM, HIDDEN, VOCAB = 16, 64, 40
ADAGRAD = {"kind": "adagrad", "lr": 0.1}


def tokens_of(steps: int, texts: int = 8, length: int = 64) -> list[Tensor]:
    """Batches of few tokens, so that each shares most of its n-grams with the next."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (texts, length), generator=generator) for _ in range(steps)]


class GPT(nn.Module):
    """Layers of attention over a memory, without kernels whose sums depend on the order of threads."""

    def __init__(self, name: str, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(0.1 * torch.randn(VOCAB, HIDDEN))
        self.memory = NGramMemory(HIDDEN, 500, DIM, name, optimizer=ADAGRAD)
        self.memory.table.weight[torch.arange(2000)] = torch.randn(2000, DIM)
        nn.init.normal_(self.memory.value.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 2 * HIDDEN, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.to(device, dtype)
        rows = {id(each) for each in self.memory.table.parameters()}
        dense = [each for each in self.parameters() if id(each) not in rows]
        self.optimizers = [torch.optim.SGD(dense, lr=0.1), SparseOptimizer(modules=[self.memory.table])]

    def loss(self, tokens: Tensor, rows: Tensor | StagedRows) -> Tensor:
        one_hot = functional.one_hot(tokens.to(self.weight.device), VOCAB).to(self.weight.dtype)
        hidden = self.memory(one_hot @ self.weight, rows)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], self.weight.device, self.weight.dtype)
        with sdpa_kernel(SDPBackend.MATH):
            logits = self.layers(hidden, mask, is_causal=True) @ self.weight.T
        return functional.mse_loss(logits[:, :-1], one_hot[:, 1:])

    def train_on(self, pairs: Iterable[tuple[Tensor, Any]]) -> list[float]:
        losses = []
        for tokens, rows in pairs:
            loss = self.loss(tokens, rows)
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.optimizers[0].zero_grad()
            losses.append(loss)
        return [loss.item() for loss in losses]


def unstaged(batches: Iterable[Tensor], device: str = DEVICE) -> Iterator[tuple[Tensor, Tensor]]:
    return ((batch, batch.to(device)) for batch in batches)


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"padding_idx": [2, 5]}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_gives_what_it_gives_on_the_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    modules = [DistEmbedding(9, DIM, fresh_name(), optimizer=ADAGRAD, **options) for _ in range(3)]
    for module in modules:
        module.weight[torch.arange(9)] = torch.arange(9 * DIM).view(9, DIM) / 7
        module.to(dtype)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(9, (4, 5), generator=generator) for _ in range(5)]
    for ids, staged in StagingDataLoader(batches, modules[2], DEVICE):
        outputs = [modules[0](ids), modules[1](ids.to(DEVICE)), modules[2](staged)]
        for module, output, device in zip(modules, outputs, ("cpu", DEVICE, DEVICE), strict=True):
            assert output.device.type == device
            assert output.dtype == dtype
            assert torch.equal(output.cpu(), outputs[0])
            (output * output.detach()).sum().backward()
            SparseOptimizer(modules=[module]).step()
    for module in modules[1:]:
        assert torch.equal(module.rows(), modules[0].rows())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_give_what_they_give_on_the_cpu(mode: Any) -> None:
    modules = [DistEmbeddingBag(9, DIM, fresh_name(), mode, optimizer=ADAGRAD, padding_idx=3) for _ in range(2)]
    ids, offsets = torch.randint(9, (30,), generator=torch.Generator().manual_seed(0)), torch.arange(0, 30, 5)
    for module in modules:
        module.weight[torch.arange(9)] = torch.arange(9 * DIM).view(9, DIM) / 7
    for _ in range(5):
        outputs = [
            module(ids.to(device), offsets.to(device)) for module, device in zip(modules, ("cpu", DEVICE), strict=True)
        ]
        assert outputs[1].device.type == DEVICE
        assert torch.equal(outputs[1].cpu(), outputs[0])
        for module, output in zip(modules, outputs, strict=True):
            (output * output.detach()).sum().backward()
            SparseOptimizer(modules=[module]).step()
    torch.testing.assert_close(modules[1].rows(), modules[0].rows(), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("_deterministic")
def test_a_memory_gives_and_collects_what_it_does_on_the_cpu() -> None:
    (tokens,) = tokens_of(1)
    on_cpu, on_device, staged = (GPT(fresh_name(), device) for device in ("cpu", DEVICE, DEVICE))
    losses = on_cpu.loss(tokens, tokens), on_device.loss(tokens, tokens.to(DEVICE))
    ((_, rows),) = StagingDataLoader([tokens], staged.memory, DEVICE)
    losses = (*losses, staged.loss(tokens, rows))
    for loss in losses:
        torch.testing.assert_close(loss.cpu(), losses[0], rtol=1e-4, atol=1e-5)
        loss.backward()
    (ids, grads), *others = (module.memory.table._trace[0] for module in (on_cpu, on_device, staged))
    for other_ids, other_grads in others:
        assert torch.equal(other_ids, ids)
        torch.testing.assert_close(other_grads, grads, rtol=1e-3, atol=1e-5)
    assert torch.equal(others[0][1], others[1][1])
    for name in ("key", "value"):
        ours, theirs = (getattr(module.memory, name).weight.grad for module in (staged, on_device))
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefetch_count", [1, 3])
def test_twenty_steps_with_staging_are_those_without_to_the_bit(prefetch_count: int, dtype: torch.dtype) -> None:
    ours, theirs = GPT(fresh_name(), DEVICE, dtype), GPT(fresh_name(), DEVICE, dtype)
    batches = tokens_of(20)
    staged = ours.train_on(StagingDataLoader(batches, ours.memory, DEVICE, prefetch_count))
    assert staged == theirs.train_on(unstaged(batches))
    assert staged[-1] < staged[0]
    assert torch.equal(ours.memory.table.rows(), theirs.memory.table.rows())
    assert all(
        torch.equal(one, other)
        for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True)
        if "table" not in name
    )


def test_large_batches_one_after_another_do_not_mix() -> None:
    """Copies of megabytes, behind work that keeps the device busy: pinned memory must not be used again too soon."""
    module = DistEmbedding(None, 256, fresh_name(), optimizer={"kind": "sgd", "lr": 1.0})
    busy = torch.randn(4096, 4096, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(50_000, (20_000,), generator=generator) for _ in range(6)]
    expected = [module(ids).detach() for ids in batches]
    found = []
    with torch.no_grad():
        for _, rows in StagingDataLoader(batches, module, DEVICE):
            for _ in range(20):
                busy = busy @ busy / 4096
            found.append(module(rows))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_gradients_of_large_batches_arrive_whole() -> None:
    module = DistEmbedding(None, 256, fresh_name(), optimizer={"kind": "sgd", "lr": 1.0})
    ids = torch.arange(20_000)
    busy = torch.randn(4096, 4096, device=DEVICE)
    factors = torch.randn(20_000, 256, device=DEVICE)
    for _, rows in StagingDataLoader([ids] * 3, module, DEVICE):
        looked_up = module(rows)
        for _ in range(20):
            busy = busy @ busy / 4096
        (looked_up * (factors + 0 * busy[0, 0])).sum().backward()
        ((_, grads),) = module._trace
        assert torch.equal(grads, (factors + 0 * busy[0, 0]).cpu())
        module.reset_trace()


def test_a_forward_with_staging_waits_for_no_device() -> None:
    model = GPT(fresh_name(), DEVICE)
    (tokens,) = tokens_of(1)
    on_device = tokens.to(DEVICE)
    ((_, rows),) = StagingDataLoader([tokens], model.memory, DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        hidden = functional.embedding(on_device, model.weight)
        model.memory(hidden, rows)
        with pytest.raises(RuntimeError):
            model.memory(hidden, on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
