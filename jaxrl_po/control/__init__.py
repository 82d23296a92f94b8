"""Control problems: gymnax environments, and any that speak their interface."""
