"""The Hopper kernel for sums of probabilities per key: the backward's loop over queries, with one product."""
