"""Files that were damaged on purpose: ways to damage them, and every reader of the product that they are brought to."""
