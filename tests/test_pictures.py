"""Charts as PNG files, and the page of a tuning: what is drawn is what the JSON says."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_cli import refused, run_json
from test_report import CHROMIUM, Reader, dom

from eyas import charts
from eyas.charts import Canvas, Curve, Point, Rect, Series, Text
from eyas.pages import Charts, Page
from eyas.pictures import write_png
from eyas.tune_report import TreeRow, best_by_size, tune_page

needs_plots = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
EVIL = "<img src=x onerror=alert(1)> $x^2$"


def tree_row(workload: str, levels: int, nodes: int, predicted: float, measured: float | None) -> dict[str, Any]:
    return {
        "workload": workload, "tree": f"dynamic:levels={levels},top_k=4,nodes={nodes}", "levels": levels,
        "nodes": nodes, "tau_predicted": 1 + levels / 4, "tau": None if measured is None else 1.5,
        "tokens_per_second_predicted": predicted, "tokens_per_second": measured, "memory_bytes": nodes * 2**19,
        "tau_formula": 2.0, "interval": None if measured is None else [measured - 5, measured + 5],
    }  # fmt: skip


@pytest.fixture
def record() -> dict[str, Any]:
    rows = [
        tree_row("all", 2, 4, 100.0, None), tree_row("all", 3, 4, 110.0, 99.0), tree_row("all", 3, 8, 120.0, 126.0),
        tree_row("all", 4, 40, 60.0, None), tree_row(EVIL, 3, 4, 90.0, None), tree_row(EVIL, 3, 8, 130.0, 130.0),
    ]  # fmt: skip
    costs = {"verify": [[0, 9.0], [4, 10.0]], "expand": [[1, 1.0], [4, 1.5]], "first": 1.25, "rest": 0.5,
             "plain_rest": 0.25}  # fmt: skip
    machine = {"cpu": "a CPU", "threads": 2, "system": "Linux"}
    return {"kind": "tune", "machine": machine, "rows": rows, "chosen": rows[2]["tree"], "costs": costs}


def test_curves_by_hand() -> None:
    """The plot is 400 - 44 - 12 = 344 pixels wide, 12 of them free at each end, and 240 - 26 - 34 = 180 high."""
    near = [Curve("c", "#111", [Point(1, 2.0, "one"), Point(3, 4.0, "three", (3.0, 4.0))])]
    svg = charts.curves("t", near, "size", "u", mark=1.0).svg()
    # places 1, 2 and 3, so 3 is at the right end; the axis ends at 4, 45 pixels for each 1
    assert '<polyline points="56.0,116.0 376.0,26.0"' in svg
    assert '<line x1="376.0" y1="71.0" x2="376.0" y2="26.0" stroke="#1f2933"/>' in svg, "the whisker"
    assert '<line x1="44.0" y1="161.0" x2="388.0" y2="161.0" stroke="#6b7280" stroke-dasharray="4 4"/>' in svg
    assert "c, one: 2.00 u" in svg and "c, three: 4.00 (3.00 to 4.00) u" in svg
    far = [Curve("c", "#111", [Point(1, 1.0, "a"), Point(4, 1.0, "b"), Point(11, 1.0, "c")], "dots")]
    svg = charts.curves("t", far, "size", "u").svg()
    # 1, 2, 4, 8, 16 stand at equal distances of 80 pixels; 11 at log2(11) of them
    assert [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', svg)] == [56.0, 216.0, 332.8]
    assert re.findall(r"middle[^>]*>(\d+)<", svg) == ["1", "2", "4", "8", "16"]
    assert "polyline" not in svg
    ring = charts.curves("t", [Curve("c", "#111", [Point(1, 1.0, "a")], "ring")], "size", "u").svg()
    assert 'r="8.0" fill="none" stroke="#111"' in ring


def test_a_chart_alone_has_its_key() -> None:
    """Names that do not fit beside one another go below; the page's own chart stays what it was."""
    names = ["a name of some length", "another one of that sort", "short"]
    whole = charts.bars("t", ["x"], [Series(name, f"#11{i}", [1.0]) for i, name in enumerate(names)], "u")
    before = whole.svg()
    alone = whole.alone("it is about " + "much " * 10 + "more")
    assert whole.svg() == before and alone.marks[: len(whole.marks)] == whole.marks
    rest = alone.marks[len(whole.marks) :]
    squares = [(mark.x, mark.y, mark.colour) for mark in rest if isinstance(mark, Rect)]
    # 300 wide: the second name begins at 12 + 18 + 6.6 * 21 + 12 = 180.6 and would end beyond the edge
    assert squares == [(12.0, 224.0, "#110"), (12.0, 242.0, "#111"), (pytest.approx(200.4), 242.0, "#112")]
    assert [mark.text for mark in rest if isinstance(mark, Text)] == [
        *names, "it is about much much much much much much", "much much much much more",
    ], "41 letters to a line"  # fmt: skip
    assert (alone.width, alone.height) == (300, 220 + 18 + 24 + 2 * 16 + 6)
    (wider,) = [Canvas(20, 10, "t", [("a" * 50, "#111")]).alone("x").width]
    assert wider == pytest.approx(42 + 50 * 6.6)


