"""Prompts, and rewards for the completions of prompts."""
