"""`python -m recstore_ops.cli`."""

from recstore_ops.cli import main

if __name__ == "__main__":
    main()
