"""Tests the parts of `gpu.sh` for one GPU: their list, their flags, and their resumption."""

import json
import os
import subprocess
import sys

import bench
import libraries
import pytest
import rows

from experiments.benchmarks import control as benchmark_control
from experiments.benchmarks import language as benchmark_language
from jaxrl_po.run.experiment import control, flags, language, settings

GPU = libraries.BENCHMARKS / "gpu.sh"
PARTS = [str(part) for part in range(1, 20)]
FAKE = f"""#!{sys.executable}
import json, os, pathlib, sys
argv = sys.argv[1:]
if argv[0] == "-" and argv[1].endswith(".json"):
    os.execv(sys.executable, [sys.executable, *argv])
with open(os.environ["LOG"], "a") as log:
    log.write(json.dumps(argv) + "\\n")
out = [word.removeprefix("--out=") for word in argv if word.startswith("--out=")]
if os.environ.get("FAIL", "nothing") in " ".join(argv):
    sys.exit("out of memory")
if out:
    place = pathlib.Path(out[0])
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text("{{}}")
    (place / "summary.json").write_text('{{\\n  "steps": 2\\n}}\\n')
    only = [word.removeprefix("--only=") for word in argv if word.startswith("--only=")]
    result = {{"failed": os.environ.get("FAILED", "")}}
    (place / "bench.json").write_text(json.dumps(dict.fromkeys(only, result)))
print('{{"steps_per_second": 3}}')
"""


@pytest.fixture
def gpu(tmp_path):
    """Runs `gpu.sh` with a stand-in for Python; returns its status, lines and commands."""
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)

    def run(*parts, **variables):
        log = tmp_path / "log"
        log.write_text("")
        environment = {"PYTHON": fake, "OUT": tmp_path / "out", "LOG": log, **variables}
        done = subprocess.run(
            [GPU, *parts],
            env=os.environ | {name: str(value) for name, value in environment.items()},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        file = tmp_path / "out" / "gpu.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        ran = [json.loads(line) for line in log.read_text().splitlines()]
        return done, [json.loads(line) for line in lines], ran

    return run


def test_the_parts_for_a_gpu_are_listed(gpu):
    subprocess.run(["bash", "-n", GPU], check=True)
    done, _, ran = gpu()
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == PARTS
    assert gpu("20")[0].returncode == gpu("one")[0].returncode == 2
    assert not ran


@pytest.mark.slow
@pytest.mark.parametrize("tiny", ["", "1"])
def test_every_gpu_part_gives_existing_flags(gpu, tiny, monkeypatch):
    monkeypatch.setattr(libraries, "interpreters", lambda pythons: {})
    for part in PARTS:
        done, lines, ran = gpu(part, TINY=tiny, REJAX=sys.executable, MODEL=GPU)
        assert done.returncode == 0, done.stdout
        assert ran
        for argv in ran:
            if argv[0] == "-m":
                assert argv[1] == "jaxrl_po"
                domain = {"control": control, "language": language}[argv[2]]
                settings.parse_settings(domain, argv[3:])
            elif argv[0].endswith("bench.py"):
                options = flags.parse_records(argv[1:], {"": bench.Options})[""]
                assert options.tiny == bool(tiny)
                assert [row.name for row in rows.chosen(options.only)] == [options.only]
            elif argv[0] != "-":
                module = benchmark_control if "control" in argv[0] else benchmark_language
                flags.parse_records(argv[1:], {"": module.Options})
    assert {str(line["part"]) for line in lines} == set(PARTS)
    cases = [line["case"] for line in lines]
    assert len(set(cases)) == len(cases)
    if not tiny:
        for method in ("ppo 4x128", "addition by grpo", "addition by dapo"):
            assert f"{method}, seeds 256" in cases
        assert "ppo 4x128, seeds 4096" in cases


def test_a_part_goes_on_where_it_was(gpu, tmp_path):
    done, lines, ran = gpu("1", TINY="1", FAIL="--seeds=2")
    assert done.returncode == 1
    assert "ppo 4x128, seeds 2 failed: out of memory" in done.stdout
    assert [line["case"] for line in lines] == ["ppo 4x128, seeds 1", "ppo 64x128", "ppo 2048x10"]
    assert lines[0]["row"] == {"steps_per_second": 3}
    assert len(ran) == 4
    done, lines, ran = gpu("1", TINY="1")
    assert done.returncode == 0
    assert [argv[1] for argv in ran] == ["--seeds=2"]
    assert lines[3]["case"] == "ppo 4x128, seeds 2"
    assert gpu("1", TINY="1")[2] == []
    # A run that has started is resumed; any other content of the run's folder is replaced.
    assert gpu("3", TINY="1")[2][0][-1] == "--overwrite"
    (tmp_path / "out" / "gpu.jsonl").unlink()
    assert gpu("3", TINY="1")[2][0][-1] == "--resume"


def test_runs_that_are_compared_choose_their_kernels_anew(gpu):
    kept = {"9": False, "13": True}
    for part, keeps in kept.items():
        runs = [argv for argv in gpu(part, TINY="1")[2] if argv[0] == "-m"]
        assert runs
        assert all(("--compilation_cache=" not in argv) == keeps for argv in runs)


def test_failing_gpu_peer_is_measured_again(gpu):
    done, lines, _ = gpu("10", FAILED="ours ran on a GPU, rejax on cpu")
    assert done.returncode == 1
    assert "beside rejax-4x128 failed: ours ran on a GPU, rejax on cpu" in done.stdout
    assert lines == []
    assert gpu("10")[1][0]["row"] == {"failed": ""}


def test_a_part_whose_time_is_over_says_so(gpu):
    done, lines, ran = gpu("1", LIMIT="30")
    assert done.returncode == 75
    assert done.stdout.splitlines()[-1] == (
        "time is over before ppo 4x128, seeds 1: start part 1 again"
    )
    assert lines == ran == []
