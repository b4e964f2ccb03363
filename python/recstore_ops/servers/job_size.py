"""The number of processes of the job, as the operators know it.

Each process of a job would train a copy of its own of an embedded table, which no other process sees. Opening such a
table in a job is refused. A program may also open it first and begin the job then, as trainers do that are given a
model. So the operators refuse the rows of such a table as long as there is a job, in compiled graphs too. They look at
the number that is noted here.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from recstore_ops import _native


def watch_job() -> None:
    """Notes the size of the job whenever `torch.distributed` begins or ends one."""
    if not dist.is_available():
        return
    # What `init_process_group` and `destroy_process_group` set, wherever a program has them from.
    from torch.distributed import distributed_c10d

    known = type(distributed_c10d._world)
    # Private in torch: a release that keeps it elsewhere still has the check when a module is made.
    default_group: Any = getattr(known, "default_pg", None)
    if not isinstance(default_group, property) or default_group.fget is None or default_group.fset is None:
        return
    getter, setter = default_group.fget, default_group.fset

    def begin_or_end(world: Any, group: dist.ProcessGroup | None) -> None:
        setter(world, group)
        _note(group)

    known.default_pg = property(getter, begin_or_end, default_group.fdel, default_group.__doc__)
    _note(distributed_c10d._world.default_pg)


def _note(group: dist.ProcessGroup | None) -> None:
    _native.set_job_size(1 if group is None else group.size())
