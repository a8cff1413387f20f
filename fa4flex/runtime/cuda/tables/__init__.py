"""Memory that a launch reads besides tensors: block tables, and corrected lengths."""
