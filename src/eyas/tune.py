"""Which tree decodes fastest here: costs measured in the loop, acceptance by replay, the best few checked by running.

What a tree brings depends on the prompts, what it costs on the machine; neither is asked of a formula. The forecast
says where to look; what is chosen was the fastest in alternated runs beside plain decoding. Costs are measured once
before the runs and again between them, so that a machine that drifts shifts forecast and measurement alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, pairwise, starmap
from typing import Any

from tqdm import tqdm

from eyas import bench
from eyas.costs import SHAPES, Costs, Meter
from eyas.expect import Shares, expect
from eyas.forecast import UNPRUNED, Foresight, Tally, shapes, tree_bytes
from eyas.generate import Request, Round, generate_plain
from eyas.measure import Answer, draws, find_divergence, rounding, timed
from eyas.model import Model
from eyas.policies import Chain, Dynamic, Policy, Static, parse_policy
from eyas.prompts import Item
from eyas.replay import replay, trace
from eyas.sampling import Sampling

LEVELS = range(1, 9)
TOP_KS = (1, 2, 3, 4, 6, 8, 10)
NODES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
EAGLE_2 = Dynamic(8, 10, 59)  # the setting of EAGLE's own code
ALL = "all"  # the workload that is all of them together
_FEW = 4  # of the best by forecast are checked, with other numbers of nodes each
_CHECKED = 8  # trees at least
_FIRST = 10 * len(SHAPES)  # rounds that costs are measured on before anything is forecast
_BETWEEN = 2 * len(SHAPES)  # and after each prompt of each run


def grid() -> list[Policy]:
    """The trees that are considered: chains, and dynamic ones of 1 to 8 levels with no more nodes than these grow."""
    chains: list[Policy] = [Chain(levels) for levels in LEVELS]
    wide = [(levels, top_k) for levels in LEVELS for top_k in TOP_KS if top_k > 1]
    return chains + [
        Dynamic(levels, top_k, nodes)
        for levels, top_k in wide
        for nodes in NODES
        if levels <= nodes <= top_k + (levels - 1) * top_k**2
    ]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    max_new_tokens: int
    repeats: int = 5  # alternated runs, for the interval
    also: tuple[Policy, ...] = ()  # trees that are checked whatever is forecast of them


@dataclass(frozen=True)
class Row:
    """A tree on a workload: what was forecast and, where it was checked, what was measured."""

    workload: str
    tree: str
    levels: int
    nodes: int
    tau_predicted: float | None  # by replay: exact for these prompts
    tau_formula: float | None  # the closed formula, which takes depths to be independent (`expect`)
    tau: float | None
    tokens_per_second_predicted: float
    tokens_per_second: float | None
    interval: list[float] | None  # of the runs: the slowest and the fastest
    memory_bytes: int  # keys, values, logits and states of the tree's rows


@dataclass(frozen=True)
class Plain:
    """Plain decoding on a workload."""

    workload: str
    tokens_per_second_predicted: float
    tokens_per_second: float
    interval: list[float]


@dataclass(frozen=True)
class Tuned:
    """What was found."""

    chosen: Policy  # the fastest of those that were measured
    rows: list[Row]
    plain: list[Plain]  # by workload, `ALL` last
    costs: Costs
    divergences: list[dict[str, object]]  # of answers of the first run that are not plain decoding's


def tune(
    model: Model,
    workloads: Mapping[str, Sequence[Item]],
    sampling: Sampling,
    plan: Plan,
    keep: Callable[[Costs], None],
) -> Tuned:
    """The best tree for a model with its drafter on some prompts, of which prompt i is sample i of the keyed noise.

    The model's own tree is checked too. `keep` gets the costs as soon as they are known, and once more at the end.

    Raises:
        InputError: a prompt leaves no room for an answer, or all answers end at once; a tree is drawn at random.
    """
    assert model.drafter is not None, "there is a drafter to tune trees for"
    items, how = list(chain(*workloads.values())), bench.How(plan.max_new_tokens)
    requests = bench.first_requests(model, items, sampling, how)
    usual = [parse_policy("static"), EAGLE_2, model.policy, *plan.also]
    considered = list(dict.fromkeys([*usual, *grid()]))

    answers = _Answers(model, requests, considered)
    meter: Meter[Any, Any] = Meter(model.target, model.drafter)
    meter.warm_up(requests[0])
    meter.run_all(requests, _FIRST, "costs")
    keep(meter.costs())
    checked = to_check({policy: answers.tally(policy, meter.costs()) for policy in considered}, usual)
    runs = _Runs(model, checked, requests)
    runs.run(plan.repeats, meter)
    if len(meter.samples) >= 2 * _FIRST:
        del meter.samples[:_FIRST]  # enough are of the runs' own minutes: the machine may have been another before
    keep(meter.costs())
    return _found(model, workloads, considered, answers, runs, meter.costs())


class _Answers:
    """The target's answers, and what is known of each."""

    def __init__(self, model: Model, requests: Sequence[Request], policies: Sequence[Policy]) -> None:
        assert model.drafter is not None
        self._all = range(len(requests))
        self._foresights: list[Foresight] = []
        self._drawn: list[Counter[tuple[int, int, bool]]] = []  # draws by depth, rank, and whether they hit
        for request in tqdm(requests, desc="traces", unit="answer"):
            answer = timed(generate_plain(model.target, request.prompt, request.sampling, request.stop, False))
            recorded = trace(model.target, model.drafter, request, answer, shapes(policies))
            self._foresights.append(Foresight(recorded, len(request.prompt), policies))
            whole = replay(recorded, Dynamic(LEVELS[-1], TOP_KS[-1], UNPRUNED))
            own = ((draw, rank) for draw in draws([whole]) for rank in range(len(draw.children)))
            self._drawn.append(Counter((draw.depth, rank, rank == draw.rank) for draw, rank in own))

    def tally(self, policy: Policy, costs: Costs, places: Sequence[int] | None = None) -> Tally:
        """Some answers, or all, under a policy."""
        chosen = self._all if places is None else places
        return sum((self._foresights[i].tally(policy, costs) for i in chosen), Tally())

    def plain(self, costs: Costs, places: Sequence[int]) -> Tally:
        return sum((self._foresights[i].plain(costs) for i in places), Tally())

    def shares(self, places: Sequence[int]) -> Shares | None:
        """Acceptance by depth and rank over some answers, in trees that were not pruned."""
        drawn = sum((self._drawn[i] for i in places), Counter[tuple[int, int, bool]]())
        by_depth: dict[int, dict[int, float]] = {}
        for depth, rank, _ in sorted(drawn):
            hit, missed = (drawn[depth, rank, which] for which in (True, False))
            by_depth.setdefault(depth, {})[rank] = hit / (hit + missed)
        return Shares.measured([list(own.values()) for own in by_depth.values()]) if by_depth else None


