"""The commands of `recstore`, each a file; `recstore_command` finds them by name."""

from recstore_command import main
from recstore_command.commands import app

__all__ = ["app", "main"]
