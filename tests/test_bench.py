"""A comparison: conversations, repeated runs, temperatures, the papers' table, and going on after an interruption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_cli import ROW_KEYS, refused, run_json
from tiny import tiny_target, tiny_tokenizer

from eyas import bench, results
from eyas.cli import main
from eyas.generate import Memory, generate
from eyas.initial import new_head
from eyas.measure import Answer, Divergence
from eyas.model import Model
from eyas.policies import Chain, Dynamic
from eyas.prompts import Item
from eyas.sampling import Sampling
from eyas.targets.eager import EagerTarget
from eyas.verify import Stop

BYTES = 260


@pytest.fixture(scope="module")
def methods() -> list[bench.Method]:
    target = tiny_target(vocab=BYTES)
    head = new_head("eagle", target).double().eval()
    drafted = Model(target, tiny_tokenizer(), head, Dynamic(3, 3, 6))
    chain = replace(drafted, policy=Chain(3))
    return [bench.Method(None, replace(drafted, drafter=None)), bench.Method("h", drafted), bench.Method("h", chain)]


ITEMS = [Item("a", ("hello", "and then?", "so?")), Item("b", ("you",), system="be brief"), Item("c", ("x", "y"))]


@pytest.mark.parametrize("batch", [1, 2])
def test_conversations_go_on_from_plain_answers(methods: list[bench.Method], batch: int) -> None:
    rows, answers = bench.compare(methods, ITEMS, "w", Sampling(0.7), bench.How(12, batch, all_turns=True))
    assert [row.sequences for row in rows] == [row.identical for row in rows] == [6, 6, 6]
    plain = methods[0].model
    said: list[list] = [[], [{"role": "system", "content": "be brief"}], []]
    expected = {}
    for i, item in enumerate(ITEMS):
        for turn, text in enumerate(item.turns):
            said[i].append({"role": "user", "content": text})
            output = plain.generate(said[i], max_new_tokens=12, temperature=0.7, sample=i)
            expected[item.id, turn] = output.token_ids
            said[i].append({"role": "assistant", "content": output.text})
    order = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1)]
    if batch == 2:
        order = [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("c", 0), ("c", 1)]
    for side in answers:
        assert [answer.tokens for answer in side] == [expected[key] for key in order]
    found = list(bench.plain_answers(plain, ITEMS, Sampling(0.7), bench.How(12, all_turns=True)))
    assert [answer.tokens for _, answer in found] == list(expected.values())
    assert found[2][0].prompt == plain.encode(said[0][:5])


def test_a_conversation_reads_only_what_is_new(methods: list[bench.Method], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the target computes for a prompt: the whole one first, then what stands after the answer before."""
    computed: list[int] = []
    verify = EagerTarget.verify

    def counting(self: EagerTarget, items: list, *rest, **more):
        computed.append(sum(len(tree) for _, tree in items))
        return verify(self, items, *rest, **more)

    monkeypatch.setattr(EagerTarget, "verify", counting)
    _, (answers,) = bench.compare(methods[:1], ITEMS[:1], "w", Sampling(), bench.How(5, all_turns=True))
    model = methods[0].model
    said: list = []
    lengths = []
    for text, answer in zip(ITEMS[0].turns, answers, strict=True):
        said.append({"role": "user", "content": text})
        lengths.append(len(model.encode(said)))
        said.append({"role": "assistant", "content": model.decode(answer.tokens)})
    warm_up, first, second, third = [number for number in computed if number > 1]
    assert warm_up == first == lengths[0]
    assert second <= lengths[1] - lengths[0] + 1 and third <= lengths[2] - lengths[1] + 1


def test_the_first_turn_alone(methods: list[bench.Method]) -> None:
    rows, _ = bench.compare(methods, ITEMS, "w", Sampling(), bench.How(6))
    assert [row.sequences for row in rows] == [3, 3, 3]
    for row in rows:
        assert (row.turns, row.runs, row.tokens_per_second_interval, row.answers) == ("first", 1, None, [])


def test_repeats_give_intervals_and_change_nothing_else(methods: list[bench.Method]) -> None:
    (plain, *_), _ = bench.compare(methods, ITEMS, "w", Sampling(), bench.How(6, repeats=1))
    rows, answers = bench.compare(methods, ITEMS, "w", Sampling(), bench.How(6, repeats=3))
    for row, side in zip(rows, answers, strict=True):
        assert (row.new_tokens, row.sequences, len(side), row.runs) == (plain.new_tokens, 3, 3, 3)
        assert row.tokens_per_second_interval is not None and row.speedup_interval is not None
        slow, fast = row.tokens_per_second_interval
        assert slow <= row.tokens_per_second <= fast
        assert row.tokens_per_second == pytest.approx(3 * row.new_tokens / row.seconds)
        assert row.speedup_interval[0] <= row.speedup_vs_plain <= row.speedup_interval[1]
    assert rows[0].speedup_interval == [1.0, 1.0]
    text = results.table(rows)
    assert "3 runs, " in text and "acceptance by depth" in text


