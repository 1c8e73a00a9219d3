"""`eyas train`: a head from the target's own answers."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from eyas import checkpoint, data, features, train
from eyas.commands.common import count, load_eager, print_json, say, threads
from eyas.errors import InputError

HELP = "a head from the target's own answers"


def run(arguments: argparse.Namespace) -> int:
    config = train.TrainConfig(**{f.name: getattr(arguments, f.name) for f in fields(train.TrainConfig)})
    out, answers = Path(arguments.out), Path(arguments.answers)
    _prepare_out(out, arguments.resume)
    target, tokenizer = load_eager(arguments)
    made_for = checkpoint.target_fingerprint(target, tokenizer)
    length = min(arguments.max_length, target.spec.max_length)
    sequences = list(data.read_answers(answers, target.spec.vocab_size, length, arguments.limit))
    if len(sequences) < 2:
        raise InputError(f"{answers} holds {len(sequences)} usable answers; training needs at least 2")
    held_out = max(1, len(sequences) // 50)
    training, validation = sequences[:-held_out], sequences[-held_out:]
    size = min(arguments.draft_vocab, target.spec.vocab_size)
    vocabulary, covered = train.draft_vocabulary(training, size, target.spec.eos_ids)
    say(f"draft vocabulary: {len(vocabulary)} tokens cover {100 * covered:.1f} % of the answers")
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
        print_json(record | metrics)
    else:
        say(f"the head lies in {out}; try it: eyas generate --target {arguments.target} --head {out} --prompt ...")
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=["eagle", "eagle3"], default="eagle3")
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", required=True, help="JSONL(.gz) with prompt_ids and response_ids")
    parser.add_argument("--out", required=True, help="the head's folder")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", help="of the target and of the products (default %(default)s)")
    parser.add_argument("--threads", type=threads, default=None, help="default: EYAS_NUM_THREADS, or the cores")
    parser.add_argument("--limit", type=count, default=None, help="only the first N answers")
    parser.add_argument("--max-length", type=count, default=512, help="tokens of a sequence; longer ones are cut")
    parser.add_argument(
        "--features", default=None, help="a folder to keep the target's states in (else made each time)"
    )
    parser.add_argument("--draft-vocab", type=count, default=8192, help="tokens that the head drafts over")
    parser.add_argument("--ttt-steps", type=count, default=4, help="EAGLE-3: simulated steps of the training-time test")
    parser.add_argument("--layers", type=count, default=1, help="EAGLE-3: decoder layers, 1 to 5 (default %(default)s)")
    parser.add_argument("--noise", type=float, default=0.1, help="EAGLE-1: uniform feature noise")
    parser.add_argument("--json", action="store_true")
    for field in fields(train.TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help="(default %(default)s)")
