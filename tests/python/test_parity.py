"""Lookups and training against torch: outputs and gradients of every step, and the rows after 50 of them.

Where torch has no counterpart the reference is in double precision, in `reference.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pytest
import reference
import torch
from examples import steps
from reference import LazyOptimizer, Rule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    SparseOptimizer,
    Table,
    TableConfig,
    default_table,
    embedding,
    embedding_bag,
    table_names,
)

# torch's Adagrad makes sparse tensors without saying whether they shall be checked.
pytestmark = [pytest.mark.tier("test"), pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

NUM_IDS, DIM, STEPS = 40, 8, steps(50)

# Rows, outputs and gradients are of order 1, where float32 rounds to 6e-8; the sums of a step and 50 steps of
# feedback add up to tens of such errors, a wrong equation to 1e-3 and more.
TOLERANCE = 1e-5

INITIALIZER = {"kind": "normal", "std": 0.5}

Mode = Literal["sum", "mean", "max"]
BagLayout = Literal["offsets", "include_last_offset", "2-D", "non-contiguous 1-D", "non-contiguous 2-D"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Batches of 24 ids gain nothing from threads, which `test_determinism.py` is about."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Steps(Protocol):
    def step(self) -> Any: ...


@dataclass(frozen=True)
class Rival:
    """An optimizer of the store and what it must agree with."""

    ours: dict[str, Any]
    theirs: Callable[[Tensor], Steps]


def torch_rival(kind: str, theirs: type, convention: dict[str, str] | None = None, **options: Any) -> Rival:
    return Rival({"kind": kind, **(convention or {}), **options}, lambda weight: theirs([weight], **options))


def numpy_rival(kind: str, rule: Rule, **options: Any) -> Rival:
    return Rival({"kind": kind, **options}, lambda weight: LazyOptimizer(weight, rule))


TORCH_CONVENTION = {"convention": "torch"}

TORCH_SPARSE = {
    "sgd": torch_rival("sgd", torch.optim.SGD, lr=0.1),
    "adagrad_torch": torch_rival("adagrad", torch.optim.Adagrad, TORCH_CONVENTION, lr=0.1, eps=1e-3),
    "adam": torch_rival("adam", torch.optim.SparseAdam, lr=0.02, eps=0.01),
}

NUMPY_LAZY = {
    "sgd_decay": numpy_rival("sgd", reference.sgd(0.1, 0.05), lr=0.1, weight_decay=0.05),
    "adagrad": numpy_rival("adagrad", reference.adagrad(0.1, 0.01), lr=0.1, eps=0.01),
    "adagrad_decay": numpy_rival("adagrad", reference.adagrad(0.1, 1e-10, 0.05), lr=0.1, weight_decay=0.05),
    "adagrad_torch_decay": numpy_rival(
        "adagrad",
        reference.adagrad(0.1, 0.01, 0.05, True),
        lr=0.1,
        eps=0.01,
        weight_decay=0.05,
        **TORCH_CONVENTION,
    ),
    "rowwise_adagrad": numpy_rival("rowwise_adagrad", reference.rowwise_adagrad(0.1, 0.01), lr=0.1, eps=0.01),
    "rowwise_adagrad_decay": numpy_rival(
        "rowwise_adagrad", reference.rowwise_adagrad(0.1, 1e-10, 0.05), lr=0.1, weight_decay=0.05
    ),
    "rowwise_adagrad_torch": numpy_rival(
        "rowwise_adagrad",
        reference.rowwise_adagrad(0.1, 0.01, 0.0, True),
        lr=0.1,
        eps=0.01,
        **TORCH_CONVENTION,
    ),
    "rowwise_adagrad_torch_decay": numpy_rival(
        "rowwise_adagrad",
        reference.rowwise_adagrad(0.1, 0.01, 0.05, True),
        lr=0.1,
        eps=0.01,
        weight_decay=0.05,
        **TORCH_CONVENTION,
    ),
    "adam_decay": numpy_rival("adam", reference.adam(0.02, 0.01, 0.05), lr=0.02, eps=0.01, weight_decay=0.05),
    "adam_row": numpy_rival("adam", reference.adam(0.02, 0.01, by_row=True), lr=0.02, eps=0.01, bias_correction="row"),
    "adamw": numpy_rival("adamw", reference.adamw(0.02, 0.01, 0.1), lr=0.02, eps=0.01, weight_decay=0.1),
    "adamw_row": numpy_rival(
        "adamw", reference.adamw(0.02, 0.01, by_row=True), lr=0.02, eps=0.01, bias_correction="row"
    ),
    "momentum": numpy_rival("sgd", reference.momentum(0.05, 0.8), lr=0.05, momentum=0.8),
    "nesterov": numpy_rival(
        "sgd", reference.momentum(0.05, 0.8, True, 0.05), lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.05
    ),
    "adagrad_lr_decay": numpy_rival(
        "adagrad", reference.adagrad(0.1, 0.01, lr_decay=0.1), lr=0.1, eps=0.01, lr_decay=0.1
    ),
    "rmsprop": numpy_rival(
        "rmsprop", reference.rmsprop(0.01, 0.9, 0.1, weight_decay=0.05), lr=0.01, alpha=0.9, eps=0.1, weight_decay=0.05
    ),
    "rmsprop_centered": numpy_rival(
        "rmsprop", reference.rmsprop(0.01, 0.9, 0.1, True), lr=0.01, alpha=0.9, eps=0.1, centered=True
    ),
    "rmsprop_momentum": numpy_rival(
        "rmsprop",
        reference.rmsprop(0.01, 0.9, 0.1, True, 0.5),
        lr=0.01,
        alpha=0.9,
        eps=0.1,
        centered=True,
        momentum=0.5,
    ),
    "adadelta": numpy_rival("adadelta", reference.adadelta(0.5, 0.9, 0.01, 0.05), lr=0.5, eps=0.01, weight_decay=0.05),
    "amsgrad": numpy_rival(
        "adam",
        reference.adam(0.02, 0.01, beta2=0.6, amsgrad=True),
        lr=0.02,
        eps=0.01,
        betas=[0.9, 0.6],
        amsgrad=True,
    ),
    "amsgrad_adamw": numpy_rival(
        "adamw",
        reference.adamw(0.02, 0.01, 0.1, True, 0.6, True),
        lr=0.02,
        eps=0.01,
        weight_decay=0.1,
        betas=[0.9, 0.6],
        amsgrad=True,
        bias_correction="row",
    ),
    "rowwise_adam": numpy_rival("rowwise_adam", reference.rowwise_adam(0.02, 0.01), lr=0.02, eps=0.01),
    "rowwise_adam_row": numpy_rival(
        "rowwise_adam",
        reference.rowwise_adam(0.02, 0.01, 0.05, True),
        lr=0.02,
        eps=0.01,
        weight_decay=0.05,
        bias_correction="row",
    ),
    "lamb": numpy_rival("lamb", reference.lamb(0.02, 0.01, 0.05), lr=0.02, eps=0.01, weight_decay=0.05),
    "lamb_row": numpy_rival("lamb", reference.lamb(0.02, 0.01, by_row=True), lr=0.02, eps=0.01, bias_correction="row"),
    "lion": numpy_rival("lion", reference.lion(0.01, weight_decay=0.05), lr=0.01, weight_decay=0.05),
    "ftrl": numpy_rival("ftrl", reference.ftrl(0.1, 1.0, 0.3, 0.1), alpha=0.1, beta=1.0, l1=0.3, l2=0.1),
    "ftrl_plain": numpy_rival("ftrl", reference.ftrl(0.1), lr=0.1),
}

TORCH_DENSE = {
    "sgd_decay": torch_rival("sgd", torch.optim.SGD, lr=0.1, weight_decay=0.05),
    "adagrad_decay": torch_rival("adagrad", torch.optim.Adagrad, TORCH_CONVENTION, lr=0.1, eps=1e-3, weight_decay=0.05),
    # torch's dense Adam adds eps after the correction of bias, ours and SparseAdam before: it must have no weight.
    "adam_decay": torch_rival("adam", torch.optim.Adam, lr=0.02, weight_decay=0.05, eps=1e-12),
    "adamw": torch_rival("adamw", torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "momentum": torch_rival("sgd", torch.optim.SGD, lr=0.05, momentum=0.8, weight_decay=0.05),
    "nesterov": torch_rival("sgd", torch.optim.SGD, lr=0.05, momentum=0.8, nesterov=True),
    "adagrad_lr_decay": torch_rival("adagrad", torch.optim.Adagrad, TORCH_CONVENTION, lr=0.1, eps=1e-3, lr_decay=0.1),
    "rmsprop": torch_rival("rmsprop", torch.optim.RMSprop, lr=0.01, alpha=0.9, eps=0.1, weight_decay=0.05),
    "rmsprop_centered": torch_rival("rmsprop", torch.optim.RMSprop, lr=0.01, alpha=0.9, eps=0.1, centered=True),
    "rmsprop_momentum": torch_rival("rmsprop", torch.optim.RMSprop, lr=0.01, alpha=0.9, eps=0.1, momentum=0.5),
    "adadelta": torch_rival("adadelta", torch.optim.Adadelta, lr=0.5, rho=0.8, eps=0.01, weight_decay=0.05),
    "amsgrad": torch_rival("adam", torch.optim.Adam, lr=0.02, betas=(0.9, 0.6), eps=1e-12, amsgrad=True),
    "amsgrad_adamw": torch_rival("adamw", torch.optim.AdamW, lr=0.02, betas=(0.9, 0.6), amsgrad=True),
}

RIVALS = {**TORCH_SPARSE, **NUMPY_LAZY}


@dataclass(frozen=True)
class Batch:
    """What one lookup takes."""

    input: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None


Forward = Callable[[Batch, Tensor | None], Tensor]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def rows_of(table: Table) -> Tensor:
    return torch.ops.recstore.emb_read.table(table.handle, torch.arange(NUM_IDS), table.dim)


def assert_same_gradients(table: Table, expected: Tensor | None) -> None:
    """Holds what a table collected against the gradient of a weight, sparse or dense."""
    assert expected is not None
    collected = table.collected()
    ids, gradients = collected[0][1:] if collected else (torch.empty(0).long(), torch.empty(0, table.dim))
    if expected.is_sparse:
        assert torch.equal(ids, expected.coalesce().indices()[0])
    assert_near(torch.zeros(NUM_IDS, table.dim).index_copy(0, ids, gradients), expected.to_dense())


def assert_train_alike(
    table: Table, ours: Forward, weight: Tensor, theirs: Forward, rival: Rival, batches: Iterator[Batch]
) -> None:
    """Trains both side by side; compares outputs and gradients of each step, and the rows at the end."""
    generator = torch.Generator().manual_seed(1)
    optimizer, rival_optimizer = SparseOptimizer(modules=[table]), rival.theirs(weight)
    for batch in batches:
        factors = [None if batch.weights is None else batch.weights.detach().requires_grad_() for _ in range(2)]
        output, expected = ours(batch, factors[0]), theirs(batch, factors[1])
        assert_near(output, expected)

        slope = torch.randn(expected.shape, generator=generator)
        for pooled in (output, expected):
            (pooled * (slope + 0.25 * pooled)).sum().backward()
        assert_same_gradients(table, weight.grad)
        if factors[0] is not None and factors[1] is not None:
            assert factors[0].grad is not None
            assert factors[1].grad is not None
            assert_near(factors[0].grad, factors[1].grad)

        optimizer.step()
        rival_optimizer.step()
        weight.grad = None
        assert table.collected() == []
    assert_near(rows_of(table), weight.detach())


def random_ids(layout: str, generator: torch.Generator) -> Tensor:
    """Ids with duplicates in one of several shapes and strides."""
    shape = {
        "1-D": (24,),
        "2-D": (6, 4),
        "3-D": (2, 3, 4),
        "non-contiguous": (8, 6),
        "0-D": (),
        "strided": (48,),
    }
    ids = torch.randint(NUM_IDS, shape[layout], generator=generator)
    if layout == "non-contiguous":
        return ids[::2].t()
    return ids[::2] if layout == "strided" else ids


LAYOUTS = ["0-D", "1-D", "2-D", "3-D", "non-contiguous", "strided", "sometimes empty"]


def id_batches(layout: str) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        if layout == "sometimes empty":
            ids = random_ids("1-D", generator)
            yield Batch(ids[:0] if step % 5 == 0 else ids)
        else:
            yield Batch(random_ids(layout, generator))


def assert_embedding_trains_alike(name: str, layout: str, padding_idx: int | None, rival: Rival, sparse: bool) -> None:
    ours = DistEmbedding(NUM_IDS, DIM, name, padding_idx=padding_idx, optimizer=rival.ours, initializer=INITIALIZER)
    theirs = nn.Embedding(NUM_IDS, DIM, padding_idx, sparse=sparse, _weight=rows_of(ours.table))
    batches = every_id_batches() if layout == "every id" else id_batches(layout)
    assert_train_alike(
        ours.table,
        lambda batch, _: ours(batch.input),
        theirs.weight,
        lambda batch, _: theirs(batch.input),
        rival,
        batches,
    )


def every_id_batches() -> Iterator[Batch]:
    """All ids in random order, some of them twice."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        again = torch.randint(NUM_IDS, (10,), generator=generator)
        yield Batch(torch.cat([torch.randperm(NUM_IDS, generator=generator), again]))


