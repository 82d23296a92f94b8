"""Rollouts in environments and dialogues that run on the host."""
