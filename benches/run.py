"""`python benches/run.py` measures everything; `--help` lists the options, README.md tells how it is measured."""

from __future__ import annotations

import sys
from pathlib import Path

# `benches` is a package of the repository; its own folder, which Python puts first, would hide modules of Python.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benches.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
