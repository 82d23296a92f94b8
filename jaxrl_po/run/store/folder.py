"""The folder of a run: locked by one run at a time, overwritten only on request.

A run that the folder holds is resumed only with the settings that the run started with.
"""

import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from jaxrl_po.config import ConfigError, Json, Setting, Values
from jaxrl_po.run.devices import processes
from jaxrl_po.run.errors import UserCodeError, format_error, spell, unread_format
from jaxrl_po.run.store import provenance, sources
from jaxrl_po.run.store.metrics import strict, write_atomically
from jaxrl_po.version import FORMATS

CONFIG = "config.json"
REMOVED = {"reproducible": False}  # settings that only former versions have, with their defaults
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
STARTED_RUN_FILES = (
    *(CONFIG, "metrics.jsonl", "samples.jsonl"),
    *("checkpoints", "tensorboard", "wandb_id"),
)
ARTEFACTS = (
    *STARTED_RUN_FILES,
    *(".chunk.json", "summary.json", "curves.png"),
    *("evaluation.json", "episode.gif"),  # files of the commands `evaluate` and `render`
    *("sweep.json", "sweep.png", "sweep.csv", "table.txt", "programs"),  # files of `sweep`
)


def inspect(out: str, *, resume: bool, overwrite: bool, script: str = "") -> Json:
    """Checks that a run may use the folder `out`; changes no files.

    Args:
      out: value of `--out`.
      resume: value of `--resume`.
      overwrite: value of `--overwrite`.
      script: name of a command that resumes only its own runs; empty if it resumes every run.

    Returns:
      The `config.json` of the run to resume; empty for a new run.

    Raises:
      ConfigError: no folder is named, the folder cannot be written, the folder holds files but
        neither `resume` nor `overwrite` is set, or the folder holds the run of another command.
    """
    if not out:
        raise ConfigError("out", "must name a folder for the results, e.g. runs/first")
    if resume and overwrite:
        raise ConfigError("resume", "must be left out with overwrite: give one of them")
    folder = Path(out)
    require_name(out)
    if "[" in str(folder.absolute()):  # orbax reads a path as a glob pattern and finds no file
        raise ConfigError(
            "out",
            f"{folder.absolute()} must have no [ in its path, which orbax takes for a pattern",
        )
    ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not ancestor.is_dir():
        raise ConfigError("out", f"{out} must be a folder, but {ancestor} is a file")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise ConfigError("out", f"{out} must be a folder that can be written; {ancestor} cannot")
    # Hidden files do not count, since the lock and temporary files are hidden.
    used = folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir())
    used = used and (resume or not _only_begun(folder))
    if used and not (resume or overwrite):
        raise ConfigError(
            "out",
            f"{out} already holds files; give resume to continue, overwrite to replace the run, or "
            "choose another",
        )
    if not (used and resume):
        return {}
    stored = read_settings(folder, "resume")
    if script and stored.get("script", script) != script:
        raise ConfigError("resume", f"{out} holds a run of {stored['script']}, not of {script}")
    return stored


def _only_begun(folder: Path) -> bool:
    """Returns whether a folder holds only a run that ended before its first line and checkpoint."""
    held = {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}
    if not held.keys() <= {*STARTED_RUN_FILES} or any(path.is_symlink() for path in held.values()):
        return False
    try:
        ours = "script" in read_settings(folder)
    except ConfigError:
        return False
    begun = "metrics.jsonl" in held and b"\n" in held["metrics.jsonl"].read_bytes()
    return ours and not begun and not any(folder.glob("checkpoints/*/*"))


def require_name(out: str, flag: str = "out") -> None:
    """Raises ConfigError if an output path starts with `~` or the system refuses its name."""
    if out.startswith("~"):
        why = "must not begin with ~, which a shell expands only in a word of its own"
        raise ConfigError(flag, f"{out} {why}: $HOME{out[1:]}")
    try:
        Path(out).exists()
    except OSError as error:
        raise ConfigError(flag, f"{out} cannot be used: {error.strerror}") from None


def read_settings(folder: Path, flag: str = "out", makers: str = "jaxrl-po") -> Json:
    """Reads a run's settings from `config.json`, with paths resolved by `sources.located`.

    Args:
      folder: Folder of the run.
      flag: Name of the flag that names the folder, for messages.
      makers: Names of the commands that create the expected runs, for messages.

    Raises:
      UserCodeError: The file cannot be read or is damaged.
      ConfigError: The file has a format that is not one of `FORMATS`.
    """
    damaged = UserCodeError(flag, f"{folder} holds a damaged {CONFIG}")
    try:
        stored = json.loads((folder / CONFIG).read_text(encoding="utf-8-sig"))
    except OSError:
        wanted = f"must be the folder of a run of {makers}, got {folder}"
        raise UserCodeError(flag, f"{wanted}; it holds no {CONFIG}") from None
    except ValueError:
        raise damaged from None
    if not isinstance(stored, dict):
        raise damaged
    if {"model_type", "architectures"} & stored.keys():
        return stored  # the config.json of a pretrained model
    ours = "format" in stored or "script" in stored
    if ours and (why := unread_format(stored.get("format"))):
        raise ConfigError(flag, f"{folder / CONFIG} {why}")
    resolved = stored.get("resolved", {})
    code = resolved.get(sources.DIGESTS, {}) if isinstance(resolved, dict) else None
    texts = ("out", *sources.STORED, *sources.PATHS)
    if not isinstance(code, dict) or not all(
        isinstance(values.get(name, ""), str) for values in (stored, code) for name in texts
    ):
        raise damaged
    try:
        return stored | sources.located(stored, code, stored.get("out", ""), folder)
    except ValueError:
        raise damaged from None


