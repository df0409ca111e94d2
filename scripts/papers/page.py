"""A page of HTML that stands by itself: sections of tables, words and charts; no script, nothing to
fetch.

Pure text; everything that is not a chart is escaped. Written to a file by the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from papers.charts import Chart, svg

__all__ = ["Section", "page"]

_STYLE = """
body { font: 15px/1.45 sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .6em 0 }
th, td { padding: .2em .8em .2em 0; text-align: left; vertical-align: top }
th, td { border-bottom: 1px solid #ddd }
pre { overflow-x: auto }
.remark { color: #555; margin: .2em 0 }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading, a table with its head as the first row, words below it, and charts; `text` is kept
    as it is spaced.
    """

    title: str
    rows: Sequence[Sequence[str]] = ()
    text: str = ""
    remarks: Sequence[str] = ()
    charts: Sequence[Chart] = ()


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(part for section in sections for part in _section(section)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(section.title)}</h2>"
    if section.rows:
        head, *rows = section.rows
        yield f"<table><tr>{_cells('th', head)}</tr>"
        yield from (f"<tr>{_cells('td', row)}</tr>" for row in rows)
        yield "</table>"
    if section.text:
        yield f"<pre>{escape(section.text)}</pre>"
    yield from (f'<p class="remark">{escape(remark)}</p>' for remark in section.remarks)
    yield from (svg(chart) for chart in section.charts)


def _cells(tag: str, row: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
