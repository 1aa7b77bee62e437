"""The `packattn` command. Each subcommand is a module with `SUMMARY`, `add_arguments(parser)` and `run(args) -> int`, and
`EXAMPLES` if it has any: lines of a command, two or more spaces, and what it does."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
from collections.abc import Sequence

import packattn

# name of the subcommand -> its module; imported only when the command line is read, in this order of help
COMMANDS = {
    "info": "packattn.cli.info",
    "demo": "packattn.cli.demo",
    "check": "packattn.cli.check",
    "plot": "packattn.cli.plot",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="packattn",
        description="Attention for packed rows: every token sees its own document only, and this can be checked.",
    )
    parser.add_argument("--version", action="version", version=f"packattn {packattn.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        examples = getattr(module, "EXAMPLES", "")
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=(module.__doc__ or "").strip().split("\n\n")[0],
            epilog=f"examples:\n{textwrap.indent(examples, '  ')}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter if examples else argparse.HelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    args = build_parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("packattn: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has gone; keep Python from failing again while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return int(status)
