"""The tuner finds a planted optimum, keeps it for exactly this place, and `--tree auto` is what was kept."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timed import Clock, TimedDrafter, TimedTarget
from tiny import tiny_tokenizer

from eyas import tune as room
from eyas.automatic import auto_tree, keep_tree, write_tree
from eyas.cli import main
from eyas.costs import Costs
from eyas.errors import InputError
from eyas.forecast import Tally
from eyas.model import Model, load
from eyas.policies import Chain, Dynamic, Policy, parse_policy
from eyas.prompts import Item
from eyas.sampling import Sampling
from eyas.tune import ALL, EAGLE_2, Plan, best_by, grid, num_nodes, to_check, tune


def test_the_grid_holds_no_tree_twice() -> None:
    trees = grid()
    assert len(set(map(str, trees))) == len(trees) and Chain(8) in trees and Dynamic(1, 2, 2) in trees
    assert Dynamic(1, 2, 3) not in trees, "one level of two grows two nodes"
    assert Dynamic(2, 2, 6) in trees and Dynamic(2, 2, 7) not in trees, "2 + 4"
    assert Dynamic(5, 3, 4) not in trees, "four nodes reach no fifth level"
    assert max(map(num_nodes, trees)) == 64


def promising(**speeds: int) -> dict[Policy, Tally]:
    """Forecasts by levels and nodes, as in l2n3: one answer each, of so many tokens a second."""
    found: dict[Policy, Tally] = {}
    for name, speed in speeds.items():
        levels, nodes = map(int, name[1:].split("n"))
        found[Chain(levels) if levels == nodes else Dynamic(levels, 3, nodes)] = Tally(1, speed, speed, 1000.0)
    return found


def test_what_is_checked() -> None:
    forecast = promising(l1n1=50, l2n2=60, l3n3=70, l2n3=75, l2n4=90, l3n4=91, l2n5=80, l2n6=65, l2n7=64, l2n8=63)
    assert best_by(forecast, num_nodes)[:3] == [Dynamic(3, 3, 4), Dynamic(2, 3, 5), Dynamic(2, 3, 3)]
    usual: list[Policy] = [parse_policy("static"), EAGLE_2, Dynamic(3, 3, 4)]
    best = [Dynamic(2, 3, 5), Dynamic(2, 3, 3), Dynamic(2, 3, 6)]
    assert to_check(forecast, usual) == [*usual, Chain(3), *best, Dynamic(2, 3, 7)], "filled up to eight"
    more = [*usual, *(Chain(n) for n in (4, 5, 6, 7, 8))]
    assert to_check(forecast, more) == [*more, Chain(3), *best], "nothing is dropped"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_a_planted_optimum_is_found(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is always right, a target that takes 40 ms more from the fourth node on: chain:3. Its round takes
    8 + 3 * 0.5 + 1 + 2 * 0.25 + 0.25 = 11.25 ms and brings 4 tokens."""
    monkeypatch.setattr(room, "TOP_KS", (1, 2, 3))
    monkeypatch.setattr(room, "_BETWEEN", 4)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    model = Model(TimedTarget(clock, cliff=40.0), tokenizer, TimedDrafter(clock, seed=0), Dynamic(2, 2, 6))
    workloads = {"one": [Item("a", ("ABCDE",))], "other": [Item("b", ("BCDEF",))]}
    kept: list[Costs] = []
    found = tune(model, workloads, Sampling(), Plan(17, repeats=2, also=(Chain(7),)), kept.append)
    assert found.chosen == Chain(3) and found.divergences == []
    assert found.costs.verify[:6] == tuple((n, pytest.approx(8 + 0.5 * n + 40 * (n > 3))) for n in range(6))
    assert kept[-1] == found.costs and len(kept) == 2, "as soon as they are known, and at the end"
    by_tree = {(row.workload, row.tree): row for row in found.rows}
    best = by_tree[ALL, "chain:3"]
    # 17 tokens: one of the prompt's own forward, four rounds of 4; the prompt 5 ms and 0.25 for its keys and values
    assert (best.tau, best.tau_predicted, best.levels, best.nodes) == (4.0, 4.0, 3, 3)
    assert best.tokens_per_second == pytest.approx(17e3 / (5.25 + 4 * 11.25))
    assert {"static", str(EAGLE_2), "chain:7", str(model.policy)} <= {tree for (_, tree) in by_tree}
    measured = [row for row in found.rows if row.tokens_per_second is not None]
    assert len([row for row in measured if row.workload == ALL]) >= 8
    assert {row.workload for row in measured} == {"one", "other", ALL}
    for row in measured:
        assert row.tau == row.tau_predicted, row.tree
        assert row.tokens_per_second == pytest.approx(row.tokens_per_second_predicted, rel=0.01), row.tree
        assert row.interval == pytest.approx([row.tokens_per_second] * 2)
    assert [own.workload for own in found.plain] == ["one", "other", ALL]
    assert found.plain[-1].tokens_per_second == pytest.approx(17e3 / (5.25 + 16 * 8.25))


