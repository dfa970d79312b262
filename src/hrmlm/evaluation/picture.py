"""Where pictures and their data go, and what draws them."""

import os
from pathlib import Path
from typing import Any

from hrmlm.errors import UserError


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files. Raises: UserError naming the extra where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("the picture needs matplotlib: pip install 'hrmlm[study]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def check_out(directory: Path) -> None:
    """Before the work, not after it: can a picture be drawn, and written there?

    Raises: UserError if not.
    """
    pyplot()
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UserError(f"--out {directory}: {place} is a file; give a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"--out {directory}: {place} may not be written to; give another directory")
