"""Staged rows give what lookups give, to the bit, over a device whose copies are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_draws import fresh_name
from slow_copies import SlowCopies
from torch import Tensor, nn
from torch.nn import functional

from recstore_ops import DistEmbedding, DistEmbeddingBag, NGramMemory, SparseOptimizer, StagedRows, StagingDataLoader
from recstore_ops.nn.copies import CudaCopies
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]
DIM, HIDDEN, VOCAB = 3, 6, 12
ADAGRAD = {"kind": "adagrad", "lr": 0.1}


def tokens_of(steps: int, seed: int = 0) -> list[Tensor]:
    """Batches of few tokens, so that each shares most of its n-grams with the next."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (3, 7), generator=generator) for _ in range(steps)]


class Model(nn.Module):
    """A memory above token embeddings and below a head."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.memory = NGramMemory(HIDDEN, 50, DIM, name, optimizer=ADAGRAD, seed=1, **options)
        self.memory.table.weight[torch.arange(200)] = torch.randn(200, DIM)
        nn.init.normal_(self.memory.value.weight)
        self.head = nn.Linear(HIDDEN, VOCAB)
        rows = {id(each) for each in self.memory.table.parameters()}
        dense = [each for each in self.parameters() if id(each) not in rows]
        self.optimizers = [torch.optim.SGD(dense, lr=0.5), SparseOptimizer(modules=[self.memory.table])]

    def loss(self, tokens: Tensor, rows: Tensor | StagedRows) -> Tensor:
        logits = self.head(self.memory(self.tokens(tokens), rows))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.optimizers[0].zero_grad()

    def state(self) -> list[Tensor]:
        return [*(each for name, each in self.state_dict().items() if "table" not in name), self.memory.table.rows()]


def unstaged(batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((batch, batch) for batch in batches)


def are_equal(one: Model, other: Model) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one.state(), other.state(), strict=True))


@pytest.mark.parametrize("prefetch_count", [1, 3])
def test_a_model_trains_as_without_staging_to_the_bit(prefetch_count: int, table_name: TableName) -> None:
    ours, theirs = Model(table_name()), Model(table_name())
    loader = StagingDataLoader(tokens_of(20), ours.memory, SlowCopies(), prefetch_count)
    assert len(loader) == 20
    losses: list[list[float]] = [[], []]
    for model, pairs, own in ((ours, loader, losses[0]), (theirs, unstaged(tokens_of(20)), losses[1])):
        for tokens, rows in pairs:
            loss = model.loss(tokens, rows)
            loss.backward()
            model.step()
            own.append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    assert are_equal(ours, theirs)


def test_rows_are_those_at_the_forward_whatever_changed_them(table_name: TableName) -> None:
    """A step after the next batch was given, a write, and rows that leave."""
    module = DistEmbedding(None, DIM, table_name(), optimizer=ADAGRAD)
    ids = torch.arange(5)
    optimizer = SparseOptimizer(modules=[module])
    loader = StagingDataLoader([ids] * 4, module, SlowCopies())
    batches = iter(loader)
    _, first = next(batches)
    module(first).square().sum().backward()
    _, second = next(batches)
    optimizer.step()
    assert torch.equal(module(second), module(ids))
    _, third = next(batches)
    module.weight[torch.tensor([2])] = torch.ones(1, DIM)
    assert torch.equal(module(third), module(ids))
    _, fourth = next(batches)
    operators.hashtable_delete(module.table.handle, torch.tensor([2]))
    assert torch.equal(module(fourth), module(ids))
    assert list(batches) == []


def test_a_copy_that_is_not_waited_for_would_show(table_name: TableName) -> None:
    module = DistEmbedding(None, DIM, table_name())
    rows = module(module.stage(torch.arange(3), SlowCopies(waits=False)))
    assert rows.isnan().all()


def test_gradients_come_while_the_rest_of_backward_goes_on(table_name: TableName) -> None:
    model, copies = Model(table_name()), SlowCopies()
    model.tokens.weight.register_hook(lambda grad: copies.log.append("tokens"))
    ((tokens, rows),) = StagingDataLoader(tokens_of(1), model.memory, copies)
    loss = model.loss(tokens, rows)
    assert copies.log == ["to device", "wait"]
    loss.backward()
    assert sorted(copies.log[2:-1]) == ["to host", "tokens"]
    assert copies.log[-1] == "synchronize"
    assert model.memory.table.table.has_collected()


def test_passes_are_collected_in_their_order(table_name: TableName) -> None:
    ours, theirs = Model(table_name()), Model(table_name())
    staged = list(StagingDataLoader(tokens_of(6), ours.memory, SlowCopies()))
    for model, pairs in ((ours, staged), (theirs, list(unstaged(tokens_of(6))))):
        for tokens, rows in pairs:
            model.loss(tokens, rows).backward()
        sum((model.loss(tokens, tokens) for tokens, _ in pairs), torch.zeros(())).backward()
        model.step()
    assert are_equal(ours, theirs)


def test_a_graph_that_is_kept_collects_twice(table_name: TableName) -> None:
    module = DistEmbedding(None, DIM, table_name())
    loss = module(module.stage(torch.tensor([1, 1, 2]), SlowCopies())).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    ((ids, grads),) = module._trace
    assert ids.tolist() == [1, 2]
    assert grads.tolist() == [[4.0] * DIM, [2.0] * DIM]


SCALED = {"scale_grad_by_freq": True}


@pytest.mark.parametrize(
    ("options", "converted"),
    [
        ({}, torch.float32),
        ({"padding_idx": 2}, torch.float32),
        ({"padding_idx": [2, 0, 5]}, torch.float32),
        (SCALED, torch.float32),
        ({**SCALED, "padding_idx": 3}, torch.bfloat16),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": torch.float16}, torch.float32),
    ],
)
def test_an_embedding_gives_the_same_with_every_option(
    options: dict[str, Any], converted: torch.dtype, table_name: TableName
) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(9, (2, 4), generator=generator, dtype=torch.int32) for _ in range(5)]
    name = table_name()  # Steps of 16-bit rows round by the table's name.

    def trained(is_staged: bool) -> tuple[list[Tensor], Tensor]:
        module = DistEmbedding(9, DIM, name, optimizer=ADAGRAD, seed=1, on_existing="reset", **options)
        module.weight[torch.arange(9)] = torch.arange(9 * DIM).view(9, DIM) / 7
        module.to(converted)
        wrapped = [{"ids": ids} for ids in batches]
        loader = StagingDataLoader(wrapped, module, SlowCopies(), features=lambda batch: batch["ids"])
        outputs = []
        for asked in (rows for _, rows in loader) if is_staged else batches:
            output = module(asked)
            output.square().sum().backward()
            SparseOptimizer(modules=[module]).step()
            outputs.append(output.detach())
        return outputs, module.rows()

    (ours, our_rows), (theirs, their_rows) = trained(True), trained(False)
    assert ours[0].dtype == theirs[0].dtype == converted
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert torch.equal(our_rows, their_rows)


def test_a_frozen_module_and_no_grad_give_rows_without_gradient(table_name: TableName) -> None:
    module, copies = DistEmbedding(None, DIM, table_name()), SlowCopies()
    ids = torch.arange(4)
    with torch.no_grad():
        assert torch.equal(module(module.stage(ids, copies)), module(ids))
    module.frozen = True
    rows = module(module.stage(ids, copies))
    assert not rows.requires_grad
    assert torch.equal(rows, module(ids))
    module.frozen = False
    rows = module(module.stage(ids, copies))
    module.frozen = True
    rows.sum().backward()
    assert not module.table.has_collected()


def test_a_batch_that_is_filled_anew_keeps_its_rows(table_name: TableName) -> None:
    module = DistEmbedding(None, DIM, table_name())
    ids = torch.tensor([1, 2])
    staged = module.stage(ids, SlowCopies())
    expected = module(ids)
    ids.fill_(9)
    rows = module(staged)
    assert torch.equal(rows, expected)
    rows.sum().backward()
    assert module._trace[0][0].tolist() == [1, 2]


def test_rows_that_the_store_has_dropped_are_read(table_name: TableName, capfd: pytest.CaptureFixture[str]) -> None:
    module = DistEmbedding(None, DIM, table_name())
    ids = torch.arange(4)
    staged = module.stage(ids, SlowCopies())
    handles = [operators.emb_prefetch(module.table.handle, ids) for _ in range(1024)]
    assert "prefetches were dropped" in capfd.readouterr().err
    assert torch.equal(module(staged), module(ids))
    for handle in handles:
        operators.emb_wait_result(handle, DIM)


def test_rows_are_for_one_forward_of_their_module(table_name: TableName) -> None:
    one, other = DistEmbedding(None, DIM, table_name()), DistEmbedding(None, DIM, table_name())
    staged = one.stage(torch.arange(2), SlowCopies())
    with pytest.raises(ValueError, match=f'staged for table "{one.name}", got a lookup in table "{other.name}"'):
        other(staged)
    with pytest.raises(RuntimeError, match=f'table "{one.name}": torch.func takes no staged rows'):
        torch.func.grad(lambda weight: (one(staged) * weight).sum())(torch.ones(()))
    one(staged)
    with pytest.raises(ValueError, match=f'staged rows of table "{one.name}" were taken by a forward before'):
        one(staged)


def test_what_cannot_be_staged_is_refused(table_name: TableName) -> None:
    module = DistEmbedding(5, DIM, table_name())
    for device in ("cpu", torch.device("meta")):
        with pytest.raises(ValueError, match=f"staged for a CUDA device, got {device}; on the CPU lookups read them"):
            StagingDataLoader([], module, device)
    with pytest.raises(ValueError, match="prefetch_count must be at least 1, got 0"):
        StagingDataLoader([], module, SlowCopies(), prefetch_count=0)
    with pytest.raises(TypeError, match=r"prefetch_count must be an int, got 1\.5"):
        StagingDataLoader([], module, SlowCopies(), prefetch_count=1.5)  # type: ignore[arg-type]
    for other in (nn.Linear(1, 1), DistEmbeddingBag(5, DIM, table_name())):
        with pytest.raises(TypeError, match=f"whose rows are staged, got {type(other).__name__}"):
            StagingDataLoader([], other, SlowCopies())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f'table "{module.name}": rows are staged by ids on the CPU, got ids on meta'):
        module.stage(torch.empty(3, dtype=torch.int64, device="meta"), SlowCopies())
    with pytest.raises(TypeError, match="ids must be int64"):
        module.stage(torch.ones(3), SlowCopies())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")
def test_without_cuda_that_is_said() -> None:
    with pytest.raises(RuntimeError, match="staged for cuda, but torch has no CUDA here"):
        CudaCopies("cuda")


def test_an_error_comes_where_its_batch_would(table_name: TableName) -> None:
    module = DistEmbedding(5, DIM, table_name())
    batches = iter(StagingDataLoader([torch.tensor([1]), torch.tensor([7])], module, SlowCopies(), 1))
    assert module(next(batches)[1]).shape == (1, DIM)
    with pytest.raises((IndexError, RuntimeError), match=f'table "{module.name}"'):
        module(next(batches)[1])


ACTS = st.lists(st.tuples(st.sampled_from(["step", "write", "delete"]), st.lists(st.integers(0, 5), min_size=1)))


@settings(deadline=None, max_examples=40)
@given(ids=st.lists(st.integers(0, 5), min_size=1, max_size=8), acts=ACTS)
def test_any_changes_between_staging_and_forward_are_seen(ids: list[int], acts: list[tuple[str, list[int]]]) -> None:
    module = DistEmbedding(None, DIM, fresh_name(), optimizer=ADAGRAD)
    staged = module.stage(torch.tensor(ids), SlowCopies())
    for act, changed in acts:
        if act == "step":
            module(torch.tensor(changed)).square().sum().backward()
            SparseOptimizer(modules=[module]).step()
        elif act == "write":
            module.weight[torch.tensor(changed)] = torch.full((len(changed), DIM), 2.0)
        else:
            operators.hashtable_delete(module.table.handle, torch.tensor(changed))
    assert torch.equal(module(staged), module(torch.tensor(ids)))
