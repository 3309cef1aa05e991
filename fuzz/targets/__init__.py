"""One file each: its first sentence is the one invariant that it attacks."""