def test_answers_that_end_at_once_are_refused(clock: Clock) -> None:
    model = Model(TimedTarget(clock), tiny_tokenizer(), TimedDrafter(clock), Chain(1))
    model.tokenizer.chat_template = None
    with pytest.raises(InputError, match="too short"):
        tune(model, {"one": [Item("a", ("ABCDE",))]}, Sampling(), Plan(1), lambda _: None)


def test_auto_is_what_was_tuned_here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    here = {"cpu": "a", "threads": 2}
    monkeypatch.setattr("eyas.kept.machine", lambda: here)
    target, head = str(folder / "target"), str(folder / "eagle3")
    model = load(target, head, backend="eager")
    spec = model.target.spec
    assert "not tuned" in auto_tree(spec, head)[1] and model.policy == auto_tree(spec, head)[0]
    file = keep_tree(spec, head, Chain(7), {"rows": []})
    assert load(target, head, backend="eager").policy == Chain(7) == auto_tree(spec, head)[0]
    assert auto_tree(spec, head)[1] == "tuned on this machine"
    assert load(target, head, backend="eager", tree="chain:2").policy == Chain(2), "what is asked for comes first"
    assert load(target, head, backend="eager", dtype="float64").policy != Chain(7), "another dtype"
    assert load(target, str(folder / "eagle"), backend="eager").policy != Chain(7), "another head"
    here["threads"] = 1
    assert auto_tree(spec, head)[0] != Chain(7), "another number of threads"
    here["threads"] = 2
    for broken in ("{}", "[", '{"tree": 3}', '{"tree": "static:no such file"}'):
        file.write_text(broken)
        assert "not tuned" in auto_tree(spec, head)[1]


def test_a_tree_in_the_heads_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    head = tmp_path / "head"
    head.mkdir()
    for file in (folder / "eagle3").iterdir():
        (head / file.name).write_bytes(file.read_bytes())
    spec = load(str(folder / "target"), str(head), backend="eager").target.spec
    keep_tree(spec, str(head), Chain(5), {})
    write_tree(spec, str(head), Chain(3), {"tokens_per_second": 9.5})
    write_tree(replace(spec, dtype=torch.bfloat16), str(head), Chain(4), {})
    assert auto_tree(spec, str(head))[0] == Chain(5), "what was tuned here comes first; the file changes no head"
    (kept,) = (tmp_path / "cache" / "trees").iterdir()
    kept.unlink()
    assert auto_tree(spec, str(head)) == (Chain(3), "of the head's folder, tuned elsewhere")
    assert load(str(folder / "target"), str(head), backend="eager", dtype="bfloat16").policy == Chain(4)
    assert json.loads((head / "tree.json").read_text())["eager float32"]["tokens_per_second"] == 9.5
    (head / "tree.json").write_text("[")
    assert "not tuned" in auto_tree(spec, str(head))[1]


SMALL = ["--backend", "eager", "--max-new-tokens", "10", "--repeats", "2"]


def test_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    prompts = tmp_path / "mine.txt"
    prompts.write_text("hello\nyou there\n")
    called = ["--target", str(folder / "target"), "--head", str(folder / "eagle3"), "--backend", "eager"]
    assert main(["tune", *called, "--workload", str(prompts), "--limit", "1", *SMALL[2:], "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert out.count("\n") == 1 and record["kind"] == "tune" and record["settings"]["workloads"] == {"mine": 1}
    assert f"--tree auto is {record['chosen']} here from now on" in err and "not tuned" in err
    rows = [row for row in record["rows"] if row["tokens_per_second"] is not None and row["workload"] == "mine"]
    assert len(rows) >= 8 and record["chosen"] in [row["tree"] for row in rows]
    assert max(rows, key=lambda row: row["tokens_per_second"])["tree"] == record["chosen"]
    assert all(row["tau"] == row["tau_predicted"] for row in rows) and record["costs"]["verify"][0][0] == 0
    assert main(["generate", *called, "--prompt", "hi", "--max-new-tokens", "3"]) == 0
    assert f"tree for {folder / 'eagle3'}: {record['chosen']} (tuned on this machine)" in capsys.readouterr().err


def test_what_was_measured_outlives_an_interruption(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    monkeypatch.setattr(room._Runs, "run", interrupted)
    called = ["tune", "--target", str(folder / "target"), "--head", "lookup", "--workload", "gsm8k", "--limit", "1"]
    assert main([*called, *SMALL]) == 130
    assert len([*(tmp_path / "costs").iterdir()]) == 1 and not (tmp_path / "trees").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--head", "none"], "without a head"),
        (["--head", "nobody"], "unknown head"),
        (["--head", "lookup", "--tree", "sampled"], "at random"),
        (["--head", "lookup", "--tree", "oak"], "unknown tree"),
        (["--head", "lookup", "--write"], "names no folder"),
        (["--head", "smollm2-eagle3", "--write"], "names no folder"),
        (["--head", "lookup", "--temperature", "-1"], "temperature"),
        (["--head", "lookup", "--workload", "missing.jsonl"], "missing.jsonl"),
        (["--head", "lookup", "--workload", "gsm8k", "--workload", "x/gsm8k"], "x/gsm8k"),
    ],
)
def test_wrong_flags_cost_no_time(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--target", "no such target", *flags]) == 2
    out, err = capsys.readouterr()
    assert words in err and out == "" and len(err.splitlines()) == 1
