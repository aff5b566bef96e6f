"""Traces as people and other programs read them: accounts, files for Perfetto, OpenTelemetry."""
