"""A GPU, and what is kept for it between launches."""
