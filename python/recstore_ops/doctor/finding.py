"""What one check of `recstore doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        topic: what was looked at.
        found: what it is like.
        state: `ok`, `warning` for what costs speed or may surprise, `error` for what will not work.
        advice: what to do; empty where there is nothing.
    """

    topic: str
    found: str
    state: State = "ok"
    advice: str = ""
