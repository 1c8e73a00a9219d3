"""`eyas generate`: answer one prompt, streaming to the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eyas.commands.common import (
    decoding_flags,
    free,
    load_model,
    print_json,
    sampling_of,
    say,
    say_if_plain,
    say_if_short,
)
from eyas.errors import InputError, one_line
from eyas.guard import Guarded
from eyas.machine import peak_memory_bytes
from eyas.measure import first_draws, plain_forwards, timed
from eyas.model import TextStream

HELP = "answer one prompt"


def add_flags(parser: argparse.ArgumentParser) -> None:
    decoding_flags(parser, target=None, max_new_tokens=256)
    parser.add_argument(
        "--head", type=_head, default=None, help="a shipped head, a folder, lookup, small:TARGET, or none (default)"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the prompt's text")
    source.add_argument("--prompt-file", help="a file with the prompt; - is standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="as a user's turn in the chat template")
    form.add_argument("--raw", action="store_false", dest="chat", help="as it is, without a chat template")
    parser.add_argument("--stop", action="append", default=[], help="end before this string (repeatable)")


def run(arguments: argparse.Namespace) -> int:
    prompt = _prompt_text(arguments)
    model = load_model(arguments, arguments.head)
    ids = model.encode(prompt, arguments.chat)
    stop = model.stopping(arguments.max_new_tokens, arguments.stop)
    sampling = sampling_of(arguments, model)  # before the clock starts: a grammar reads the whole vocabulary
    stream = TextStream(stop, model.decode)
    out = sys.stderr if arguments.json else sys.stdout

    def shown():
        try:
            for round_ in model.rounds(ids, sampling, stop):
                print(stream.feed(round_), end="", file=out, flush=True)
                yield round_
        except (InputError, FloatingPointError):  # what is wrong is said on a line of its own
            if stream.shown:
                print(file=out)
            raise

    answer = timed(shown())
    print(file=out)
    output = model.output(answer, len(ids), stop)
    forwards = len(output.rounds) - 1
    guarded = model.drafter is not None and isinstance(model.policy, Guarded)
    record = {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": output.prompt_tokens,
        "new_tokens": len(output.token_ids),
        "target_forwards": forwards,
        "tau": output.tau,
        "finish_reason": output.finish_reason,
        "seconds": output.seconds,
        "tokens_per_second": len(output.token_ids) / output.seconds,
        "target": arguments.target,
        "head": arguments.head,
        "tree": str(model.policy) if model.drafter else None,
        "guard": guarded,
        "plain_forwards": plain_forwards([answer]),
        "backend": model.target.spec.backend,
        "dtype": str(model.target.spec.dtype).removeprefix("torch."),
        "seed": arguments.seed,
        "temperature": arguments.temperature,
        "peak_memory_bytes": peak_memory_bytes(),
    }
    if arguments.json:
        print_json(record)
    else:
        tau = "" if output.tau is None else f", tau {output.tau:.2f}"
        say(f"{record['new_tokens']} tokens in {forwards} target forwards{tau}, "
             f"{record['tokens_per_second']:.1f} tokens/s, finished by {output.finish_reason}")  # fmt: skip
    if free(arguments, arguments.temperature):
        say_if_short("this answer", *first_draws([answer]), str(model.policy), model.figures)
    if guarded:
        say_if_plain("this answer", forwards, plain_forwards([answer]))
    return 0


def _prompt_text(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None:
        text = arguments.prompt
    else:
        try:
            read = sys.stdin.buffer.read if arguments.prompt_file == "-" else Path(arguments.prompt_file).read_bytes
            text = read().decode("utf-8").removesuffix("\n")
        except (OSError, AttributeError, ValueError) as error:  # AttributeError, ValueError: standard input is closed
            raise InputError(f"cannot read the prompt file {arguments.prompt_file!r}: {one_line(error)}") from error
    if not text:
        raise InputError("the prompt is empty: it must hold at least one character")
    return text


def _head(text: str) -> str | None:
    return None if text == "none" else text
