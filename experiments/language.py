"""Trains a transformer on a verifiable task.

Example: `python experiments/language.py --task=addition --out=runs/addition`
"""

from jaxrl_po.__main__ import entry

if __name__ == "__main__":
    entry("language")
