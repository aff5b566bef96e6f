"""A link on top of its bytes: on this machine, and over slow, distant and bad cables."""
