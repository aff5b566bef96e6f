"""Connections of an HTTP server: who is let in, for how long, and that nobody on one of them ends the others."""
