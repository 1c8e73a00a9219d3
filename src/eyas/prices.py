"""The policy that a model decodes with: the one that was named, with the prices of rounds where it weighs them, and
guarded where that was asked for.

Prices are those that `eyas tune` kept for this machine, back end, dtype, thread count, target and head. They are
measured on the spot only where somebody asked for what needs them: a figure that was taken in passing, on a busy
machine, would steer every later run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from eyas import costs
from eyas.by_value import Adaptive
from eyas.checkpoint import place_of
from eyas.costs import Costs
from eyas.drafters.base import Drafter
from eyas.generate import Request
from eyas.guard import Guarded
from eyas.policy import Policy
from eyas.targets.base import Target

_ROUNDS = 160  # of a measurement on the spot: some seconds


def priced(
    policy: Policy,
    guard: bool | None,
    automatic: bool,
    target: Target[Any],
    head: str,
    drafter: Drafter[Any],
    requests: Callable[[], Sequence[Request]],
) -> Policy:
    """`policy`, knowing what it has to know.

    Arguments:
        guard: fall back to plain rounds while drafting does not pay? None: where the tree was chosen automatically and
            there are prices.
        requests: what to measure on if need be.

    Raises:
        InputError: the guard is asked for around a tree that is drawn at random.
    """
    guarded = automatic if guard is None else guard
    wanted = guard or isinstance(policy, Adaptive)
    if not (wanted or guarded):
        return policy
    found = _prices(target, head, drafter, requests if wanted else None)
    if found is None:
        return policy
    if isinstance(policy, Adaptive):
        policy = replace(policy, prices=found)
    return Guarded(policy, found) if guarded else policy


def _prices(
    target: Target[Any], head: str, drafter: Drafter[Any], requests: Callable[[], Sequence[Request]] | None
) -> Costs | None:
    """Those that are kept; measured now, and kept, if there are requests to do it with."""
    place = place_of(target.spec, head)
    found = costs.kept(place)
    if found is None and requests is not None:
        found = costs.measure_costs(target, drafter, requests(), _ROUNDS)
        costs.keep(place, found)
    return found
