"""The card of a head: what people should know before they use it."""

from __future__ import annotations

from collections.abc import Mapping

from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import SWITCHES, Eagle3
from eyas.drafters.student import Student
from eyas.fit import acceptance
from eyas.initial import Learner
from eyas.train import Trainer


def card(
    trainer: Trainer,
    metrics: Mapping[str, float | None],
    target: str,
    states: str,
    made_for: Mapping[str, str],
    answers: str,
    tree: str,
) -> str:
    """Markdown. `metrics` are those of `fit`, `states` says what made the states, `tree` what
    prompts were decoded with."""
    config, best, measured = trainer.config, metrics["best_tau"], "not measured"
    what = "model" if isinstance(trainer.head, Student) else "head"
    if best is not None:
        measured = f"""{best:.2f} tokens a forward ({config.validate_prompts} held-out prompts, temperature 0,
  {config.validate_tokens} tokens each, tree `{tree}`)"""
    return f"""# {trainer.head.kind} {what} for {target}

- {_shape(trainer.head)}
- States of the {states}; chat template {made_for["chat_template"]}, as the answers were made.
- Data: `{answers}`, {len(trainer.features)} sequences; {trainer.tokens_seen:,} tokens seen in {trainer.step} steps of
  {config.sequences} sequences; AdamW, peak learning rate {config.learning_rate}, seed {config.seed}; token loss
  {trainer.head.config.token_loss}, {trainer.head.steps} depths.
- Simulated at the end of training: {acceptance(trainer.recent)}.
- Decoded: {measured}.
- A {what} is made for one target: with other weights, or another template, acceptance falls; the output stays right.
"""


def _shape(head: Learner) -> str:
    if isinstance(head, Student):
        made = f"layers {list(head.config.layers)} of the target" if head.config.layers else "a model of its own"
        return f"Reads tokens only; started from {made}; embedding and output head stayed as they were."
    reads = f"Reads states {list(head.reads)} of the target (indices of transformers' `hidden_states`)"
    if isinstance(head, Eagle):
        return f"{reads}, drafts over all tokens."
    size = head.config.vocab_size if head.draft_vocabulary_Q is None else len(head.draft_vocabulary_Q)
    drafts = f"drafts over {size} of {head.config.vocab_size} tokens"
    if not isinstance(head, Eagle3):
        return f"{reads}, {drafts}; {head.config.heads} heads of {head.config.layers} blocks."
    on = [switch for switch in SWITCHES if vars(head.config)[switch]]
    return f"{reads}, {drafts}; layers: {head.config.layers}; switches: {', '.join(on) or 'none'}."