@needs_plots
def test_a_picture_shows_the_marks(tmp_path: Path) -> None:
    """Pixel by pixel, twice as fine as the chart; later marks hide earlier ones, and text is no formula."""
    from matplotlib.image import imread

    canvas = Canvas(100, 50, "t")
    canvas.rect(10, 10, 30, 20, "#ff0000", "a")
    canvas.rect(30, 10, 30, 20, "#00ff00", "b")
    canvas.path([(70, 5), (70, 45)], "#0000ff")
    canvas.dot(85, 20, 6, "#000000", "c")
    canvas.dot(85, 40, 6, "#000000", "d", ring=True)
    canvas.line(0, 48, 100, 48, "#ff00ff")
    write_png(canvas, tmp_path / "a.png")
    image = imread(tmp_path / "a.png")
    assert image.shape == (100, 200, 4)

    def colour(x: int, y: int) -> list[float]:
        return [round(float(value), 1) for value in image[2 * y, 2 * x, :3]]

    white, black = [1.0, 1.0, 1.0], [0.2, 0.2, 0.2]  # dots let a fifth through
    assert colour(20, 20) == [1.0, 0.0, 0.0] and colour(35, 20) == colour(55, 20) == [0.0, 1.0, 0.0]
    assert colour(70, 40) == [0.0, 0.0, 1.0] and colour(5, 5) == colour(65, 20) == white
    assert colour(85, 20) == black and colour(85, 40) == white and colour(85, 34) != white
    assert colour(20, 48)[1] < 0.5
    empty = Canvas(100, 50, "t")
    write_png(empty, tmp_path / "empty.png")
    assert (imread(tmp_path / "empty.png") == 1).all()
    places = {}
    for anchor in ("start", "middle", "end"):
        text = Canvas(100, 50, "t")
        text.text(50, 30, EVIL[-5:-1] + "$", anchor=anchor, colour="#000000")
        write_png(text, tmp_path / "text.png")
        dark = (imread(tmp_path / "text.png")[..., 0] < 0.9).nonzero()
        places[anchor] = (dark[1].min() / 2, dark[1].max() / 2)
        assert 18 < dark[0].min() / 2 and dark[0].max() / 2 < 34, "it stands on its line"
    assert places["start"][0] >= 50 and places["end"][1] <= 51
    assert places["middle"][0] == pytest.approx(100 - places["middle"][1], abs=2)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".png"]


def test_names_of_pictures() -> None:
    one, two = Canvas(10, 10, "Tau / Ü"), Canvas(10, 10, "../x")
    found = Page("p", ["text", Charts("T=0.5", (one, two)), Charts("", (one,))]).pictures()
    assert list(found) == ["01-tau-t-0.5.png", "02-x-t-0.5.png", "03-tau.png"]


