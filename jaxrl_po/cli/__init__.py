"""The commands of `jaxrl-po`, one module each."""
