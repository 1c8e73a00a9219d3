"""The command line: `eyas COMMAND`. Others script against it, so names, defaults and exit codes are fixed.

Exit codes: 0 done; 2 wrong usage or input, with one plain sentence on standard error; 130 Ctrl-C; 1 anything else, an
unexplained divergence included. With `--json` standard output holds one line, one JSON object.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import transformers

from eyas import native
from eyas.commands import bench, demo, expect, export, generate, import_, inspect, prepare, report, train, tune
from eyas.commands.common import EXIT_FAILED
from eyas.errors import InputError, one_line

COMMANDS = (demo, generate, bench, tune, report, expect, inspect, import_, export, prepare, train)
EXIT_INPUT, EXIT_INTERRUPTED = 2, 130


class _Parser(argparse.ArgumentParser):
    """argparse, with one plain sentence instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    transformers.logging.set_verbosity_error()
    for stream in (sys.stdout, sys.stderr):  # an answer may hold characters that the terminal does not know
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    try:
        argv = _checked(sys.argv[1:] if argv is None else argv)
        if argv and argv[0] == "train":
            argv = [argv[0], *train.with_recipe(argv[1:])]
        arguments = _parser().parse_args(argv)
        native.ask_threads(arguments.threads)
        return arguments.run(arguments)
    except InputError as error:
        print(f"eyas: {one_line(error, 2000)}", file=sys.stderr)
        return EXIT_INPUT
    except BrokenPipeError:  # the reader of our output has gone, as in `eyas generate | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except FloatingPointError as error:  # weights or logits that are no numbers
        print(f"eyas: {one_line(error)}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:  # a place that cannot be read or written
        print(f"eyas: {one_line(error)}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        print("eyas: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _checked(argv: Sequence[str]) -> Sequence[str]:
    """Arguments, without those that argparse (up to Python 3.12) or the system's calls would stumble over."""
    for argument in argv:
        flag, _, value = argument.partition("=")
        if flag.startswith("--") and value == "--":
            raise InputError(f"{flag} needs another value than --")
        try:
            whole = b"\0" not in os.fsencode(argument)
        except UnicodeEncodeError:
            whole = False
        if not whole:
            raise InputError(f"an argument must be a text without null characters, got {argument!r}")
    return argv


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="eyas", description="Lossless speculative decoding with EAGLE heads.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        own = commands.add_parser(command.__name__.rpartition(".")[2].removesuffix("_"), help=command.HELP)
        command.add_flags(own)
        own.set_defaults(run=command.run)
    return parser
