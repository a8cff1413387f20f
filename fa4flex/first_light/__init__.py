"""`python -m fa4flex first-light`: is every kernel right on this GPU, and how fast, in one report."""
