"""Classes of blocks from the lists of each row, as torch's BlockMask holds them."""
