"""The folder of a run: locked by one run at a time, overwritten only on request.

A run in it is resumed only with the settings it was started with.
"""

import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxrl_po.run.devices import processes
from jaxrl_po.run.errors import RunError, UsageError, shown
from jaxrl_po.run.store import provenance, sources
from jaxrl_po.run.store.failures import is_full, line, reason, unread
from jaxrl_po.run.store.metrics import strict, write_atomically
from jaxrl_po.version import FORMATS

CONFIG = "config.json"
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
ARTEFACTS = (
    *(CONFIG, "metrics.jsonl", "samples.jsonl", ".chunk.json", "summary.json", "curves.png"),
    *("checkpoints", "tensorboard", "wandb_id"),
    *("evaluation.json", "episode.gif"),  # written by `evaluate` and `render`
    *("sweep.json", "sweep.png", "table.txt", "programs"),  # written by `sweep`
    *("arms", "verdict.json", "verdict.png"),  # written by `study`
)
LINKED = ("metrics.jsonl", "checkpoints", "checkpoints/latest", "checkpoints/best")
# What a run may leave that ended before its first line.
BEGINNING = {
    *(CONFIG, "metrics.jsonl", "samples.jsonl"),
    *("checkpoints", "tensorboard", "wandb_id", "arms"),
}
# Flags of one start, which are not stored: a run that was started with --overwrite would otherwise
# be deleted when it is resumed.
OF_A_START = (
    *("resume", "overwrite", "distributed", "coordinator", "num_processes", "process_id"),
    *("coordinator_timeout", "compile_for", "json"),
)
MAY_DIFFER = (
    *("out", "devices", "mesh", "shard_params", "total_steps"),
    *("compilation_cache", "reward_timeout", "tensorboard", "wandb"),
    *OF_A_START,
)


def inspect(out: str, *, resume: bool, overwrite: bool) -> dict[str, Any]:
    """Checks that a run may use the folder `out`; changes nothing.

    Args:
      out: the value of `--out`.
      resume: the value of `--resume`.
      overwrite: the value of `--overwrite`.

    Returns:
      The `config.json` of the run to resume, without the flags of its start; empty for a new run.

    Raises:
      UsageError: no folder is named, it cannot be written, or it is not empty and neither switch is
        given.
    """
    if not out:
        raise UsageError("--out must name a folder for the results, e.g. --out=runs/first")
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other: give one of them")
    folder = Path(out)
    require_name(out)
    if "[" in str(folder.absolute()):  # a pattern to orbax, which then finds no file
        raise UsageError(
            f"--out={out} must have no [ in its path ({folder.absolute()}): checkpoints could not "
            "be read again"
        )
    require_links(f"--out={out}", folder, () if overwrite else LINKED)
    ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not ancestor.is_dir():
        raise UsageError(f"--out={out} must be a folder, but {ancestor} is a file")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise UsageError(f"--out={out} must be a folder that can be written; {ancestor} cannot")
    # Hidden files do not count: the lock and temporary files are among them.
    used = folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir())
    used = used and (resume or not _only_begun(folder))
    if used and not (resume or overwrite):
        raise UsageError(
            f"--out={out} already holds files; add --resume to continue a run, "
            "--overwrite to replace it, or choose another"
        )
    if not (used and resume):
        return {}
    try:
        stored = read_settings(folder)
    except FileNotFoundError:
        why = f"--out={out} holds files but no {CONFIG} of a run; choose the folder of a run"
        raise UsageError(f"--resume: {why}") from None
    except ValueError:
        why = f"{folder / CONFIG} is damaged; repair it, or choose another --out"
        raise UsageError(f"--resume: {why}") from None
    return {name: value for name, value in stored.items() if name not in OF_A_START}


def _only_begun(folder: Path) -> bool:
    """Whether it holds nothing but a run that ended before its first line and checkpoint."""
    held = {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}
    if not held.keys() <= BEGINNING or any(path.is_symlink() for path in held.values()):
        return False
    try:
        ours = "script" in read_settings(folder)
    except (OSError, ValueError, UsageError):
        return False
    begun = "metrics.jsonl" in held and b"\n" in held["metrics.jsonl"].read_bytes()
    return ours and not begun and not any((*folder.glob("checkpoints/*/*"), *folder.glob("arms/*")))


def require_name(out: str) -> None:
    """Raises UsageError where `--out` begins with `~`, or is a name that no file can have.

    Or it leads through a link to what is not there, such as a disk that is not mounted.
    """
    if out.startswith("~"):
        why = "must not begin with ~, which a shell expands only in a word of its own"
        raise UsageError(f"--out={out} {why}: --out=$HOME{out[1:]}")
    try:
        Path(out).exists()  # raises where a name is too long
    except OSError as error:
        raise UsageError(f"--out={out} cannot be used: {error.strerror}") from None
    require_links(f"--out={out}", Path(out), Path(out).absolute().parents)


