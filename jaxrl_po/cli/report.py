"""Writes an HTML page about runs: `jaxrl-po report runs/a runs/b --out=runs/report.html`.

Figures and style are embedded, so the file can be sent and read anywhere. The page contains the
final scores, the learning curves and their comparison, sample completions, the hardware and
software of each run, and the settings (settings that differ come first).
"""

import base64
import html
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_po import config
from jaxrl_po.cli import plot
from jaxrl_po.config import ConfigError, static
from jaxrl_po.run.data import transcripts
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.store import folder, metrics

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #e4e7ea; }
img { max-width: 100%; } img.run { max-width: 34rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e4e7ea; }
th, td { vertical-align: top; }
th { color: #5c646e; font-weight: 600; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
td.differs { background: #fdf3e7; }
"""


@config.record
class ReportOptions:
    """Options of a report; the folders of the runs come before the flags."""

    metric: str = static(
        "",
        "metric to compare, higher is better; empty takes the greedy return or the held-out "
        "greedy accuracy",
    )
    out: str = static("runs/report.html", "file to write, in place of an earlier report")


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns an HTML table; the text of a cell is HTML, with or without the tag `<td>`."""
    cells = [[f"<th>{cell}</th>" for cell in head]]
    cells += [[x if x.startswith("<td") else f"<td>{x}</td>" for x in row] for row in rows]
    lines = (f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def html_image(path: Path, text: str, kind: str = "") -> str:
    """Returns an HTML image with the content of a PNG file."""
    data = base64.b64encode(path.read_bytes()).decode()
    source = f"data:image/png;base64,{data}"
    return f'<p><img class="{kind}" alt="{html.escape(text)}" src="{source}"></p>'


def settings_table(runs: Sequence[plot.Run]) -> str:
    """Returns a table of all settings of the runs; different settings come first and are marked."""
    names = dict.fromkeys(name for run in runs for name in run.config if name != "resolved")
    shown = {name: [json.dumps(run.config.get(name)) for run in runs] for name in names}
    rows = []
    for name, values in sorted(shown.items(), key=lambda item: len(set(item[1])) == 1):
        opening = '<td class="differs">' if len(set(values)) > 1 else "<td>"
        cells = (f"{opening}{html.escape(value)}</td>" for value in values)
        rows.append([f"<code>{html.escape(name)}</code>", *cells])
    return html_table(["flag", *(html.escape(run.label) for run in runs)], rows)


def examples_table(path: Path) -> str:
    """Returns a table of samples at the first and the last evaluation; empty without samples."""
    try:
        rows = metrics.read(path)
    except ConfigError as error:
        raise UsageError(error.message) from None
    if not rows:
        return ""
    ends = dict.fromkeys((rows[0]["iteration"], rows[-1]["iteration"]))
    cells = []
    for row in (each for each in rows if each["iteration"] in ends):
        said = row["prompt"], transcripts.transcript(row)
        texts = (f"<pre>{html.escape(text)}</pre>" for text in said)
        score = transcripts.show(row["score"])
        cells.append([f"{row['step']:,}", row["decoding"], *texts, score])
    return html_table(["step", "decoding", "prompt", "completion", "score"], cells)


def circumstances_table(run: plot.Run) -> str:
    """Returns a table of conditions, besides settings, of a run: hardware, versions and code."""
    resolved: dict[str, Any] = run.config.get("resolved", {})
    said = {name: json.dumps(value, ensure_ascii=False) for name, value in resolved.items()}
    return html_table(["", ""], [[html.escape(x) for x in row] for row in said.items()])


def page(paths: Sequence[str], runs: Sequence[plot.Run], metric: str) -> str:
    """Returns the complete HTML document of a report."""
    title = " · ".join(run.label for run in runs)
    with tempfile.TemporaryDirectory() as scratch:
        comparison = Path(scratch) / "plot.png"
        plot.save_figure(runs, metric, comparison)
        compared = plot.format_comparisons(runs, metric)
        table_of_scores = f"<pre>{html.escape(compared)}</pre>"
        parts = [f"<h1>{html.escape(title)}</h1>", "<h2>Scores</h2>", table_of_scores]
        parts += ["<h2>Curves</h2>", html_image(comparison, f"{metric} of {title}")]
    for path, run in zip(paths, runs, strict=True):
        label = html.escape(run.label)
        for png in sorted(Path(path).glob("*.png")):
            parts.append(html_image(png, f"{png.stem} of {run.label}", "run"))
        written = examples_table(Path(path) / "samples.jsonl")
        parts += [f"<h2>What {label} wrote, first and last</h2>", written] if written else []
        parts += [f"<h2>What {label} ran on</h2>", circumstances_table(run)]
    parts += ["<h2>Settings</h2>", settings_table(runs)]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def main(argv: Sequence[str]) -> int:
    """Runs the command `report`; returns the exit status."""
    summary = "One page for runs: jaxrl-po report runs/a runs/b --out=a.html"
    folders, options = plot.split_arguments(argv, "jaxrl-po report", summary, ReportOptions)
    if options is None:
        return 0
    path = folder.require_file(options.out, ".html")
    runs = plot.read_runs(folders)
    metric = plot.choose_metric(options.metric, runs)
    with folder.naming_path(path):
        text = page(folders, runs, metric)
    with folder.writing(path):
        metrics.write_atomically(path, text)
    print(f"see {path}")
    return 0
