"""Pathfinder (Linsley et al. 2018, arXiv 1805.08315; Long Range Arena): do two discs lie on the same dashed curve?

An image has two long curves and shorter ones that distract. A disc is on the first dash of a long curve, the other one
on the last dash of the same curve with label 1, and of the other curve with label 0. Where the discs are, how far
apart, and in which directions their dashes point, should not tell the label. So where these make one label likelier
than the other, some of its images are left out, until both are about as likely, as far as a regression tells.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any, NamedTuple

import numpy as np
import scipy.special

TRIES = 4  # how often a long curve is begun in an image before the image is given up
CANDIDATES = 12  # how many places for the next dash are looked at; the first that has room is taken
FAR = 1e6  # the place of dashes that are not drawn
POOL = 2048  # how many images are begun together at most
SPARE = 6  # how many are begun for one that is asked for, since not all have room and some are left out
POOLS = 14  # of images with room, from which it is found what discs tell
DIRECTIONS = 5  # features of the distance and the directions, which tell most
STEPS = 10  # of Newton's method
PENALTY = 3.0  # of the squares of a regression's weights
WAYS = list(product(range(2), repeat=2))  # to put discs on two curves


class Style(NamedTuple):
    """Of the images of a size, in pixels."""

    dash: float  # length of a dash
    gap: float  # from the end of a dash to the next one
    dashes: int  # number of dashes in a long curve
    distractors: int  # number of curves of half as many dashes, which end early where there is no room
    turn: float = 0.8  # radians from a dash to the next one, at most
    width: float = 1.2  # width of a line
    radius: float = 1.7  # radius of a disc

    @property
    def pitch(self) -> float:
        return self.dash + self.gap

    @property
    def margin(self) -> float:
        """Between dashes that do not follow one another."""
        return 2 * self.gap + 1

    def mixed(self, other: "Style", share: float) -> "Style":
        """With this share of the other in each number."""
        mixed: Any = [(1 - share) * mine + share * its for mine, its in zip(self, other, strict=True)]
        dash, gap, dashes, distractors, *rest = mixed
        return Style(dash, gap, round(dashes), round(distractors), *rest)


# The long curves, end to end, are about as long as a side.
STYLES = {
    32: Style(3, 1.5, 6, 3),
    64: Style(4, 2, 10, 5),
    128: Style(5, 3, 16, 8, width=1.5, radius=2.5),
    256: Style(8, 4, 20, 12, width=2, radius=4),
}


class Odds(NamedTuple):
    """The log odds of label 1 as a function of what can be seen of discs: a logistic regression."""

    mean: np.ndarray
    deviation: np.ndarray
    weights: np.ndarray

    def __call__(self, features: np.ndarray) -> np.ndarray:
        return terms((features - self.mean) / self.deviation) @ self.weights


class Drawings(NamedTuple):
    """What images are drawn from."""

    dashes: np.ndarray  # float32 [images, dashes, 2, (y, x)]: the centre, and a direction of length 1
    curves: np.ndarray  # int [dashes]: which curve a dash is of; 0 and 1 are the long ones
    discs: np.ndarray  # int [images, 2]: which long curve the first disc begins, and which the second one ends

    @property
    def ends(self) -> np.ndarray:
        """The dashes that the discs are on: [images, 2, 2, (y, x)]."""
        return dashes_of_discs(self.dashes, self.discs, int(np.count_nonzero(self.curves == 0)))

    @property
    def labels(self) -> np.ndarray:
        return (self.discs[:, 0] == self.discs[:, 1]).astype(np.int32)


class Examples(NamedTuple):
    images: np.ndarray  # uint8 [images, side, side]
    targets: np.ndarray  # uint8 [images, side, side]: how many discs are on the curve of a pixel, and 1; 0 on none
    labels: np.ndarray  # int32 [images]


def examples(side: int, count: int, seed: int | list[int], style: Style, odds: Odds) -> Examples:
    """With the odds of this size and style."""
    random = np.random.default_rng(seed)
    parts: list[Examples] = []
    while (missing := count - sum(len(part.labels) for part in parts)) > 0:
        drawings = plan(side, style, odds, random, missing)
        parts.append(Examples(*draw(side, style, drawings), drawings.labels))
    return Examples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def plan(side: int, style: Style, odds: Odds, random: np.random.Generator, most: int) -> Drawings:
    """Of at most so many images, those that have room and are not left out for what their discs tell."""
    dashes = long_curves(side, style, random, min(POOL, SPARE * most))
    # An image stays with a probability that is the odds against its label, at most 1.
    discs = random.integers(2, size=(len(dashes), 2))
    told = odds(surroundings(side, dashes_of_discs(dashes, discs, style.dashes)))
    likelier = np.where(discs[:, 0] == discs[:, 1], told, -told)
    kept = np.flatnonzero(np.log(random.random(len(dashes))) < -likelier)[:most]
    lengths = [style.dashes] * 2 + [max(2, style.dashes // 2)] * style.distractors
    curves = np.repeat(np.arange(len(lengths)), lengths)
    drawings = Drawings(np.full((len(kept), len(curves), 2, 2), FAR, np.float32), curves, discs[kept])
    drawings.dashes[:, curves < 2] = dashes[kept]
    for distractor in range(2, len(lengths)):
        grow(side, style, drawings.dashes, np.flatnonzero(curves == distractor), 1, random)
    return drawings


def long_curves(side: int, style: Style, random: np.random.Generator, begun: int) -> np.ndarray:
    """The dashes of both long curves of an image, one curve after the other, where both have room."""
    dashes = np.full((begun, 2 * style.dashes, 2, 2), FAR, np.float32)
    for curve in np.split(np.arange(2 * style.dashes), 2):
        dashes = dashes[grow(side, style, dashes, curve, TRIES, random)]
    return dashes


def dashes_of_discs(dashes: np.ndarray, discs: np.ndarray, length: int) -> np.ndarray:
    """[images, 2, 2, (y, x)], of long curves of so many dashes."""
    return dashes[np.arange(len(dashes))[:, None], length * discs + [0, length - 1]]


def odds_of(side: int, style: Style, apply: Callable[..., Iterable[np.ndarray]] = map) -> Odds:
    """What discs tell of the label. With the `map` of a pool of processes these make the images.

    Raises ValueError if the style has no room in images of this size.
    """
    seen = np.concatenate(list(apply(partial(seen_of_discs, side, style), range(POOLS))), 1)
    if not seen.size:
        raise ValueError(f"images of {side} x {side} pixels have no room for two curves as in {style}")
    labels = [first == second for first, second in WAYS]
    return log_odds(np.concatenate(seen), np.repeat(labels, seen.shape[1]))


def seen_of_discs(side: int, style: Style, seed: int) -> np.ndarray:
    """In a pool of images, with the discs in all ways: [ways, images, features]."""
    dashes = long_curves(side, style, np.random.default_rng([0, seed]), POOL)  # examples have other seeds
    discs = [np.tile(way, (len(dashes), 1)) for way in WAYS]
    return np.stack([surroundings(side, dashes_of_discs(dashes, x, style.dashes)) for x in discs])


def surroundings(side: int, ends: np.ndarray) -> np.ndarray:
    """What can be seen of discs without following a curve, whatever way an image is turned or mirrored: [images, 10].

    From their dashes [images, 2, 2, (y, x)]: how far apart they are, where the dashes point as seen from the line
    between them, and how far each disc, and the middle between them, is from the middle of the image.
    """
    places, directions = ends[:, :, 0] / side - 0.5, ends[:, :, 1] * [[1], [-1]]
    line = places[:, 1] - places[:, 0]
    apart = np.linalg.norm(line, axis=-1, keepdims=True)
    y, x = np.moveaxis(line / apart, -1, 0)[:, :, None]
    along = directions[..., 0] * y + directions[..., 1] * x
    across = directions[..., 0] * x - directions[..., 1] * y
    across = across * np.sign(across[:, :1])
    middle = np.linalg.norm(places.mean(1), axis=-1, keepdims=True)
    return np.concatenate([apart, along, across, middle, np.sort(np.abs(places), axis=-1).reshape(-1, 4)], 1)


def log_odds(features: np.ndarray, labels: np.ndarray) -> Odds:
    """Of label 1."""
    mean, deviation = features.mean(0), features.std(0)
    x = terms((features - mean) / deviation)
    weights = np.zeros(x.shape[1])
    for _ in range(STEPS):
        likely = scipy.special.expit(x @ weights)
        curvature = (x.T * (likely * (1 - likely))) @ x + PENALTY * np.eye(len(weights))
        weights -= np.linalg.solve(curvature, x.T @ (likely - labels) + PENALTY * weights)
    return Odds(mean, deviation, weights)


def terms(x: np.ndarray) -> np.ndarray:
    """Products of up to two features, and of up to four of the distance and the directions."""
    each = [range(x.shape[1])] * 3 + [range(DIRECTIONS)] * 2
    factors = [chosen for n, of in enumerate(each) for chosen in combinations_with_replacement(of, n)]
    return np.stack([x[:, list(chosen)].prod(1) for chosen in factors], 1)


def grow(
    side: int, style: Style, dashes: np.ndarray, curve: np.ndarray, tries: int, random: np.random.Generator
) -> np.ndarray:
    """Adds a curve, of the dashes of these numbers, to each image; returns where all of it found room."""
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
    """Returns a dash for each image, and whether there is room for it. Unless it begins a curve, it follows the last
    one."""
    images = len(dashes)
    if begins:
        others = dashes
        angle = random.uniform(-np.pi, np.pi, (images, CANDIDATES))
        direction = np.stack([np.sin(angle), np.cos(angle)], -1)
        centre = random.uniform(0, side, (images, CANDIDATES, 2))
    else:
        others, before = dashes[:, :-1], dashes[:, None, -1]
        turn = random.uniform(-style.turn, style.turn, (images, CANDIDATES))
        angle = np.arctan2(before[..., 1, 0], before[..., 1, 1]) + turn
        direction = np.stack([np.sin(angle), np.cos(angle)], -1)
        centre = before[..., 0, :] + style.pitch / 2 * (before[..., 1, :] + direction)
    border = style.pitch / 2 + style.radius
    room = ((border < centre) & (centre < side - border)).all(-1)
    candidates = np.stack([centre, direction], 2).astype(np.float32)
    mine, theirs = (sampled(style, x) for x in (candidates, others))
    squares = (mine[:, :, None, 0] - theirs[:, None, :, 0]) ** 2 + (mine[:, :, None, 1] - theirs[:, None, :, 1]) ** 2
    room &= ~(squares < style.margin**2).any(2).reshape(images, CANDIDATES, 3).any(-1)
    chosen = np.arange(images), room.argmax(1)
    return candidates[chosen], room[chosen]


def sampled(style: Style, dashes: np.ndarray) -> np.ndarray:
    """[images, dashes, 2, 2] -> [images, 3 · dashes, 2]: both ends and the middle stand for a dash."""
    along = style.dash / 2 * np.array([-1, 0, 1], np.float32)[:, None]
    return (dashes[:, :, None, 0] + along * dashes[:, :, None, 1]).reshape(len(dashes), 3 * dashes.shape[1], 2)


def draw(side: int, style: Style, drawings: Drawings) -> tuple[np.ndarray, np.ndarray]:
    """The images, anti-aliased, and their targets."""
    images = np.zeros((len(drawings.dashes), side, side), np.float32)
    targets = np.zeros(images.shape, np.uint8)
    counts = (drawings.discs[:, :, None] == drawings.curves).sum(1)  # [images, dashes]: discs on the curve of a dash
    dash, pixels, covered = strokes(side, drawings.dashes, style.dash / 2, style.width / 2)
    np.maximum.at(images, pixels, covered)
    np.maximum.at(targets, pixels, np.where(covered > 0, counts[dash][:, None, None] + 1, 0).astype(np.uint8))
    places = drawings.ends * [[1], [0]]
    _, pixels, covered = strokes(side, places, 0.0, style.radius)
    np.maximum.at(images, pixels, covered)
    return np.round(images * 255).astype(np.uint8), targets


def strokes(side: int, dashes: np.ndarray, half: float, radius: float) -> tuple[Any, Any, np.ndarray]:
    """Of lines of a half length, with round ends of a radius: which lines there are (image, number), the pixels around
    each (image, y, x), and how much of a pixel the line covers, about: float32 [lines, rows, columns]."""
    image, which = np.nonzero(dashes[..., 0, 0] < FAR)
    centre, direction = np.moveaxis(dashes[image, which], 1, 0)[:, :, None, None]
    reach = int(np.ceil(half + radius + 1))
    pixels = np.moveaxis(np.mgrid[-reach : reach + 1, -reach : reach + 1], 0, -1) + np.floor(centre).astype(int)
    offset = pixels + 0.5 - centre
    along = np.clip((offset * direction).sum(-1, keepdims=True), -half, half)
    covered = np.clip(radius + 0.5 - np.linalg.norm(offset - along * direction, axis=-1), 0, 1)
    y, x = np.clip(pixels, 0, side - 1).transpose(3, 0, 1, 2)  # beyond the border nothing is covered
    return (image, which), (image[:, None, None], y, x), covered.astype(np.float32)
