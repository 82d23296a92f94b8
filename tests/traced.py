"""The operations of a program as JAX traced it."""

from jax.extend.core import jaxprs_in_params


def equations(jaxpr):
    """All of a program's, those of functions, branches and loops inside included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
