import pytest
from rich.console import Console

from jaxrl_po.run.loop.progress import Progress, clock

ROW = {"step": 1_500, "episode_return/iqm": 42.25, "time/steps_per_second": 250_000.0}


def test_plain_lines_where_there_is_no_terminal(capsys):
    with Progress(
        "ppo on X", 20_000, unit="steps", watch=("episode_return", "greedy_return")
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
        "ppo on X: 1,500/20,000 steps 250,000/s  episode return 42.25  1:15 left",
        # NaN leaves the last number standing
        "ppo on X: 3,000/20,000 steps  episode return 42.25  greedy return 50",
        "done [brackets stay]",
    ]


def test_a_long_phase_is_a_line_every_few_seconds(monkeypatch, capsys):
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


def test_quiet_shows_nothing(capsys):
    with Progress("ppo on X", 20_000, quiet=True) as progress:
        progress.report("a line")
        progress.phase("compiling")
        progress.update({"step": 10}, 3.0)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(
        "jaxrl_po.run.loop.progress.Console", lambda: Console(force_terminal=True, width=160)
    )
    with Progress("ppo on X", 20_000, watch=("episode_return",)) as progress:
        progress.phase("compiling")
        progress._bar.refresh()
        progress.update(ROW, 75.0)
    shown = capsys.readouterr().out
    assert "compiling · ppo on X" in shown
    assert "episode return 42.25" in shown
    assert "1:15 left" in shown


def test_steps_and_speed_are_those_of_each_seed_and_the_mean_is_called_what_it_is(capsys):
    with Progress("ppo on X", 20_000, watch=("episode_return",), num_seeds=10) as progress:
        progress.update(ROW, 75.0)
    assert capsys.readouterr().out == (
        "ppo on X: 1,500/20,000 steps 25,000/s × 10 seeds  IQM of 10 seeds: episode return 42.25"
        "  1:15 left\n"
    )


def test_a_held_out_accuracy_is_called_so(capsys):
    with Progress("grpo on X", 20_000, watch=("greedy_accuracy",)) as progress:
        progress.update({**ROW, "greedy_accuracy/iqm": 0.5}, 75.0)
    assert "  held-out greedy accuracy 0.5  1:15 left\n" in capsys.readouterr().out


def test_the_bar_and_the_time_left_stay_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr(
        "jaxrl_po.run.loop.progress.Console", lambda: Console(force_terminal=True, width=80)
    )
    title = "reinforce_pp on SpaceInvaders-MinAtar, 16 seeds"
    with Progress(title, 10_000_000, watch=("episode_return",), num_seeds=16) as progress:
        progress.update({**ROW, "step": 5_000_000}, 75.0)
        progress._bar.refresh()
    shown = capsys.readouterr().out
    assert "━" in shown
    assert "1:15 left" in shown
    assert "reinforce_pp" in shown


def test_the_warm_start_is_seen_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr(
        "jaxrl_po.run.loop.progress.Console", lambda: Console(force_terminal=True, width=80)
    )
    detail = "step 10,000/10,000, accuracy 0.31"
    with Progress("reinforce_pp on running_sum, 16 seeds", 10_000) as progress:
        progress.phase("warm start", detail, "< 11:20 left")
        progress._bar.refresh()
        progress.update({"step": 0}, float("inf"))
    shown = capsys.readouterr().out
    assert "warm start" in shown
    assert detail in shown
    assert "< 11:20 left" in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0:00"), (59.9, "0:59"), (60.0, "1:00"), (6000.0, "100:00")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text
