"""The command line: `zcompile show PLAN.json` makes a plan visible.

Errors name the file, what is wrong with it, and what to do, and exit with 2.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from zcompile.errors import ZeroError
from zcompile.schedule.plan import Plan
from zcompile.show import diff, dot, html, text, trace, values

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_WIDTH = 132  # columns of a file or a pipe; a terminal has its own


class Format(StrEnum):
    text = "text"
    trace = "trace"
    dot = "dot"
    svg = "svg"
    html = "html"
    json = "json"


_SUFFIXES = {  # the longest first
    ".trace.json": "trace",
    ".json": "json",
    ".txt": "text",
    ".dot": "dot",
    ".gv": "dot",
    ".svg": "svg",
    ".html": "html",
    ".htm": "html",
}
_OF_TWO = (Format.text, Format.trace, Format.html)
_OF_DIFF = (Format.text, Format.json, Format.html)


@app.callback()
def main() -> None:
    """ZeRO as a compiler."""


@app.command()
def show(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN.json [PLAN2.json]")],
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            "-f",
            help="text (a table and a timeline), trace (for ui.perfetto.dev and chrome://tracing), "
            "dot, svg (drawn by Graphviz), html (one page, which needs no network), or json (the "
            "plan again, checked). Default: what the file name given by -o ends in, else text.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file, in place of the terminal.")
    ] = None,
    differ: Annotated[
        bool, typer.Option("--diff", help="What changed between two plans: text, json or html.")
    ] = False,
) -> None:
    """Show one plan, or two beside each other."""
    form = form or (Format.text if output is None else _form_of(output))
    if differ and len(plans) != 2:
        _fail(f"--diff takes two plans, not {len(plans)}")
    if len(plans) > 2:
        _fail(f"one plan or two can be shown, not {len(plans)}")
    if len(plans) == 2 and form not in (_OF_DIFF if differ else _OF_TWO):
        can = ", ".join(_OF_DIFF if differ else _OF_TWO)
        also = "" if differ else ", or add --diff for what changed"
        _fail(f"--format {form} is of one plan; with two, choose of {can}{also}")
    if output is None and form is Format.html and sys.stdout.isatty():
        _fail("an HTML page is 5 MB: name a file for it, as in -o plan.html")
    read = [_read(path) for path in plans]
    for path, plan in zip(plans, read):
        for problem in values.unknown_anchors(plan)[:5]:
            print(f"{path}: {problem}", file=sys.stderr)
    try:
        if form is Format.text:
            _print(read, output, differ)
        else:
            _write(_render(read, form, differ), output)
    except (ZeroError, ValueError) as error:
        _fail(str(error))
    except BrokenPipeError:  # `zcompile show PLAN.json | head`
        sys.stderr.close()


def _form_of(output: Path) -> Format:
    for suffix, form in _SUFFIXES.items():
        if output.name.lower().endswith(suffix):
            return Format(form)
    if not output.suffix:  # such as /dev/stdout
        return Format.text
    _fail(
        f"{output} ends in none of {', '.join(_SUFFIXES)}, which say what is written; give such a "
        "name, or --format"
    )


def _render(plans: list[Plan], form: Format, differ: bool) -> str:
    if form is Format.html:
        return html.page(*plans)
    if form is Format.trace:
        return trace.trace(plans)
    if form is Format.dot:
        return dot.dot(plans[0])
    if form is Format.svg:
        return dot.svg(plans[0])
    if differ:
        return json.dumps(dataclasses.asdict(diff.diff(*plans)), indent=1) + "\n"
    return plans[0].to_json() + "\n"


def _print(plans: list[Plan], output: Path | None, differ: bool) -> None:
    console, paper = Console(highlight=False), io.StringIO()
    if output is not None or not console.is_terminal:
        console = Console(file=paper, highlight=False, width=_WIDTH, color_system=None)
    reports = [] if differ else [text.report(plan, console.width) for plan in plans]
    if len(plans) == 2:
        reports.append(diff.report(diff.diff(*plans)))
    for index, report in enumerate(reports):
        if index:
            console.print()
        console.print(report)
    if console.file is paper:
        _write("".join(f"{line.rstrip()}\n" for line in paper.getvalue().splitlines()), output)


def _write(made: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(made)
        sys.stdout.flush()
        return
    try:
        output.write_text(made, encoding="utf-8")
    except OSError as error:
        _fail(f"{output} cannot be written: {error.strerror}")


def _read(path: Path) -> Plan:
    try:
        raw = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        _fail(
            f"{path}: no such file. Plans are written by options={{'dump': DIR}}, "
            "into DIR/rank0/, and by Plan.to_json()"
        )
    except (OSError, UnicodeDecodeError) as error:
        _fail(f"{path} cannot be read as text: {error}")
    remedy = "docs/plan-schema.md describes what a plan holds"
    try:
        plan = Plan.from_json(raw)
    except json.JSONDecodeError as error:
        _fail(f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}")
    except ValueError as error:
        _fail(f"{path}: {error}. {remedy}")
    except (KeyError, TypeError, AttributeError) as error:
        _fail(f"{path} is not a plan ({type(error).__name__}: {error}). {remedy}")
    return plan


def _fail(message: str) -> NoReturn:
    print(f"zcompile: {message}", file=sys.stderr)
    raise typer.Exit(2)
