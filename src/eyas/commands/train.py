"""`eyas train`: a head from the target's own answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eyas import checkpoint, data, features, fit, initial, native, train
from eyas.card import card
from eyas.commands.common import EXIT_FAILED, count, new_folder, print_json, say, threads
from eyas.drafters.eagle3 import SWITCHES
from eyas.drafters.rollout import TOKEN_LOSSES
from eyas.drafters.student import Student
from eyas.errors import InputError, one_line
from eyas.model import choose_device, choose_policy, load
from eyas.policies import parse_policy
from eyas.prepared import read_prepared
from eyas.targets.base import Target
from eyas.targets.eager import EagerTarget
from eyas.team import Team, join

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]  # where this Python is newer, it is not installed

HELP = "a head from the target's own answers"
_SAME = 1e-2  # a draft log-probability in training and in drafting, both in float32


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", metavar="FILE", help="a TOML file with these flags as keys; flags win")
    parser.add_argument("--kind", choices=list(initial.KINDS), default="eagle3")
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", required=True, help="a folder of eyas prepare, or JSONL(.gz) of ids")
    parser.add_argument("--out", required=True, help="the head's folder")
    parser.add_argument("--resume", action="store_true", help="go on where the run in --out stopped")
    parser.add_argument("--start", default=None, metavar="HEAD", help="go on from a head, with a fresh optimiser")
    parser.add_argument("--backend", default="auto", help="that makes the states: the one that will serve")
    parser.add_argument("--dtype", default="bfloat16", help="of that target: bfloat16 (default), int8, float32, ...")
    parser.add_argument("--device", default="cpu", help="cpu (default), or a GPU like cuda")
    parser.add_argument("--shard-target", action="store_true", help="spread the target over torchrun's processes")
    parser.add_argument("--threads", type=threads, default=None, help="default: EYAS_NUM_THREADS, or the cores")
    parser.add_argument("--limit", type=count, default=None, help="only the first N answers")
    parser.add_argument("--max-length", type=count, default=512, help="tokens of a sequence; longer ones are cut")
    parser.add_argument("--features", default=None, help="a folder to keep the states in (else made each time)")
    parser.add_argument("--draft-vocab", type=count, default=8192, help="tokens that the head drafts over")
    parser.add_argument(
        "--ttt-steps",
        type=count,
        default=None,
        help="depths: EAGLE-3's training-time test (4), HASS for EAGLE-1 (1: none), Medusa's heads (4)",
    )
    parser.add_argument(
        "--layers",
        type=count,
        default=None,
        help="EAGLE-3: decoder layers, 1 to 5 (1); Medusa: blocks (1); small: of the target's layers (4)",
    )
    parser.add_argument(
        "--reads", type=_numbers, default=None, metavar="I,I,..", help="EAGLE-3: states of the target (2,N/2,N-3)"
    )
    parser.add_argument("--noise", type=float, default=0.1, help="EAGLE-1: uniform feature noise")
    parser.add_argument("--loss", choices=TOKEN_LOSSES, default="ce", help="of tokens: cross-entropy, or acceptance")
    for switch in SWITCHES:
        flag = "--" + switch.replace("_", "-")
        parser.add_argument(flag, action="store_true", help="EAGLE-3.1; not every runtime loads such heads")
    parser.add_argument("--validate-tree", default="auto", help="the tree that held-out prompts are decoded with")
    parser.add_argument("--tensorboard", action="store_true", help="write events into OUT/tensorboard too")
    parser.add_argument("--shard-mb", type=count, default=None, help="split the head's weights into files below this")
    parser.add_argument("--json", action="store_true")
    for field in fields(train.TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help="(default %(default)s)")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, got {text!r}") from error


def with_recipe(argv: Sequence[str]) -> list[str]:
    """The arguments with those of a recipe before them, so that flags given beside it win.

    Raises:
        InputError: no such file, or it holds something else than names and values.
    """
    given = list(argv)
    for i, argument in enumerate(given):
        name, _, value = argument.partition("=")
        if name == "--recipe":
            return _flags_of(value or next(iter(given[i + 1 :]), "")) + given
    return given


def _flags_of(path: str) -> list[str]:
    try:
        recipe = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the recipe {path!r}: {one_line(error)}") from error
    flags = []
    for key, value in recipe.items():
        if not isinstance(value, (bool, int, float, str)):
            raise InputError(f"the recipe {path!r}: {key} must be a text, a number, true or false, got {value!r}")
        if value is not False:
            flags.append(f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return flags


def run(arguments: argparse.Namespace) -> int:
    with join(choose_device(arguments.device)) as (team, device):
        return _run(arguments, team, device)


def _run(arguments: argparse.Namespace, team: Team, device: torch.device) -> int:
    config = train.TrainConfig(**{f.name: getattr(arguments, f.name) for f in fields(train.TrainConfig)})
    out = Path(arguments.out)
    if arguments.validate_tree != "auto":
        parse_policy(arguments.validate_tree)  # refused now, not after loading
    shaping = [name for name in ("layers", "reads", *SWITCHES) if getattr(arguments, name)]
    if arguments.start is not None and shaping:
        raise InputError(f"--{shaping[0].replace('_', '-')} shapes a new head: with --start the head has its own shape")
    if team.first:
        _prepare_out(out, arguments.resume)
    eager, target, tokenizer = _targets(arguments, team, device)
    policy = choose_policy(arguments.validate_tree, target.spec, None)
    made_for = {**checkpoint.target_fingerprint(eager, tokenizer), "dtype": _name(target.spec.dtype)}
    training, held_out = _sequences(arguments, target, made_for)
    config.check(len(training), team.size)  # before states are made
    head, vocabulary = _head(arguments, eager, tokenizer, training)
    if arguments.shard_target:
        eager.share_out(device)
    reads = tuple(dict.fromkeys((*head.reads, target.spec.num_layers)))
    source: features.Features = features.Streamed(target, training, reads)
    if arguments.features is not None:
        if team.size > 1 and not features.is_stored(Path(arguments.features)):
            raise InputError(f"{arguments.features} is not a complete feature store: make it with one process first")
        source = features.store(target, training, reads, Path(arguments.features), made_for)
    trainer = train.Trainer(head, source, config, features.states_dtype(target), made_for, device, team)
    ids_Q = vocabulary if head.kind == "eagle" else None
    validate = fit.decoder(
        target,
        lambda head: checkpoint.serving(head, target, ids_Q),
        policy,
        held_out,
        config.validate_prompts,
        config.validate_tokens,
        quiet=not team.first,
    )
    held = features.Streamed(target, held_out, reads)
    metrics = fit.fit(trainer, out, held, validate, arguments.resume, arguments.tensorboard)
    difference = fit.serving_difference(trainer.head, held)
    if not team.first:
        return 0
    how = f"{target.spec.backend} back end, {_name(target.spec.dtype)}"
    text = card(trainer, metrics, arguments.target, how, made_for, Path(arguments.answers).name, str(policy))
    if isinstance(trainer.head, Student):
        checkpoint.save_student(trainer.head, tokenizer, out, text, shard_mb=arguments.shard_mb)
    else:
        checkpoint.save_head(trainer.head, out, made_for, text, shard_mb=arguments.shard_mb)
    if head.kind == "eagle":  # a head with all of the target's rows, of which the native back end takes these
        checkpoint.save_vocabulary(out, vocabulary)
    record = {"out": str(out), "kind": head.kind, "steps": trainer.step, "serving_difference": difference, **metrics}
    if arguments.json:
        print_json(record)
    else:
        name = f"{checkpoint.SMALL}{out}" if head.kind == "small" else out
        say(f"the head lies in {out}; try it: eyas generate --target {arguments.target} --head {name} --prompt ...")
    if difference > _SAME:
        say(f"drafting differs from training by {difference:.3g} in a log-probability: the head is not to be trusted")
        return EXIT_FAILED
    return 0


def _targets(
    arguments: argparse.Namespace, team: Team, device: torch.device
) -> tuple[EagerTarget, Target[Any], PreTrainedTokenizerBase]:
    """The model as transformers runs it, which the head starts from; and the one that makes the states."""
    if arguments.shard_target and team.size == 1:
        raise InputError("--shard-target spreads the target over several processes: start them with torchrun")
    backend = "eager" if arguments.shard_target else arguments.backend
    first_on = "cpu" if arguments.shard_target else str(device)  # what is to be spread need not fit one device
    model = load(arguments.target, backend=backend, dtype=arguments.dtype, device=first_on)
    if isinstance(model.target, EagerTarget):
        return model.target, model.target, model.tokenizer
    torch.set_num_threads(native.use_threads())  # the core leaves PyTorch one thread, and training is PyTorch's
    return checkpoint.load_target(arguments.target, torch.bfloat16)[0], model.target, model.tokenizer


def _sequences(
    arguments: argparse.Namespace, target: Target[Any], made_for: Mapping[str, str]
) -> tuple[list[data.Sequence], list[data.Sequence]]:
    """Those to train on, and the last 2 % to validate with."""
    answers, spec = Path(arguments.answers), target.spec
    bounds = (spec.vocab_size, min(arguments.max_length, spec.max_length), arguments.limit)
    prepared = answers.is_dir()
    sequences = list(read_prepared(answers, *bounds, made_for) if prepared else data.read_answers(answers, *bounds))
    if len(sequences) < 2:
        raise InputError(f"{answers} holds {len(sequences)} usable answers; training needs at least 2")
    held_out = max(1, len(sequences) // 50)
    return sequences[:-held_out], sequences[-held_out:]


def _head(
    arguments: argparse.Namespace,
    target: EagerTarget,
    tokenizer: PreTrainedTokenizerBase,
    training: Sequence[data.Sequence],
) -> tuple[initial.Learner, torch.Tensor]:
    """The head to train, and the most frequent tokens."""
    size = min(arguments.draft_vocab, target.spec.vocab_size)
    vocabulary, covered = initial.draft_vocabulary(training, size, target.spec.eos_ids)
    if arguments.kind != "small":
        say(f"draft vocabulary: {len(vocabulary)} tokens cover {100 * covered:.1f} % of the answers")
    steps = arguments.ttt_steps or (4 if arguments.kind == "eagle3" else initial.KINDS[arguments.kind])
    if arguments.start is not None and arguments.kind == "small":
        small = checkpoint.load_small(arguments.start, target, tokenizer).model
        assert isinstance(small, EagerTarget), small
        return initial.new_student(small, target, arguments.loss), vocabulary
    if arguments.start is not None:
        head = checkpoint.read_head_for(arguments.start, target)
        if head.kind != arguments.kind:
            raise InputError(f"--kind is {arguments.kind}, and the head {arguments.start!r} is of kind {head.kind}")
        return initial.for_training(head, steps, arguments.noise, arguments.loss), vocabulary
    head = initial.new_head(
        arguments.kind,
        target,
        None if arguments.kind == "eagle" else vocabulary,
        steps=steps,
        noise=arguments.noise,
        token_loss=arguments.loss,
        layers=arguments.layers,
        window=min(arguments.max_length, target.spec.max_length),
        reads=arguments.reads,
        **{switch: getattr(arguments, switch) for switch in SWITCHES},
    )
    return head, vocabulary


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _prepare_out(out: Path, resume: bool) -> None:
    """The folder that a training writes into: new or empty, or holding the state that is to be resumed."""
    begun = (out / fit.STATE).is_file()
    if resume and not begun:
        raise InputError(f"{out} holds no training to resume")
    if begun and not resume:
        raise InputError(f"{out} holds a training that was begun: give --resume to go on, or another --out")
    if not begun:
        new_folder(out)
    out.mkdir(parents=True, exist_ok=True)
