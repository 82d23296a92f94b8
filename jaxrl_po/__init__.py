"""Policy optimisation in JAX as one idea, collect → estimate → improve, from REINFORCE to DAPO."""

from jaxrl_po.version import __version__ as __version__
