"""What figures were measured on and with."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

from benches.competitors import fbgemm
from recstore_ops import __version__

ROOT = Path(__file__).resolve().parents[1]


def described() -> dict[str, str]:
    """Returns date, commit, processor, cores, huge pages and versions by name."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "transparent huge pages": _huge_pages(),
        "Python": platform.python_version(),
        "recstore-ops": __version__,
        "torch": torch.__version__,
        "FBGEMM": fbgemm.version() or f"not installed; {fbgemm.HOW_TO_INSTALL}",
    }


def _commit() -> str:
    """The checked out commit, marked where files differ from it."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    """The model, and which of the vector instructions that matter it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(_field(line) for line in lines if ":" in line)
    flags = fields.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2") if name in flags), platform.machine())
    numbers = ", ".join(f"{name} {fields[name]}" for name in ("cpu family", "model") if name in fields)
    return f"{fields.get('model name', platform.machine())} ({numbers}, {widest})"


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _huge_pages() -> str:
    try:
        choices = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return choices[choices.find("[") + 1 : choices.find("]")]
