"""Output functions, and their gradients, where they are launches of their own."""
