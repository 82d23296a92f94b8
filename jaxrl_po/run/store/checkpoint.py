"""Checkpoints of a training state: written atomically in the background, verified when read.

A thin layer over orbax. A state is stored as a dict from each leaf's path to a host array, together
with the number of the storage format. Typed PRNG keys are stored as their raw words. Orbax refuses
arrays of size zero, so such leaves are not stored but rebuilt when the state is loaded. Checksums
of the files are written last: a checkpoint without checksums is unfinished; a checkpoint that does
not match its checksums is damaged and never passed to orbax.

With several processes, all processes take part in saving a state, the first process writes the
files, and all processes read them. Arrays are stored with their global shapes, so a state can be
loaded onto another number of devices and processes.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp

from jaxrl_po.run.devices import processes
from jaxrl_po.run.errors import unread_format
from jaxrl_po.run.store.metrics import write_atomically
from jaxrl_po.types import PyTree
from jaxrl_po.version import FORMATS

CHECKSUMS = "checksums.json"
ITEM = "default"  # name of the folder that orbax creates for a single item
FORMAT = "format"  # key of the format number; keys of leaves start with a dot or a bracket

Arrays = dict[str, npt.NDArray[Any]]


class CheckpointError(Exception):
    """Checkpoints exist, but none is usable."""


class SaveError(OSError):
    """A training state could not be written; earlier checkpoints are unaffected."""


class Store:
    """A folder of checkpoints, numbered by iteration, that retains the newest `keep` checkpoints.

    Args:
      folder: folder to create if absent; unfinished checkpoints of a killed run are deleted.
      keep: number of retained checkpoints. With at least two checkpoints, a run survives damage
        to the newest checkpoint.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
      ...     store.save(3, {"w": jnp.arange(2.0)})
      ...     store.load({"w": jnp.zeros(2)})
      (3, {'w': Array([0., 1.], dtype=float32)})
    """

    def __init__(self, folder: Path, *, keep: int = 2):
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._manager = _manager(self._folder, read_only=not processes.is_writer())
        self._keep = keep
        self._clear_unfinished()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def iterations(self) -> list[int]:
        """Returns the iterations that have a checkpoint, in ascending order."""
        self.wait_until_finished()
        return list(processes.on_first_process(self._steps))

    def _steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, iteration: int, state: PyTree, *, after: "Store | None" = None) -> None:
        """Copies `state` to the host and writes it in the background.

        The caller may donate the state's buffers as soon as this method returns.

        Args:
          iteration: number of the checkpoint to write.
          state: training state to write.
          after: store whose pending save must reach the disk before this checkpoint.

        Raises:
          SaveError: the previous checkpoint could not be written.
        """
        arrays = to_host(state)
        self.wait_until_finished()
        if processes.is_writer():
            first = after._written if after else None
            self._written = self._writer.submit(self._write, iteration, arrays, first)

    def _write(self, iteration: int, arrays: Arrays, first: Future[None] | None) -> None:
        if first is not None:
            first.result()  # raises the error of a failed save before this checkpoint is written
        step = self._folder / str(iteration)
        try:
            self._folder.stat()  # orbax would create a moved folder again
            if iteration in self._manager.all_steps():
                self._manager.delete(iteration)
            stored = {**arrays, FORMAT: np.int32(FORMATS[-1])}
            self._manager.save(iteration, args=ocp.args.StandardSave(stored), force=True)
            write_atomically(step / CHECKSUMS, json.dumps(checksums(step / ITEM)))
            steps = self._steps()
            # After a resume at an earlier iteration, checkpoints of later iterations remain.
            kept = [each for each in steps if each <= iteration][-self._keep :]
            # Old checkpoints are deleted after the checksums are written: until then, an old
            # checkpoint may be the newest intact one.
            for each in set(steps).difference(kept):
                self._manager.delete(each)
        except (OSError, ValueError) as error:  # tensorstore reports a full disk as a ValueError
            self._clear_unfinished()
            found = re.search(r"os_error_code='(\d+)'", str(error))
            number = int(found[1]) if found else getattr(error, "errno", None)
            reason = str(error) if number is None else os.strerror(number)
            raise SaveError(number, reason, str(step)) from error

    def _clear_unfinished(self) -> None:
        if processes.is_writer():
            for path in self._folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(path, ignore_errors=True)

    def wait_until_finished(self) -> None:
        """Waits until the pending save is on disk; raises SaveError if that save failed."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def load(
        self, like: PyTree, *, report: Callable[[str], None] = print
    ) -> tuple[int, PyTree] | None:
        """Loads the newest intact checkpoint; reports and deletes newer, damaged checkpoints.

        Args:
          like: state, or `jax.ShapeDtypeStruct`s (with shardings), of the expected structure.
          report: `(line) -> None`, called with a message for each unusable checkpoint.

        Returns:
          `(iteration, state)`, placed like `like`, or None if no checkpoint was ever completed.

        Raises:
          CheckpointError: no checkpoint is intact and some are damaged (nothing is deleted), or the
            newest intact checkpoint holds other names, shapes or dtypes than `like`.
        """
        self.wait_until_finished()
        newest = processes.on_first_process(lambda: self._drop_damaged(report), CheckpointError)
        self._manager.reload()  # orbax caches the list of checkpoints
        return None if newest is None else (newest, from_host(self.read(newest), like))

    def _drop_damaged(self, report: Callable[[str], None]) -> int | None:
        """Deletes all checkpoints newer than the newest intact one, whose iteration is returned."""
        found = {each: condition_of(self._folder / str(each)) for each in self._steps()}
        intact = [iteration for iteration, condition in found.items() if condition == "intact"]
        if not intact and "damaged" in found.values():
            raise CheckpointError(
                f"no checkpoint in {self._folder} is intact: {sorted(found)} are damaged"
            )
        newest = max(intact, default=None)
        for iteration, condition in found.items():
            if newest is None or iteration > newest:
                report(f"checkpoint {self._folder / str(iteration)} is {condition} and dropped")
                shutil.rmtree(self._folder / str(iteration))
        return newest

    def read(self, iteration: int) -> Arrays:
        """Returns a checkpoint's arrays by leaf path; raises CheckpointError as `peek` does."""
        return _restore(self._manager, iteration)

    def close(self) -> None:
        """Waits until all pending saves are on disk and closes the store."""
        self._writer.shutdown()
        self._manager.close()
        self.wait_until_finished()


