"""What a flag names as `file.py:name`: an environment, network, task or reward of one's own."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_po.run.data import workers
from jaxrl_po.run.experiment.flags import UsageError

FLAGS = ("env", "task", "reward", "policy", "critic", "environment")
DIGESTS = "code"  # entry of a run: what its files of code hold, by flag
DATA = ("task.train", "task.test", "demonstrations")
FOLDERS = ("init_from", "teacher", *DATA)  # and files


class UserCodeError(UsageError):
    """A file of the user's own, or a folder that a run began with, cannot be used."""


def is_source(name: str) -> bool:
    """Whether a name reads like `file.py:name`.

    Example:
      >>> is_source("my_env.py:Corridor"), is_source("CartPole-v1")
      (True, False)
    """
    return ".py:" in name


def absolute(settings: Mapping[str, Any]) -> dict[str, str]:
    """The flags among `settings` that name files or folders to read, with absolute paths.

    They are stored so, for a run may be resumed or evaluated from another folder.

    Example:
      >>> absolute({"env": "/home/me/../us/my_env.py:Corridor", "task": "addition"})
      {'env': '/home/us/my_env.py:Corridor'}
    """
    folders = {name: os.path.abspath(settings[name]) for name in FOLDERS if settings.get(name)}
    return folders | {
        name: ",".join(map(_absolute, settings[name].split(",")))
        for name in FLAGS
        if is_source(settings.get(name, ""))
    }


def _absolute(source: str) -> str:
    if not is_source(source):
        return source
    place, _, name = source.rpartition(":")
    return f"{os.path.abspath(place)}:{name}"


def short(name: str) -> str:
    """A name for titles: that of a file without its folder.

    Example:
      >>> short("/home/me/my_env.py:Corridor"), short("CartPole-v1")
      ('my_env.py:Corridor', 'CartPole-v1')
    """
    return Path(name).name if is_source(name) else name


def files(settings: Mapping[str, Any]) -> list[Path]:
    """The files that the flags among `settings` name.

    Example:
      >>> files({"task": "addition", "reward": "mine.py:nearly,package.module:other"})
      [PosixPath('mine.py')]
    """
    named = [source for name in FLAGS for source in settings.get(name, "").split(",")]
    return [Path(source.rpartition(":")[0]) for source in named if is_source(source)]


def digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """By flag, what is named in files of what content: as it would be if the files were moved."""
    return {
        name: ",".join(map(_digest, settings[name].split(",")))
        for name in FLAGS
        if is_source(settings.get(name, ""))
    }


def _digest(source: str) -> str:
    place, _, name = source.rpartition(":")
    if not is_source(source) or not os.path.isfile(place):
        return source
    return f"{digest(place)}:{name}"


def digest(path: str) -> str:
    """Of a file's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def found(settings: Mapping[str, Any], stored: Mapping[str, str], run: Path) -> dict[str, str]:
    """The flags of a run whose files are gone, with the same files where they are now.

    They are looked for below the current folder and those above the run, as after a project's
    folder was renamed.

    Args:
      settings: flag name to value.
      stored: `digests` when the run began.
      run: its folder.

    Raises:
      ValueError: a flag names more or less than it did.
    """

    def now(source: str, digest: str) -> str:
        place, _, name = source.rpartition(":")
        if is_source(source) and not os.path.isfile(place):
            parts = Path(place).parts[1:]
            for base in (Path.cwd(), *run.absolute().parents):
                for i in range(len(parts)):
                    moved = f"{base.joinpath(*parts[i:])}:{name}"
                    if _digest(moved) == digest:
                        return moved
        return source

    return {
        flag: ",".join(
            now(*pair)
            for pair in zip(settings[flag].split(","), stored[flag].split(","), strict=True)
        )
        for flag in FLAGS
        if flag in stored and flag in settings
    }


def make(flag: str, source: str) -> Any:
    """Calls what `file.py:name` names, a class or a function, without arguments.

    Args:
      flag: that names it.
      source: its value.

    Raises:
      UserCodeError: names the flag, the file and, for an error in that file, its line.
    """
    place = source.rpartition(":")[0]
    if not os.path.isfile(place):  # where a name is too long, `Path.is_file` raises
        raise UserCodeError(f"--{flag}={source}: there is no file {place}")
    try:
        return workers.load(source)()
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"--{flag}={source}: {workers.describe(error)}") from error
