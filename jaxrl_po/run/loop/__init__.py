"""Training: compiled programs, and the loop around them."""
