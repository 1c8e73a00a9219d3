"""A head's own figures, and when a run falls so short of them that it is said."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from eyas.checkpoint import promised, shipped_heads
from eyas.cli import main
from eyas.commands.common import say_if_plain
from eyas.errors import InputError
from eyas.model import load
from eyas.promise import FILE, Figures, binomial_tail, read_figures, shortfall, write_figures

CHAIN = Figures("chain:3", "mt_bench", 1.6, (0.4, 0.3, 0.3))
TREES = [CHAIN, Figures("static", "mt_bench", 2.2, (0.7, 0.5)), Figures("static", "gsm8k", 2.4, (0.8, 0.6))]


def test_the_tail_of_a_binomial_by_hand() -> None:
    assert binomial_tail(0, 3, 0.5) == pytest.approx(1 / 8)
    assert binomial_tail(1, 3, 0.5) == pytest.approx(4 / 8)
    assert binomial_tail(1, 4, 0.2) == pytest.approx(0.8**4 + 4 * 0.2 * 0.8**3)
    assert (binomial_tail(3, 3, 0.5), binomial_tail(2, 9, 0.0), binomial_tail(2, 9, 1.0)) == (1.0, 1.0, 0.0)
    assert math.isclose(binomial_tail(900, 2000, 0.45), 0.51, abs_tol=0.02)


def test_a_warning_needs_draws_and_distance() -> None:
    # half of the lowest static figure is .35: the chance of no hit in 20 is .65^20 = 1.8e-4, in 22 7.7e-5
    assert shortfall(0, 20, "static", TREES) is None
    assert "0 of 22 first guesses held" in (shortfall(0, 22, "static", TREES) or "")
    assert shortfall(36, 100, "static", TREES) is None
    assert shortfall(10, 100, "static", TREES) is not None
    # chains are held to chains (half of .4), trees without figures of their own to the lowest of all
    assert shortfall(10, 100, "chain:3", TREES) is None and shortfall(10, 100, "dynamic:nodes=9", TREES) is None
    assert shortfall(0, 0, "static", TREES) is None and shortfall(0, 999, "static", []) is None


def test_figures_in_a_file(tmp_path: Path) -> None:
    assert read_figures(tmp_path) == []
    write_figures(tmp_path, TREES)
    assert read_figures(tmp_path) == TREES
    for broken in (
        "{",
        "3",
        "[[]]",
        '[{"tree": "static"}]',
        '[{"tree": "", "workload": "", "tau": 1, "alpha_by_depth": [2]}]',
    ):
        (tmp_path / FILE).write_text(broken)
        with pytest.raises(InputError, match="no list of"):
            read_figures(tmp_path)


def test_shipped_figures_can_be_read() -> None:
    assert all(0.2 < row.alpha_by_depth[0] < 1 < row.tau for head in shipped_heads() for row in promised(head))
    assert promised("lookup") == []


def answered(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict, str]:
    """The JSON of `eyas generate`, and what it said beside."""
    assert main(["generate", *flags, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_a_head_that_promised_more_is_named(folder: Path, tmp_path: Path, capsys) -> None:
    head = tmp_path / "head"
    copytree(folder / "eagle3", head)
    write_figures(head, [replace(CHAIN, alpha_by_depth=(1.0,))])
    flags = ["--target", str(folder / "target"), "--head", str(head), "--backend", "eager", "--tree", "chain:2"]
    record, said = answered(capsys, *flags, "--prompt", "hello", "--max-new-tokens", "40")
    assert "first guesses held" in said and record["new_tokens"] == 40
    assert "first guesses" not in answered(capsys, *flags, "--prompt", "x", "--temperature", "1")[1]
    model = load(str(folder / "target"), str(head), backend="eager", tree="chain:2")
    with pytest.warns(UserWarning, match="first guesses held"):
        model.generate("hello", max_new_tokens=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        model.generate("hello", max_new_tokens=40)


def test_the_guard_by_flags(folder: Path, capsys) -> None:
    """Costs are measured where they are asked for, and kept."""
    target = ["--target", str(folder / "target"), "--backend", "eager", "--prompt", "hi", "--max-new-tokens", "24"]
    flags = [*target, "--head", str(folder / "eagle3")]
    plain = answered(capsys, *target)[0]
    assert not answered(capsys, *flags)[0]["guard"]  # nothing is known of this machine
    for more in (["--guard"], ["--tree", "adaptive", "--guard"], ["--tree", "adaptive"], [], ["--no-guard"]):
        record, said = answered(capsys, *flags, *more)
        assert record["token_ids"] == plain["token_ids"]
        assert ("costs:" in said) == (more == ["--guard"])
        assert record["guard"] == ("--guard" in more or not more)  # auto is guarded once there are costs
    assert record["plain_forwards"] == 0
    assert main(["generate", *flags, "--tree", "sampled", "--temperature", "1", "--guard"]) == 2
    assert "drawn at random" in capsys.readouterr().err
    for wrong in (1, "yes"):
        with pytest.raises(InputError, match="guard"):
            load(str(folder / "target"), guard=wrong)  # type: ignore[arg-type]


def test_a_guard_that_fell_back_says_so(capsys) -> None:
    for forwards, plain, said in ((40, 21, True), (40, 20, False), (15, 15, False)):
        say_if_plain("this answer", forwards, plain)
        assert ("eyas tune" in capsys.readouterr().err) == said