def require_links(flag: str, folder: Path, names: Sequence[str | Path] = LINKED) -> None:
    """Raises UsageError where a folder, or one of the names in it, is a link that leads nowhere.

    What it stands for may lie on a disk that is not mounted now. A name may be an absolute path.
    """
    for path in (folder, *(folder / name for name in names)):
        if path.is_symlink() and not os.path.exists(path):
            leads = f"{path} is a link to {os.readlink(path)}, which is not there"
            raise UsageError(f"{flag}: {leads}; mount that disk, or mend the link")


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads the settings of a run, its `config.json`, with the paths of `sources.located`.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged.
      UsageError: it is of another format, see `FORMATS`.
    """
    stored = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    ours = isinstance(stored, dict) and ("format" in stored or "script" in stored)
    if ours and (why := unread(stored.get("format"))):
        raise UsageError(f"{folder / CONFIG} {why}")
    resolved = stored.get("resolved", {}) if isinstance(stored, dict) else None
    code = resolved.get(sources.DIGESTS, {}) if isinstance(resolved, dict) else None
    if not isinstance(code, dict):
        raise ValueError("no settings of a run")
    for name in ("out", *sources.FLAGS, *sources.PATHS):
        if not isinstance(stored.get(name, ""), str) or not isinstance(code.get(name, ""), str):
            raise ValueError(f"{name} is no text")
    return stored | sources.located(stored, code, stored.get("out", ""), folder)


def require_same(settings: Mapping[str, Any], stored: Mapping[str, Any], out: str) -> None:
    """Checks that a resumed run has the settings it was started with; `total_steps` may grow.

    A file or folder may have another path if the run has its digest: that of code is compared here,
    that of data by `provenance.require_data`.

    Args:
      settings: flag name to value, of this start.
      stored: flag name to value, of the run in the folder.
      out: the value of `--out`.

    Raises:
      UsageError: names the first flag that differs.
    """
    resolved = stored.get("resolved", {})
    code = resolved.get(sources.DIGESTS, {})
    for name, value in settings.items():
        if name not in stored or name in MAY_DIFFER or strict(value) == stored[name]:
            continue
        if name in code and sources.digests({name: value}) == {name: code[name]}:
            continue
        if resolved.get(provenance.DIGEST_OF.get(name)) and value and stored[name]:
            continue
        or_same = ", or the same in a file of the same content" * (name in code)
        raise UsageError(
            f"--{name}={shown(value)} must be {shown(stored[name])}, as in the run in {out} that "
            f"is resumed{or_same}; leave it out, or choose another --out"
        )
    if settings["total_steps"] < stored.get("total_steps", 0):
        least = f"{stored['total_steps']}, as in the run in {out} that is resumed: it may only grow"
        raise UsageError(f"--total_steps={settings['total_steps']} must be at least {least}")


@contextmanager
def claim(out: str, *, overwrite: bool) -> Iterator[Path]:
    """Creates the folder and locks it; the lock ends with the process, however that ends.

    With several processes, the first one locks it for all.

    Args:
      out: the value of `--out`.
      overwrite: delete the files of an earlier run, and nothing else.

    Raises:
      UsageError: it cannot be created or written, an earlier run cannot be deleted, or another run
        has locked it.
      OSError: raised inside; where the system names no file, it names the folder.
    """
    folder = Path(out)
    if not processes.is_writer():
        yield folder
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        why = f"must be a folder that can be written: {error.strerror}"
        raise UsageError(f"--out={out} {why}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "is in use by another run; wait for its end or choose another"
            raise UsageError(f"--out={out} {why}") from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise UsageError(f"--out={out} cannot be locked: {reason(error)}") from None
            why = f"cannot be locked on its file system ({reason(error)}); let no other run use it"
            print(f"note: --out={out} {why}", file=sys.stderr)
        if overwrite:  # under the lock, so never the files of a run that still writes
            _clear(folder)
        try:
            yield folder
        except OSError as error:
            error.filename = error.filename or str(folder)
            raise


def _clear(folder: Path) -> None:
    """Deletes the files of an earlier run; the one that makes the folder that of a run goes last.

    Raises:
      UsageError: names what cannot be deleted.
    """
    try:
        for name in reversed(ARTEFACTS):
            _remove(folder / name)
    except OSError as error:
        others = f"other files of the run in {folder} may be deleted already"
        why = f"{error.filename} cannot be deleted: {reason(error)}; {others}"
        raise UsageError(f"--overwrite: {why}") from None


def _remove(path: Path) -> None:
    """Deletes a file, a link but not what it leads to, or a folder; one mounted is emptied."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for each in path.iterdir():
        _remove(each)
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):  # mounted, or the parent of such
            raise


def require_file(out: str, suffix: str, flag: str = "out") -> Path:
    """The path of a flag that names a file, after a check that it can be written.

    Raises:
      UsageError: another suffix, a folder, or a file that cannot be written.
    """
    path = Path(out)
    require_name(out)
    ancestor = next(each for each in path.absolute().parents if each.exists())
    if path.suffix.lower() != suffix or path.is_dir():
        raise UsageError(f"--{flag}={out} must be a file whose name ends in {suffix}")
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        why = f"must be a file that can be written; {ancestor} is no folder to write to"
        raise UsageError(f"--{flag}={out} {why}")
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Creates the folder of the file `--out`; inside, a failure to write becomes a `UsageError`.

    Raises:
      UsageError: names the file and what went wrong.
      RunError: likewise, where the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if is_full(error):
            raise RunError(line(error, path)) from None
        why = f"must be a file that can be written: {reason(error)}"
        raise UsageError(f"--out={path} {why}") from None


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes `config.json`: the settings of a run, its absolute path and the format's number."""
    write_json(folder / CONFIG, {"format": FORMATS[-1], **settings, "out": os.path.abspath(folder)})


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file atomically; NaN and infinity become null."""
    text = json.dumps(strict(content), indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(path, text + "\n")
