"""Searches settings of a method on an environment, seeds and numbers vmapped in one program."""

from jaxrl_po.__main__ import entry

if __name__ == "__main__":
    entry("sweep")