@pytest.mark.parametrize("optimizer", TORCH_SPARSE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_embedding_trains_as_in_torch_for_every_shape_of_ids(
    layout: str, optimizer: str, table_name: Callable[[], str]
) -> None:
    assert_embedding_trains_alike(table_name(), layout, None, RIVALS[optimizer], sparse=True)


@pytest.mark.parametrize("optimizer", RIVALS)
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_embedding_trains_by_the_equation_of_every_optimizer(
    padding_idx: int | None, optimizer: str, table_name: Callable[[], str]
) -> None:
    assert_embedding_trains_alike(table_name(), "2-D", padding_idx, RIVALS[optimizer], sparse=True)


@pytest.mark.parametrize("optimizer", TORCH_DENSE)
def test_embedding_trains_as_in_torch_with_weight_decay_when_every_row_is_touched(
    optimizer: str, table_name: Callable[[], str]
) -> None:
    assert_embedding_trains_alike(table_name(), "every id", None, TORCH_DENSE[optimizer], sparse=False)


def test_embedding_of_any_int64_trains_as_one_of_small_ids(table_name: Callable[[], str]) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-(2**63), 2**63 - 1, (NUM_IDS,), generator=generator)
    ids[:3] = torch.tensor([-(2**63), 2**63 - 1, -1])
    ours = DistEmbedding(None, DIM, table_name(), padding_idx=-1, optimizer={"kind": "adam"})
    theirs = nn.Embedding(NUM_IDS, DIM, padding_idx=2, sparse=True, _weight=ours.weight[ids])
    optimizer, rival = SparseOptimizer(modules=[ours]), torch.optim.SparseAdam(theirs.parameters(), lr=0.01)

    for batch in id_batches("2-D"):
        output, expected = ours(ids[batch.input]), theirs(batch.input)
        assert_near(output, expected)
        for rows in (output, expected):
            (rows + rows**2).sum().backward()
        optimizer.step()
        rival.step()
        rival.zero_grad()

    assert_near(ours.weight[ids], theirs.weight.detach())


