"""The report's plots as plain Plotly data.

Colours are names such as `$accent`, which the page replaces, so that it can be dark or light.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from .request import Candidate, Request, describe_latency, latency_parts
from .run import Figure
from .words import show

__all__ = ["plots"]

_MIB = 1 << 20
_HEIGHT = 340
_BAR_HEIGHT = 56


def _label(candidate: Candidate) -> str:
    # Plotly reads tags and links in labels; a record's text must stay text.
    return html.escape(candidate.name)


def _bars(figures: Sequence[Figure], scale: float = 1.0) -> dict[str, Any]:
    """Return error bars from the medians to both ends."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [(f.high - f.median) / scale for f in figures],
        "arrayminus": [(f.median - f.low) / scale for f in figures],
        "thickness": 1.2,
        "width": 4,
        "color": "$muted",
    }


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "rangemode": "tozero", "fixedrange": True, "automargin": True, **more}


def _plot(title: str, note: str, data: list[dict[str, Any]], **layout: Any) -> dict[str, Any]:
    return {"title": title, "note": note, "data": data, "layout": {"height": _HEIGHT, "showlegend": False, **layout}}


def _dots(
    pool: Sequence[Candidate], picked: str | None, figures: Sequence[tuple[Figure, Figure]], x: float
) -> dict[str, Any]:
    chosen = [c.run.bundle.sha256 == picked for c in pool]
    widest = max(first.median for first, _ in figures)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [first.median / x for first, _ in figures],
        "y": [second.median for _, second in figures],
        "error_x": _bars([first for first, _ in figures], x),
        "error_y": _bars([second for _, second in figures]),
        "text": [f"  {_label(c)}  " for c in pool],
        # Towards the middle, where there is room.
        "textposition": ["middle left" if first.median > widest / 2 else "middle right" for first, _ in figures],
        "cliponaxis": False,
        "hovertext": [
            f"{_label(c)}<br>{html.escape(show(first))}<br>{html.escape(show(second))}"
            for c, (first, second) in zip(pool, figures, strict=True)
        ],
        "hoverinfo": "text",
        "marker": {"size": 11, "color": ["$accent" if is_picked else "$ink" for is_picked in chosen]},
    }


def _scatter(
    pool: Sequence[Candidate],
    picked: str | None,
    names: tuple[str, str],
    titles: tuple[str, str],
    text: tuple[str, str],
) -> list[dict[str, Any]]:
    """Return one plot of two quantities, of those candidates that have both; none where nobody has."""
    have = [
        (c, (first, second))
        for c in pool
        if isinstance(first := c.values[names[0]], Figure) and isinstance(second := c.values[names[1]], Figure)
    ]
    if not have:
        return []
    dots = _dots([c for c, _ in have], picked, [figures for _, figures in have], _MIB)
    return [_plot(*text, [dots], xaxis=_axis(titles[0]), yaxis=_axis(titles[1]))]


def _times(pool: Sequence[Candidate], request: Request, picked: str | None) -> list[dict[str, Any]]:
    """Return bars of a request's time: to the first token, then decoding; the interval is of both together."""
    have = [
        (c, first, total)
        for c in pool
        for first, total in [latency_parts(c.run, request)]
        if isinstance(first, Figure) and isinstance(total, Figure)
    ]
    if not have:
        return []
    names = [_label(c) for c, _, _ in have]
    chosen = [c.run.bundle.sha256 == picked for c, _, _ in have]
    common = {"type": "bar", "orientation": "h", "y": names, "hoverinfo": "text", "width": 0.55}
    data = [
        {
            **common,
            "name": "to the first token",
            "x": [first.median for _, first, _ in have],
            "hovertext": [f"to the first token: {html.escape(show(first))}" for _, first, _ in have],
            "marker": {"color": ["$accent" if is_picked else "$ink" for is_picked in chosen]},
        },
        {
            **common,
            "name": "to the end of the call",
            "x": [total.median - first.median for _, first, total in have],
            "error_x": _bars([total for _, _, total in have]),
            "hovertext": [f"all of it: {html.escape(show(total))}" for _, _, total in have],
            "marker": {"color": ["$accent-soft" if is_picked else "$ink-soft" for is_picked in chosen]},
        },
    ]
    return [
        _plot(
            "Where a request's time goes",
            f"Of {describe_latency(have[0][0].run, request)}. Dark: to the first token. Light: the rest.",
            data,
            barmode="stack",
            height=110 + _BAR_HEIGHT * len(have),
            xaxis=_axis("seconds"),
            yaxis=_axis("", autorange="reversed"),
        )
    ]


def plots(pool: Sequence[Candidate], request: Request, picked: str | None) -> list[dict[str, Any]]:
    """Return the plots of one section: `title`, `note`, `data`, `layout`; one is left out where figures are missing.

    Args:
      pool: Candidates that may be compared.
      request: What latency is of.
      picked: SHA-256 of the bundle to point out.
    """
    return [
        *_times(pool, request, picked),
        *_scatter(
            pool, picked, ("memory", "decode"), ("peak RSS, MiB", "decode, tokens/s"),
            ("Speed against memory", "Up and to the left is better."),
        ),
        *_scatter(
            pool, picked, ("size", "fidelity"), ("size, MiB", "KL to float, nats per token"),
            ("Fidelity against size", "Down and to the left is better."),
        ),
    ]  # fmt: skip
