"""A report as a list of blocks, written as HTML for a browser or a phone and as Markdown for a terminal or a diff."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A section's title."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of remarks; `warning` sets it apart."""

    lines: tuple[str, ...]
    warning: bool = False


@dataclass(frozen=True)
class Table:
    """Cells, the header first; a cell that begins with a verdict's word gets its colour."""

    cells: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Plot:
    """An SVG with a caption; Markdown shows the caption only."""

    svg: str
    caption: str


Block = Heading | Text | Bullets | Table | Plot

_CSS = """
:root { color-scheme: light; --ink: #1f2328; --soft: #5b626c; --line: #e3e6ea; --paper: #fff; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; background: var(--paper); min-height: 100vh; }
h1 { font-size: 1.65rem; line-height: 1.25; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; padding-top: 1.1rem; border-top: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 46rem; }
.lead { color: var(--soft); }
figure { margin: 1rem 0 .5rem; }
figure svg { width: 100%; height: auto; display: block; }
figure text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif !important; }
figcaption, caption { color: var(--soft); font-size: .86rem; text-align: left; }
caption { caption-side: bottom; padding-top: .45rem; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .36rem .8rem .36rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { font-weight: 600; color: var(--soft); font-size: .8rem; white-space: normal; vertical-align: bottom;
  min-width: 4.2rem; line-height: 1.3; }
td.worse { color: #b3261e; font-weight: 600; } td.better { color: #0a7d4f; font-weight: 600; }
td.quiet { color: var(--soft); }
ul { padding-left: 1.15rem; max-width: 46rem; } li { margin: .25rem 0; }
ul.warning { list-style: none; padding: .7rem 1rem; background: #fff7e6; border-left: 3px solid #d99a00; }
@media (max-width: 40rem) { main { padding: 1.25rem .9rem 3rem; } h1 { font-size: 1.35rem; }
  figure { overflow-x: auto; } figure svg { min-width: 36rem; } }
@media print { body { background: #fff; } }
"""

_TONES = (("worse", "worse"), ("better", "better"), ("within noise", "quiet"), ("the same", "quiet"))
_TONES += (("missing", "quiet"), ("skipped", "quiet"), ("not logged", "quiet"))


def to_html(title: str, lead: str, blocks: Sequence[Block]) -> str:
    """Return a page that needs no other file."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{html.escape(title)}</h1>\n<p class="lead">{html.escape(lead)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def to_markdown(title: str, lead: str, blocks: Sequence[Block]) -> str:
    """Return the same as Markdown."""
    return "\n\n".join([f"# {title}", lead, *(_markdown(block) for block in blocks)]) + "\n"


def markdown_table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, the first row its header."""
    head, *body = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in cells]
    return [head, "|" + "---|" * len(cells[0]), *body]


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Text(text):
            return f"<p>{html.escape(text)}</p>"
        case Bullets(lines, warning):
            items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
            return f'<ul class="warning">{items}</ul>' if warning else f"<ul>{items}</ul>"
        case Plot(svg, caption):
            return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"
        case Table(cells, caption):
            head, *body = cells
            top = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
            rows = "".join(f"<tr>{''.join(map(_cell, line))}</tr>" for line in body)
            below = f"<caption>{html.escape(caption)}</caption>" if caption else ""
            table = f"<table>{below}<thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table>"
            return f'<div class="wide">{table}</div>'


def _cell(text: str) -> str:
    tone = next((name for word, name in _TONES if text.startswith(word)), "")
    return f'<td class="{tone}">{html.escape(text)}</td>' if tone else f"<td>{html.escape(text)}</td>"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {text}"
        case Text(text):
            return text
        case Bullets(lines, _):
            return "\n".join(f"- {line}" for line in lines)
        case Plot(_, caption):
            return f"*Plot in the HTML page: {caption}*"
        case Table(cells, caption):
            return "\n".join(markdown_table(cells)) + (f"\n\n{caption}" if caption else "")