def _manager(folder: Path, *, read_only: bool) -> ocp.CheckpointManager:
    _silence_orbax()
    me = jax.process_index()
    # Orbax sees each process as the only one, so that it adds no barriers.
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    options = ocp.CheckpointManagerOptions(
        create=False,
        read_only=read_only,
        enable_async_checkpointing=False,
        multiprocessing_options=alone,
    )
    return ocp.CheckpointManager(folder, options=options)


def _silence_orbax() -> None:
    """Hides messages of orbax and tensorstore about a failed write, which also raises an error.

    Orbax logs the failure, then closes its event loop while tensorstore still tries to report each
    array to that loop.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    tell = sys.unraisablehook
    if not (isinstance(tell, functools.partial) and tell.func is _unless_of_a_loop):
        sys.unraisablehook = functools.partial(_unless_of_a_loop, tell)
        warnings.filterwarnings("ignore", r"coroutine '(\w+Handler|run_sync)\..*never awaited")


def _unless_of_a_loop(tell: Callable[[Any], object], what: Any) -> None:
    closed = "Event loop is closed" in str(what.exc_value)
    if not closed and what.object is not asyncio.BaseEventLoop.__del__:
        tell(what)


def _restore(manager: ocp.CheckpointManager, iteration: int) -> Arrays:
    arrays = dict(manager.restore(iteration, args=ocp.args.StandardRestore()))
    if why := unread_format(arrays.pop(FORMAT, None)):
        raise CheckpointError(f"the checkpoint {why}")
    return arrays


def peek(
    folder: Path, like: PyTree, *, part: str = "", without: str = "", seed_index: int | None = None
) -> tuple[int, PyTree] | None:
    """Reads the newest intact checkpoint of a folder that another process may be writing to.

    Reading changes nothing in the folder.

    Args:
      folder: folder of a `Store`; may be absent.
      like: state, or `jax.ShapeDtypeStruct`s, of the expected structure; see `Store.load`.
      part: leaf path of the part of the state that `like` describes; empty for the whole state.
      without: leaf path of a part of the state that `like` lacks, whether or not the checkpoint
        holds that part; empty to read all parts.
      seed_index: index of the seed to read from the stacked state; None for all seeds.

    Returns:
      `(iteration, state)`, placed like `like`, or None if no checkpoint is intact.

    Raises:
      CheckpointError: the checkpoint holds other names, shapes or dtypes than `like`, or its
        storage format is unknown.
    """
    found = _peek_arrays(folder)
    if found is None:
        return None
    read = {
        name.removeprefix(part): array if seed_index is None else array[seed_index]
        for name, array in found[1].items()
        if name.startswith(part) and not (without and name.startswith(without))
    }
    return found[0], from_host(read, like)


def _peek_arrays(folder: Path) -> tuple[int, Arrays] | None:
    tried: list[int] = []
    # The process that writes newer checkpoints may delete the checkpoint that is being read.
    while (found := _steps_in(folder)) != tried:
        for iteration in found:
            step = folder / str(iteration)
            if condition_of(step) != "intact":
                continue
            try:
                with contextlib.closing(_manager(folder.absolute(), read_only=True)) as manager:
                    arrays = _restore(manager, iteration)
            except Exception:
                if condition_of(step) == "intact":
                    raise
            else:
                if condition_of(step) == "intact":
                    return iteration, arrays
        tried = found
    return None


def newest_intact(folder: Path) -> int | None:
    """Returns the iteration of a folder's newest intact checkpoint, or None; changes no files."""
    found = (each for each in _steps_in(folder) if condition_of(folder / str(each)) == "intact")
    return next(found, None)


