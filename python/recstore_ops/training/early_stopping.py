"""Stops a run whose validation logloss does not fall any more."""

from __future__ import annotations

import math
from typing import Any


class EarlyStopping:
    """Stops after `patience` evaluations in a row without a new lowest logloss; 0 never stops."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._lowest = math.inf
        self._since = 0

    def should_stop(self, logloss: float) -> bool:
        """Takes an evaluation's validation logloss."""
        if logloss < self._lowest:
            self._lowest, self._since = logloss, 0
        else:
            self._since += 1
        return 0 < self._patience <= self._since

    def state_dict(self) -> dict[str, Any]:
        """Returns what evaluations have changed."""
        return {"lowest": self._lowest, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self._lowest, self._since = state["lowest"], state["since"]
