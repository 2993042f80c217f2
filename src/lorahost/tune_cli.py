"""`lorahost tune`: the tuner's own command line, as `python -m lorahost_kernels.tune` has it."""

from __future__ import annotations

import sys

import click


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(arguments: tuple[str, ...]) -> None:
    """Tune the LoRA kernels for this GPU and a model's shape (`lorahost tune -h`)."""
    from lorahost_kernels.tune.command import main

    sys.exit(main(arguments, "lorahost tune"))
