"""Ways from a call to the launch of an earlier one that looks like it."""
