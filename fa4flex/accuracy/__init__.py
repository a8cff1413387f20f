"""The command `python -m fa4flex accuracy`: errors of formats of 16, 8 and 4 bits on hard tensors."""
