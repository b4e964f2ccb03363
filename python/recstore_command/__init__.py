"""The command `recstore`, beside the package: `recstore --version` and `recstore --help` import no torch."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_NEEDED = ("rich", "typer")
"""The modules of the extra `cli`."""


def main() -> None:
    """Runs `recstore`; a ValueError, an OSError or a missing package ends it with one sentence and exit code 2."""
    try:
        _check_packages()
        from recstore_command.commands import app

        app()
    except ModuleNotFoundError:  # Of a package that no extra has: a fault of the installation, not of the user.
        raise
    except (ValueError, OSError, ImportError) as error:
        print(f"recstore: {_sentence(error)}", file=sys.stderr)
        sys.exit(2)


def _check_packages() -> None:
    for module in _NEEDED:
        if find_spec(module) is None:
            raise ImportError(f"recstore needs {module}: pip install 'recstore-ops[cli]'", name=module)


def _sentence(error: Exception) -> str:
    """Returns the message of an error; of one that the system raised, the file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
