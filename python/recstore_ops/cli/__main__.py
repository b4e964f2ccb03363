"""`python -m recstore_ops.cli`."""

from recstore_ops.cli import main

main()
