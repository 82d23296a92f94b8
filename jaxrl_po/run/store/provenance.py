"""Conditions, besides settings, that the numbers of a run depend on, for bitwise reproduction.

XLA gives bitwise identical results for the same program on the same machine, with the same device
layout and versions. On a GPU, identical bits require deterministic kernels, which add in a fixed
order and are chosen by rule instead of autotuning.
"""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr_consts

from jaxrl_po import backend
from jaxrl_po.config import ConfigError, Json, Values
from jaxrl_po.run.store import sources
from jaxrl_po.run.store.metrics import strict
from jaxrl_po.types import Learner
from jaxrl_po.version import __version__

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "gymnax")
NUMERICS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    "jax_threefry_partitionable",
)
FLAG = "--xla_gpu_deterministic_ops"
CPU_DEVICES = "jax_num_cpu_devices"
LOWERED_FROM = ("device", "xla_flags", "jax_config", "versions", "source")
BASE = "base"  # entry of a run with adapters: digest of the pretrained model below the adapters
PROMPTS = "prompts"  # entry of a run with prompts from a file: digest of the prompts' tokens
# Maps a flag to the entry of `config.json` with the digest of the flag's data.
DIGEST_OF = {"init_from": BASE, **dict.fromkeys(sources.DATA, PROMPTS)}
# Text of the message about changed data, and the text that names the remedy.
DATA = {
    BASE: ("holds adapters over another base", "the base that init_from of the run names"),
    PROMPTS: (
        "began with another set of prompts and answers, or demonstrations",
        "the file, or, where a chat template writes today's date, give it the date of the run as "
        "an argument (task.template_arguments)",
    ),
}
PACKAGE = Path(__file__).parent.parent.parent


