"""The kernel that merges partial outputs of split keys."""
