"""Device code that every pipeline shares."""
