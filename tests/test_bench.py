"""Tests the benchmark beside other libraries: alternation, verdicts, the page."""

import json
import os
import re
import subprocess
import sys

import bench
import libraries
import machine
import page
import pytest
import rows
import timing
from tables import cases

from experiments.benchmarks import control as benchmark_control
from experiments.benchmarks import language as benchmark_language
from jaxrl_po import backend
from jaxrl_po.config import ConfigError
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment import flags

BENCHMARKS = libraries.BENCHMARKS
# Each run of the stand-in takes the next of its speeds and logs a word to a file.
PROGRAM = """
import json, pathlib, sys
speeds = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
speed = speeds[next((word for word in sys.argv if word.startswith("--threads")), "")]
log = pathlib.Path(__file__).with_suffix(".log")
turns = log.read_text().count("\\n") if log.exists() else 0
log.write_text((log.read_text() if turns else "") + " ".join(sys.argv[1:]) + "\\n")
if speed is None:
    sys.exit("first line\\nno kernel for this machine\\n")
print("some other output")
print(json.dumps({speeds["unit"]: speed[turns % len(speed)], "device": speeds["device"]}))
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Returns a factory of programs with fixed speeds and of their rows; machine load is not
    measured."""
    (tmp_path / "peers").mkdir()
    monkeypatch.setattr(libraries, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(machine, "clock", lambda: None)

    def make(ours, theirs, *, unit="steps_per_second", devices=("cpu", "cpu"), choices=((),)):
        for path, speeds, device in (
            ("ours", ours, devices[0]),
            ("peers/theirs", theirs, devices[1]),
        ):
            (tmp_path / f"{path}.py").write_text(PROGRAM)
            table = speeds if isinstance(speeds, dict) else {"": speeds}
            (tmp_path / f"{path}.json").write_text(
                json.dumps(table | {"unit": unit, "device": device})
            )
        monkeypatch.setattr(
            libraries, "PEERS", {"them": libraries.Peer("them 1.0", "them", "theirs.py")}
        )
        row = rows.Row("them-small", "them", "work", "ours.py", ("--size=2",), ("--size=1",))
        monkeypatch.setattr(rows, "ROWS", (row._replace(choices=choices),))
        return tmp_path

    return make


def start(folder, *arguments):
    given = f"--pythons=them={sys.executable}"
    return bench.main([given, f"--out={folder / 'out'}", "--rounds=3", *arguments])


def turns(folder, name):
    log = folder / f"{name}.log"
    return log.read_text().splitlines() if log.exists() else []


def test_row_takes_turns_fills_page_and_is_stored(programs, capsys):
    folder = programs(
        [9.0, 2000.0, 2100.0, 2000.0],
        {"--threads=1": [500.0], "--threads=2": [1000.0]},
        choices=(("--threads=1",), ("--threads=2",)),
    )
    file = folder / "page.md"
    file.write_text(f"by hand\n{page.BEGIN}\nold\n{page.END}\nmore by hand\n")
    assert start(folder, f"--page={file}") == 0
    text = file.read_text()
    # The first round does not count; the round tried both options of the peer.
    line = (
        "| `them-small` | them 1.0: work | 2k (2k – 2.1k) steps/s "
        "| 1k (1k – 1k) steps/s, with threads=2 | **2.00 (2.00 – 2.10)** | – / – | quiet |"
    )
    assert line in text
    assert text.startswith(f"by hand\n{page.BEGIN}\n")
    assert text.endswith(f"(bench.png)\n{page.END}\nmore by hand\n")
    assert "old" not in text
    assert "not quiet" not in text
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert turns(folder, "ours") == ["--size=2 --json"] * 4
    first, *others = turns(folder, "peers/theirs")
    assert first == "--size=2 --threads=1"
    assert others == ["--size=2 --threads=2"] * 4
    # A second start does not measure again and writes the same page.
    assert start(folder, f"--page={file}") == 0
    assert len(turns(folder, "ours")) == 4
    assert file.read_text() == text
    assert line in capsys.readouterr().out
    # Rows of other sizes are measured again.
    assert start(folder, "--tiny") == 0
    assert turns(folder, "ours")[4:] == ["--size=2 --size=1 --json"] * 4
    assert (folder / "out" / "bench.md").read_text().startswith("Measured with --tiny: no figure")


def test_noisy_row_is_marked_and_measured_again(programs):
    folder = programs([4.0, 4.0, 1.0, 4.0], [0.25], unit="seconds_per_iteration")
    assert start(folder) == 0
    text = (folder / "out" / "bench.md").read_text()
    # a faster program takes fewer seconds
    assert "| 0.06 (0.06 – 0.25) | – / – | noisy: rounds of ours differ by a factor of 4.00" in text
    assert "not quiet in the rows marked noisy" in text
    assert start(folder) == 0
    assert len(turns(folder, "ours")) == 8


def test_a_peer_that_fails_costs_its_rows_only(programs, monkeypatch, capsys):
    folder = programs([5.0], None)
    monkeypatch.setattr(
        rows, "ROWS", (*rows.ROWS, rows.ROWS[0]._replace(name="them-other", script="gone.py"))
    )
    assert start(folder) == 0
    told = [line for line in (folder / "out" / "bench.md").read_text().splitlines() if "`" in line]
    assert [line.count("|") for line in told] == [8, 8]
    assert "failed: them ended: no kernel for this machine" in told[0]
    assert "failed: " in told[1]
    (folder / "out" / "bench.json").unlink()
    message = "no matching distribution"

    def refuse(environment):
        raise RunError(message)

    monkeypatch.setattr(libraries, "install", refuse)
    assert bench.main([f"--out={folder / 'out'}"]) == 0
    assert f"failed: them cannot be installed: {message}" in capsys.readouterr().out


def test_programs_on_different_devices_are_not_compared(programs):
    folder = programs([5.0], [5.0], devices=("NVIDIA H100", "cpu"))
    assert start(folder) == 0
    text = (folder / "out" / "bench.md").read_text()
    assert "failed: ours ran on NVIDIA H100, them on cpu" in text


@cases(
    "arguments, message",
    (["--only=tlr"], "only: must hold a word of rejax-4x128, "),
    (["--pythons=torch=/bin/sh"], "pythons: unknown name 'torch'"),
    (["--pythons=trl=nowhere"], "pythons: must be environment=path of an interpreter, got trl="),
    (["--tiny", "--page=docs/benchmarks.md"], "tiny: has no figures for a page"),
    (["--page=nowhere.md"], "page: must be a page with the lines <!-- begin"),
)
def test_what_cannot_be_measured_is_named(arguments, message, tmp_path):
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        bench.main([*arguments, f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_the_page_has_a_place_for_the_table():
    text = (BENCHMARKS.parent.parent / "docs" / "benchmarks.md").read_text()
    written = page.put(text, "new\n")
    assert "new" in written
    assert page.put(written, text.partition(f"{page.BEGIN}\n")[2].partition(page.END)[0]) == text


def test_optional_rows_are_measured_by_their_name_only():
    optional = {row.name for row in rows.ROWS if row.optional}
    for words in ("", "trl,brax"):
        assert not optional & {row.name for row in rows.chosen(words)}
    assert [row.name for row in rows.chosen("trl-smollm2-135m")] == ["trl-smollm2-135m"]


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.name)
def test_both_programs_of_a_row_take_its_sizes(row):
    ours = [*row.ours, *row.sizes, *row.small]
    sections = {"": benchmark_control.Options}
    if row.script == "language.py":
        sections = {"": benchmark_language.Options, "lora": benchmark_language.Adapters}
    flags.parse_records(ours, sections)
    peer = libraries.PEERS[row.peer]
    source = (BENCHMARKS / "peers" / peer.script).read_text()
    theirs = [*peer.arguments, *row.theirs, *row.sizes, *row.small, *sum(row.choices, ())]
    for name in {word.removeprefix("--").partition("=")[0] for word in theirs}:
        assert re.search(rf'"(--)?{name}"', source), name
    pinned = (BENCHMARKS / "peers" / f"{peer.environment}.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", each) for each in pinned)
    if not peer.repository:
        name, version = peer.title.lower().split()
        assert f"{name}=={version}" in pinned


def test_the_peer_has_the_shape_of_ours():
    row = next(row for row in rows.ROWS if row.name == "trl-smollm2-135m")
    theirs = dict(word.removeprefix("--").split("=") for word in row.theirs)
    shape = benchmark_language.SHAPES["smollm2-135m"]
    names = {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "mlp_width": "intermediate_size",
        "vocabulary": "vocab_size",
    }
    assert {name: int(theirs[name]) for name in names} == {a: shape[b] for a, b in names.items()}


def test_an_environment_is_made_once_for_its_requirements(tmp_path, monkeypatch):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "them.txt").write_text("them==1.0\n")
    ran = []

    def output_of(command):
        ran.append([str(word) for word in command])
        (tmp_path / "made" / "them").mkdir(parents=True, exist_ok=True)
        return ""

    monkeypatch.setattr(libraries, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(libraries, "ENVIRONMENTS", tmp_path / "made")
    monkeypatch.setattr(timing, "output_of", output_of)
    python = tmp_path / "made" / "them" / "bin" / "python"
    assert libraries.install("them") == python
    assert [" ".join(command[1:4]) for command in ran] == ["-m venv --clear", "-m pip install"]
    libraries.install("them")
    assert len(ran) == 2
    (tmp_path / "peers" / "them.txt").write_text("them==1.1\n")
    libraries.install("them")
    assert len(ran) == 4


def test_a_repository_is_cloned_at_its_commit(tmp_path, monkeypatch):
    origin, git = tmp_path / "origin", ["git", "-C", str(tmp_path / "origin")]
    subprocess.run(["git", "init", "--quiet", origin], check=True)
    named = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty"]
    subprocess.run([*git, *named, "--message=one"], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    monkeypatch.setattr(libraries, "ENVIRONMENTS", tmp_path / "made")
    place = libraries.clone(libraries.Repository(str(origin), commit))
    assert (place / ".git" / "HEAD").read_text().strip() == commit
    assert libraries.clone(libraries.Repository("nowhere", commit)) == place
    with pytest.raises(RunError, match=r"^fatal: "):
        libraries.clone(libraries.Repository("nowhere", "0" * 40))


def test_program_error_is_its_last_line(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "somewhere")
    asks = "import os; print('JAX_COMPILATION_CACHE_DIR' in os.environ)"
    assert timing.output_of([sys.executable, "-c", asks]) == "False\n"
    for code, message in {
        "raise SystemExit('first\\nlast\\n ')": "^last$",
        "raise SystemExit('ERROR: no version\\n[notice] a new release')": "^ERROR: no version$",
        "raise SystemExit(3)": "^status 3$",
        "import time; time.sleep(60)": "did not end in 1 seconds",
    }.items():
        with pytest.raises(RunError, match=message):
            timing.output_of([sys.executable, "-c", code], timeout=1.0)
    with pytest.raises(RunError, match="printed no JSON object last"):
        timing.last_line([sys.executable, "-c", "print('done')"])
    with pytest.raises(RunError, match="nowhere: No such file"):
        timing.output_of(["nowhere"])


def test_clock_counts_usable_processors(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  900 0 0 900 0 0 0 0 0 0\n"
        "cpu0 100 20 30 4000 500 6 7 8 100 20\n"
        "cpu1 1 1 1 1 1 1 1 1 0 0\n"
        "cpu2 100 0 0 0 0 0 0 0 0 0\nintr 5\n"
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    clock = machine.clock(stat)
    # Busy time excludes idle time and waiting for a disk; the time of users already includes
    # guests.
    assert clock.busy == pytest.approx((100 + 20 + 30 + 6 + 7 + 8 + 100) / 100)
    assert backend.cores() == 2
    assert machine.clock(tmp_path / "none") is None
    later = machine.Clock(clock.available + 20.0, clock.busy + 15.0, clock.own + 14.0)
    assert machine.others(clock, later) == pytest.approx(0.05)
    assert machine.others(None, later) is machine.others(later, later) is None


def test_a_quiet_machine_has_no_noise():
    quiet = {"ours": [1.0, 1.24], "theirs": [3.0, 3.0]}
    assert machine.noise(quiet, [0.04, None, 0.05]) == ""
    assert machine.noise(quiet, [None]) == ""
    assert "others took 30 %" in machine.noise(quiet, [0.6, 0.0])
    assert machine.noise({"ours": [1.0, 1.3]}, []).startswith("rounds of ours differ")
