"""Empty stand-in for what gymnax imports to draw games: its import takes long, with scipy.stats."""
