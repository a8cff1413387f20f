"""The Blackwell backward kernel of heads wider than 128, whose tiles of tensor memory take turns."""
