"""Groups whose ranks run out of batches at different times; see `recstore_ops.sharding.join`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class Announcements:
    """Whether what a group exchanges just now was announced to the ranks that have no more batches.

    Args:
        group: the ranks once more, over which their tables exchange meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._is_announced = False

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Within it exchanges are what was announced."""
        self._is_announced = True
        try:
            yield
        finally:
            self._is_announced = False

    def check(self) -> None:
        """Refuses an exchange that ranks without batches would not take part in.

        Raises:
            RuntimeError: it was not announced.
        """
        if not self._is_announced:
            raise RuntimeError(
                "within sharding.join sharded tables take lookups, backward passes and steps only, for ranks without "
                "batches take part in these; clip, scale, open, save and load before or after it"
            )


joinings: dict[dist.ProcessGroup, Announcements] = {}
"""By the group of the tables."""
