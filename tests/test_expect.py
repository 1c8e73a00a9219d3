"""Expected tokens per forward, by hand and against what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from test_cli import refused, run_json
from tiny import tiny_target

from eyas.cli import main
from eyas.drafters.small_model import SmallModel
from eyas.errors import InputError
from eyas.expect import Shares, at_least_one, chain, example, expect, shape
from eyas.generate import generate
from eyas.measure import acceptance_by_depth, acceptance_by_depth_and_rank, timed
from eyas.policies import Chain, Dynamic, Sampled, Static
from eyas.sampling import Sampling
from eyas.verify import Stop


def test_chains() -> None:
    assert chain(0.5, 2) == 1.75 and chain(0.0, 4) == 1.0 and chain(1.0, 4) == 5.0
    for alpha in (0.0, 0.3, 0.7, 1.0):
        for length in (1, 4):
            found = expect(Chain(length), Shares(((alpha,),)))
            assert math.isclose(found.independent, chain(alpha, length))
            assert found.independent == found.exclusive == found.exclusive_most
            assert (found.levels, found.nodes) == (length, length)


def test_the_textbook_example() -> None:
    found = example(0.7)
    assert math.isclose(found.chain_reaches_depth_2, 0.49)
    assert math.isclose(found.one_level, 0.973) and math.isclose(at_least_one(0.7, 3), 0.973)
    assert math.isclose(found.widened_at_depth_2, 0.6811)
    assert math.isclose(found.widened_at_both, 0.946729)


def test_a_tree_by_hand() -> None:
    """Three candidates at depth 1, two below the best of them, one below the second."""
    tree = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)))
    shares = Shares(((0.6, 0.2, 0.1), (0.5, 0.25)))
    found = expect(tree, shares)
    assert math.isclose(found.exclusive, 1 + 0.6 + 0.2 + 0.1 + 0.6 * (0.5 + 0.25) + 0.2 * 0.5)
    assert found.exclusive == found.exclusive_most, "every rank is listed"
    level = 1 - 0.4**3  # .6 .24 .096 by rank, where the first one that holds is taken
    assert math.isclose(found.independent, 1 + level + 0.6 * (1 - 0.5**2) + 0.24 * 0.5)
    assert (found.levels, found.nodes) == (2, 6)


def test_what_ranks_that_are_not_listed_may_be() -> None:
    two = expect(Static(((0,), (1,), (2,))), Shares(((0.7,),)))
    assert math.isclose(two.exclusive, 1.7) and math.isclose(two.exclusive_most, 2.0)
    assert math.isclose(two.independent, 1.973), "as if a third candidate could still be right"
    gap = expect(Static(((0,), (2,))), Shares(((0.5, 0.3, 0.1),)))
    assert math.isclose(gap.exclusive, 1.6), "by rank, not by place"
    assert math.isclose(gap.independent, 1.75)


def test_a_dynamic_tree_is_grown_by_its_shares() -> None:
    """.5 .3 below every node. Level 1: .5 .3; level 2: .25 .15 .15 .09; of these the best four."""
    shares = Shares(((0.5, 0.3),))
    tree = shape(Dynamic(2, 2, 4), shares)
    assert tree.tokens == (0, 0, 1, 0, 1) and tree.parents == (-1, 0, 0, 1, 1)
    assert math.isclose(expect(Dynamic(2, 2, 4), shares).exclusive, 1 + 0.5 + 0.3 + 0.25 + 0.15)


def test_a_dynamic_tree_has_the_shares_of_its_depths() -> None:
    """Level 1: .5 .3; level 2, where the first candidate is nearly sure: .45 .025 .27 .015; the best four."""
    tree = shape(Dynamic(2, 2, 4), Shares(((0.5, 0.3), (0.9, 0.05), (0.1, 0.1))))
    assert (tree.tokens, tree.parents) == ((0, 0, 1, 0, 0), (-1, 0, 0, 1, 2))


def test_depths_below_the_last_are_like_it() -> None:
    assert math.isclose(expect(Chain(3), Shares(((0.5,), (0.2,)))).exclusive, 1 + 0.5 + 0.1 + 0.02)


def test_measured_shares_never_exceed_one() -> None:
    """Second candidates that were kept only in doubt were right more often than they would have been throughout."""
    assert Shares.measured([[0.9, 0.4, 0.2]]).by_depth == ((0.9, pytest.approx(0.1), pytest.approx(0.0)),)


@pytest.mark.parametrize("wrong", [(), ((),), ((1.1,),), ((-0.1,),), ((0.7, 0.4),), ((math.nan,),)])
def test_wrong_shares_are_refused(wrong: tuple) -> None:
    with pytest.raises(InputError):
        Shares(wrong)


def test_trees_that_have_no_formula() -> None:
    for policy in (Sampled(), Static(((0,), (10**20,)))):
        with pytest.raises(InputError):
            expect(policy, Shares(((0.5,),)))


def test_measured_chains_give_their_own_tau_back() -> None:
    """The chance of a path is then what was counted for it. Rounds with less than all levels, the last one's, aside."""
    target = tiny_target()
    drafter = SmallModel(tiny_target(seed=0))
    answer = timed(generate(target, drafter, Chain(3), [1, 8, 4], Sampling(1.0, seed=2), Stop(80)))
    answer.rounds[:] = [round_ for round_ in answer.rounds if round_.tree is None or len(round_.tree) == 4]
    shares = Shares.measured(acceptance_by_depth_and_rank([answer]))
    assert math.isclose(expect(Chain(3), shares).exclusive, 1 + sum(acceptance_by_depth([answer])))


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = run_json(capsys, "expect", "--alpha", "0.7", "--tree", "chain:2", "--tree", "static")
    assert [row["tree"] for row in record["rows"]] == ["chain:2", "static"]
    assert record["rows"][0]["independent"] == pytest.approx(2.19)
    assert record["rows"][1]["nodes"] == 25
    assert record["example"]["one_level"] == pytest.approx(0.973)
    assert main(["expect", "--alpha", "0.7"]) == 0
    out = capsys.readouterr().out
    assert "(1-a^3)/(1-a) = 2.19" in out and "0.973" in out and "0.68" in out and "0.95" in out
    row = {"workload": "w", "method": "eagle", "tree": "chain:2", "temperature": 0.0, "tau": 1.5}
    rows = [{**row, "acceptance_by_depth_and_rank": [[0.5], [0.2]]}, {**row, "tree": None}]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": rows}))
    measured = run_json(capsys, "expect", "--bench", str(tmp_path / "bench.json"), "--tree", "chain:1")
    assert [(row["tree"], row["measured_tau"]) for row in measured["rows"]] == [("chain:2", 1.5), ("chain:1", 1.5)]
    assert [row["exclusive"] for row in measured["rows"]] == pytest.approx([1.6, 1.5])
    assert main(["expect", "--bench", str(tmp_path / "bench.json")]) == 0
    assert "measured 1.50 with chain:2" in capsys.readouterr().out


def test_wrong_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "unknown tree" in refused(capsys, "expect", "--alpha", "0.7", "--tree", "auto")
    assert "numbers with commas" in refused(capsys, "expect", "--alpha", "x")
    assert "at most 1" in refused(capsys, "expect", "--alpha", "0.7,0.5")
    assert "required" in refused(capsys, "expect")
    row = {"workload": "w", "method": "m", "temperature": 0, "tau": 1.5, "acceptance_by_depth_and_rank": [["x"]]}
    wrong = json.dumps({"rows": [{**row, "tree": "chain:2"}]})
    for text in ("{", "[]", '{"rows": [{"tree": "chain:2"}]}', '{"rows": []}', wrong):
        (tmp_path / "x.json").write_text(text)
        assert "x.json" in refused(capsys, "expect", "--bench", str(tmp_path / "x.json"))
