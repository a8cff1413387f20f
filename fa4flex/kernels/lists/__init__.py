"""Code that kernels for listed keys share, on any chip: entries that count, unions, tiles, keys, masks."""
