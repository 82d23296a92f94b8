"""Tests a claim about methods on many seeds, each arm tuned."""

from jaxrl_po.__main__ import entry

if __name__ == "__main__":
    entry("study")
