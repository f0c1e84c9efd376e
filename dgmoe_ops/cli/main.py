"""The command that the others hang below."""

from __future__ import annotations

import click

import dgmoe_ops

from .doctor import doctor
from .plan import plan
from .warmup import warmup


@click.group()
@click.version_option(dgmoe_ops.__version__, package_name="dgmoe_ops")
def main() -> None:
    """Say what dgmoe_ops can run here, what a call of the layer takes, and compile for it."""


main.add_command(doctor)
main.add_command(plan)
main.add_command(warmup)
