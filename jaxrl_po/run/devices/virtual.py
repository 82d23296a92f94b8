"""The same bits on any number of devices: each plays some of V virtual devices, one after another.

Rounding depends on the shapes that XLA compiles for, on what it fuses, and on the order of sums.
Here none of them depends on the number of devices. The program of one virtual device is cut at each
of its communications. What lies between two cuts runs in a loop over the virtual devices of a
device, at the shapes of one; their results are gathered from all and added one after another. What
is equal on all virtual devices is computed once on each device.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.extend.core import primitives as of_jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_po.config import ConfigError
from jaxrl_po.types import PyTree

VIRTUAL = 8  # devices of every reproducible run

REDUCTIONS = {of_jax.pmin_p: (jnp.min, jax.lax.pmin), of_jax.pmax_p: (jnp.max, jax.lax.pmax)}
COMMUNICATIONS = {of_jax.psum_p, of_jax.all_gather_p, of_jax.axis_index_p, *REDUCTIONS}


class Value(NamedTuple):
    """A value of the program of a virtual device.

    Attributes:
      array: the value; of all n virtual devices of this device, `[n, …]`, where `own`.
      own: whether virtual devices may differ in it.
    """

    array: Any
    own: bool


class Turns(NamedTuple):
    """The virtual devices of one device.

    Attributes:
      axis: mesh axis over which virtual devices lie.
      number: of them on this device, n.
      zero: 0, which the compiler does not know.
    """

    axis: str
    number: int
    zero: jax.Array

    def each(self, value: Value) -> Any:
        """The value of each virtual device, `[n, …]`."""
        array = value.array
        return array if value.own else jnp.broadcast_to(array, (self.number, *jnp.shape(array)))

    def everywhere(self, value: Value) -> jax.Array:
        """The value of each virtual device of all devices, `[V, …]`."""
        return jax.lax.all_gather(self.each(value), self.axis, tiled=True)


def divided(
    wanted: int | None, available: int, num_seeds: int, num_rows: int
) -> tuple[int, int, int]:
    """Virtual devices over seeds and over rows, and those that each device plays.

    Args:
      wanted: number of devices; None for as many as divide.
      available: their number.
      num_seeds: seeds side by side, which are shared out where V divides them.
      num_rows: rows (environments or prompts) of each seed, which are otherwise.

    Raises:
      ConfigError: there are fewer devices, they do not divide V, or V divides neither.
    """
    counts = [n for n in range(1, VIRTUAL + 1) if VIRTUAL % n == 0]
    devices = wanted or max(n for n in counts if n <= available)
    if devices not in counts or devices > available:
        raise ConfigError(
            f"devices must be 'auto' or one of {', '.join(map(str, counts))} with reproducible, "
            f"and at most {available}, the number there is, got {devices}"
        )
    if num_seeds % VIRTUAL and num_rows % VIRTUAL:
        raise ConfigError(
            f"reproducible must be off, or {VIRTUAL} divide the {num_seeds} seeds or the "
            f"{num_rows} rows (environments or prompts)"
        )
    seed, data = (1, VIRTUAL) if num_seeds % VIRTUAL else (VIRTUAL, 1)
    return seed, data, VIRTUAL // devices


def in_turns(
    function: Callable[..., PyTree],
    mesh: Mesh,
    axis_name: str | None,
    in_specs: Any,
    out_specs: Any,
) -> Callable[..., PyTree]:
    """Runs a function on V virtual devices; results do not depend on the number of real ones.

    Args:
      function: of a virtual device, which sees its share of the arguments.
      mesh: of the devices; their number along one axis divides V, and the others have size 1.
      axis_name: the mesh axis over which it communicates; None for the seeds, which do not.
      in_specs: see `jax.shard_map`.
      out_specs: likewise.
    """
    axis = axis_name or "seed"
    devices = mesh.shape[axis]

    def shares(specs: Any, tree: PyTree) -> list[P]:
        return jax.tree.leaves(jax.tree.broadcast(specs, tree))

    def run(*arguments: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(arguments)
        taken = shares(in_specs, arguments)
        of_one = [
            jax.ShapeDtypeStruct(_shape(x.shape, _cut(spec, axis)), x.dtype)
            for x, spec in zip(leaves, taken, strict=True)
        ]
        program, shapes = jax.make_jaxpr(function, axis_env=[(axis, VIRTUAL)], return_shape=True)(
            *jax.tree.unflatten(structure, of_one)
        )
        given = shares(out_specs, shapes)

        def on_device(*leaves: jax.Array) -> list[jax.Array]:
            number = VIRTUAL // devices
            turns = Turns(axis, number, _zero(leaves[0]))
            inputs = [
                Value(x if at is None else _split(x, at, number), at is not None)
                for x, at in zip(leaves, (_cut(spec, axis) for spec in taken), strict=True)
            ]
            outputs = play(program.jaxpr, program.consts, inputs, turns)
            return [
                _merge(turns.each(value), at)
                if at is not None
                # Equal on all virtual devices, if only by the rules of `jax.shard_map`.
                else (value.array[0] if value.own else value.array)
                for value, at in zip(outputs, (_cut(spec, axis) for spec in given), strict=True)
            ]

        placed = jax.shard_map(
            on_device, mesh=mesh, in_specs=tuple(taken), out_specs=given, check_vma=False
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), placed(*leaves))

    return run


def _cut(spec: P, axis: str) -> int | None:
    """The dimension that lies over the axis, if one does."""
    return next((at for at, name in enumerate(spec) if name == axis), None)


def _shape(shape: tuple[int, ...], at: int | None) -> tuple[int, ...]:
    """The shape of a virtual device's share."""
    return tuple(size // VIRTUAL if i == at else size for i, size in enumerate(shape))


def _split(x: jax.Array, at: int, number: int) -> jax.Array:
    """The shares of n virtual devices, `[n, …]`, of an array cut at a dimension."""
    cut = x.reshape(*x.shape[:at], number, x.shape[at] // number, *x.shape[at + 1 :])
    return jnp.moveaxis(cut, at, 0)


def _merge(x: jax.Array, at: int) -> jax.Array:
    """The inverse of `_split`."""
    cut = jnp.moveaxis(x, 0, at)
    return cut.reshape(*cut.shape[:at], -1, *cut.shape[at + 2 :])


def _zero(x: jax.Array) -> jax.Array:
    """0, computed from any array: no 32-bit word has 64 bits that are set."""
    data = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.lax.population_count(data.ravel()[:1].astype(jnp.int32).sum()) // 64


def play(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value], turns: Turns) -> list[Value]:
    """Walks the program of a virtual device, for all virtual devices of this device.

    Args:
      jaxpr: the program, or a function that it calls.
      consts: values of its constants.
      inputs: values of its arguments.
      turns: the virtual devices.

    Returns:
      Values of its outputs.
    """
    values: dict[Any, Value] = {}
    values |= zip(jaxpr.constvars, (Value(const, False) for const in consts), strict=True)
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> Value:
        return Value(atom.val, False) if isinstance(atom, Literal) else values[atom]

    def compute(equations: list[JaxprEqn], later: Sequence[Any]) -> None:
        """Equations without communication; `later` are atoms that are read after them."""
        common, differing = _parts(equations, values)
        own = [atom for equation in differing for atom in equation.invars]
        for part, needed in ((common, [*own, *later]), (differing, later)):
            made = dict.fromkeys(var for equation in part for var in equation.outvars)
            outvars = [var for var in _variables(needed) if var in made]
            if not outvars:
                continue
            read_here = _variables(atom for equation in part for atom in equation.invars)
            invars = [var for var in read_here if var not in made]
            run = functools.partial(_evaluate, jaxpr, part, invars, outvars)
            arguments = [values[var] for var in invars]
            if part is common:
                results = run([value.array for value in arguments])
            else:
                results = _loop(run, arguments, turns)
            values.update(zip(outvars, (Value(x, part is differing) for x in results), strict=True))

    waiting: list[JaxprEqn] = []
    for i, equation in enumerate(jaxpr.eqns):
        if not _communicates(equation):
            waiting.append(equation)
            continue
        rest = [atom for equation in jaxpr.eqns[i:] for atom in equation.invars]
        compute(waiting, [*rest, *jaxpr.outvars])
        waiting = []
        operands = [read(atom) for atom in equation.invars]
        outputs = RULES[equation.primitive](equation.params, operands, turns)
        values |= zip(equation.outvars, outputs, strict=True)
    compute(waiting, jaxpr.outvars)
    return [read(atom) for atom in jaxpr.outvars]


def _parts(
    equations: list[JaxprEqn], values: dict[Any, Value]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Those whose results are the same on all virtual devices, and the others."""
    own = {var for var, value in values.items() if value.own}
    common, differing = list[JaxprEqn](), list[JaxprEqn]()
    for equation in equations:
        if own.isdisjoint(_variables(equation.invars)):
            common.append(equation)
        else:
            differing.append(equation)
            own |= set(equation.outvars)
    return common, differing


def _variables(atoms: Iterable[Any]) -> list[Any]:
    """Without constants, each once, in order: a program must not depend on that of a set."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def _communicates(equation: JaxprEqn) -> bool:
    """Whether an equation, or one inside it, communicates between virtual devices."""
    inner = (each for jaxpr in jaxprs_in_params(equation.params) for each in jaxpr.eqns)
    return equation.primitive in COMMUNICATIONS or any(map(_communicates, inner))


def _evaluate(
    jaxpr: Jaxpr,
    equations: list[JaxprEqn],
    invars: list[Any],
    outvars: list[Any],
    arrays: Sequence[Any],
) -> list[Any]:
    """Some equations of a program."""
    part = jaxpr.replace(constvars=[], invars=invars, outvars=outvars, eqns=equations)
    return list(jax.core.eval_jaxpr(part, [], *arrays))


def _loop(
    function: Callable[[Sequence[Any]], list[Any]], arguments: Sequence[Value], turns: Turns
) -> list[Any]:
    """The function on each virtual device in turn; results `[n, …]`."""

    def of_one(own: list[Any]) -> list[Any]:
        mine = iter(own)
        return [next(mine) if value.own else value.array for value in arguments]

    def nothing(arrays: list[Any]) -> list[Any]:
        return [jax.lax.full(x.shape, 0, x.dtype) for x in jax.eval_shape(function, arrays)]

    # In a branch, so that what is inside is not fused with what is outside, where shapes, and even
    # whether there is a loop, depend on n. Of two branches without a matrix product the compiler
    # would compute both; of three it does not.
    branches = [function, nothing, nothing]
    return list(
        jax.lax.map(
            lambda own: jax.lax.switch(turns.zero, branches, of_one(own)),
            [value.array for value in arguments if value.own],
        )
    )


def _psum(params: Any, operands: list[Value], turns: Turns) -> list[Value]:
    def added(value: Value) -> jax.Array:
        return functools.reduce(operator.add, turns.everywhere(value))

    return [Value(added(value), False) for value in operands]


def _reduce(reduction: Any, params: Any, operands: list[Value], turns: Turns) -> list[Value]:
    local, over = reduction
    return [Value(over(local(turns.each(x), axis=0), turns.axis), False) for x in operands]


def _all_gather(params: Any, operands: list[Value], turns: Turns) -> list[Value]:
    at = params["all_gather_dimension"]
    of_all = [jnp.moveaxis(turns.everywhere(value), 0, at) for value in operands]
    if params["tiled"]:
        of_all = [x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :]) for x in of_all]
    return [Value(x, False) for x in of_all]


