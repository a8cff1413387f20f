"""Hand-written device code that generated modules import. Neither torch nor sympy is imported here."""
