"""Upstream's own programs of the same pin, to measure against."""
