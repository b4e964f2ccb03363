"""Whether a person sees what a program shows of its progress."""

import sys


def is_watched() -> bool:
    """Whether the standard error is a terminal, or the page of a notebook; not so in a pipe, a log or a service."""
    ipython = sys.modules.get("IPython")
    return sys.stderr.isatty() or (ipython is not None and hasattr(ipython.get_ipython(), "kernel"))
