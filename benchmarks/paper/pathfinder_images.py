"""Pathfinder (Linsley et al. 2018, arXiv 1805.08315; Long Range Arena): do two discs lie on the same dashed curve?

An image has two long curves, and shorter ones as distractors. One disc is on the first dash of a long curve. The other
disc is on the last dash of the same curve (label 1) or of the other long curve (label 0).

The positions of the discs, their distance and the directions of their dashes should not predict the label. If they make
one label more likely, some images with this label are rejected, until a regression finds both about equally likely.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any, NamedTuple

import numpy as np
import scipy.special

TRIES = 4  # attempts to place a long curve in an image before the image is rejected
CANDIDATES = 12  # random candidates for the next dash; the first one with room is used
ROUNDS = (1, 4)  # the first candidate is tried alone, then three more, then the others
FAR = 1e6  # coordinates of dashes that are not drawn
POOL = 2048  # maximum number of images that are generated together
SPARE = 6  # images to start per requested image, since many have no room or are rejected
POOLS = 14  # pools of images that the regression is fitted to
DIRECTIONS = 5  # number of features for the distance and the directions, the strongest predictors
STEPS = 10  # iterations of Newton's method
PENALTY = 3.0  # L2 penalty of the regression's weights
DISC_PAIRS = list(product(range(2), repeat=2))  # the long curves of the first and the second disc


class Style(NamedTuple):
    """The style of images of one size. Lengths are in pixels."""

    dash: float  # length of a dash
    gap: float  # from the end of a dash to the next one
    dashes: int  # number of dashes in a long curve
    distractors: int  # number of short curves with half as many dashes, or fewer if there is no room
    turn: float = 0.8  # maximum turn from a dash to the next one, in radians
    width: float = 1.2  # width of a line
    radius: float = 1.7  # radius of a disc

    @property
    def pitch(self) -> float:
        return self.dash + self.gap

    @property
    def margin(self) -> float:
        """The minimum distance of dashes that are not consecutive."""
        return 2 * self.gap + 1

    def mixed(self, other: "Style", share: float) -> "Style":
        """Interpolate all numbers. `share` is the weight of the other style."""
        mixed: Any = [(1 - share) * x + share * y for x, y in zip(self, other, strict=True)]
        dash, gap, dashes, distractors, *rest = mixed
        return Style(dash, gap, round(dashes), round(distractors), *rest)


# The end-to-end length of the long curves is about the side of the image.
STYLES = {
    32: Style(3, 1.5, 6, 3),
    64: Style(4, 2, 10, 5),
    128: Style(5, 3, 16, 8, width=1.5, radius=2.5),
    256: Style(8, 4, 20, 12, width=2, radius=4),
}


class Odds(NamedTuple):
    """The log odds of label 1 from the features of the discs: a logistic regression."""

    mean: np.ndarray
    deviation: np.ndarray
    weights: np.ndarray

    def __call__(self, features: np.ndarray) -> np.ndarray:
        return terms((features - self.mean) / self.deviation) @ self.weights


class Drawings(NamedTuple):
    """The geometry of images, before they are drawn."""

    dashes: np.ndarray  # float32 [images, dashes, 2, (y, x)]: the centre, and a direction of length 1
    curves: np.ndarray  # int [dashes]: the curve of each dash; 0 and 1 are the long ones
    discs: np.ndarray  # int [images, 2]: the long curves that begin at the first disc and end at the second one

    @property
    def ends(self) -> np.ndarray:
        """Return the dashes under the discs: [images, 2, 2, (y, x)]."""
        return dashes_of_discs(self.dashes, self.discs, int(np.count_nonzero(self.curves == 0)))

    @property
    def labels(self) -> np.ndarray:
        return (self.discs[:, 0] == self.discs[:, 1]).astype(np.int32)


class Examples(NamedTuple):
    images: np.ndarray  # uint8 [images, side, side]
    targets: np.ndarray  # uint8 [images, side, side]: 0 on no curve, otherwise 1 + number of discs on the pixel's curve
    labels: np.ndarray  # int32 [images]


def examples(side: int, count: int, seed: int | list[int], style: Style, odds: Odds) -> Examples:
    """Return images with their targets and labels. The odds must be for this size and style."""
    random = np.random.default_rng(seed)
    parts: list[Examples] = []
    while (missing := count - sum(len(part.labels) for part in parts)) > 0:
        drawings = plan(side, style, odds, random, missing)
        parts.append(Examples(*draw(side, style, drawings), drawings.labels))
    return Examples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def plan(side: int, style: Style, odds: Odds, random: np.random.Generator, most: int) -> Drawings:
    """Return at most `most` drawings: images with enough room that are not rejected because of their discs."""
    dashes = long_curves(side, style, random, min(POOL, SPARE * most))
    # An image is kept with a probability equal to the odds against its label, at most 1.
    discs = random.integers(2, size=(len(dashes), 2))
    predicted = odds(surroundings(side, dashes_of_discs(dashes, discs, style.dashes)))
    likelier = np.where(discs[:, 0] == discs[:, 1], predicted, -predicted)
    kept = np.flatnonzero(np.log(random.random(len(dashes))) < -likelier)[:most]
    lengths = [style.dashes] * 2 + [max(2, style.dashes // 2)] * style.distractors
    curves = np.repeat(np.arange(len(lengths)), lengths)
    drawings = Drawings(np.full((len(kept), len(curves), 2, 2), FAR, np.float32), curves, discs[kept])
    drawings.dashes[:, curves < 2] = dashes[kept]
    for distractor in range(2, len(lengths)):
        grow(side, style, drawings.dashes, np.flatnonzero(curves == distractor), 1, random)
    return drawings


def long_curves(side: int, style: Style, random: np.random.Generator, count: int) -> np.ndarray:
    """Start `count` images. If both long curves have room, return their dashes, one curve after the other."""
    dashes = np.full((count, 2 * style.dashes, 2, 2), FAR, np.float32)
    for curve in np.split(np.arange(2 * style.dashes), 2):
        dashes = dashes[grow(side, style, dashes, curve, TRIES, random)]
    return dashes


def dashes_of_discs(dashes: np.ndarray, discs: np.ndarray, length: int) -> np.ndarray:
    """Return the dashes under the discs, [images, 2, 2, (y, x)]. Long curves have `length` dashes."""
    return dashes[np.arange(len(dashes))[:, None], length * discs + [0, length - 1]]


def odds_from_discs(side: int, style: Style, apply: Callable[..., Iterable[np.ndarray]] = map) -> Odds:
    """Fit the odds of label 1 to the features of the discs. `apply` may be the `map` of a pool of processes.

    Raises ValueError if images of this size have no room for the style's curves.
    """
    features = np.concatenate(list(apply(partial(disc_features, side, style), range(POOLS))), 1)
    if not features.size:
        raise ValueError(f"images of {side} x {side} pixels have no room for two curves as in {style}")
    labels = [first == second for first, second in DISC_PAIRS]
    return fit_log_odds(np.concatenate(features), np.repeat(labels, features.shape[1]))


def disc_features(side: int, style: Style, seed: int) -> np.ndarray:
    """Return features of a pool of images, with all pairs of discs: [pairs, images, features]."""
    dashes = long_curves(side, style, np.random.default_rng([0, seed]), POOL)  # examples have other seeds
    discs = [np.tile(pair, (len(dashes), 1)) for pair in DISC_PAIRS]
    return np.stack([surroundings(side, dashes_of_discs(dashes, x, style.dashes)) for x in discs])


def surroundings(side: int, ends: np.ndarray) -> np.ndarray:
    """Return features of discs and their dashes, [images, 2, 2, (y, x)], that do not need the curves: [images, 10].

    The features are the distance of the discs, the directions of their dashes relative to the line between them, and
    how far the discs and their midpoint are from the centre of the image. Rotations by 90 degrees and reflections of
    the image do not change them.
    """
    positions, directions = ends[:, :, 0] / side - 0.5, ends[:, :, 1] * [[1], [-1]]
    line = positions[:, 1] - positions[:, 0]
    distance = np.linalg.norm(line, axis=-1, keepdims=True)
    y, x = np.moveaxis(line / distance, -1, 0)[:, :, None]
    along = directions[..., 0] * y + directions[..., 1] * x
    across = directions[..., 0] * x - directions[..., 1] * y
    across = across * np.sign(across[:, :1])
    middle = np.linalg.norm(positions.mean(1), axis=-1, keepdims=True)
    return np.concatenate([distance, along, across, middle, np.sort(np.abs(positions), axis=-1).reshape(-1, 4)], 1)


def fit_log_odds(features: np.ndarray, labels: np.ndarray) -> Odds:
    """Fit the log odds of label 1."""
    mean, deviation = features.mean(0), features.std(0)
    x = terms((features - mean) / deviation)
    weights = np.zeros(x.shape[1])
    for _ in range(STEPS):
        likely = scipy.special.expit(x @ weights)
        curvature = (x.T * (likely * (1 - likely))) @ x + PENALTY * np.eye(len(weights))
        weights -= np.linalg.solve(curvature, x.T @ (likely - labels) + PENALTY * weights)
    return Odds(mean, deviation, weights)


def terms(x: np.ndarray) -> np.ndarray:
    """Return products of up to two features, and of up to four features for the distance and the directions."""
    columns = [range(x.shape[1])] * 3 + [range(DIRECTIONS)] * 2
    factors = [chosen for n, some in enumerate(columns) for chosen in combinations_with_replacement(some, n)]
    return np.stack([x[:, list(chosen)].prod(1) for chosen in factors], 1)


def grow(
    side: int, style: Style, dashes: np.ndarray, curve: np.ndarray, tries: int, random: np.random.Generator
) -> np.ndarray:
    """Add a curve with these dash numbers to each image. Return which images have room for the whole curve."""
    found = np.zeros(len(dashes), bool)
    for _ in range(tries):
        growing = np.flatnonzero(~found)
        dashes[growing[:, None], curve] = FAR
        for dash in curve:
            added, room = next_dash(side, style, dashes[growing, :dash], dash == curve[0], random)
            growing = growing[room]
            dashes[growing, dash] = added[room]
        found[growing] = True
    return found


def next_dash(
    side: int, style: Style, dashes: np.ndarray, begins: bool, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return a dash for each image, and whether there is room for it. It continues the last dash or begins a curve."""
    images = len(dashes)
    if begins:
        others = dashes
        angles = random.uniform(-np.pi, np.pi, (images, CANDIDATES))
        centres = random.uniform(0, side, (images, CANDIDATES, 2))
    else:
        others, before = dashes[:, :-1], dashes[:, None, -1]
        turn = random.uniform(-style.turn, style.turn, (images, CANDIDATES))
        angles = np.arctan2(before[..., 1, 0], before[..., 1, 1]) + turn
    border = style.pitch / 2 + style.radius
    added, room = np.zeros((images, 2, 2), np.float32), np.zeros(images, bool)
    for some in np.split(np.arange(CANDIDATES), ROUNDS):
        left = np.flatnonzero(~room)
        angle = angles[left[:, None], some]
        direction = np.stack([np.sin(angle), np.cos(angle)], -1)
        if begins:
            centre = centres[left[:, None], some]
        else:
            centre = before[left, :, 0] + style.pitch / 2 * (before[left, :, 1] + direction)
        candidates = np.stack([centre, direction], 2).astype(np.float32)
        fits = ((border < centre) & (centre < side - border)).all(-1) & ~crowded(style, candidates, others[left])
        room[left] = fits.any(1)
        added[left] = candidates[np.arange(len(left)), fits.argmax(1)]
    return added, room


