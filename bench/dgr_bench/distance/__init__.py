"""How far native numerics, other thread counts and other devices are from exact numerics, as distributions."""
