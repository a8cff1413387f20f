"""One call: its tensors, and the arguments of a launch that they become."""
