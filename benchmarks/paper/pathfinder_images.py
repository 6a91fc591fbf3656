"""Pathfinder (Linsley et al. 2018, arXiv 1805.08315; Long Range Arena): do two discs lie on the same dashed curve?

An image has two long curves and shorter ones that distract. With label 1 the discs are the ends of one of the long
curves, with label 0 an end of each. The geometry is drawn before the label is, and is kept only if both pairs of discs
are about as far apart, so that their distance does not tell the label.
"""

from typing import Any, NamedTuple

import numpy as np

TRIES = 4  # how often a long curve is begun in an image before the image is given up
CANDIDATES = 12  # how many places for the next dash are looked at; the first that has room is taken
FAR = 1e6  # the place of dashes that are not drawn


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


class Drawings(NamedTuple):
    """What images are drawn from."""

    dashes: np.ndarray  # float32 [images, dashes, 2, (y, x)]: the centre, and a direction of length 1
    curves: np.ndarray  # int [dashes]: which curve a dash is of; 0 and 1 are the long ones
    counts: np.ndarray  # int [images, dashes]: how many discs are on the curve that a dash is of
    discs: np.ndarray  # [images, 2, (y, x)]
    labels: np.ndarray  # int32 [images]


class Examples(NamedTuple):
    images: np.ndarray  # uint8 [images, side, side]
    targets: np.ndarray  # uint8 [images, side, side]: how many discs are on the curve of a pixel, and 1; 0 on none
    labels: np.ndarray  # int32 [images]


def examples(side: int, count: int, seed: int | list[int], style: Style | None = None) -> Examples:
    """Without a style, of that of the size."""
    style = style or STYLES[side]
    random = np.random.default_rng(seed)
    parts: list[Examples] = []
    while (missing := count - sum(len(part.labels) for part in parts)) > 0:
        attempts = min(512, max(32, 16 * missing))  # some fifteenth of them become images
        drawings = plan(side, style, attempts, random)
        parts.append(Examples(*draw(side, style, drawings), drawings.labels))
    return Examples(*(np.concatenate(arrays)[:count] for arrays in zip(*parts, strict=True)))


