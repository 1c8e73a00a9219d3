"""Charts as PNG files, for where no page can go: drawn by matplotlib, whose wheel brings fonts and everything else.

It draws the very marks that the page's SVG is made of. A converter of SVG would be less code here, but those need a
library or fonts of the system, and without them fail or leave the texts out.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path as FilePath

from eyas.charts import Canvas, Line, Path, Rect, Text
from eyas.errors import InputError
from eyas.files import whole

_PIXELS = 96  # of a chart to the inch
_FINE = 2  # pixels of the picture for each of them
_POINT = 72 / _PIXELS  # a pixel in the units of lines and letters
_SIDES = {"start": "left", "middle": "center", "end": "right"}


def check_pictures() -> None:
    """Refuse what will not work, before anything slow.

    Raises:
        InputError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("PNG files are drawn by matplotlib, which is not installed: pip install 'eyas[plots]'")


def write_png(canvas: Canvas, path: FilePath) -> None:
    """A chart as a PNG file of twice its size, whole or not at all.

    Raises:
        InputError: matplotlib is not installed.
        OSError: the place cannot be written.
    """
    check_pictures()
    from matplotlib.figure import Figure  # an optional dependency
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, Rectangle

    figure = Figure(figsize=(canvas.width / _PIXELS, canvas.height / _PIXELS), dpi=_FINE * _PIXELS)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, canvas.width), ylim=(canvas.height, 0))
    axes.set_axis_off()
    for order, mark in enumerate(canvas.marks):  # matplotlib would draw kind by kind
        if isinstance(mark, Text):
            look = {"color": mark.colour, "fontsize": mark.size * _POINT, "ha": _SIDES[mark.anchor], "zorder": order}
            axes.text(mark.x, mark.y, mark.text, va="baseline", parse_math=False, **look)
        elif isinstance(mark, Line):
            dashes = (0, (4, 4)) if mark.dash else "-"
            look = {"color": mark.colour, "linewidth": _POINT, "linestyle": dashes, "zorder": order}
            axes.add_line(Line2D([mark.x1, mark.x2], [mark.y1, mark.y2], **look))
        elif isinstance(mark, Path):
            places = [x for x, _ in mark.points], [y for _, y in mark.points]
            axes.add_line(Line2D(*places, color=mark.colour, linewidth=2 * _POINT, zorder=order))
        elif isinstance(mark, Rect):
            size = mark.width, mark.height
            axes.add_patch(Rectangle((mark.x, mark.y), *size, facecolor=mark.colour, linewidth=0, zorder=order))
        else:
            look = {"fill": False, "edgecolor": mark.colour, "linewidth": _POINT}
            if not mark.ring:
                look = {"facecolor": mark.colour, "alpha": 0.8, "linewidth": 0}
            axes.add_patch(Circle((mark.x, mark.y), mark.radius, zorder=order, **look))
    with whole(path) as temporary:
        figure.savefig(temporary, format="png", facecolor="white")
