"""Stages lost, cut off, stalled and slowed down."""
