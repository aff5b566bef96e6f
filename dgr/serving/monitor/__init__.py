"""What an operator sees of a running stage: metrics, health, readiness."""
