"""Layers of the published widths: bits, speed against the machine's own limits, memory, latencies."""
