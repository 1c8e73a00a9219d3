"""Trees grown from a scripted drafter, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from eyas.drafters.base import Candidates
from eyas.errors import InputError
from eyas.policies import Chain, Dynamic, Policy, Static, grow, parse_policy

# Below every node stand the tokens 10, 11, 12, ... with these probabilities.
PROBABILITIES = (0.5, 0.3, 0.1)


@dataclass
class Scripted:
    """Gives the same candidates below every node and writes down what it was asked."""

    probabilities: tuple[float, ...] = PROBABILITIES
    asked: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def candidates(self, num: int, width: int) -> Candidates:
        p = self.probabilities[:width]
        tokens = torch.arange(10, 10 + len(p)).expand(num, -1)
        return Candidates(tokens, torch.tensor(p).log().expand(num, -1))

    def expand(self, state: None, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        self.asked.append((list(rows), list(tokens)))
        return self.candidates(len(rows), width)


def grown(policy: Policy, max_levels: int = 99, probabilities: tuple[float, ...] = PROBABILITIES):
    drafter = Scripted(probabilities)
    tree = grow(policy, drafter, None, 1, drafter.candidates(1, policy.width), max_levels)  # type: ignore[arg-type]
    return tree, drafter


def test_chain() -> None:
    tree, drafter = grown(Chain(3))
    assert (tree.tokens, tree.parents) == ((1, 10, 10, 10), (-1, 0, 1, 2))
    assert drafter.asked == [([0], [10]), ([1], [10])]
    assert math.isclose(tree.scores[3], 3 * math.log(0.5), rel_tol=1e-6)


def test_static_tree_asks_only_for_inner_nodes_and_drops_missing_ranks() -> None:
    policy = Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 2), (1, 2, 0)))
    tree, drafter = grown(policy)
    assert tree.tokens == (1, 10, 11, 10, 11, 10, 12, 10)
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 2, 6)
    assert drafter.asked == [([0, 0], [10, 11]), ([2], [12])]  # row 2 is the second node of the first level
    tree, drafter = grown(policy, probabilities=(0.6, 0.4))  # no third candidate: (1, 2) and what is below are gone
    assert tree.tokens == (1, 10, 11, 10, 11, 10)


def test_dynamic_tree_expands_by_path_value_and_keeps_the_best() -> None:
    tree, drafter = grown(Dynamic(num_levels=3, top_k=2, nodes=5))
    # level 1: .5 .3   level 2 below both: .25 .15 .15 .09   level 3 below .25 and .15 (the first): .125 .075 .075 .045
    assert drafter.asked == [([0, 0], [10, 11]), ([1, 1], [10, 11])]
    assert [round(math.exp(score), 3) for score in tree.scores] == [1, 0.5, 0.3, 0.25, 0.15, 0.15]
    assert tree.parents == (-1, 0, 0, 1, 1, 2)  # .15 twice: the earlier one is kept first, .125 falls out


def test_levels_are_clipped_to_the_budget() -> None:
    assert len(grown(Chain(5), max_levels=2)[0]) == 3
    assert len(grown(Dynamic(), max_levels=0)[0]) == 1
    tree, drafter = grown(Dynamic(6, 2, 99), max_levels=1)
    assert (len(tree), drafter.asked) == (3, [])


def test_certain_children_do_not_orphan_themselves() -> None:
    tree, _ = grown(Dynamic(4, 1, 2), probabilities=(1.0,))  # every score is exactly 0
    assert tree.parents == (-1, 0, 1)


def test_parse() -> None:
    assert parse_policy("chain:4") == Chain(4)
    assert parse_policy("dynamic") == Dynamic(6, 8, 24)
    assert parse_policy("dynamic:nodes=59,levels=8,top_k=10") == Dynamic(8, 10, 59)
    assert str(parse_policy("dynamic:nodes=9")) == "dynamic:levels=6,top_k=8,nodes=9"


@pytest.mark.parametrize(
    "text",
    ["", "chain", "chain:0", "chain:-1", "chain:x", "tree", "dynamic:levels=0", "dynamic:depth=3", "dynamic:nodes="]
    + ["chain:" + "9" * 5000, "dynamic:nodes=10001", "dynamic:top_k=1025", "static:\x00", "static:\ud800"],
)
def test_refuses_unknown_and_endless_trees(text: str) -> None:
    with pytest.raises(InputError):
        parse_policy(text)


@pytest.mark.parametrize("text", ["[]", "{", "[[0], [0]]", "[[0, 0]]", "[[-1]]", "[[]]", "[0]", '[["a"]]'])
def test_refuses_impossible_tree_files(tmp_path, text: str) -> None:
    (tmp_path / "tree.json").write_text(text)
    with pytest.raises(InputError):
        parse_policy(f"static:{tmp_path / 'tree.json'}")
    with pytest.raises(InputError, match="cannot read"):
        parse_policy(f"static:{tmp_path / 'missing.json'}")


def test_a_rank_beyond_every_vocabulary_asks_for_what_there_is() -> None:
    assert Static(((0,), (10**20,))).width == (1 << 31) - 1  # the native core counts in 32 bits
    assert grown(Static(((0,), (10**20,))))[0].tokens == (1, 10)
