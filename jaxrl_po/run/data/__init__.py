"""Prompts, and the rewards of what is written to them."""
