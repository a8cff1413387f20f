"""New keys and values into pages of a cache, rotated on the way where that is asked for."""
