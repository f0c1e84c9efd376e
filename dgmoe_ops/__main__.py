"""`python -m dgmoe_ops`: what this machine can run, and what a call will take."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        from .cli.main import main as command
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(
            f"python -m dgmoe_ops needs {error.name}, which is not installed:"
            " pip install click rich  (or install dgmoe_ops with its extra: cli)"
        )
    command(prog_name="python -m dgmoe_ops")


if __name__ == "__main__":
    main()
