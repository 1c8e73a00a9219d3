"""Pages that are whole: text, tables and charts in one HTML file, whose policy lets a browser fetch nothing.

Refuses to know what is reported; charts stay charts until they are shown, so that they can become pictures too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from eyas.charts import Canvas

# Told apart by people who see colours differently (Okabe and Ito); plain decoding is grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c564b")
PLAIN = "#9ca3af"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class Charts:
    """Charts side by side."""

    about: str  # what they show, where the page around them does not say it
    charts: tuple[Canvas, ...]


@dataclass(frozen=True)
class Page:
    """A title, and below it pieces of HTML and charts."""

    title: str
    parts: Sequence[str | Charts]

    def html(self) -> str:
        style = (files("eyas") / "page" / "style.css").read_text(encoding="utf-8")
        parts = [part if isinstance(part, str) else _side_by_side(part) for part in self.parts]
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
            f"<h1>{escape(self.title)}</h1>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
        )

    def pictures(self) -> dict[str, Canvas]:
        """Every chart with its key and a line about it, by the name of a PNG file."""
        found = [(part.about, chart) for part in self.parts if isinstance(part, Charts) for chart in part.charts]
        return {
            f"{number:02}-{_plain(f'{chart.title} {about}')}.png": chart.alone(f"{self.title}; {about}")
            for number, (about, chart) in enumerate(found, start=1)
        }


def _plain(text: str) -> str:
    """A text as a part of a file's name."""
    return "-".join(re.findall(r"[a-z0-9.]+", text.lower()))[:80].strip(".-")


def _side_by_side(group: Charts) -> str:
    return f'<div class="charts">{"".join(chart.svg() for chart in group.charts)}</div>'


def note(text: str) -> str:
    return f'<p class="faint">{escape(text)}</p>'


def swatch(colour: str) -> str:
    return f'<span class="swatch" style="background:{colour}"></span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names with their colours."""
    items = "".join(f"<li>{swatch(colour)}{escape(name)}</li>" for name, colour in entries)
    return f'<ul class="legend">{items}</ul>'


def grid(heads: Sequence[str], lines: Iterable[Sequence[str]], num_names: int) -> str:
    """A table whose first columns are names and whose others are numbers."""

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = (' class="name"' if i < num_names else "" for i in range(len(cells)))
        filled = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(filled)}</tr>"

    return f'<div class="wide"><table>{row("th", heads)}{"".join(row("td", line) for line in lines)}</table></div>'
