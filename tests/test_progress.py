import io
import re
import sys
from types import SimpleNamespace

import pytest
from tables import cases

from jaxrl_po.run.loop.progress import Progress

ROW = {"step": 1_500, "episode_return/iqm": 42.25, "time/steps_per_second": 250_000.0}


def test_plain_lines_where_there_is_no_terminal(capsys):
    with Progress(
        "ppo on X",
        20_000,
        unit="steps",
        watch=("episode_return", "greedy_return", "episode_return"),
    ) as progress:
        progress.phase("compiling")
        progress.update(ROW, 75.0)
        progress.update(
            {"step": 3_000, "episode_return/iqm": float("nan"), "greedy_return/iqm": 50.0},
            float("inf"),
        )
        progress.report("done [brackets stay]")
    assert capsys.readouterr().out.splitlines() == [
        "ppo on X: compiling",
        "ppo on X: episode return 42.25  1,500/20,000 steps 250,000/s  1:15 left",
        # a number without a new measurement is not printed again
        "ppo on X: greedy return 50  3,000/20,000 steps",
        "done [brackets stay]",
    ]


def test_long_phase_prints_a_line_every_few_seconds(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("jaxrl_po.run.loop.progress.time.monotonic", lambda: now[0])
    with Progress("ppo on X", 20_000) as progress:
        for step in range(20, 120, 20):
            progress.phase("warm start", f"step {step}/400", "1:20 left")
            now[0] += 2.0
        progress.phase("initialising")
    assert capsys.readouterr().out.splitlines() == [
        "ppo on X: warm start, step 20/400, 1:20 left",
        "ppo on X: warm start, step 80/400, 1:20 left",
        "ppo on X: initialising",
    ]


def test_notebook_updates_one_line_and_keeps_reports(monkeypatch):
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    shown = []
    handle = SimpleNamespace(update=lambda text, raw: shown.append(("update", text["text/plain"])))

    def display(text, raw, display_id):
        shown.append(("display", text["text/plain"]))
        return handle

    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("IPython.display.display", display)
    for quiet in (False, True):
        with Progress("ppo on X", 20_000, quiet=quiet) as progress:
            progress.phase("compiling")
            progress.report("a warning")
            progress.update({"step": 1_500}, 75.0)
    assert stream.getvalue() == "a warning\n"
    assert shown == [
        ("display", "ppo on X: compiling"),
        ("update", "ppo on X: 1,500/20,000 steps  1:15 left"),
    ]


def test_texts_name_flags_only_in_a_command(capsys):
    line = "--total_steps: 40 becomes 32; --resume continues a--b; lower --config.max_kl"
    for flags in (True, False):
        with Progress("ppo on X", 20_000, flags=flags) as progress:
            progress.report(line)
    arguments = "total_steps: 40 becomes 32; resume continues a--b; lower config.max_kl"
    assert capsys.readouterr().out.splitlines() == [line, arguments]


@pytest.fixture
def terminal(monkeypatch):
    """Sets the width and the kind of the terminal that stdout is connected to."""

    def be(columns, kind="xterm"):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", kind)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return be


def lines(capsys):
    """Returns the lines that a terminal shows, without colours."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out))


def test_a_bar_on_a_terminal(terminal, capsys):
    terminal(160)
    with Progress("ppo on X [a]", 20_000, watch=("episode_return",)) as progress:
        progress.phase("compiling")
        progress._bar.refresh()
        progress.update(ROW, 75.0)
    shown = "\n".join(lines(capsys))
    assert "compiling · ppo on X [a]" in shown
    assert "episode return 42.25" in shown
    assert "1:15 left" in shown


def test_steps_and_speed_are_per_seed_means_labelled(capsys):
    with Progress("ppo on X", 20_000, watch=("episode_return",), num_seeds=10) as progress:
        progress.update(ROW, 75.0)
    assert capsys.readouterr().out == (
        "ppo on X: episode return 42.25 (IQM)  1,500/20,000 steps 25,000/s × 10 seeds  1:15 left\n"
    )


def test_score_bar_and_time_fit_a_narrow_terminal(terminal, capsys):
    terminal(80)
    title, watch = "reinforce_pp on SpaceInvaders-MinAtar, 16 seeds", ("greedy_accuracy", "entropy")
    with Progress(title, 10_000_000, watch=watch, num_seeds=16) as progress:
        row = {**ROW, "step": 5_000_000, "greedy_accuracy/iqm": 0.8125, "entropy/iqm": 1.25}
        progress.update(row, 75.0)
        progress.update({**row, "greedy_accuracy/iqm": float("nan")}, 75.0)
        progress._bar.refresh()
    bars = [line for line in lines(capsys) if "━" in line]
    assert all(len(line) <= 80 for line in bars)
    assert bars[-1].startswith("held-out greedy accuracy 0.8125 (IQM) reinf")
    assert "1:15 left" in bars[-1]


def test_warm_start_fits_a_narrow_terminal(terminal, capsys):
    terminal(80)
    detail = "step 10,000/10,000, accuracy 0.31"
    with Progress("reinforce_pp on running_sum, 16 seeds", 10_000) as progress:
        progress.phase("warm start", detail, "< 11:20 left")
        progress._bar.refresh()
        progress.update({"step": 0}, float("inf"))
    shown = "\n".join(lines(capsys))
    assert f"{detail} warm st" in shown
    assert "< 11:20 left" in shown


def test_words_do_not_break_at_line_ends(terminal, capsys):
    terminal(80)
    words = [*("config.learning_rate=0.001, " * 9).split(), "/a-long/path" * 9, "end"]
    with Progress("ppo on X", 20_000) as progress:
        progress._bar.stop()
        progress.report(" ".join(words))
    shown = [line for line in lines(capsys) if "config" in line or "path" in line or "end" in line]
    assert " ".join(shown).split() == words
    assert all(len(line) <= 80 or line == words[-2] for line in shown)


@cases("kind", "a dumb terminal", "a file")
def test_lines_are_printed_without_a_moving_cursor(kind, terminal, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    if kind == "a dumb terminal":
        terminal(80, "dumb")
    with Progress("ppo on X", 20_000, watch=("episode_return",)) as progress:
        progress.phase("compiling")
        progress.update(ROW, 75.0)
    assert capsys.readouterr().out == (
        "ppo on X: compiling\n"
        "ppo on X: episode return 42.25  1,500/20,000 steps 250,000/s  1:15 left\n"
    )