def _axis_index(params: Any, operands: list[Value], turns: Turns) -> list[Value]:
    first = jax.lax.axis_index(turns.axis) * turns.number
    return [Value(first + jnp.arange(turns.number, dtype=jnp.int32), True)]


def _call(params: Any, operands: list[Value], turns: Turns) -> list[Value]:
    return play(params["jaxpr"].jaxpr, params["jaxpr"].consts, operands, turns)


def _owned(function: Callable[[list[Value]], list[Value]], operands: list[Value]) -> list[bool]:
    """Which outputs may differ between virtual devices; nothing is computed."""
    found: list[bool] = []

    def trace(arrays: list[Any]) -> list[Any]:
        outputs = function(_values(arrays, [value.own for value in operands]))
        found.extend(value.own for value in outputs)
        return [value.array for value in outputs]

    jax.eval_shape(trace, [value.array for value in operands])
    return found


def _carried(
    step: Callable[[list[Value]], list[Value]], carry: list[Value], turns: Turns
) -> list[Value]:
    """The carry of a loop, where any step may make virtual devices differ, of each of them."""
    while True:
        later = _owned(step, carry)
        grown = [
            Value(turns.each(value), True) if own else value
            for value, own in zip(carry, later, strict=True)
        ]
        if [value.own for value in grown] == [value.own for value in carry]:
            return carry
        carry = grown