@dataclass(frozen=True)
class Bags:
    """How bags are given."""

    layout: BagLayout
    mode: Mode = "sum"
    padding_idx: int | None = None
    weighted: bool = False

    @property
    def includes_last_offset(self) -> bool:
        return self.layout in ("include_last_offset", "non-contiguous 1-D")

    def __str__(self) -> str:
        padding = "" if self.padding_idx is None else f", padding {self.padding_idx}"
        return f"{self.mode}, {self.layout}{padding}{', weighted' if self.weighted else ''}"


def bag_batches(bags: Bags) -> Iterator[Batch]:
    """Bags with duplicate ids and, where their length varies, with empty ones in every place."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        lengths = torch.randint(0, 5, (8,), generator=generator)
        lengths[torch.randint(8, (1,), generator=generator)] = 0
        offsets = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
        ids = random_ids("2-D", generator)
        if bags.layout == "non-contiguous 2-D":
            ids = random_ids("non-contiguous", generator)
        elif bags.layout != "2-D":
            ids = torch.randint(NUM_IDS, (int(lengths.sum()), 2), generator=generator)[:, 0]
        weights = 0.5 * torch.randn(*ids.shape, 2, generator=generator)[..., 0] if bags.weighted else None
        if bags.layout in ("offsets", "include_last_offset"):
            ids = ids.contiguous()
        if bags.layout == "offsets":
            offsets = offsets[:-1]
        elif bags.layout == "non-contiguous 1-D":
            offsets = torch.stack([offsets, offsets], dim=1)[:, 0]
        yield Batch(ids, offsets if ids.dim() == 1 else None, weights)


def assert_bags_train_alike(name: str, bags: Bags, rival: Rival) -> None:
    ours = DistEmbeddingBag(
        NUM_IDS,
        DIM,
        name,
        bags.mode,
        bags.padding_idx,
        bags.includes_last_offset,
        optimizer=rival.ours,
        initializer=INITIALIZER,
    )
    theirs = nn.EmbeddingBag(
        NUM_IDS,
        DIM,
        mode=bags.mode,
        sparse=bags.mode != "max",  # torch has no sparse gradient of the maximum.
        _weight=rows_of(ours.table),
        include_last_offset=bags.includes_last_offset,
        padding_idx=bags.padding_idx,
    )
    assert_train_alike(
        ours.table,
        lambda batch, weights: ours(batch.input, batch.offsets, weights),
        theirs.weight,
        lambda batch, weights: theirs(batch.input, batch.offsets, weights),
        rival,
        bag_batches(bags),
    )


LAYOUTS_OF_BAGS: tuple[BagLayout, ...] = (
    "offsets",
    "include_last_offset",
    "2-D",
    "non-contiguous 1-D",
    "non-contiguous 2-D",
)
POOLINGS: tuple[tuple[Mode, bool], ...] = (("sum", False), ("sum", True), ("mean", False), ("max", False))

BAGS = [
    Bags(layout, mode, padding_idx, weighted)
    for layout in LAYOUTS_OF_BAGS
    for mode, weighted in POOLINGS
    for padding_idx in (None, 3)
]


@pytest.mark.parametrize("bags", BAGS, ids=str)
def test_bags_train_as_in_torch_for_every_mode_and_layout(bags: Bags, table_name: Callable[[], str]) -> None:
    assert_bags_train_alike(table_name(), bags, RIVALS["adagrad_torch"])


@pytest.mark.parametrize("bags", BAGS, ids=str)
def test_bags_are_pooled_alike_without_gradients(bags: Bags, table_name: Callable[[], str]) -> None:
    ours = DistEmbeddingBag(
        NUM_IDS, DIM, table_name(), bags.mode, bags.padding_idx, bags.includes_last_offset, initializer=INITIALIZER
    )
    for batch in itertools.islice(bag_batches(bags), 5):
        with torch.no_grad():
            pooled = ours(batch.input, batch.offsets, batch.weights)
        assert not pooled.requires_grad
        assert torch.equal(pooled, ours(batch.input, batch.offsets, batch.weights).detach())


@pytest.mark.parametrize("bags", [Bags("2-D", "max", -1), Bags("offsets", "sum", -1, True)], ids=str)
def test_bags_train_as_in_torch_with_sgd_and_a_padding_idx_from_the_end(
    bags: Bags, table_name: Callable[[], str]
) -> None:
    assert_bags_train_alike(table_name(), bags, RIVALS["sgd"])


@pytest.mark.parametrize("optimizer", RIVALS)
@pytest.mark.parametrize("bags", [Bags("offsets", "sum", 3, True), Bags("include_last_offset", "mean", 3)], ids=str)
def test_bags_train_by_the_equation_of_every_optimizer(
    bags: Bags, optimizer: str, table_name: Callable[[], str]
) -> None:
    assert_bags_train_alike(table_name(), bags, RIVALS[optimizer])


def test_a_trace_holds_the_summed_gradient_of_each_id_until_the_step(table_name: Callable[[], str]) -> None:
    rows, bags = DistEmbedding(None, 1, table_name()), DistEmbeddingBag(None, 1, table_name(), "sum")
    ids = torch.tensor([[7, -7], [7, 7]])
    (rows(ids).sum() + 2 * bags(ids).sum()).backward()

    [(row_ids, row_gradients)] = rows._trace
    [(name, bag_ids, bag_gradients)] = bags._trace
    SparseOptimizer(modules=[rows, bags]).step()

    assert name == bags.name
    assert row_ids.tolist() == bag_ids.tolist() == [-7, 7]
    assert row_gradients.tolist() == [[1.0], [3.0]]
    assert bag_gradients.tolist() == [[2.0], [6.0]]
    assert rows._trace == bags._trace == []


@pytest.mark.parametrize("optimizer", TORCH_SPARSE)
def test_functional_embedding_trains_as_in_torch(optimizer: str, table_name: Callable[[], str]) -> None:
    rival = RIVALS[optimizer]
    table = Table(table_name(), DIM, TableConfig(initializer=INITIALIZER, optimizer=rival.ours))
    weight = nn.Parameter(rows_of(table))
    assert_train_alike(
        table,
        lambda batch, _: embedding(batch.input, table, padding_idx=5),
        weight,
        lambda batch, _: functional.embedding(batch.input, weight, padding_idx=5, sparse=True),
        rival,
        id_batches("3-D"),
    )


@pytest.mark.parametrize("optimizer", TORCH_SPARSE)
def test_functional_embedding_bag_trains_as_in_torch(optimizer: str, table_name: Callable[[], str]) -> None:
    rival = RIVALS[optimizer]
    table = Table(table_name(), DIM, TableConfig(initializer=INITIALIZER, optimizer=rival.ours))
    weight = nn.Parameter(rows_of(table))
    assert_train_alike(
        table,
        lambda batch, factors: embedding_bag(
            batch.input, table, batch.offsets, "sum", factors, include_last_offset=True, padding_idx=5
        ),
        weight,
        lambda batch, factors: functional.embedding_bag(
            batch.input,
            weight,
            batch.offsets,
            mode="sum",
            sparse=True,
            per_sample_weights=factors,
            include_last_offset=True,
            padding_idx=5,
        ),
        rival,
        bag_batches(Bags("include_last_offset", "sum", 5, True)),
    )


def test_functional_forms_of_a_dim_train_the_default_table() -> None:
    dim = 109
    table = default_table(dim)
    weight = nn.Parameter(torch.zeros(NUM_IDS, dim))
    rival = torch_rival("sgd", torch.optim.SGD, lr=0.01)  # What an unconfigured table has.
    assert_train_alike(
        table,
        lambda batch, _: embedding(batch.input, dim).sum(1) + embedding_bag(batch.input, dim, mode="mean"),
        weight,
        lambda batch, _: (
            functional.embedding(batch.input, weight, sparse=True).sum(1)
            + functional.embedding_bag(batch.input, weight, mode="mean", sparse=True)
        ),
        rival,
        id_batches("2-D"),
    )


def test_functional_forms_of_a_dim_open_the_default_table_anew_after_it_was_dropped() -> None:
    dim, ids = 110, torch.arange(3)
    embedding(ids, dim)
    torch.ops.recstore.drop_table(f"default/{dim}")

    torch.ops.recstore.emb_update(ids, torch.ones(3, dim))

    assert torch.equal(embedding(ids, dim), torch.ops.recstore.emb_read(ids, dim))


@pytest.mark.parametrize(("optimizer", "dim"), [(name, 120 + number) for number, name in enumerate(RIVALS)])
def test_the_two_argument_ops_train_a_configured_default_table(optimizer: str, dim: int) -> None:
    rival, generator = RIVALS[optimizer], torch.Generator().manual_seed(0)
    table = Table(f"default/{dim}", dim, TableConfig(initializer=INITIALIZER, optimizer=rival.ours))
    weight = nn.Parameter(rows_of(table))
    rival_optimizer = rival.theirs(weight)

    for batch in id_batches("non-contiguous"):
        gradients = torch.randn(dim, *batch.input.shape, generator=generator).permute(1, 2, 0)
        torch.ops.recstore.emb_update(batch.input, gradients)
        flat = gradients.reshape(-1, dim)
        weight.grad = torch.sparse_coo_tensor(batch.input.reshape(1, -1), flat, weight.shape).coalesce()
        rival_optimizer.step()
        expected = functional.embedding(batch.input, weight.detach())
        assert_near(torch.ops.recstore.emb_read(batch.input, dim), expected)

    assert_near(torch.ops.recstore.emb_read(torch.arange(NUM_IDS), dim), weight.detach())


def test_the_two_argument_ops_start_at_zeros_and_take_sgd_steps_of_a_hundredth() -> None:
    ids, gradients = torch.tensor([7, -7, 7]), torch.tensor([[1.0] * 107, [2.0] * 107, [3.0] * 107])
    assert torch.ops.recstore.emb_read(ids, 107).count_nonzero() == 0
    assert "default/107" not in table_names()

    torch.ops.recstore.emb_update(ids, gradients)

    rows = torch.ops.recstore.emb_read(torch.tensor([7, -7, 0]), 107)
    assert_near(rows, torch.tensor([-0.04, -0.02, 0.0])[:, None].expand(3, 107))


@pytest.mark.parametrize("optimizer", RIVALS)
def test_several_backwards_make_one_step_of_their_sum(optimizer: str, table_name: Callable[[], str]) -> None:
    rival = RIVALS[optimizer]
    ours = DistEmbedding(NUM_IDS, DIM, table_name(), optimizer=rival.ours, initializer=INITIALIZER)
    theirs = nn.Embedding(NUM_IDS, DIM, sparse=True, _weight=rows_of(ours.table))
    optimizer_step, rival_step = SparseOptimizer(modules=[ours]).step, rival.theirs(theirs.weight).step

    for step, batch in enumerate(id_batches("2-D")):
        for module in (ours, theirs):
            (0.3 * module(batch.input)).sum().backward()
            (module(batch.input[1:]) ** 2).sum().backward()
        assert_same_gradients(ours.table, theirs.weight.grad)
        if step % 3 == 2:  # Gradients of three batches, each with two backwards.
            optimizer_step()
            rival_step()
            theirs.weight.grad = None

    assert_near(rows_of(ours.table), theirs.weight.detach())


@pytest.mark.parametrize("convention", ["recstore", "torch"])
def test_adagrad_moves_by_lr_after_two_backwards_before_the_first_step(
    convention: str, table_name: Callable[[], str]
) -> None:
    module = DistEmbedding(
        None,
        1,
        table_name(),
        optimizer={"kind": "adagrad", "lr": 0.1, "convention": convention},
        initializer="zeros",
    )
    for gradient in (0.1, 0.2):
        (gradient * module(torch.tensor([5]))).sum().backward()

    SparseOptimizer(modules=[module]).step()

    # Two steps would give -0.1 * (0.1 / 0.1 + 0.2 / sqrt(0.05)) = -0.19.
    # One rounding of float32 at 0.1 is 7e-9.
    assert module(torch.tensor([5])).item() == pytest.approx(-0.1 * 0.3 / math.sqrt(0.09 + 1e-10), abs=2e-8)
    assert module.table.statistics()["step"] == 1


def test_two_modules_over_one_table_make_one_step_of_their_sum(table_name: Callable[[], str]) -> None:
    name, options = table_name(), {"kind": "adagrad", "lr": 0.1}
    first, second = (DistEmbedding(None, 1, name, optimizer=options, initializer="zeros") for _ in range(2))
    (0.1 * first(torch.tensor([5])) + 0.2 * second(torch.tensor([5]))).sum().backward()

    SparseOptimizer(modules=[first, second]).step()

    # As above: one rounding of float32.
    assert first(torch.tensor([5])).item() == pytest.approx(-0.1, abs=2e-8)


Schedule = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]

SCHEDULES: dict[str, Schedule] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, 0.1 * (epoch + 1))),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
}


@pytest.mark.parametrize("optimizer", TORCH_SPARSE)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("modules_at", ["construction", "step"])
def test_learning_rate_schedules_act_as_in_torch(
    modules_at: str, schedule: str, optimizer: str, table_name: Callable[[], str]
) -> None:
    rival = RIVALS[optimizer]
    ours = DistEmbedding(NUM_IDS, DIM, table_name(), optimizer=rival.ours, initializer=INITIALIZER)
    theirs = nn.Embedding(NUM_IDS, DIM, sparse=True, _weight=rows_of(ours.table))
    rival_optimizer = rival.theirs(theirs.weight)
    assert isinstance(rival_optimizer, torch.optim.Optimizer)
    modules = [ours] if modules_at == "construction" else None
    sparse_optimizer = SparseOptimizer(lr=rival.ours["lr"], modules=modules)
    schedules = [SCHEDULES[schedule](one) for one in (sparse_optimizer, rival_optimizer)]

    for batch in id_batches("1-D"):
        for module in (ours, theirs):
            (module(batch.input) ** 2).sum().backward()
        sparse_optimizer.step([ours])
        rival_optimizer.step()
        rival_optimizer.zero_grad()
        for one in schedules:
            one.step()

    assert sparse_optimizer.param_groups[0]["lr"] == rival_optimizer.param_groups[0]["lr"]
    assert_near(rows_of(ours.table), theirs.weight.detach())


def test_a_table_first_stepped_late_follows_the_schedule(table_name: Callable[[], str]) -> None:
    early, late = (DistEmbedding(None, 1, table_name(), initializer="zeros") for _ in range(2))
    optimizer = SparseOptimizer(lr=1.0)
    schedule = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    for module in (early, late):
        module(torch.tensor([5])).sum().backward()
        optimizer.step([module])
        schedule.step()

    assert [module(torch.tensor([5])).item() for module in (early, late)] == [-1.0, -0.5]


def test_init_func_gives_the_first_rows(table_name: Callable[[], str]) -> None:
    calls: list[tuple[tuple[int, int], torch.dtype]] = []

    def init_func(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        calls.append((shape, dtype))
        return torch.arange(shape[0] * shape[1], dtype=dtype).reshape(shape)

    ours = DistEmbedding(NUM_IDS, DIM, table_name(), init_func, padding_idx=2)

    expected = torch.arange(NUM_IDS * DIM).reshape(NUM_IDS, DIM).float()
    expected[2] = 0
    assert calls == [((NUM_IDS, DIM), torch.float32)]
    assert torch.equal(ours(torch.arange(NUM_IDS)), expected)


def test_init_func_rows_train_as_in_torch(table_name: Callable[[], str]) -> None:
    weight = nn.Parameter(torch.randn(NUM_IDS, DIM, generator=torch.Generator().manual_seed(0)))
    rival = RIVALS["adagrad_torch"]
    ours = DistEmbedding(NUM_IDS, DIM, table_name(), lambda shape, dtype: weight.detach(), optimizer=rival.ours)
    assert_train_alike(
        ours.table,
        lambda batch, _: ours(batch.input),
        weight,
        lambda batch, _: functional.embedding(batch.input, weight, sparse=True),
        rival,
        id_batches("2-D"),
    )


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_from_pretrained_trains_as_in_torch_when_not_frozen(
    padding_idx: int | None, table_name: Callable[[], str]
) -> None:
    weight = torch.randn(NUM_IDS, DIM, generator=torch.Generator().manual_seed(0))
    rival = RIVALS["adam"]
    ours = DistEmbedding.from_pretrained(
        weight, table_name(), freeze=False, padding_idx=padding_idx, optimizer=rival.ours
    )
    theirs = nn.Embedding.from_pretrained(weight.clone(), freeze=False, padding_idx=padding_idx, sparse=True)
    assert_train_alike(
        ours.table,
        lambda batch, _: ours(batch.input),
        theirs.weight,
        lambda batch, _: theirs(batch.input),
        rival,
        id_batches("2-D"),
    )


def test_from_pretrained_gets_no_gradient_unless_told(table_name: Callable[[], str]) -> None:
    weight = torch.randn(NUM_IDS, DIM, generator=torch.Generator().manual_seed(0))
    module = DistEmbedding.from_pretrained(weight, table_name())

    rows = module(torch.arange(NUM_IDS))

    assert torch.equal(rows, weight)
    assert not rows.requires_grad
