"""Workloads: what counts as a prompt in each form of file, and the sets by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.errors import InputError
from eyas.prompts import FOREIGN, SHIPPED, SUITES, Item, read_workload


def test_sets_that_ship() -> None:
    """All four are whole, with ids of their own; MT-bench alone has second turns."""
    for name in SHIPPED:
        items = read_workload(name, None)
        assert len(items) == len({item.id for item in items}) == 80
        assert {len(item.turns) for item in items} == ({2} if name == "mt_bench" else {1})
    assert read_workload("gsm8k", 3) == read_workload("gsm8k", None)[:3]
    assert read_workload("humaneval", 1)[0].text.startswith("Complete the code I provided.")
    assert set(SUITES["eagle"]) <= {*SHIPPED, *FOREIGN}


FORMS = {
    "turns.jsonl": [{"id": 7, "turns": ["a", "b"]}, {"question_id": "q", "turns": ["c"]}],
    "messages.jsonl": [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
                      {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]},
        {"id": "q", "messages": [{"role": "user", "content": "c"}]},
    ],
    "sharegpt.json": [
        {"id": "7", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"},
                                      {"from": "human", "value": "b"}]},
        {"id": "q", "conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "x"}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_files(tmp_path: Path, name: str) -> None:
    records = FORMS[name]
    lines = "\n\n".join(json.dumps(record) for record in records)
    (tmp_path / name).write_text(json.dumps(records) if name.endswith(".json") else lines)
    first, second = read_workload(tmp_path / name, None)
    assert (first.turns, second) == (("a", "b"), Item("q", ("c",)))
    assert first.id == ("1" if name == "messages.jsonl" else "7")
    assert first.system == ("s" if name == "messages.jsonl" else None)
    assert len(read_workload(tmp_path / name, 1)) == 1


def test_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffone\n\n two\u2028still two\n".encode())
    assert read_workload(tmp_path / "p.txt", None) == [Item("1", ("one",)), Item("3", (" two\u2028still two",))]


@pytest.mark.parametrize("place", ["alpaca.jsonl", "alpaca/question.jsonl"])
def test_sets_in_a_folder(tmp_path: Path, place: str) -> None:
    """By our name, or as the EAGLE repository lays them out."""
    with pytest.raises(InputError, match="--data-dir"):
        read_workload("alpaca", None)
    with pytest.raises(InputError, match=r"neither alpaca\.jsonl nor alpaca/question\.jsonl"):
        read_workload("alpaca", None, tmp_path)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text('{"question_id": 81, "category": "", "turns": ["a"]}\n')
    assert read_workload("alpaca", None, tmp_path) == [Item("81", ("a",))]


WRONG = [
    '{"messages": []}', '{"messages": [{"role": "assistant", "content": "x"}]}', '{"messages": [{"role": "user"}]}',
    '{"messages": "x"}', '{"conversations": [{"from": "human", "value": ""}]}', '{"conversations": [1]}', '{"a": 1}',
    '{"messages": [{"role": "system", "content": 1}, {"role": "user", "content": "a"}]}', '"text"', "{",
]  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "w.jsonl").write_text('{"turns": ["a"]}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        read_workload(tmp_path / "w.jsonl", None)
    assert len(read_workload(tmp_path / "w.jsonl", 1)) == 1


def test_a_json_file_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"turns": ["a"]}')
    with pytest.raises(InputError, match="an array of conversations"):
        read_workload(tmp_path / "w.json", None)
