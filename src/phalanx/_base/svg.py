"""Write SVG: one self-contained file of shapes, readable on a light and on a dark page."""

from __future__ import annotations

from html import escape

INK = "#1f2933"
FAINT = "#7b8794"
RULE = "#d9dee4"
PAPER = "#ffffff"

_HUES = (211, 12, 145, 276, 38, 186, 330, 95, 245, 60, 165, 300)


def colour(index: int, lightness: int = 42) -> str:
    """Return one of twelve distinct hues; it is lighter with a higher `lightness` (0 to 100)."""
    return f"hsl({_HUES[index % len(_HUES)]}, 62%, {lightness}%)"


class Drawing:
    """A `Drawing` is a page of `width` by `height` pixels; later shapes cover earlier ones."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._shapes: list[str] = []
        self._arrowheads: dict[str, str] = {}

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str, stroke: str = "none",
        radius: float = 0, dashed: bool = False, stroke_width: float = 1,
    ) -> None:  # fmt: skip
        """Draw a rectangle with its upper left corner at x, y."""
        dash = ' stroke-dasharray="3 2"' if dashed else ""
        self._shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="{_n(stroke_width)}"{dash}/>'
        )

    def text(
        self, x: float, y: float, text: str, *, size: float = 12, fill: str = INK, anchor: str = "middle",
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Write a line of text on the baseline y; `anchor` is start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{fill}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def line(
        self, points: list[tuple[float, float]], *, stroke: str, width: float = 1, dashed: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        """Draw a line through all points; the page's script finds a line with a `name` by `data-name`."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        dash += "" if name is None else f' data-name="{escape(name)}"'
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{_n(width)}" '
            f'stroke-linejoin="round"{dash}/>'
        )

    def circle(self, x: float, y: float, radius: float, *, fill: str, stroke: str = "none", tooltip: str = "") -> None:
        """Draw a dot; `tooltip` is shown when the pointer is over it."""
        title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
        edge = "" if stroke == "none" else f' stroke="{stroke}" stroke-width="2"'
        self._shapes.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"{edge}>{title}</circle>')

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, stroke: str, width: float, dashed: bool
    ) -> None:
        """Draw a curve that leaves downwards and arrives from above, with an arrowhead of its colour."""
        (x0, y0), (x1, y1) = start, end
        bend = (y1 - y0) * 0.55
        head = self._arrowheads.setdefault(stroke, f"head{len(self._arrowheads)}")
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        self._shapes.append(
            f'<path d="M{_n(x0)},{_n(y0)} C{_n(x0)},{_n(y0 + bend)} {_n(x1)},{_n(y1 - bend)} {_n(x1)},{_n(y1)}" '
            f'fill="none" stroke="{stroke}" stroke-width="{_n(width)}" marker-end="url(#{head})"{dash}/>'
        )

    def inline(self, scale: str = "") -> str:
        """Return the picture as an element of a page, on the page's background, as wide as possible.

        `scale` is the data of its axes for the page's script, as `data-scale`.
        """
        width, height = self._size
        data = f' data-scale="{escape(scale)}"' if scale else ""
        head = f'<svg viewBox="0 0 {_n(width)} {_n(height)}" role="img"{data}>'
        lines = [head, f"<title>{escape(self._title)}</title>"]
        return "".join([*lines, *self._shapes, "</svg>"])

    def __str__(self) -> str:
        width, height = self._size
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0.5 L8,4 L0,7.5 z" fill="{fill}"/></marker>'
            for fill, name in self._arrowheads.items()
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
            f'height="{_n(height)}" font-family="system-ui, \'Segoe UI\', \'DejaVu Sans\', sans-serif" role="img">',
            f"<title>{escape(self._title)}</title>",
            f"<defs>{heads}</defs>",
            f'<rect width="{_n(width)}" height="{_n(height)}" fill="{PAPER}"/>',
            *self._shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _n(value: float) -> str:
    """Return a number with at most one decimal: a tenth of a pixel, at half the file size."""
    return f"{value:.1f}".removesuffix(".0")
