"""Hops over the kernel's own TCP and a line between network namespaces."""