def require_same(given: Values, stored: Values, fields: Mapping[str, Setting], out: str) -> None:
    """Raises ConfigError if a setting differs from the stored run although resuming forbids that.

    A path may change if its content has the stored digest. This function compares the digests of
    code; `provenance.require_data` compares the digests of data.

    Args:
      given: Settings that the run is now started with, by flag name.
      stored: Settings of the run in the folder, by flag name.
      fields: Metadata of each setting's field, by flag name.
      out: Value of `--out`.

    Raises:
      ConfigError: A setting differs; the error names the first flag that differs.
    """
    resolved = stored.get("resolved", {})
    code = resolved.get(sources.DIGESTS, {})
    for name, value in given.items():
        may_change = name in fields and (fields[name].resume != "same" or not fields[name].stored)
        if name not in stored or may_change or strict(value) == stored[name]:
            continue
        if name in code and sources.digests({name: value}) == {name: code[name]}:
            continue
        if resolved.get(provenance.DIGEST_OF.get(name)) and value and stored[name]:
            continue
        or_same = ", or the same in a file of the same content" * (name in code)
        raise ConfigError(
            name,
            f"must be {spell(stored[name])}, as in the run in {out}{or_same}, got {spell(value)}; "
            "leave it out, or choose another folder",
        )
    for name, value in given.items():
        if name in fields and fields[name].resume == "grows" and value < stored.get(name, 0):
            least = f"{stored[name]}, as in the run in {out} that is resumed"
            raise ConfigError(name, f"must be at least {least}, got {value}: it may only grow")


@contextmanager
def claim(out: str, *, overwrite: bool) -> Iterator[Path]:
    """Creates the folder of a run and locks it until the process ends, normally or by a kill.

    With several processes, the first process locks the folder for all processes.

    Args:
      out: value of `--out`.
      overwrite: whether to delete the files of an earlier run; other files always remain.

    Raises:
      ConfigError: the folder cannot be created, locked or cleared, or another run has locked it.
      OSError: error raised inside the context; names the folder if the system names no file.
    """
    folder = Path(out)
    if not processes.is_writer():
        yield folder
        return
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _lock(stack.enter_context((folder / ".lock").open("w", encoding="utf-8")), out)
            if overwrite:  # under the lock, so that a run that is still writing loses no files
                _clear(folder)
        except OSError as error:
            raise ConfigError("out", f"{out} cannot be used: {format_error(error)}") from None
        with naming_path(folder):
            yield folder


def _lock(file: TextIO, out: str) -> None:
    """Locks a file, or prints a note if its file system does not support locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        why = "is in use by another run; wait for its end or choose another"
        raise ConfigError("out", f"{out} {why}") from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        why = f"cannot be locked ({error.strerror}); let no other run use it"
        print(f"note: --out={out} {why}", file=sys.stderr)


def _clear(folder: Path) -> None:
    """Deletes the files of an earlier run, `config.json` last.

    Raises:
      ConfigError: a file cannot be deleted.
    """
    try:
        for name in reversed(ARTEFACTS):
            _remove(folder / name)
    except OSError as error:
        why = f"{error.filename} cannot be deleted: {error.strerror}"
        raise ConfigError(
            "overwrite", f"{why}; other files of the run may be deleted already"
        ) from None


def _remove(path: Path) -> None:
    """Deletes a file, link or folder; a mount point is emptied but remains, with its parents."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for each in path.iterdir():
        _remove(each)
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise


def require_file(out: str, suffix: str, flag: str = "out") -> Path:
    """Returns the path of a file that a flag names, after checking that it can be written.

    Raises:
      ConfigError: the suffix is wrong, the path is a folder, or the file cannot be written.
    """
    path = Path(out)
    require_name(out, flag)
    ancestor = next(each for each in path.absolute().parents if each.exists())
    if path.suffix.lower() != suffix or path.is_dir():
        raise ConfigError(flag, f"must be a file whose name ends in {suffix}, got {out}")
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        why = f"{out} must be a file that can be written; {ancestor} is no folder to write to"
        raise ConfigError(flag, why)
    return path


@contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Context that adds the name `path` to any OSError that names no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context that creates the folder of a file and names the file in any OSError."""
    with naming_path(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


def removed(stored: Values) -> list[str]:
    """Returns a line for each stored setting that no longer exists and differs from its default.

    Example:
      >>> removed({"reproducible": False}), removed({"seed": 1, "reproducible": True})
      ([], ['config.json: reproducible=true is a setting of a former version, without effect now'])
    """
    return [
        f"{CONFIG}: {name}={spell(stored[name])} is a setting of a former version, without effect "
        "now"
        for name, default in REMOVED.items()
        if stored.get(name, default) != default
    ]


def write_settings(folder: Path, settings: Values) -> None:
    """Writes `config.json`: a run's settings, its absolute path and the format number."""
    write_json(folder / CONFIG, {"format": FORMATS[-1], **settings, "out": os.path.abspath(folder)})


def write_json(path: Path, content: object) -> None:
    """Replaces a JSON file atomically; NaN and infinity become null."""
    text = json.dumps(strict(content), indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(path, text + "\n")
