"""A small DeepSeek V4 model that has learned: English text, and to recall what was stated far back."""
