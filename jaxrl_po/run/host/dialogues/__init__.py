"""Dialogues with environments in Python, whose public methods are tools of the policy."""
