"""A report as a list of parts, written as Markdown or as one HTML page that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hrmlm.studies.figures import DARK, LIGHT, colours


@dataclass(frozen=True)
class Heading:
    """A heading of a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Commands or settings, letter by letter."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table; its first column names the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture. name: of its file, beside the Markdown."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Fold:
    """Parts that are shown when asked for."""

    title: str
    parts: Sequence["Part"]


Part = Heading | Text | Items | Code | Table | Figure | Fold

_SHORT = 24
"""Characters of a cell, a number with its interval say, that is not broken into lines."""

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1f23;--soft:#5b6570;--line:#d5dae0;--page:#fff;--tint:#f4f6f8;LIGHT}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa5b1;--line:#39424c;--page:#14181d;--tint:#1d232a;DARK}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:64rem;padding:1rem 1rem 4rem;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25}h2{font-size:1.2rem;margin-top:2.2rem}
caption,figcaption{color:var(--soft);font-size:.9rem;text-align:left;padding:.3rem 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{padding:.4rem .6rem;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}
th:first-child,td:first-child{text-align:left}thead th{color:var(--soft);font-weight:600;overflow-wrap:normal}
.short{white-space:nowrap}
pre{background:var(--tint);padding:.8rem;border-radius:6px;white-space:pre-wrap;font-size:.85rem}
figure{margin:1.2rem 0;max-width:44rem}svg{width:100%;height:auto;display:block}
summary{cursor:pointer;color:var(--soft)}
.summary{background:var(--tint);border-radius:8px;padding:.4rem 1rem .4rem 1.9rem}
@media(max-width:56rem){thead{display:none}tr{display:block;border-bottom:2px solid var(--line);padding:.4rem 0}
td,tbody th{display:flex;justify-content:space-between;gap:1rem;border:0;padding:.15rem 0;text-align:right}
tbody th:first-child{text-align:left;font-weight:700}
td::before{content:attr(data-label);color:var(--soft);text-align:left}}
"""


def html(title: str, parts: Sequence[Part]) -> str:
    """One page, complete in itself: no script, no address, light and dark, readable on a phone."""
    style = _STYLE.replace("LIGHT", colours(LIGHT)).replace("DARK", colours(DARK)).strip()
    body = "\n".join(_html(part) for part in parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _html(part: Part) -> str:
    match part:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Items(items):
            return f'<ul class="summary">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>'
        case Code(text):
            return f"<pre><code>{escape(text)}</code></pre>"
        case Table():
            return _html_table(part)
        case Figure(_, svg, caption):
            return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
        case Fold(title, parts):
            inner = "\n".join(_html(one) for one in parts)
            return f"<details><summary>{escape(title)}</summary>\n{inner}\n</details>"


def _kind(cell: str) -> str:
    return "short" if len(cell) <= _SHORT else "long"


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = []
    for row in table.rows:
        cells = [f'<th scope="row">{escape(row[0])}</th>']
        cells += [
            f'<td class="{_kind(cell)}" data-label="{escape(column)}">{escape(cell)}</td>'
            for column, cell in zip(table.columns[1:], row[1:], strict=True)
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def markdown(title: str, parts: Sequence[Part]) -> str:
    """The same as Markdown; pictures are files beside it."""
    return "\n\n".join([f"# {title}", *(_markdown(part) for part in parts)]) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Heading(text):
            return f"## {text}"
        case Text(text):
            return text
        case Items(items):
            return "\n".join(f"- {item}" for item in items)
        case Code(text):
            return "```\n" + text.rstrip("\n") + "\n```"
        case Table(columns, rows, caption):
            lines = ["| " + " | ".join(_cell(c) for c in columns) + " |"]
            lines.append("|" + "---|" * len(columns))
            lines += ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows]
            return "\n".join(lines) + (f"\n\n{caption}" if caption else "")
        case Figure(name, _, caption):
            return f"![{caption}](figures/{name}.svg)"
        case Fold(title, parts):
            return "\n\n".join([f"### {title}", *(_markdown(one) for one in parts)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
