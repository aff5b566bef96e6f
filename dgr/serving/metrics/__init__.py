"""Metrics that several servers have in common."""
