"""Long Range Arena (Tay et al. 2020, arXiv 2011.04006): the five tasks' shapes, and the small transformer for them."""

from .models import Config

SMALL = {"layers": 2, "width": 64, "heads": 2, "hidden": 128}
TASKS = {  # with the rows of a batch
    "listops": (Config(**SMALL, grid=(2048,), vocabulary=16, classes=10), 32),
    "text": (Config(**SMALL, grid=(4096,), vocabulary=256, classes=2), 32),
    "retrieval": (Config(**SMALL, grid=(4096,), vocabulary=256, classes=2, documents=2), 32),
    "image": (Config(**SMALL, grid=(1024,), vocabulary=256, classes=10), 256),
    "pathfinder": (Config(**SMALL, grid=(1024,), vocabulary=256, classes=2), 256),
}