def to_check(forecast: Mapping[Policy, Tally], usual: Sequence[Policy]) -> list[Policy]:
    """The trees that are run: the usual ones, the best chain, and the best of those sizes that promise most."""
    of_size = best_by(forecast, num_nodes)
    best_chain = max((policy for policy in forecast if isinstance(policy, Chain)), key=_speed(forecast))
    checked = list(dict.fromkeys([*usual, best_chain, *of_size[:_FEW]]))
    return (checked + [policy for policy in of_size if policy not in checked])[: max(len(checked), _CHECKED)]


def best_by(forecast: Mapping[Policy, Tally], size: Callable[[Policy], int]) -> list[Policy]:
    """The tree of each size that promises most, the fastest first."""
    found: dict[int, Policy] = {}
    for policy in sorted(forecast, key=_speed(forecast), reverse=True):
        found.setdefault(size(policy), policy)
    return list(found.values())


def _speed(forecast: Mapping[Policy, Tally]) -> Callable[[Policy], float]:
    return lambda policy: forecast[policy].tokens_per_second


def num_nodes(policy: Policy) -> int:
    """Draft nodes that a policy's trees have at most."""
    if isinstance(policy, Dynamic):
        return policy.nodes
    return len(policy.paths) if isinstance(policy, Static) else policy.levels


def num_levels(policy: Policy) -> int:
    return policy.levels


