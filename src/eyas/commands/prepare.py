"""`eyas prepare`: prompts or conversations to the target's own answers."""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from eyas import checkpoint, prepare
from eyas.commands.common import EXIT_FAILED, back_end, count, model_flags, print_json, say
from eyas.conversations import read_conversations
from eyas.data import Sequence
from eyas.endpoint import Endpoint, EndpointError
from eyas.errors import InputError
from eyas.masks import ChatTemplate
from eyas.model import load
from eyas.prepared import read_prepared
from eyas.sampling import Sampling

HELP = "prompts or conversations to the target's own answers"


def add_flags(parser: argparse.ArgumentParser) -> None:
    model_flags(parser)
    parser.add_argument(
        "--prompts",
        required=True,
        help="JSONL(.gz) with messages, turns or conversations; lines of text; a folder of these, or a data set's",
    )
    parser.add_argument("--out", required=True, help="the folder; one that was begun is gone on with")
    parser.add_argument("--limit", type=count, default=None, help="only the first N conversations")
    parser.add_argument(
        "--temperatures",
        type=_temperatures,
        default=(0.0, 0.8),
        metavar="T,T",
        help="conversation i takes the one at place i modulo their number (default 0,0.8)",
    )
    parser.add_argument("--max-new-tokens", type=count, default=512, help="of an answer (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=count, default=32, help="answers that share a forward (default %(default)s)")
    parser.add_argument("--keep-answers", action="store_true", help="take the file's answers instead of sampling")
    parser.add_argument("--endpoint", default=None, metavar="URL", help="sample there: an OpenAI-compatible server")
    parser.add_argument("--model", default=None, metavar="NAME", help="of the target at the endpoint")
    parser.add_argument("--concurrency", type=count, default=32, help="conversations asked at once (default 32)")
    parser.add_argument("--show", type=count, default=None, metavar="N", help="print N sequences with their answers")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    settings = prepare.Settings(arguments.temperatures, arguments.max_new_tokens, arguments.seed)
    for temperature in settings.temperatures:  # wrong settings are refused before anything slow
        Sampling(temperature=temperature, seed=settings.seed)
    endpoint = _endpoint(arguments)
    conversations = list(read_conversations(Path(arguments.prompts), arguments.limit))
    if not conversations:
        raise InputError(f"{arguments.prompts} holds no prompt")
    source, made_for = _source(arguments, settings, endpoint)
    out = Path(arguments.out)
    try:
        result = prepare.prepare(conversations, source, made_for, out)
    except EndpointError as error:
        say(f"eyas: {error}; what was answered lies in {out}, and the same command goes on from there")
        return EXIT_FAILED
    except KeyboardInterrupt:
        say(f"what was answered lies in {out}, and the same command goes on from there")
        raise
    for name in result.redone:
        say(f"{name} was broken, and has been made anew")
    if arguments.show is not None:
        out_file = sys.stderr if arguments.json else sys.stdout
        for sequence in islice(read_prepared(out, sys.maxsize, sys.maxsize), arguments.show):
            print(shown(sequence, source.template, out_file.isatty()) + "\n", file=out_file)
    _report(arguments, result)
    return 0


def _endpoint(arguments: argparse.Namespace) -> Endpoint | None:
    if (arguments.endpoint is None) != (arguments.model is None):
        raise InputError("an endpoint needs both --endpoint URL and --model NAME")
    if arguments.endpoint is None:
        return None
    if arguments.keep_answers:
        raise InputError("give --endpoint or --keep-answers: answers are sampled, or they are kept")
    return Endpoint(arguments.endpoint, arguments.model, os.environ.get("OPENAI_API_KEY"))


def _source(
    arguments: argparse.Namespace, settings: prepare.Settings, endpoint: Endpoint | None
) -> tuple[prepare.Source, dict[str, str]]:
    """What answers, and the fingerprint of the target."""
    if endpoint is None and not arguments.keep_answers:
        model = load(arguments.target, backend=arguments.backend, dtype=arguments.dtype, device=arguments.device)
        say(f"back end: {back_end(model)}")
        made_for = checkpoint.named_fingerprint(arguments.target, model.target.spec, model.tokenizer)
        return prepare.Sampled(model, settings, arguments.batch), made_for
    spec, tokenizer = checkpoint.load_outline(arguments.target)
    made_for = checkpoint.outline_fingerprint(spec, tokenizer)
    del made_for["dtype"]  # whatever the answers were made in
    template = ChatTemplate(tokenizer, spec.eos_ids)
    if endpoint is None:
        return prepare.Kept(template, spec.max_length), made_for
    length = min(spec.max_length, endpoint.max_length() or spec.max_length)
    return prepare.Asked(endpoint, template, length, settings, arguments.concurrency), made_for


def shown(sequence: Sequence, template: ChatTemplate, colour: bool) -> str:
    """A sequence's text; what the target wrote is green, or stands in [[double brackets]]."""
    before, after = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
    parts, place = [], 0
    for start, end in sequence.spans:
        parts += [template.whole_text(sequence.tokens[place:start]), before]
        parts += [template.whole_text(sequence.tokens[start:end]), after]
        place = end
    return "".join([*parts, template.whole_text(sequence.tokens[place:])])


def _report(arguments: argparse.Namespace, result: prepare.Result) -> None:
    whole, speed = result.whole, result.new.answer_tokens / result.seconds
    finishes = {"stop": whole.stop, "length": whole.length, "given": whole.given}
    if arguments.json:
        figures = {key: value for key, value in asdict(whole).items() if key not in finishes}
        shares = {name: number / whole.sequences if whole.sequences else 0.0 for name, number in finishes.items()}
        print_json(
            {
                "folder": arguments.out,
                "target": arguments.target,
                **figures,
                "finish": shares,
                "new_tokens": result.new.answer_tokens,
                "seconds": result.seconds,
                "tokens_per_second": speed,
                "redone": result.redone,
            }
        )
    ends = ", ".join(f"{number} by {name}" for name, number in finishes.items() if number)
    say(f"{whole.sequences} sequences of {whole.conversations} conversations ({whole.cut} cut): {whole.answer_tokens} "
        f"answer tokens after {whole.prompt_tokens} of prompts; ended: {ends}; {speed:.0f} new tokens/s; "
        f"in {arguments.out}")  # fmt: skip


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(math.isfinite(temperature) and temperature >= 0 for temperature in found):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 with commas between, such as 0,0.8, got {text!r}")
    return found
