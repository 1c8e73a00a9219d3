"""The command line: `eyas COMMAND`. Others script against it, so names, defaults and exit codes are fixed.

Exit codes: 0 done; 2 wrong usage or input, with one plain sentence on standard error; 130 Ctrl-C; 1 anything else, an
unexplained divergence included. With `--json` standard output holds one line, one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from eyas import bench, checkpoint, data, doctor, features, native, train
from eyas.drafters.eagle3 import Eagle3
from eyas.errors import InputError, one_line
from eyas.grammar import compiled
from eyas.measure import timed
from eyas.model import BACKENDS, Model, TextStream, attach_head, choose_backend, choose_policy, load
from eyas.policies import parse_policy
from eyas.sampling import Sampling
from eyas.targets.eager import EagerTarget
from eyas.targets.native import NativeTarget

EXIT_INPUT, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130


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
        arguments = _parser().parse_args(_checked(sys.argv[1:] if argv is None else argv))
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


# -- commands ----------------------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.head == "none":
        raise InputError("the demo shows a head beside plain decoding: give a head")
    _say("loading the demo target (the first time, its weights are converted: about half a minute)")
    model = _load(arguments, arguments.head)
    items = bench.read_workload(Path(str(files("eyas") / "demo.jsonl")), arguments.limit)
    methods = [bench.Method(None, replace(model, drafter=None)), bench.Method(arguments.head, model)]
    rows, answers = bench.compare(methods, items, "demo", _sampling(arguments, model), arguments.max_new_tokens)
    texts = []
    for i, item in enumerate(items):
        plain, drafted = (model.decode(side[i].tokens) for side in answers)
        speeds = [len(side[i].tokens) / side[i].seconds for side in answers]
        same = answers[0][i].tokens == answers[1][i].tokens if methods[1].keyed else None
        texts.append({"id": item.id, "prompt": item.text, "plain": plain, "text": drafted, "identical": same})
        if not arguments.json:
            _show_pair(item, plain, drafted, same, speeds, bench.tau(answers[1][i : i + 1]))
    return _report(arguments, model, rows, {"texts": texts})


def _generate(arguments: argparse.Namespace) -> int:
    prompt = _prompt_text(arguments)
    model = _load(arguments, arguments.head)
    ids = model.encode(prompt, arguments.chat)
    stop = model.stopping(arguments.max_new_tokens, arguments.stop)
    sampling = _sampling(arguments, model)  # before the clock starts: a grammar reads the whole vocabulary
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
        "backend": model.target.spec.backend,
        "dtype": str(model.target.spec.dtype).removeprefix("torch."),
        "seed": arguments.seed,
        "temperature": arguments.temperature,
        "peak_memory_bytes": bench.peak_memory_bytes(),
    }
    if arguments.json:
        _print_json(record)
    else:
        tau = "" if output.tau is None else f", tau {output.tau:.2f}"
        _say(f"{record['new_tokens']} tokens in {forwards} target forwards{tau}, "
             f"{record['tokens_per_second']:.1f} tokens/s, finished by {output.finish_reason}")  # fmt: skip
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    workloads = {path: bench.read_workload(Path(path), arguments.limit) for path in arguments.workload}
    specs = [_method(text, arguments) for text in arguments.method]  # before anything slow: a typo costs no time
    plain = _load(arguments, None)
    drafters = {head: attach_head(head, plain.target, plain.tokenizer) for head in {head for head, _ in specs}}
    for head, drafter in drafters.items():
        _say_if_slow(head, replace(plain, drafter=drafter))
    methods = [bench.Method(None, plain)]
    methods += [
        bench.Method(head, replace(plain, drafter=drafters[head], policy=choose_policy(tree, plain.target.spec)))
        for head, tree in specs
    ]
    rows: list[bench.Row] = []
    for path, items in workloads.items():
        settings = (_sampling(arguments, plain), arguments.max_new_tokens, arguments.batch)
        rows += bench.compare(methods, items, Path(path).stem, *settings)[0]
    return _report(arguments, plain, rows, {})


def _inspect(arguments: argparse.Namespace) -> int:
    if arguments.head is None and arguments.target is None:
        raise InputError("give --head, --target or both: there is nothing to inspect")
    record: dict[str, object] = {}
    if arguments.head is not None:
        record["head"] = doctor.describe_head(arguments.head)
    if arguments.target is not None:
        if arguments.dtype == "int8":
            record["quality"] = _quality(arguments)
            arguments.dtype = None
        target, tokenizer = _load_eager(arguments)
        record["target"] = doctor.describe_target(target, tokenizer)
        if arguments.head is not None:
            record["fit"] = doctor.fit(arguments.head, target, tokenizer)
    if arguments.json:
        _print_json(record)
    else:
        for section, values in record.items():
            print(section)
            for key, value in values.items() if isinstance(values, dict) else ():
                print(f"  {key}: {value}")
    return 0


def _quality(arguments: argparse.Namespace) -> dict[str, object]:
    answers = None
    if arguments.answers is not None:
        spec = load(arguments.target, backend="native").target.spec
        read = data.read_answers(Path(arguments.answers), spec.vocab_size, spec.max_length, arguments.limit)
        answers = list(read)
        if not answers:
            raise InputError(f"{arguments.answers} holds no usable answer")
    return doctor.quality(arguments.target, answers, arguments.limit)


def _train(arguments: argparse.Namespace) -> int:
    config = train.TrainConfig(**{f.name: getattr(arguments, f.name) for f in fields(train.TrainConfig)})
    out, answers = Path(arguments.out), Path(arguments.answers)
    _prepare_out(out, arguments.resume)
    target, tokenizer = _load_eager(arguments)
    made_for = checkpoint.target_fingerprint(target, tokenizer)
    length = min(arguments.max_length, target.spec.max_length)
    sequences = list(data.read_answers(answers, target.spec.vocab_size, length, arguments.limit))
    if len(sequences) < 2:
        raise InputError(f"{answers} holds {len(sequences)} usable answers; training needs at least 2")
    held_out = max(1, len(sequences) // 50)
    training, validation = sequences[:-held_out], sequences[-held_out:]
    size = min(arguments.draft_vocab, target.spec.vocab_size)
    vocabulary, covered = train.draft_vocabulary(training, size, target.spec.eos_ids)
    _say(f"draft vocabulary: {len(vocabulary)} tokens cover {100 * covered:.1f} % of the answers")
    head = train.new_head(
        arguments.kind,
        target,
        vocabulary if arguments.kind == "eagle3" else None,
        arguments.ttt_steps,
        arguments.noise,
        arguments.layers,
        window=length,
    )
    reads = tuple(dict.fromkeys((*head.reads, target.spec.num_layers)))
    source: features.Features = features.Streamed(target, training, reads)
    if arguments.features is not None:
        source = features.store(target, training, reads, Path(arguments.features), made_for)
    trainer = train.Trainer(head, source, config, target.spec.dtype, made_for)
    if arguments.resume:
        trainer.restore(out / "training.safetensors")
    metrics = train.run(trainer, out, features.Streamed(target, validation, reads))
    card = train.card(trainer, arguments.target, made_for, answers.name)
    checkpoint.save_head(trainer.head, out, made_for, card)
    if arguments.kind == "eagle":  # a head with all of the target's rows, of which the native back end takes these
        checkpoint.save_vocabulary(out, vocabulary)
    record = {"out": str(out), "kind": arguments.kind, "steps": trainer.step, "tokens_seen": trainer.tokens_seen}
    if arguments.json:
        _print_json(record | metrics)
    else:
        _say(f"the head lies in {out}; try it: eyas generate --target {arguments.target} --head {out} --prompt ...")
    return 0


def _prepare_out(out: Path, resume: bool) -> None:
    """The folder that a training writes into: new or empty, or holding the state that is to be resumed."""
    begun = (out / "training.safetensors").is_file()
    if resume and not begun:
        raise InputError(f"{out} holds no training to resume")
    if begun and not resume:
        raise InputError(f"{out} holds a training that was begun: give --resume to go on, or another --out")
    out.mkdir(parents=True, exist_ok=True)
    if not begun and any(out.iterdir()):
        raise InputError(f"{out} is not empty: give a new folder as --out")


# -- flags -------------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="eyas", description="Lossless speculative decoding with EAGLE heads.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    demo = commands.add_parser("demo", help="the demo target with a shipped head beside plain decoding")
    _common(demo, target="smollm2", max_new_tokens=96)
    demo.add_argument(
        "--head",
        default="smollm2-eagle3",
        help="a shipped head, a folder, lookup, or small:TARGET (default %(default)s)",
    )
    demo.add_argument("--limit", type=_count, default=None, help="only the first N prompts")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="answer one prompt")
    _common(generate, target=None, max_new_tokens=256)
    generate.add_argument(
        "--head", type=_head, default=None, help="a shipped head, a folder, lookup, small:TARGET, or none (default)"
    )
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the prompt's text")
    source.add_argument("--prompt-file", help="a file with the prompt; - is standard input")
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="as a user's turn in the chat template")
    form.add_argument("--raw", action="store_false", dest="chat", help="as it is, without a chat template")
    generate.add_argument("--stop", action="append", default=[], help="end before this string (repeatable)")
    generate.set_defaults(run=_generate)

    compare = commands.add_parser("bench", help="methods side by side on workloads")
    _common(compare, target=None, max_new_tokens=128)
    compare.add_argument("--workload", action="append", required=True, help="a JSONL file with turns, or lines of text")
    compare.add_argument("--limit", type=_count, default=None, help="only the first N prompts of each")
    compare.add_argument(
        "--method", action="append", default=[], metavar="HEAD[@TREE]", help="repeatable; plain always runs"
    )
    compare.add_argument(
        "--batch", type=_count, default=1, metavar="N", help="prompts that share their forwards (default %(default)s)"
    )
    compare.set_defaults(run=_bench)

    inspect = commands.add_parser("inspect", help="what a head or a target is, and whether they fit")
    inspect.add_argument("--head", default=None)
    inspect.add_argument("--target", default=None)
    inspect.add_argument("--dtype", default=None, help="of the target; int8 adds what it costs in perplexity")
    inspect.add_argument("--answers", default=None, help="int8: JSONL(.gz) as for train (default: the target's own)")
    inspect.add_argument("--limit", type=_count, default=64, help="int8: answers, at most (default %(default)s)")
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=_inspect, threads=None)

    _train_parser(commands.add_parser("train", help="a head from the target's own answers"))
    return parser


def _common(parser: argparse.ArgumentParser, target: str | None, max_new_tokens: int) -> None:
    if target is None:
        parser.add_argument("--target", required=True, help="a folder, a GGUF file, a hub id, or smollm2")
    else:
        parser.add_argument("--target", default=target, help="a folder, a GGUF file, or smollm2 (default)")
    trees = "chain:K, static[:FILE], dynamic:..., sampled:..., or auto (default)"
    parser.add_argument("--tree", default="auto", help=trees)
    parser.add_argument("--backend", default="auto", help=f"one of {', '.join(BACKENDS)} (default %(default)s)")
    parser.add_argument(
        "--dtype",
        default=None,
        help="native: bfloat16 (default) or int8; eager: float32 (default), bfloat16, float64, or float16 on a GPU",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), or a GPU like cuda: the eager back end then")
    parser.add_argument("--threads", type=_threads, default=None, help="default: EYAS_NUM_THREADS, or the cores")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument(
        "--repetition-penalty", type=float, default=None, help="prompt included (default: the model's, or 1)"
    )
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="generated tokens only")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="generated tokens only")
    parser.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID=NUMBER", help="add to a logit (repeatable)"
    )
    parser.add_argument(
        "--bad-word", type=_text, action="append", default=[], metavar="TEXT", help="never write this (repeatable)"
    )
    parser.add_argument("--min-new-tokens", type=int, default=0, help="no end token before these")
    parser.add_argument(
        "--json-schema", type=_schema, default=None, metavar="FILE", help="the answer is JSON that fits"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=_count, default=max_new_tokens)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _train_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=["eagle", "eagle3"], default="eagle3")
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", required=True, help="JSONL(.gz) with prompt_ids and response_ids")
    parser.add_argument("--out", required=True, help="the head's folder")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", help="of the target and of the products (default %(default)s)")
    parser.add_argument("--threads", type=_threads, default=None, help="default: EYAS_NUM_THREADS, or the cores")
    parser.add_argument("--limit", type=_count, default=None, help="only the first N answers")
    parser.add_argument("--max-length", type=_count, default=512, help="tokens of a sequence; longer ones are cut")
    parser.add_argument(
        "--features", default=None, help="a folder to keep the target's states in (else made each time)"
    )
    parser.add_argument("--draft-vocab", type=_count, default=8192, help="tokens that the head drafts over")
    parser.add_argument(
        "--ttt-steps", type=_count, default=4, help="EAGLE-3: simulated steps of the training-time test"
    )
    parser.add_argument(
        "--layers", type=_count, default=1, help="EAGLE-3: decoder layers, 1 to 5 (default %(default)s)"
    )
    parser.add_argument("--noise", type=float, default=0.1, help="EAGLE-1: uniform feature noise")
    parser.add_argument("--json", action="store_true")
    for field in fields(train.TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help="(default %(default)s)")
    parser.set_defaults(run=_train)


def _load(arguments: argparse.Namespace, head: str | None) -> Model:
    settings = _sampling(arguments)  # wrong settings are refused before anything slow
    if head is not None and arguments.tree != "auto":
        parse_policy(arguments.tree).check(settings)
    how = {name: getattr(arguments, name) for name in ("backend", "dtype", "tree", "device")}
    model = load(arguments.target, head, **how)
    _say(f"back end: {_backend(model)}")
    _say_if_slow(head, model)
    if model.drafter is not None and arguments.tree == "auto":
        _say(f"tree: {model.policy} (not tuned for this machine)")
    if model.target.spec.repetition_penalty != 1 and arguments.repetition_penalty is None:
        _say(f"the model's own repetition_penalty {model.target.spec.repetition_penalty} applies to all methods")
    return model


def _say_if_slow(head: str | None, model: Model) -> None:
    if isinstance(model.drafter, Eagle3) and isinstance(model.target, NativeTarget):
        _say(f"the head {head} drafts in PyTorch, which is slower: the native core knows EAGLE-3 heads of one layer "
             f"without switches")  # fmt: skip


def _load_eager(arguments: argparse.Namespace) -> tuple[EagerTarget, PreTrainedTokenizerBase]:
    """The target as transformers runs it: what training starts from and fingerprints are taken of."""
    dtype = choose_backend("eager", arguments.dtype)
    assert isinstance(dtype, torch.dtype)
    return checkpoint.load_target(arguments.target, dtype)


def _backend(model: Model) -> str:
    spec = model.target.spec
    dtype = str(spec.dtype).removeprefix("torch.")
    if spec.backend == "native":
        return f"native ({native.core().kernels()}, {native.use_threads()} threads), {dtype}"
    return f"{spec.backend} ({torch.get_num_threads()} threads), {dtype}"


def _sampling(arguments: argparse.Namespace, model: Model | None = None) -> Sampling:
    """The flags of a draw; without a model, only to refuse wrong ones early."""
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    names += ("logit_bias", "min_new_tokens", "seed")
    settings = {name: getattr(arguments, name) for name in names}
    if arguments.repetition_penalty is not None:
        settings["repetition_penalty"] = arguments.repetition_penalty
    if model is None:
        return Sampling(**settings)
    if arguments.json_schema is not None:
        settings["json_schema"] = arguments.json_schema
    return model.sampling(bad_words=arguments.bad_word, **settings)


def _head(text: str) -> str | None:
    return None if text == "none" else text


def _method(text: str, arguments: argparse.Namespace) -> tuple[str, str]:
    """HEAD[@TREE], both checked; the name of a folder or file may hold an @."""
    whole = "@" not in text or os.path.exists(text.removeprefix(checkpoint.SMALL))
    head, _, tree = (text, "", "") if whole else text.rpartition("@")
    checkpoint.check_head(head)
    tree = tree or arguments.tree
    if tree != "auto":
        parse_policy(tree).check(_sampling(arguments))  # refused now, not after loading
    return head, tree


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


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be ID=NUMBER, such as 42=-1.5, got {text!r}") from error


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must hold at least one character")
    return text


def _schema(path: str) -> str:
    """The text of a JSON schema, checked now, not after loading."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        compiled("json_schema", text)
    except InputError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path!r}: {one_line(error)}") from error
    return text