def _values(arrays: list[Any], owned: Sequence[bool]) -> list[Value]:
    return [Value(x, own) for x, own in zip(arrays, owned, strict=True)]


def _like(values: list[Value], owned: Sequence[bool], turns: Turns) -> list[Any]:
    """Arrays of values, of each virtual device where told so."""
    return [turns.each(v) if own else v.array for v, own in zip(values, owned, strict=True)]


def _scan(params: Any, operands: list[Value], turns: Turns) -> list[Value]:
    body, fixed = params["jaxpr"], params["num_consts"]
    end = fixed + params["num_carry"]
    consts, carry, xs = operands[:fixed], operands[fixed:end], operands[end:]
    # The steps lead in what is scanned.
    steps = [Value(jnp.swapaxes(x, 0, 1) if own else x, own) for x, own in xs]

    def step(carry: list[Value], x: list[Value]) -> list[Value]:
        return play(body.jaxpr, body.consts, [*consts, *carry, *x], turns)

    first = [Value(x.array[0], x.own) for x in steps]
    carry = _carried(lambda carry: step(carry, first)[: len(carry)], carry, turns)
    owned = [value.own for value in carry]
    own_ys = _owned(lambda carry: step(carry, first), carry)[len(carry) :]

    def scanned(arrays: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = step(_values(arrays, owned), _values(x, [each.own for each in xs]))
        return _like(out[: len(owned)], owned, turns), _like(out[len(owned) :], own_ys, turns)

    after, ys = jax.lax.scan(
        scanned,
        [value.array for value in carry],
        [x.array for x in steps],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    ys = [jnp.swapaxes(y, 0, 1) if own else y for y, own in zip(ys, own_ys, strict=True)]
    return _values([*after, *ys], [*owned, *own_ys])


def _while(params: Any, operands: list[Value], turns: Turns) -> list[Value]:
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    of_test, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def step(carry: list[Value]) -> list[Value]:
        return play(body.jaxpr, body.consts, [*operands[of_test:of_body], *carry], turns)

    carry = _carried(step, operands[of_body:], turns)
    owned = [value.own for value in carry]
    values = functools.partial(_values, owned=owned)

    def unfinished(x: list[Any]) -> jax.Array:
        return _alike(play(test.jaxpr, test.consts, [*operands[:of_test], *values(x)], turns)[0])

    def advance(arrays: list[Any]) -> list[Any]:
        later = _like(step(values(arrays)), owned, turns)
        if not test.out_avals[0].ndim:
            return later
        going = unfinished(arrays)  # of each lane of a function that is vmapped

        def where_going(new: Any, old: Any, own: bool) -> Any:
            mask = jax.lax.broadcast_in_dim(going, new.shape, range(own, own + going.ndim))
            return jax.lax.select(mask, new, old)

        return list(map(where_going, later, arrays, owned))

    start = [value.array for value in carry]
    return values(jax.lax.while_loop(lambda x: jnp.any(unfinished(x)), advance, start))


def _cond(params: Any, operands: list[Value], turns: Turns) -> list[Value]:
    index, *given = operands
    branches = [
        functools.partial(play, branch.jaxpr, branch.consts, turns=turns)
        for branch in params["branches"]
    ]
    owned = list(map(any, zip(*(_owned(branch, given) for branch in branches), strict=True)))

    def arrays_of(branch: Callable[[list[Value]], list[Value]]) -> Callable[..., list[Any]]:
        return lambda: _like(branch(given), owned, turns)

    chosen = jax.lax.switch(_alike(index), [arrays_of(branch) for branch in branches])
    return _values(chosen, owned)


def _alike(value: Value) -> Any:
    """A loop or branch condition around a collective: devices that disagreed would deadlock."""
    assert not value.own, "virtual devices differ in whether they communicate"
    return value.array


RULES: dict[Any, Callable[[Any, list[Value], Turns], list[Value]]] = {
    of_jax.psum_p: _psum,
    of_jax.all_gather_p: _all_gather,
    of_jax.axis_index_p: _axis_index,
    of_jax.jit_p: _call,
    of_jax.scan_p: _scan,
    of_jax.while_p: _while,
    of_jax.cond_p: _cond,
    **{name: functools.partial(_reduce, how) for name, how in REDUCTIONS.items()},
}
