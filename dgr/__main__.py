"""``python -m dgr`` is the ``dgr`` command."""

from __future__ import annotations

import sys

from dgr.cli import main

sys.exit(main())
