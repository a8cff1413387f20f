"""`python -m fa4flex bench`: fa4flex and every installed peer, timed in one run. See docs/benchmarks.md."""
