"""Lists the operations of a program as JAX traced it."""

from jax.extend.core import jaxprs_in_params


def equations(jaxpr):
    """Returns all equations of a program, including equations inside functions, branches and
    loops."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