def _steps_in(folder: Path) -> list[int]:
    """Returns the iterations that have a subfolder in `folder`, newest first."""
    names = os.listdir(folder) if folder.exists() else []
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def condition_of(step: Path) -> str:
    """Returns whether the folder of one checkpoint is `intact`, `unfinished` or `damaged`.

    Only files listed in the checksums count: viewers and file systems add other files to a folder.

    Raises:
      OSError: a file is unreadable at the moment; the content of that file may still be intact.
    """
    if not (step / CHECKSUMS).exists():
        return "unfinished"
    try:
        listed = json.loads((step / CHECKSUMS).read_text(encoding="utf-8")).items()
        same = [zlib.crc32((step / ITEM / name).read_bytes()) == crc for name, crc in listed]
    except (FileNotFoundError, ValueError, AttributeError):
        return "damaged"
    return "intact" if same and all(same) else "damaged"


def checksums(folder: Path) -> dict[str, int]:
    """Returns the CRC-32 of each file below `folder`, by relative path; detects any flipped bit."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): zlib.crc32(path.read_bytes()) for path in files}


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: jax.Array) -> Any:
    """Returns the PRNG implementation of a key, or of a key's `jax.ShapeDtypeStruct`."""
    impls: list[Any] = []
    # `key_impl` does not accept a shape, but accepts a traced key, whose dtype it reads.
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
    return impls[0]


def _leaves(tree: PyTree) -> dict[str, jax.Array]:
    """Returns the leaves of a tree by leaf path."""
    leaves: list[tuple[Any, jax.Array]] = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def to_host(state: PyTree) -> Arrays:
    """Copies every leaf of non-zero size to a host array, by leaf path; safe under donation."""
    return {
        name: processes.gather_array(jax.random.key_data(x) if _is_key(x) else x)
        for name, x in _leaves(state).items()
        if x.size
    }


def from_host(arrays: Arrays, like: PyTree) -> PyTree:
    """Inverts `to_host`; returns a state with the structure, dtypes and placement of `like`.

    Raises:
      CheckpointError: a leaf is missing, unexpected, or has another shape or dtype; the message
        names the leaf.
    """
    remaining = _with_later_names(arrays, like)

    def restore(path: Any, leaf: jax.Array) -> jax.Array:
        name: str = jax.tree_util.keystr(path)
        shape: jax.Array = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        array = remaining.pop(name, None) if shape.size else np.zeros(shape.shape, shape.dtype)
        if array is None or array.shape != shape.shape or array.dtype != shape.dtype:
            stored = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise CheckpointError(
                f"the checkpoint holds {stored} for {name}, where "
                f"{shape.dtype}{list(shape.shape)} is wanted"
            )
        placed = processes.place_array(array, getattr(leaf, "sharding", None))
        return jax.random.wrap_key_data(placed, impl=_key_impl(leaf)) if _is_key(leaf) else placed

    state = jax.tree_util.tree_map_with_path(restore, like)
    if remaining:
        raise CheckpointError(f"the checkpoint holds {next(iter(remaining))}, which is not wanted")
    return state


OPT_STATE, MUON, ADAM = ".opt_state", "inner_states['muon']", "inner_states['adam']"


def _with_later_names(arrays: Arrays, like: PyTree) -> Arrays:
    """Returns the arrays of a version 0.4 checkpoint under today's names of optimizer states.

    In version 0.4, a cosine schedule was a separate transformation with its own step count, and a
    method with such a schedule had one optimizer leaf per parameter. The step count is dropped,
    since `TrainState.step` holds the same number, and arrays that form one vector today are
    concatenated. Muon of version 0.4 also updated matrices that are not hidden layers: the momentum
    of these matrices is dropped, and Adam, which updates them today, starts with empty moments.
    """
    wanted = _leaves(like)
    found = dict(arrays)
    former = [name for name in found if name.startswith(OPT_STATE) and name not in wanted]
    if any(MUON in name for name in former):
        empty = {name: leaf for name, leaf in wanted.items() if ADAM in name and leaf.size}
        found |= {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in empty.items()}
    for name in former:
        if MUON in name or re.fullmatch(r"\.opt_state(\[1\])?\[2\]\.count", name):
            del found[name]
    if not former:
        return found
    paths = list(_leaves(getattr(like, "params", ())))
    parameters = dict.fromkeys([*paths, *(path.removeprefix(".policy") for path in paths)])
    for name in wanted.keys() - found.keys():
        chain = re.fullmatch(r"(\.opt_state(?:\[1\])?\[1\])(\..+)", name)
        old = f"{chain[1]}[0]{chain[2]}" if chain else ""
        parts = [found.pop(old + each) for each in parameters if old + each in found]
        if old in found:
            found[name] = found.pop(old)
        elif parts:
            rows = wanted[name].shape[:-1]
            found[name] = np.concatenate([x.reshape(*rows, -1) for x in parts], axis=-1)
    return found