def plan(side: int, style: Style, attempts: int, random: np.random.Generator) -> Drawings:
    """Of as many images as there is room for among so many attempts."""
    lengths = [style.dashes] * 2 + [max(2, style.dashes // 2)] * style.distractors
    dashes = np.full((attempts, sum(lengths), 2, 2), FAR, np.float32)
    first, second = np.split(np.arange(2 * style.dashes), 2)
    for curve in (first, second):
        dashes = dashes[grow(side, style, dashes, curve, TRIES, random)]

    ends = dashes[:, [first[0], first[-1], second[0], second[-1]], 0].reshape(-1, 2, 2, 2)
    swapped = random.random(len(ends)) < 0.5
    ends[swapped] = ends[swapped, ::-1]
    same = ends[:, 0]
    apart = np.stack([np.stack([ends[:, 0, i], ends[:, 1, j]], 1) for i in (0, 1) for j in (0, 1)], 1)
    # Distances in the same interval are as frequent with either label.
    near, far = (np.floor(distance(pairs) / (side / 16)) for pairs in (same[:, None], apart))
    alike = near == far
    kept, chosen = alike.any(1), alike.argmax(1)
    labels = random.integers(2, size=len(ends)).astype(np.int32)
    discs = np.where(labels[:, None, None] == 1, same, apart[np.arange(len(ends)), chosen])

    dashes, discs, labels, swapped = dashes[kept], discs[kept], labels[kept], swapped[kept]
    curves = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.where(labels[:, None] == 1, 2 * (curves == swapped[:, None]), curves < 2)
    for distractor in range(2, len(lengths)):
        grow(side, style, dashes, np.flatnonzero(curves == distractor), 1, random)
    return Drawings(dashes, curves, counts, discs, labels)


def distance(pairs: np.ndarray) -> np.ndarray:
    return np.linalg.norm(pairs[..., 0, :] - pairs[..., 1, :], axis=-1)


def grow(
    side: int, style: Style, dashes: np.ndarray, curve: np.ndarray, tries: int, random: np.random.Generator
) -> np.ndarray:
    """Adds a curve, of the dashes of these numbers, to each image; returns where all of it found room."""
    missing = np.arange(len(dashes))
    for _ in range(tries):
        tried = dashes[missing]
        tried[:, curve] = FAR
        grown = np.ones(len(missing), bool)
        for dash in curve:
            grown &= place(side, style, tried, dash, dash == curve[0], grown, random)
        dashes[missing] = tried
        missing = missing[~grown]
    return ~np.isin(np.arange(len(dashes)), missing)


def place(
    side: int,
    style: Style,
    dashes: np.ndarray,
    dash: int,
    begins: bool,
    wanted: np.ndarray,
    random: np.random.Generator,
) -> np.ndarray:
    """Adds a dash to each image where it is wanted and there is room; returns where it was added."""
    images = len(dashes)
    if begins:
        others = dashes[:, :dash]
        angle = random.uniform(-np.pi, np.pi, (images, CANDIDATES))
        direction = np.stack([np.sin(angle), np.cos(angle)], -1)
        centre = random.uniform(0, side, (images, CANDIDATES, 2))
    else:
        others, before = dashes[:, : dash - 1], dashes[:, None, dash - 1]
        turn = random.uniform(-style.turn, style.turn, (images, CANDIDATES))
        angle = np.arctan2(before[..., 1, 0], before[..., 1, 1]) + turn
        direction = np.stack([np.sin(angle), np.cos(angle)], -1)
        centre = before[..., 0, :] + style.pitch / 2 * (before[..., 1, :] + direction)
    border = style.pitch / 2 + style.radius
    room = wanted[:, None] & ((border < centre) & (centre < side - border)).all(-1)
    candidates = np.stack([centre, direction], 2).astype(np.float32)
    mine, theirs = (sampled(style, x) for x in (candidates, others))
    squares = (mine[:, :, None, 0] - theirs[:, None, :, 0]) ** 2 + (mine[:, :, None, 1] - theirs[:, None, :, 1]) ** 2
    near = (squares < style.margin**2).any(2).reshape(images, CANDIDATES, 3).any(-1)
    room &= ~near
    chosen = np.arange(images), room.argmax(1)
    added = room[chosen]
    dashes[added, dash] = candidates[chosen][added]
    return added


def sampled(style: Style, dashes: np.ndarray) -> np.ndarray:
    """[images, dashes, 2, 2] -> [images, 3 · dashes, 2]: both ends and the middle stand for a dash."""
    along = style.dash / 2 * np.array([-1, 0, 1], np.float32)[:, None]
    return (dashes[:, :, None, 0] + along * dashes[:, :, None, 1]).reshape(len(dashes), 3 * dashes.shape[1], 2)


def draw(side: int, style: Style, drawings: Drawings) -> tuple[np.ndarray, np.ndarray]:
    """The images, anti-aliased, and their targets."""
    covered = np.zeros((len(drawings.labels), side, side), np.float32)
    strokes(covered, drawings.dashes, style.dash / 2, style.width / 2, drawings.counts)
    targets = np.ceil(covered)
    images = covered - np.maximum(targets - 1, 0)
    discs = np.stack([drawings.discs, np.zeros_like(drawings.discs)], 2)
    strokes(images, discs, 0.0, style.radius, np.zeros(discs.shape[:2]))
    return np.round(images * 255).astype(np.uint8), targets.astype(np.uint8)


def strokes(images: np.ndarray, dashes: np.ndarray, half: float, radius: float, floors: np.ndarray) -> None:
    """Draws lines of a half length, with round ends of a radius: a pixel is as bright as the line covers it, about.

    What a line covers is brighter than its floor.
    """
    image, which = np.nonzero(dashes[..., 0, 0] < FAR)
    centre, direction = np.moveaxis(dashes[image, which], 1, 0)[:, :, None, None]
    reach = int(np.ceil(half + radius + 1))
    pixels = np.moveaxis(np.mgrid[-reach : reach + 1, -reach : reach + 1], 0, -1) + np.floor(centre).astype(int)
    offset = pixels + 0.5 - centre
    along = np.clip((offset * direction).sum(-1, keepdims=True), -half, half)
    covered = np.clip(radius + 0.5 - np.linalg.norm(offset - along * direction, axis=-1), 0, 1)
    above = np.where(covered > 0, floors[image, which, None, None] + covered, 0)
    y, x = np.clip(pixels, 0, images.shape[1] - 1).transpose(3, 0, 1, 2)  # beyond the border nothing is covered
    np.maximum.at(images, (image[:, None, None], y, x), above.astype(np.float32))
