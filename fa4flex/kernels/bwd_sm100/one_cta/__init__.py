"""Single CTAs of 128 keys, for heads of at most 128. Their roles are the base of the others'."""
