"""Training by several workers that wait for nobody: what it comes to on planted rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import served_training
from served_tables import ServerProcesses
from warm_processes import side_by_side

from recstore_ops import servers, table_statistics
from recstore_ops.training import planted_interactions
from recstore_ops.training.metrics.evaluation import evaluate

pytestmark = pytest.mark.tier("test")

WORKERS, EPOCHS = 3, 12


@pytest.fixture(autouse=True)
def _embedded_afterwards() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


@pytest.mark.tier("all")
def test_an_fm_trained_by_three_workers_finds_planted_interactions(tmp_path: Path) -> None:
    planted = planted_interactions()
    with ServerProcesses(tmp_path, 2) as processes:
        given = [(processes.addresses, "fm", worker, WORKERS, EPOCHS) for worker in range(WORKERS)]
        side_by_side(served_training.train, given, 300)
        servers.set_ps_servers(processes.addresses)
        model = served_training.factorization_machine("fm")
        batches = math.ceil(len(planted.train) / WORKERS / served_training.BATCH_ROWS)
        assert [table_statistics(f"fm/{table}")["step"] for table in "wv"] == [WORKERS * EPOCHS * batches] * 2
        # How late gradients come is up to the machine. Three idle cores come to 0.86; without interactions none is
        # above 0.68.
        assert evaluate(model, [planted.test]).auc >= 0.75