class _Runs:
    """Measurement: plain decoding and trees side by side on all prompts, run after run."""

    def __init__(self, model: Model, policies: Sequence[Policy], requests: Sequence[Request]) -> None:
        self.policies, self._requests = policies, requests
        self._models = [replace(model, drafter=None), *(replace(model, policy=policy) for policy in policies)]
        self._tallies: list[list[list[Tally]]] = []  # by run, prompt and model
        self.divergences: list[dict[str, object]] = []

    def run(self, repeats: int, meter: Meter[Any, Any]) -> None:
        """Each prompt is answered by all before the next one, and costs are measured between: a machine that drifts
        slows all alike. Who begins changes from prompt to prompt."""
        warming = replace(self._requests[0], stop=replace(self._requests[0].stop, max_new_tokens=8))
        for model in self._models:
            timed(self._rounds(model, warming, False))
        allowed = rounding(self._models[0].target.spec)
        with tqdm(total=repeats * len(self._requests) * len(self._models), desc="runs", unit="answer") as bar:
            for number in range(repeats):
                self._tallies.append([])
                for i, request in enumerate(self._requests):
                    begin, judged = (number + i) % len(self._models), number == 0
                    answers: dict[int, Answer] = {}
                    for m in (*range(begin, len(self._models)), *range(begin)):
                        answers[m] = timed(self._rounds(self._models[m], request, judged and allowed > 0))
                        bar.update()
                    self._tallies[-1].append([_tallied(answers[m]) for m in range(len(self._models))])
                    if judged:
                        self._judge(i, answers, allowed)
                    meter.run_all([request], _BETWEEN)

    @staticmethod
    def _rounds(model: Model, request: Request, with_logits: bool) -> Iterator[Round]:
        return model.rounds(request.prompt, request.sampling, request.stop, with_logits)

    def _judge(self, number: int, answers: Mapping[int, Answer], allowed: float) -> None:
        """Drafted answers are plain decoding's, or rounding explains where they are not."""
        request = self._requests[number]
        for m, policy in enumerate(self.policies, 1):
            found = find_divergence(request.prompt, answers[0], answers[m], request.sampling, allowed)
            if found is not None:
                self.divergences.append({"tree": str(policy), "prompt": number, **asdict(found)})

    def measured(self, policy: Policy | None, places: Sequence[int]) -> tuple[Tally, list[float]]:
        """Some answers under a policy, or plain: all runs together, and the speed of the slowest and the fastest."""
        m = 0 if policy is None else 1 + self.policies.index(policy)
        runs = [sum((run[i][m] for i in places), Tally()) for run in self._tallies]
        speeds = [run.tokens_per_second for run in runs]
        return sum(runs, Tally()), [min(speeds), max(speeds)]


def _tallied(answer: Answer) -> Tally:
    return Tally(1, len(answer.tokens), len(answer.rounds) - 1, 1e3 * answer.seconds)


def _found(
    model: Model,
    workloads: Mapping[str, Sequence[Item]],
    considered: Sequence[Policy],
    answers: _Answers,
    runs: _Runs,
    costs: Costs,
) -> Tuned:
    assert model.drafter is not None
    bounds = [0, *accumulate(map(len, workloads.values()))]
    places = dict(zip(workloads, starmap(range, pairwise(bounds)), strict=True)) | {ALL: range(bounds[-1])}
    rows: list[Row] = []
    plain: list[Plain] = []
    for workload, own in places.items():
        shares = answers.shares(own)
        forecast = {policy: answers.tally(policy, costs, own) for policy in considered}
        curves = [*best_by(forecast, num_nodes), *best_by(forecast, num_levels)]
        shown = considered if workload == ALL else [*runs.policies, *curves]
        for policy in dict.fromkeys(shown):
            size = tree_bytes(model.target.spec, model.drafter.reads, num_nodes(policy))
            rows.append(_row(workload, policy, forecast[policy], shares, runs, own, size))
        measured, interval = runs.measured(None, own)
        promised = answers.plain(costs, own).tokens_per_second
        plain.append(Plain(workload, promised, measured.tokens_per_second, interval))
    chosen = max(runs.policies, key=lambda policy: runs.measured(policy, places[ALL])[0].tokens_per_second)
    return Tuned(chosen, rows, plain, costs, runs.divergences)


def _row(
    workload: str,
    policy: Policy,
    forecast: Tally,
    shares: Shares | None,
    runs: _Runs,
    places: Sequence[int],
    memory_bytes: int,
) -> Row:
    measured, interval = runs.measured(policy, places) if policy in runs.policies else (None, None)
    return Row(
        workload=workload,
        tree=str(policy),
        levels=policy.levels,
        nodes=num_nodes(policy),
        tau_predicted=forecast.tau,
        tau_formula=None if shares is None else expect(policy, shares).exclusive,
        tau=None if measured is None else measured.tau,
        tokens_per_second_predicted=forecast.tokens_per_second,
        tokens_per_second=None if measured is None else measured.tokens_per_second,
        interval=interval,
        memory_bytes=memory_bytes,
    )
