"""Long Range Arena (Tay et al. 2020, arXiv 2011.04006): the five tasks' shapes, and the small transformer for them."""

from . import listops
from .models import Config


def small(length: int, vocabulary: int, classes: int, documents: int = 1) -> Config:
    return Config(2, 64, 2, 128, (length,), vocabulary, classes=classes, documents=documents, projected=0.0)


TASKS = {  # each with the batch size
    "listops": (small(2048, listops.VOCABULARY, 10), 32),
    "text": (small(4096, 256, 2), 32),
    "retrieval": (small(4096, 256, 2, documents=2), 32),
    "image": (small(1024, 256, 10), 256),
    "pathfinder": (small(1024, 256, 2), 256),
}
