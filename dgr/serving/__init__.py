"""Ways in for programs that do not run trio. Nothing below imports this package; each module needs its own extra."""
