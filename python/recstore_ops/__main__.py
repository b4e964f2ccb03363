"""The command `recstore`, also as `python -m recstore_ops`."""

import sys

from recstore_ops.config.extras import MissingPackage, require


def main() -> None:
    """Runs `recstore`, or says what it lacks and ends with exit code 2."""
    try:
        require("train", "recstore")
    except MissingPackage as error:
        print(f"recstore: {error}", file=sys.stderr)
        sys.exit(2)
    from recstore_ops.cli import main as run

    run()


if __name__ == "__main__":
    main()