def _count(text: str) -> int:
    """A flag that counts something."""
    return _whole(text, 1_000_000)


def _threads(text: str) -> int:
    return _whole(text, 1024)


def _whole(text: str, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"must be between 1 and {most}, got {text}")
    return value


# -- output ------------------------------------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace, model: Model, rows: list[bench.Row], extra: dict[str, object]) -> int:
    record = {
        "machine": bench.machine(),
        "versions": bench.versions(),
        "target": arguments.target,
        "rows": [asdict(row) for row in rows],
        **extra,
    }
    if arguments.json:
        _print_json(record)
    else:
        for workload in dict.fromkeys(row.workload for row in rows):
            print(f"\n{workload}, {rows[0].dtype}, {record['machine']}")
            print(bench.table([row for row in rows if row.workload == workload]))
    for row in rows:
        for divergence in row.divergences:
            _say(f"{row.workload} {row.method} {row.tree} differs from plain: {divergence}")
    return EXIT_FAILED if bench.unexplained(rows) else 0


def _show_pair(
    item: bench.Item, plain: str, drafted: str, same: bool | None, speeds: Sequence[float], tau: float | None
) -> None:
    print(f"\n== {item.id}: {item.text}\n-- plain ({speeds[0]:.1f} tokens/s)\n{plain}")
    tau_text = "" if tau is None else f", tau {tau:.2f}"
    print(f"-- drafted ({speeds[1]:.1f} tokens/s, {speeds[1] / speeds[0]:.2f}x{tau_text})\n{drafted}")
    verdict = {True: "yes", False: "NO", None: "not claimed: a sampled tree keeps the law, not the tokens"}[same]
    print(f"-- identical: {verdict}")


def _print_json(record: Mapping[str, object]) -> None:
    print(json.dumps(record, allow_nan=False))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
