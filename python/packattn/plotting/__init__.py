"""Pictures of packed rows: the mask of a row, what sees what, and how full the rows are.

Needs matplotlib (``pip install "packattn[plot]"``), imported when something is drawn. Nothing here touches pyplot, so
no display and no backend is needed: every function returns a Figure, to be saved with ``figure.savefig(path)``.

Colours are those of Okabe and Ito, "Color Universal Design" (2008), which stay apart for colour-blind readers; what
is a fault differs in lightness or shape too.
"""

from .bins import plot_bins
from .check import plot_check
from .influence import plot_influence
from .mask import plot_mask

__all__ = ["plot_bins", "plot_check", "plot_influence", "plot_mask"]
