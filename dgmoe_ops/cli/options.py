"""What the commands share of options: sizes with their bounds, and errors as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import click

#: far above every model, so that a typing error is refused before it takes memory or hours
MOST_TOKENS = 1 << 24
MOST_WARMUP_TOKENS = 1 << 18
MOST_EXPERTS = 1 << 14
MOST_COLUMNS = 1 << 18
MOST_TOP_K = 1 << 10
MOST_ALIGNMENT = 1 << 14


class Finite(click.FloatRange):
    """A float in a range; NaN, which compares with nothing, is in none."""

    def convert(self, value, param, ctx):
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found} is not in the range {self._describe_range()}.", param, ctx)
        return found


class NamedPath(click.Path):
    """A path with a name; the empty one would be the current folder."""

    def __init__(self, **kinds: bool) -> None:
        super().__init__(path_type=Path, **kinds)

    def convert(self, value, param, ctx):
        if value == "":
            self.fail("must not be empty", param, ctx)
        return super().convert(value, param, ctx)


def sizes(command: Callable) -> Callable:
    """Add the options that give the sizes of a layer; click shows their bounds in --help."""
    experts = click.IntRange(1, MOST_EXPERTS)
    columns = click.IntRange(1, MOST_COLUMNS)
    top_k = click.IntRange(1, MOST_TOP_K)
    options = (
        click.option("--experts", required=True, type=experts, help="experts over all ranks"),
        click.option("--hidden", required=True, type=columns),
        click.option("--intermediate", required=True, type=columns),
        click.option("--top-k", required=True, type=top_k),
        click.option("--local-experts", type=experts, help="experts of this rank  [default: all]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_sizes(experts: int, local_experts: int, top_k: int) -> None:
    """Refuse sizes that contradict each other."""
    if local_experts > experts:
        raise click.UsageError(f"--local-experts {local_experts} is more than --experts {experts}")
    if top_k > experts:
        raise click.UsageError(f"--top-k {top_k} is more than --experts {experts}")


class Command(click.Command):
    """A command whose errors are JSON where --json asks for that.

    `{"error": {"message": ..., "exit_code": ...}}` then stands on stdout, and nothing on stderr;
    the exit code is 2 for a wrong option and 1 for what could not be done.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: object,
    ) -> click.Context:
        as_json = _asks_for_json(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.ClickException as error:
            if not as_json:
                raise
            raise _said(error) from error

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if not ctx.params.get("as_json"):
                raise
            raise _said(error) from error


def _asks_for_json(args: Sequence[str]) -> bool:
    end = args.index("--") if "--" in args else len(args)
    return "--json" in args[:end]


def _said(error: click.ClickException) -> click.exceptions.Exit:
    """Write an error as JSON; what then ends the program."""
    said = {"message": error.format_message(), "exit_code": error.exit_code}
    click.echo(json.dumps({"error": said}, indent=2))
    return click.exceptions.Exit(error.exit_code)
