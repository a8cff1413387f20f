"""Views of a program: explanations, listings and pictures. Nothing here changes a result."""
