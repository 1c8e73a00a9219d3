"""The report: a page that is whole, says what the JSON says, and works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_cli import refused, run_json
from tiny import tiny_target, tiny_tokenizer

from eyas import bench, charts
from eyas.charts import Curve, Point, Series
from eyas.cli import main
from eyas.drafters.small_model import SmallModel
from eyas.machine import machine, versions
from eyas.model import Model
from eyas.policies import Chain, Dynamic
from eyas.prompts import Item
from eyas.report import bench_page
from eyas.results import Cell, SuiteLine
from eyas.sampling import Sampling

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """A comparison of a target that drafts for itself, partly from other noise, with answers written down."""
    target = tiny_target(vocab=260)
    drafted = Model(target, tiny_tokenizer(), SmallModel(target), Dynamic(4, 3, 9))
    methods = [
        bench.Method(None, replace(drafted, drafter=None)),
        bench.Method("small:one", drafted),
        bench.Method("small:two", replace(drafted, policy=Chain(2))),
    ]
    items = [Item("a", (f"hello {EVIL}",)), Item("b", ("you",))]
    rows = []
    for temperature in (0.0, 1.0):
        for name, traced in (("one", 2), ("two", 0)):
            how = bench.How(14, repeats=2, traced=traced)
            rows += bench.compare(methods, items, name, Sampling(temperature), how)[0]
    whole = {"machine": machine(), "versions": versions(), "commit": "abc", "target": f"tiny {EVIL}", "rows": rows}
    return json.loads(json.dumps({**whole, "rows": [asdict(row) for row in rows]}))


class Reader(HTMLParser):
    """Tags with their attributes, and the text inside of elements with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, str] = {}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id")

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.data[self._inside] = self.data.get(self._inside, "") + data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def test_the_page_is_whole(record: dict[str, Any]) -> None:
    """It fetches nothing, and no text of a model or user becomes a part of it."""
    text = bench_page(record).html()
    found = Reader(text)
    assert not found.count("img") and not found.count("link") and not found.count("iframe")
    assert not any({"src", "href", "onerror", "onclick"} & attributes.keys() for _, attributes in found.tags)
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|\bimport\s", text)
    (policy,) = [a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'")


def test_the_page_says_what_the_json_says(record: dict[str, Any]) -> None:
    text = bench_page(record).html()
    found = Reader(text)
    # for each of two temperatures: three groups of bars, a chart of depths for each of two workloads, two of
    # calibration, one of times
    assert found.count("svg") == 2 * (3 + 2 + 2 + 1)
    assert found.count("h2") == 3 and found.count("tr") == 2 * (1 + 6)
    for row in record["rows"]:
        assert f"<td>{row['tokens_per_second']:.1f}</td>" in text
        if row["head"]:
            assert f"{row['speedup_vs_plain']:.2f} ({row['speedup_interval'][0]:.2f} to" in text
            assert f"depth 1: {row['alpha_by_depth'][0]:.3f}" in text
    answers = json.loads(found.data["answers"])
    expected = [answer for row in record["rows"] if row["head"] for answer in row["answers"]]
    assert len(answers) == len(expected) == 2 * 2 * 2
    assert all(answer in [{k: own[k] for k in answer} for own in answers] for answer in expected)
    assert {answer["label"] for answer in answers} == {
        "small dynamic:levels=4,top_k=3,nodes=9", "small chain:2",
    }  # fmt: skip


def test_calibration_puts_workloads_together(record: dict[str, Any]) -> None:
    one = {"low": 0.4, "high": 0.5, "confidence": 0.42, "accepted": 0.5, "count": 10}
    two = {"low": 0.4, "high": 0.5, "confidence": 0.48, "accepted": 0.2, "count": 30}
    rows = [{**row, "calibration": [one if row["workload"] == "one" else two]} for row in record["rows"]]
    assert "confidence 0.465, accepted 0.275 of 40" in bench_page({**record, "rows": rows}).html()


def test_a_page_without_trees_or_intervals(record: dict[str, Any]) -> None:
    """And the papers' table, where the JSON has one; heads are named where trees do not tell them apart."""
    rows = [
        {
            **row,
            "answers": [],
            "tokens_per_second_interval": None,
            "speedup_interval": None,
            "tree": row["tree"] and "t",
        }
        for row in record["rows"]
    ]
    line = SuiteLine(1.0, "small", "h", "t", {"mt_bench": Cell(1.5, 2.25), "gsm8k": Cell(2.5, None)}, Cell(2.0, 2.25))
    suite = {"name": "eagle", "table": [asdict(line)]}
    text = bench_page({**record, "rows": rows, "suite": suite}).html()
    assert "<script" not in text and "Round by round" not in text
    assert text.count("The papers' table") == 1 and "<td>2.50x / -</td><td>2.00x / 2.25</td>" in text
    assert "small t (small:one)" in text and "small t (small:two)" in text


def test_bars_by_hand() -> None:
    """The axis ends at 4; the plot is 220 - 26 - 34 = 160 pixels high: 40 for each 1."""
    svg = charts.bars("t", ["a", "b"], [Series("s", "#111", [3.0, None], [(2.5, 3.5), None])], "u", mark=1.0).svg()
    rects = re.findall(r'<rect x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', svg)
    assert rects == [("66.0", "120.0")]
    assert re.search(r'<line x1="[\d.]+" y1="86.0" x2="[\d.]+" y2="46.0" stroke="#1f2933"/>', svg), "the whisker"
    assert 'y1="146.0"' in svg and "s, a: 3.00 (2.50 to 3.50) u" in svg


def test_what_is_marked_is_on_the_axis() -> None:
    slow = [Series("s", "#111", [0.4])]
    slower = [Curve("c", "#111", [Point(1, 0.4, "a")])]
    for chart in (charts.bars("t", ["a"], slow, "u", mark=1.0), charts.curves("t", slower, "a", "u", mark=1.0)):
        (dashed,) = re.findall(r'y1="([-\d.]+)"[^>]*dasharray', chart.svg())
        assert float(dashed) == 26.0, "at the top of the axis, which ends at 1"


def test_names_of_groups_have_room() -> None:
    labels = ["mt_bench", "natural_questions", "cnn_dm"]
    svg = charts.bars("t", labels, [Series("s", "#111", [1.0, 1.0, 1.0])], "u").svg()
    places = [float(x) for x, _ in re.findall(r'<text x="([\d.]+)"[^>]*middle[^>]*>(\w+)<', svg)]
    assert len(places) == 3 and min(b - a for a, b in zip(places, places[1:], strict=False)) > 17 * 6


@pytest.mark.parametrize(
    ("most", "marks"), [(1.0, ["0.0", "0.2", "1.0"]), (93.0, ["0", "20", "100"]), (0.03, ["0.00", "0.01", "0.03"])]
)
def test_axes_end_at_round_numbers(most: float, marks: list[str]) -> None:
    svg = charts.bars("t", ["a"], [Series("s", "#111", [most])], "u").svg()
    numbers = re.findall(r'text-anchor="end"[^>]*>([\d.]+)<', svg)
    assert [numbers[0], numbers[1], numbers[-1]] == marks
    assert len(numbers) <= 6


def test_command(capsys: pytest.CaptureFixture[str], record: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(record))
    said = run_json(capsys, "report", str(file))
    assert said == {"out": str(tmp_path / "bench.html"), "bytes": (tmp_path / "bench.html").stat().st_size, "png": []}
    assert main(["report", str(file), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == (tmp_path / "bench.html").read_text() == bench_page(record).html()
    capsys.readouterr()
    assert "take the place" in refused(capsys, "report", str(file), "--out", str(file))
    assert "cannot read" in refused(capsys, "report", str(tmp_path / "missing.json"))
    kinds = ('{"kind": "tune", "rows": []}', '{"kind": "x"}', '{"kind": []}')
    broken = ('{"rows": [{}], "target": "t"}', json.dumps({**record, "machine": 3}))
    for wrong in ("{", "[]", '{"rows": []}', *kinds, *broken):
        (tmp_path / "wrong.json").write_text(wrong)
        refused(capsys, "report", str(tmp_path / "wrong.json"))
    assert not (tmp_path / "wrong.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_in_a_browser(record: dict[str, Any], tmp_path: Path) -> None:
    """The viewer draws what the rounds say, steps by button, key, slider and click, and logs no error."""
    record = json.loads(json.dumps(record))
    for last in (answer["rounds"][-1] for row in record["rows"] for answer in row["answers"]):
        if len(last["path"]) == len(last["delivered"]) > 1:
            last["delivered"].pop()  # as if the answer had ended at the accepted node, and nothing been drawn there
    answers = json.loads(Reader(bench_page(record).html()).data["answers"])
    number, answer = next((i, own) for i, own in enumerate(answers) if ended_early(own) and len(own["rounds"]) > 3)
    steps = f"""<script>
    const seen = [], note = () => seen.push({{
      what: at("what").textContent, text: at("text").textContent, round: at("round").value,
      kinds: [...document.querySelectorAll("#tree .node")].map((n) => n.classList[1]),
      now: [...document.querySelectorAll("#text .now")].map((n) => n.textContent).join(""),
      origins: [...document.querySelectorAll("#text .now")].map((n) => n.title.split(": ")[1]),
    }});
    at("answer").value = {number}; at("answer").dispatchEvent(new Event("change")); note();
    at("next").click(); note();
    document.body.dispatchEvent(new KeyboardEvent("keydown", {{ key: "ArrowRight", bubbles: true }})); note();
    at("back").click(); at("back").click(); at("back").click(); at("back").click(); note();
    at("text").lastChild.click(); note();
    document.body.innerHTML = "";
    const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
    </script></body>"""  # noqa: E501
    file = tmp_path / "page.html"
    file.write_text(bench_page(record).html().replace("</body>", steps))
    seen = json.loads(Reader(dom(file, tmp_path)).data["seen"])
    rounds = answer["rounds"]
    for shown, expected in zip(seen, (1, 2, 3, 0, len(rounds) - 1), strict=True):
        round_ = rounds[expected]
        assert shown["round"] == str(expected) and shown["what"].startswith(f"Round {expected} of {len(rounds) - 1}")
        assert shown["now"] == texts(answer, round_)
        assert shown["text"] == "".join(texts(answer, own) for own in rounds)
        assert shown["kinds"] == kinds(round_)
        assert shown["origins"] == origins(round_)


def texts(answer: Mapping[str, Any], round_: Mapping[str, Any]) -> str:
    return "".join(answer["texts"][str(token)] for token in round_["delivered"])


def ended_early(answer: Mapping[str, Any]) -> bool:
    return len(answer["rounds"][-1]["delivered"]) < len(answer["rounds"][-1]["path"])


def origins(round_: Mapping[str, Any]) -> list[str]:
    """Where each token of a round came from, in the viewer's words."""
    if round_["tokens"] is None:
        return ["from the prompt's own forward"]
    accepted = [f"draft of depth {depth}, accepted" for depth in range(1, len(round_["path"]))]
    return [*accepted, "the target's own token (bonus)"][: len(round_["delivered"])]


def kinds(round_: Mapping[str, Any]) -> list[str]:
    """Of the nodes of a round's drawing, in order."""
    if round_["tokens"] is None:
        return []
    drafted = ["accepted" if i in round_["path"] else "rejected" for i in range(1, len(round_["tokens"]))]
    return ["root", *drafted] + ["bonus"] * (len(round_["delivered"]) == len(round_["path"]))


def dom(file: Path, folder: Path) -> str:
    """The page as a browser without a network makes it; errors of its programs fail the test."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder}/user"]
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout
