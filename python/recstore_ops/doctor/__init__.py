"""The checks of `recstore doctor`: whether this installation works, and how to make it faster.

Each check is one function that returns one `Finding`.
"""

from recstore_ops.doctor.examination import (
    CHECKS,
    HUGE_PAGES,
    MEMORY,
    OVERCOMMIT,
    SIMD_VARIABLE,
    STABLE_ABI_TARGET,
    Finding,
    State,
    check_active_config,
    check_cpu,
    check_cuda,
    check_disk,
    check_fork,
    check_huge_pages,
    check_memory,
    check_native_module,
    check_python,
    check_threads,
    check_torch,
    examine,
    examine_config,
)

__all__ = [
    "CHECKS",
    "HUGE_PAGES",
    "MEMORY",
    "OVERCOMMIT",
    "SIMD_VARIABLE",
    "STABLE_ABI_TARGET",
    "Finding",
    "State",
    "check_active_config",
    "check_cpu",
    "check_cuda",
    "check_disk",
    "check_fork",
    "check_huge_pages",
    "check_memory",
    "check_native_module",
    "check_python",
    "check_threads",
    "check_torch",
    "examine",
    "examine_config",
]