def crowded(style: Style, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return which new dashes, [images, new, 2, 2], are too near to an old one, [images, old, 2, 2]."""
    y, x = (new[:, :, None, 0, axis] - old[:, None, :, 0, axis] for axis in range(2))
    # Only dashes with near centres can be too near. The summand is for rounding.
    image, number, other = np.nonzero(y**2 + x**2 < (style.margin + style.dash + 0.01) ** 2)
    apart = sampled(style, new[image, number])[:, :, None] - sampled(style, old[image, other])[:, None]
    near = (apart[..., 0] ** 2 + apart[..., 1] ** 2 < style.margin**2).any((1, 2))
    found = np.zeros(new.shape[:2], bool)
    found[image[near], number[near]] = True
    return found


def sampled(style: Style, dashes: np.ndarray) -> np.ndarray:
    """Return the ends and the middle of each dash: [dashes, 2, 2] -> [dashes, 3, 2]."""
    along = style.dash / 2 * np.array([-1, 0, 1], np.float32)[:, None]
    return dashes[:, None, 0] + along * dashes[:, None, 1]


def draw(side: int, style: Style, drawings: Drawings) -> tuple[np.ndarray, np.ndarray]:
    """Draw the images, anti-aliased, and their targets."""
    images = np.zeros((len(drawings.dashes), side, side), np.float32)
    targets = np.zeros(images.shape, np.uint8)
    counts = (drawings.discs[:, :, None] == drawings.curves).sum(1)  # [images, dashes]: discs on the curve of a dash
    dash, pixels, covered = strokes(side, drawings.dashes, style.dash / 2, style.width / 2)
    np.maximum.at(images, pixels, covered)
    np.maximum.at(targets, pixels, np.where(covered > 0, counts[dash][:, None, None] + 1, 0).astype(np.uint8))
    centres = drawings.ends * [[1], [0]]
    _, pixels, covered = strokes(side, centres, 0.0, style.radius)
    np.maximum.at(images, pixels, covered)
    return np.round(images * 255).astype(np.uint8), targets


def strokes(side: int, dashes: np.ndarray, half: float, radius: float) -> tuple[Any, Any, np.ndarray]:
    """Rasterise lines of half length `half` with round ends.

    Returns the index of each line (image, number), the pixels around it (image, y, x), and approximately how much of
    each pixel it covers, float32 [lines, rows, columns].
    """
    image, which = np.nonzero(dashes[..., 0, 0] < FAR)
    centre, direction = np.moveaxis(dashes[image, which], 1, 0)[:, :, None, None]
    reach = int(np.ceil(half + radius + 1))
    pixels = np.moveaxis(np.mgrid[-reach : reach + 1, -reach : reach + 1], 0, -1) + np.floor(centre).astype(int)
    offset = pixels + 0.5 - centre
    along = np.clip((offset * direction).sum(-1, keepdims=True), -half, half)
    covered = np.clip(radius + 0.5 - np.linalg.norm(offset - along * direction, axis=-1), 0, 1)
    y, x = np.clip(pixels, 0, side - 1).transpose(3, 0, 1, 2)  # clipped pixels have zero coverage
    return (image, which), (image[:, None, None], y, x), covered.astype(np.float32)