def test_the_best_tree_of_each_size(record: dict[str, Any]) -> None:
    known = set(TreeRow.__dataclass_fields__)
    rows = [
        TreeRow(**{k: v for k, v in row.items() if k in known}) for row in record["rows"] if row["workload"] == "all"
    ]
    speed = lambda own: [row.tokens_per_second_predicted for row in own]  # noqa: E731
    assert speed(best_by_size(rows, "nodes")) == [110.0, 120.0, 60.0]
    assert speed(best_by_size(rows, "levels")) == [100.0, 120.0, 60.0]


def test_the_tuning_says_what_its_json_says(record: dict[str, Any]) -> None:
    text = tune_page({**record, "plain": [{"workload": "all", "tokens_per_second": 70.0}], "target": EVIL}).html()
    found = Reader(text)
    assert not found.count("img") and not any("onerror" in attributes for _, attributes in found.tags)
    # two workloads with four charts each, memory by two sizes, two costs
    assert found.count("svg") == 2 * 4 + 2 + 2 and found.count("tr") == (1 + 2) + (1 + 1)
    chosen = "dynamic:levels=3,top_k=4,nodes=8"
    assert (
        f'<td class="name">{chosen} (chosen)</td><td>3</td><td>8</td><td>1.75</td><td>1.50</td><td>120.0</td>' in text
    )
    assert "<td>126.0</td><td>121.0 to 131.0</td><td>-5 %</td>" in text
    assert f"measured, {chosen}: 126.00 (121.00 to 131.00) tokens/s" in text
    assert f"chosen, {chosen}: 126.00 tokens/s" in text and f"chosen, {chosen}: 1.50 tokens per forward" in text
    assert f"forecast, {chosen}: 4.00 MiB" in text, "8 nodes of half a MiB"
    assert "measured, 5 rows: 10.00 ms" in text, "four nodes and the root"
    assert text.count("plain decoding, 70.0 tokens/s") == 1
    assert text.index("All workloads") < text.index("Workload &lt;img")
    lonely = {**record, "chosen": "chain:3"}
    assert "chosen, " not in tune_page(lonely).html(), "a tree that is in no row cannot be ringed"


@needs_plots
def test_command(capsys: pytest.CaptureFixture[str], record: dict[str, Any], tmp_path: Path) -> None:
    file, folder = tmp_path / "tune.json", tmp_path / "new" / "png"
    file.write_text(json.dumps(record))
    said = run_json(capsys, "report", str(file), "--png", str(folder))
    assert (tmp_path / "tune.html").read_text() == tune_page(record).html()
    assert said["png"] == [str(path) for path in sorted(folder.iterdir())] and len(said["png"]) == 12
    assert folder / "01-tokens-per-second-by-nodes-all-workloads.png" in folder.iterdir()
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    refused(capsys, "report", str(file), "--png", str(file))
    (tmp_path / "wrong.json").write_text("{}")
    refused(capsys, "report", str(tmp_path / "wrong.json"), "--png", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], tmp_path: Path
) -> None:
    """A page needs nothing; a picture is refused before anything is written."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "tune.json"
    file.write_text(json.dumps(record))
    assert "pip install 'eyas[plots]'" in refused(capsys, "report", str(file), "--png", str(tmp_path / "png"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tune.json"]
    assert run_json(capsys, "report", str(file))["png"] == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_in_a_browser(record: dict[str, Any], tmp_path: Path) -> None:
    """Every chart is drawn, in its own room, and nothing reaches beyond the page."""
    count = """<script>
    const boxes = [...document.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect());
    const out = document.createElement("pre"); out.id = "seen";
    out.textContent = JSON.stringify({
      drawn: boxes.filter((box) => box.width > 200 && box.height > 100).length,
      apart: boxes.every((a, i) => boxes.slice(i + 1).every((b) => b.left >= a.right || b.top >= a.bottom)),
      wide: document.documentElement.scrollWidth <= window.innerWidth,
    });
    document.body.append(out);
    </script></body>"""
    file = tmp_path / "page.html"
    file.write_text(tune_page(record).html().replace("</body>", count))
    seen = json.loads(Reader(dom(file, tmp_path)).data["seen"])
    assert seen == {"drawn": 12, "apart": True, "wide": True}
