"""What a user's function means: traced, with what it captures, as an expression; its derivative, its bounds."""
