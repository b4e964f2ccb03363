"""The command `recstore` as `python -m recstore_ops`."""

from recstore_command import main

if __name__ == "__main__":
    main()