def describe_process(placement: str, code: Mapping[str, str] = {}) -> Json:
    """Describes layout, devices, machine, versions and code of this process, as JSON by name.

    Args:
      placement: placement of the seeds on devices, in words.
      code: digests of the user's code, see `sources.digests`.
    """
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return {
        "placement": placement,
        "device": f"{jax.device_count()} × {jax.devices()[0].device_kind}{several}",
        "processor": processor(),
        "cores": backend.cores(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax_config": {name: getattr(jax.config, name) for name in NUMERICS},
        "versions": versions(),
        "source": source(PACKAGE),
        **({sources.DIGESTS: dict(code)} if code else {}),
        "revision": revision(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run's numbers depend on."""
    ours = {"python": platform.python_version(), "jaxrl_po": __version__}
    return ours | {name: version(name) for name in PACKAGES}


def processor() -> str:
    """Returns the processor's model name, or the architecture if the model name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def source(*places: Path) -> str:
    """Returns a digest of the Python code in some folders, tracked by git or not."""
    digest = hashlib.sha256()
    for folder in places:
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix().encode()
            digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def program(learner: Learner) -> str:
    """Computes a digest of one iteration as JAX lowers it: method, hyperparameters and problem.

    Frozen parameters are an argument of the lowered program, so the digest instead includes the
    arrays that `init` builds the frozen parameters from.
    """
    key = jax.random.key(0)
    state = jax.eval_shape(learner.init, key)
    digest = hashlib.sha256(jax.jit(learner.step).lower(state).as_text().encode())
    made = jax.make_jaxpr(lambda key: learner.init(key).params.frozen)(key)
    _, read, _ = dce_jaxpr_consts(made.jaxpr, [True] * len(made.jaxpr.outvars))
    for array in (x for x, used in zip(made.consts, read, strict=True) if used):
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()[:16]


def another_program(now: Values, before: Values) -> bool:
    """Returns whether `program` changed while all entries that lowering depends on stayed equal.

    Example:
      >>> now = dict.fromkeys(LOWERED_FROM, "a")
      >>> another_program(now | {"program": "b"}, now | {"program": "c"})
      True
      >>> another_program(now | {"program": "b", "source": "d"}, now | {"program": "c"})
      False
    """
    if differences({name: now[name] for name in LOWERED_FROM}, before):
        return False
    return now["program"] != before.get("program", now["program"])


def revision(package: Path = PACKAGE) -> Json | None:
    """Returns `{"commit": …, "dirty": …}` of the package's git checkout, or None if not in git."""
    # Inside a git hook, GIT_DIR and similar variables point to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(package), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, timeout=20, env=environment)
        return done.stdout.decode().strip()

    try:
        # `ls-files` fails if the package is installed inside the checkout of another project.
        git("ls-files", "--error-unmatch", "__init__.py")
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        return None


def differences(now: Values, before: Values) -> list[str]:
    """Returns changed entries of `describe_process`, `name: before → now`, without added entries.

    The list includes user code whose source could not be read, at this start or an earlier one.

    Example:
      >>> before = {"cores": 2, "versions": {"jax": "1", "numpy": "1"}}
      >>> differences({"cores": 4, "versions": {"jax": "2", "numpy": "1"}}, before)
      ['cores: 2 → 4', 'jax: 1 → 2']
      >>> differences({"env": "python:Maze"}, {"env": "python:Maze"})
      ["env may differ from the run's"]
    """
    found = []
    for name, value in now.items():
        was = before.get(name, value)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            found += differences(value, was)
        elif name in before and sources.OWN in f"{was} {value}":  # code with unreadable source
            found.append(f"{name} may differ from the run's")
        elif strict(value) != was:
            found.append(f"{name}: {was} → {value}")
    return found


def note(changes: Sequence[str]) -> list[str]:
    """Returns the line that a resumed run prints about `differences`; empty if nothing changed."""
    line = f"resumes under other circumstances, so numbers may differ: {'; '.join(changes)}"
    return [line] if changes else []


def go_on(now: Values, before: Values) -> Json:
    """Adds the descriptions of earlier starts that differ, as `before`, to the present description.

    Args:
      now: result of `describe_process` at this start.
      before: result of `go_on` at the last start of the resumed run; empty for a new run.
    """
    former = list(before.get("before", []))
    if differences(now, before):
        former.append({name: before[name] for name in now if name in before})
    return {**now, **({"before": former} if former else {})}


def ask_for_determinism() -> None:
    """Makes XLA use deterministic GPU kernels; must be called before the JAX backend starts.

    Raises:
      ConfigError: XLA_FLAGS disables deterministic kernels, or a GPU backend is already running.
    """
    given = os.environ.get("XLA_FLAGS", "").split()
    asked = [flag for flag in given if flag.partition("=")[0] == FLAG]
    if asked and asked[-1].lower() not in (FLAG, f"{FLAG}=true", f"{FLAG}=1"):
        why = f"must not be contradicted by {asked[-1]} in XLA_FLAGS: leave one of them out"
        raise ConfigError("deterministic", why)
    if asked:
        return
    if not _backend_runs():
        os.environ["XLA_FLAGS"] = " ".join([*given, f"{FLAG}=true"])
    elif jax.default_backend() != "cpu":
        raise ConfigError(
            "deterministic",
            f"must be given before JAX starts its {jax.default_backend()}, which runs already: "
            f"start Python with XLA_FLAGS={FLAG}=true in the environment",
        )


def _backend_runs() -> bool:
    # JAX does not report a running backend, but then refuses to change the number of CPU devices.
    count = getattr(jax.config, CPU_DEVICES)
    try:
        jax.config.update(CPU_DEVICES, 2 if count == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update(CPU_DEVICES, count)
    return False


def require_same_process(now: Values, before: Values, out: str) -> None:
    """Raises ConfigError if resuming a deterministic run on this machine could change any number.

    Another commit with the same source digest is allowed.

    Args:
      now: result of `describe_process` at this start.
      before: stored result of `describe_process` for the run in the folder; empty for a new run.
      out: value of `--out`.

    Raises:
      ConfigError: machine, versions or code differ from the run's; the message names every
        difference.
    """
    relevant = {name: value for name, value in now.items() if name != "revision"}
    # In this comparison, an entry that the stored run lacks counts as different.
    found = differences(relevant, {**dict.fromkeys(relevant), **before} if before else {})
    if found:
        raise ConfigError(
            "deterministic",
            f"promises the same bits only under the circumstances of the run in {out}; there "
            f"differ {'; '.join(found)}; resume it there, or begin another without deterministic",
        )


def require_data(entry: str, digest: str, resolved: Values, flag: str, run: str) -> None:
    """Raises ConfigError for adapters on another base, or a resume on other prompts and answers.

    Args:
      entry: `BASE` or `PROMPTS`.
      digest: present digest of the data; empty if the run does not use data of that entry.
      resolved: entry `resolved` of the run's `config.json`.
      flag: name of the flag that names the run, for messages.
      run: folder of the run whose data changed, for messages.

    Raises:
      ConfigError: the digest changed; the message names the data that the user should restore.
    """
    before = resolved.get(entry, digest)
    if digest and before != digest:
        differs, remedy = DATA[entry]
        now = f"its digest was {before} and is {digest} now; put back {remedy}"
        raise ConfigError(flag, f"{run} {differs}: {now}")
