"""Nothing, in place of what gymnax imports for pictures of its games: with scipy.stats, a third of what a small run takes."""
