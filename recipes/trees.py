"""(g) What the tree buys: chain, static and dynamic trees of the same size; path values against raw confidence; with
and without the rerank; size against tau, speed and memory.

EAGLE-2 (arXiv 2406.16858, section 4) expands and reranks by path values. Its ablations as policies: nodes chosen by
their own confidence, and nodes kept in the order in which they were grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab import Lab, Panel, draw, finish, main, mean_tau, parser, replayed, speed

from eyas.policies import Chain, Dynamic, Level, Policy, RankPath, Static, parse_policy

SIZES = (2, 4, 8, 12, 16, 25, 40, 59)


@dataclass(frozen=True)
class NoRerank(Dynamic):
    """Expanded by path value; the first nodes are kept, level by level."""

    def survivors(self, scores: Sequence[float]) -> Sequence[int]:
        return range(min(len(scores), self.nodes + 1))


class RawConfidence(Policy):
    """Expanded by each node's own confidence, whatever lies above it; reranked by path value."""

    by_rank = True

    def __init__(self, levels: int, top_k: int, nodes: int) -> None:
        self._dynamic = Dynamic(levels, top_k, nodes)
        self._above: dict[RankPath, float] = {}  # path values of the level before

    @property
    def levels(self) -> int:
        return self._dynamic.levels

    @property
    def width(self) -> int:
        return self._dynamic.width

    def expands(self, level: Level) -> list[int]:
        own = [score - self._above.get(path[:-1], 0.0) for score, path in zip(level.scores, level.paths, strict=True)]
        self._above = dict(zip(level.paths, level.scores, strict=True))
        return sorted(range(len(own)), key=own.__getitem__, reverse=True)[: self.width]

    def survivors(self, scores: Sequence[float]) -> Sequence[int]:
        return self._dynamic.survivors(scores)


def statics(size: int, shape: Static) -> Static:
    """The first nodes of EAGLE-1's tree, shortest paths first."""
    return Static(tuple(sorted(shape.paths, key=lambda path: (len(path), path))[:size]), f"static, {size} nodes")


def rows_of(policy: Policy) -> list[int]:
    """Nodes expanded at each level after the first."""
    if isinstance(policy, Static):
        inner = {path[:-1] for path in policy.paths}
        return [sum(len(path) == depth for path in inner) for depth in range(1, policy.levels)]
    return [policy.width] * (policy.levels - 1)


def recipe() -> None:
    lab = Lab(parser(__doc__).parse_args())
    drafter = lab.shipped()
    price = lab.costs(drafter, "head")
    shape = parse_policy("static")
    assert isinstance(shape, Static)
    bytes_per_node = 2 * lab.target.spec.num_layers * lab.target.spec.num_kv_heads * lab.target.spec.head_dim * 2
    rows, taus, speeds = [], {}, {}
    recorded = lab.record(drafter, [Chain(8), shape, Dynamic(8, 10, 59), RawConfidence(8, 10, 59)])
    for size in SIZES:
        trees = {
            "chain": Chain(min(size, 8)),
            "static": statics(size, shape),
            "dynamic": Dynamic(8, 10, size),
            "no rerank": NoRerank(8, 10, size),
            "raw confidence": RawConfidence(8, 10, size),
        }
        for name, policy in trees.items():
            if (name == "chain" and size > 8) or (name == "static" and size > len(shape.paths)):
                continue
            answers = replayed(recorded, policy)
            expanded = rows_of(policy)
            row = {"tree": name, "nodes": size, "levels": policy.levels, "tau": mean_tau(answers),
                   "tokens/s": 1e3 * speed(answers, expanded, price), "K/V bytes": bytes_per_node * size}  # fmt: skip
            rows.append(row)
            taus.setdefault(name, []).append((size, row["tau"]))
            speeds.setdefault(name, []).append((size, row["tokens/s"]))
    memory = {"K/V of the tree": [(size, bytes_per_node * size / 1e6) for size in SIZES]}
    draw(lab, "trees", [
        Panel("trees of one size", "nodes", "tau", taus),
        Panel("trees of one size", "nodes", "tokens/s, from measured costs", speeds),
        Panel("memory", "nodes", "MB", memory),
    ])  # fmt: skip
    finish(lab, "trees", rows, list(rows[0]))


if __name__ == "__main__":
    main(recipe)
