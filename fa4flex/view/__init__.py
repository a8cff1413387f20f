"""What people look at: explanations, listings and pictures of a program. Nothing here changes a result."""