def test_rows_say_what_rounds_say(methods: list[bench.Method]) -> None:
    rows, answers = bench.compare(methods, ITEMS, "w", Sampling(), bench.How(20, traced=2))
    plain, dynamic, chain = rows
    assert (plain.n_alpha, plain.calibration, plain.rejected_outside_vocabulary) == (None, [], None)
    assert dynamic.n_alpha is None and chain.n_alpha == chain.alpha_by_depth
    assert dynamic.rejected_outside_vocabulary == 0.0
    assert len(dynamic.draft_ms_by_level) == 3 and 0 < sum(dynamic.draft_ms_by_level) <= dynamic.draft_ms
    assert sum(dynamic.acceptance_by_depth) == pytest.approx((dynamic.tau or 0) - 1, abs=0.1)
    assert [len(row.answers) for row in rows] == [2, 2, 2]
    record = json.loads(json.dumps(dynamic.answers[1]))
    assert (record["id"], record["turn"], record["prompt"]) == ("b", 0, "you")
    delivered = [token for round_ in record["rounds"] for token in round_["delivered"]]
    assert delivered == answers[1][1].tokens
    assert "".join(record["texts"][str(token)] for token in delivered) == "".join(
        methods[0].model.tokenizer.decode([token]) for token in delivered
    )
    first, second = record["rounds"][:2]
    assert (first["tokens"], first["path"]) == (None, [])
    assert len(second["tokens"]) == len(second["parents"]) == len(second["values"]) == 7
    assert second["values"][0] == 1.0 and second["tokens"][0] == first["delivered"][0]


def test_a_divergence_names_its_turn(methods: list[bench.Method], monkeypatch: pytest.MonkeyPatch) -> None:
    """And is judged by the prompt that it was drawn after, plain decoding's answers in it."""
    prompts: list[list[int]] = []

    def found(prompt: list[int], plain: Answer, other: Answer, *rest: object) -> Divergence | None:
        prompts.append(list(prompt))
        apart = len(prompts) == 4  # plain and drafted take turns: this is the drafted one's second turn
        return Divergence(3, 7, 8, 0.5, 0.25, explained=False) if apart else None

    monkeypatch.setattr(bench, "find_divergence", found)
    rows, (plain, _) = bench.compare(methods[:2], ITEMS[2:], "w", Sampling(), bench.How(4, all_turns=True))
    assert (rows[0].identical, rows[1].identical, bench.unexplained(rows)) == (2, 1, 1)
    (divergence,) = rows[1].divergences
    assert (divergence["id"], divergence["turn"], divergence["position"], divergence["explained"]) == ("c", 1, 3, False)
    model = methods[0].model
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": model.decode(plain[0].tokens)}]
    whole = model.encode([*said, {"role": "user", "content": "y"}])  # type: ignore[list-item]
    assert prompts == [model.encode("x"), model.encode("x"), whole, whole]


def test_later_turns_need_a_template(methods: list[bench.Method]) -> None:
    bare = tiny_tokenizer()
    bare.chat_template = None
    without = [replace(methods[0], model=replace(methods[0].model, tokenizer=bare))]
    assert bench.compare(without, ITEMS[:1], "w", Sampling(), bench.How(3))[0][0].sequences == 1
    with pytest.raises(bench.InputError, match="--turns first"):
        bench.compare(without, ITEMS[:1], "w", Sampling(), bench.How(3, all_turns=True))


def test_a_conversation_ends_with_the_context(methods: list[bench.Method]) -> None:
    long = [Item("a", ("hello", "x" * 300, "never"))]
    rows, _ = bench.compare(methods[:1], long, "w", Sampling(), bench.How(3, all_turns=True))
    assert rows[0].sequences == 1


def test_memory_of_plain_decoding_by_hand(methods: list[bench.Method]) -> None:
    """What a column goes through: the second turn equals one read from nothing."""
    model = methods[0].model

    def tokens(prompt: list[int], memory: Memory | None) -> list[int]:
        rounds = generate(model.target, None, model.policy, prompt, Sampling(), Stop(4), memory=memory)
        return [token for round_ in rounds for token in round_.tokens]

    memory: Memory = Memory()
    text = [1, 8, 4, 4, 30]
    text += [*tokens(text, memory), 7, 7]
    assert tokens(text, memory) == tokens(text, None)


# -- the command -------------------------------------------------------------------------------------------------------


def common(folder: Path) -> list[str]:
    flags = ["--target", str(folder / "target"), "--dtype", "float64", "--max-new-tokens", "6"]
    return ["bench", *flags, "--method", f"{folder / 'eagle'}@chain:2"]


