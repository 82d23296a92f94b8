"""The libraries to compare with, each in its own Python environment, created at first use."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import timing

from jaxrl_po.config import ConfigError
from jaxrl_po.run import errors

BENCHMARKS = Path(__file__).parent.parent
ENVIRONMENTS = BENCHMARKS.parent.parent / ".venv" / "peers"


class Repository(NamedTuple):
    """Git repository and commit of a peer that is not a package."""

    url: str
    commit: str


class Peer(NamedTuple):
    """A library to compare with.

    Attributes:
      title: name and version of the library.
      environment: name of the library's environment, with requirements in
        `peers/<environment>.txt`.
      script: script in `peers/`, whose last line of output is one JSON object.
      arguments: arguments of the script in every row.
      repository: repository whose clone is passed to the script as `--source`; None if the script
        does not need a clone.
    """

    title: str
    environment: str
    script: str
    arguments: tuple[str, ...] = ()
    repository: Repository | None = None


PEERS = {
    "rejax": Peer("rejax 0.1.3", "rejax", "cartpole_ppo.py", ("--library=rejax",)),
    "purejaxrl": Peer(
        "PureJaxRL",
        "rejax",
        "cartpole_ppo.py",
        ("--library=purejaxrl",),
        Repository(
            "https://github.com/luchris429/purejaxrl", "31756b197773a52db763fdbe6d635e4b46522a73"
        ),
    ),
    "brax": Peer("brax 0.14.2", "brax", "brax_ppo.py"),
    "trl": Peer("TRL 1.16.0", "trl", "trl_grpo.py"),
}


def environments() -> list[str]:
    """Returns the names of the Python environments.

    One environment serves one or several libraries.
    """
    return sorted({peer.environment for peer in PEERS.values()})


def interpreters(pythons: str) -> dict[str, Path]:
    """Maps names of environments to paths of interpreters, as `--pythons` lists them."""
    known = dict.fromkeys(environments())
    given = {}
    for each in filter(None, pythons.split(",")):
        name, _, path = each.partition("=")
        errors.lookup("pythons", name, known)
        if not os.access(path, os.X_OK):
            raise ConfigError("pythons", f"must be environment=path of an interpreter, got {each}")
        given[name] = Path(path)
    return given


def install(environment: str) -> Path:
    """Returns the interpreter of an environment, which is built again if requirements have changed.

    Raises:
      RunError: the environment cannot be built.
    """
    wanted = BENCHMARKS / "peers" / f"{environment}.txt"
    place = ENVIRONMENTS / environment
    python, done = place / "bin" / "python", place / "installed.txt"
    if not (
        done.exists() and done.read_text(encoding="utf-8") == wanted.read_text(encoding="utf-8")
    ):
        print(f"making the environment {place}", flush=True)
        timing.output_of([sys.executable, "-m", "venv", "--clear", place])
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        timing.output_of([*pip, "--requirement", wanted])
        done.write_text(wanted.read_text(encoding="utf-8"), encoding="utf-8")
    return python


def clone(repository: Repository) -> Path:
    """Returns the folder of a repository at its commit; clones the repository if necessary.

    Raises:
      RunError: the repository cannot be cloned.
    """
    place = ENVIRONMENTS / repository.commit
    if not place.exists():
        begun = place.with_suffix(".begun")
        git = ["git", "-C", begun]
        timing.output_of(["git", "init", "--quiet", begun])
        timing.output_of([*git, "fetch", "--quiet", "--depth=1", repository.url, repository.commit])
        timing.output_of([*git, "checkout", "--quiet", repository.commit])
        begun.rename(place)
    return place
