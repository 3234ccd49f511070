"""The cheap worlds: learned dynamics, outcome heads, the imagined environment and the exam that says when to trust them."""