def test_suite(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    for name in ("alpaca", "cnn_dm", "natural_questions"):
        (tmp_path / f"{name}.jsonl").write_text('{"id": "1", "turns": ["a"]}\n{"id": "2", "turns": ["b"]}\n')
    # the first question of each shipped set is longer than the tiny target's context, so the sets stand in for them
    suite = [*common(folder), "--suite", "eagle", "--data-dir", str(tmp_path), "--limit", "1", "--temperatures", "0,1"]
    assert "--data-dir" in refused(capsys, *[part for part in suite if part not in ("--data-dir", str(tmp_path))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.prompts.SHIPPED", ())
        patch.setattr("eyas.prompts.FOREIGN", {name: name for name in SIX})
        for name in SIX[:3]:
            (tmp_path / f"{name}.jsonl").write_text('{"id": "1", "turns": ["a", "b"]}\n')
        record = run_json(capsys, *suite)
        assert main(suite) == 0
    assert [line["temperature"] for line in record["suite"]["table"]] == [0.0, 1.0]
    rows = {(row["workload"], row["temperature"]): row for row in record["rows"] if row["head"]}
    for line in record["suite"]["table"]:
        assert list(line["sets"]) == SIX
        cells = [rows[name, line["temperature"]] for name in SIX]
        expected = [{"speedup": row["speedup_vs_plain"], "tau": row["tau"]} for row in cells]
        assert list(line["sets"].values()) == expected
        assert line["mean"]["tau"] == pytest.approx(sum(row["tau"] for row in cells) / 6)
        assert line["mean"]["speedup"] == pytest.approx(sum(row["speedup_vs_plain"] for row in cells) / 6)
    assert {"machine", "versions", "commit", "target", "rows"} <= record.keys() and record["commit"]
    assert "eyas" in record["versions"]
    settings = record["settings"]
    assert (settings["suite"], settings["turns"], settings["temperatures"]) == ("eagle", "all", [0.0, 1.0])
    assert (settings["limit"], settings["seed"], settings["top_p"]) == (1, 0, 1.0)
    assert {row["turns"] for row in record["rows"]} == {"all"}
    assert rows["mt_bench", 1.0]["sequences"] == 2 and rows["cnn_dm", 1.0]["sequences"] == 1
    out = capsys.readouterr().out
    assert "T=1, speed-up/tau" in out and "natural_questions" in out


SIX = ["mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm", "natural_questions"]


def test_resume(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that breaks in its second workload keeps the first; the next run measures what is missing, and no more."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("hello\nyou\n")
    kept = tmp_path / "kept.jsonl"
    flags = [*common(folder), "--workload", str(tmp_path / "one.txt"), "--workload", str(tmp_path / "two.txt")]
    flags += ["--resume", str(kept)]
    compare, measured = bench.compare, []

    def counting(methods: list[bench.Method], items: list[Item], name: str, *rest: object):
        measured.append((name, [method.name for method in methods]))
        if name == "two" and len(measured) == 2:
            raise KeyboardInterrupt
        return compare(methods, items, name, *rest)

    monkeypatch.setattr(bench, "compare", counting)
    assert main(flags) == 130
    assert len(kept.read_text().splitlines()) == 2
    record = run_json(capsys, *flags)
    assert measured[2:] == [("two", ["plain", "eagle"])]
    assert [(row["workload"], row["method"]) for row in record["rows"]] == [
        ("one", "plain"), ("one", "eagle"), ("two", "plain"), ("two", "eagle"),
    ]  # fmt: skip
    assert all(row.keys() >= ROW_KEYS for row in record["rows"])
    again = run_json(capsys, *flags)
    assert (len(measured), again["rows"]) == (3, record["rows"])
    more = run_json(capsys, *flags, "--method", f"{folder / 'eagle'}@chain:1")
    assert measured[3:] == [("one", ["plain", "eagle"]), ("two", ["plain", "eagle"])]
    assert [row for row in more["rows"] if row["tree"] != "chain:1"] == record["rows"], "kept as they were"
    run_json(capsys, *flags, "--seed", "1")
    assert len(measured) == 7, "other settings are other results"
    assert not list(tmp_path.glob("kept*tmp")), "no temporary file is left"


def test_a_file_that_holds_no_results(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("hello\n")
    (tmp_path / "kept.jsonl").write_text('{"turns": ["mine"]}\n')
    flags = [*common(folder), "--workload", str(tmp_path / "w.txt"), "--resume"]
    assert "no results to go on from" in refused(capsys, *flags, str(tmp_path / "kept.jsonl"))
    assert (tmp_path / "kept.jsonl").read_text() == '{"turns": ["mine"]}\n', "nothing is lost"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "compare", None)  # a place that cannot be written is refused before anything is measured
        refused(capsys, *flags, str(tmp_path / "nowhere" / "kept.jsonl"))
    assert "nothing to measure" in refused(capsys, *common(folder))
    assert "numbers with commas" in refused(capsys, *flags, "x", "--temperatures", "0,x")
