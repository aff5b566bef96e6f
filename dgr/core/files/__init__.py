"""Files that people name: where an output may go, how it is written whole or not at all, and how much of an input is read."""
