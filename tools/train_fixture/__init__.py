"""Trains the small DeepSeek V4 model that ``dgr fixture --learned`` writes, and converts it."""
