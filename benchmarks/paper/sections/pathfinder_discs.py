"""How well Pathfinder's labels can be predicted from the discs, without following a curve.

Boosted trees are trained on the surroundings of discs, and tested on other images. Runs on a CPU; needs scikit-learn.
"""

import importlib.util

import numpy as np

from .. import pathfinder_images
from ..results import Results, Row
from ..training import accuracy_of
from .pathfinder import CONFIDENCE

PARTS = 5  # folds of the cross-validation


def run(results: Results, quick: bool) -> None:
    examples = 200 if quick else 20_000
    results.begin(examples=examples)
    if importlib.util.find_spec("sklearn") is None:
        results.fields["missing"] = {"all": "needs scikit-learn"}
        return

    def rows_of(side: int) -> list[Row]:
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.model_selection import cross_val_predict

        features, labels = disc_features(side, examples)
        trees = HistGradientBoostingClassifier(learning_rate=0.05, max_iter=150, random_state=0)
        right = cross_val_predict(trees, features, labels, cv=PARTS) == labels
        return [accuracy_of(right, CONFIDENCE)]

    results.measure([{"side": side} for side in sorted(pathfinder_images.STYLES)[: 1 if quick else None]], rows_of)


def disc_features(side: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features and labels of `count` images without distractors."""
    style = pathfinder_images.STYLES[side]._replace(distractors=0)
    odds, random = pathfinder_images.odds_from_discs(side, style), np.random.default_rng(side)
    features: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    while (missing := count - sum(map(len, labels))) > 0:
        drawings = pathfinder_images.plan(side, style, odds, random, missing)
        features.append(pathfinder_images.surroundings(side, drawings.ends))
        labels.append(drawings.labels)
    return np.concatenate(features), np.concatenate(labels)
