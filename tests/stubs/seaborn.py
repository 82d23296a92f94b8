"""Empty stand-in for seaborn, which gymnax imports to draw games and which loads slowly."""
