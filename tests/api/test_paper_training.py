"""The paper's training sections: correct labels, models that differ only in attention, and a quick run."""

import concurrent.futures
import dataclasses
import importlib
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.spatial

pytest.importorskip("optax")
ndimage = pytest.importorskip("scipy.ndimage")
nnx = pytest.importorskip("flax.nnx")

ROOT = pathlib.Path(__file__).parents[2]
SIDES = (32, 64, 128, 256)
SECTIONS = "gpt2_small gpt2_curves gpt2_context bert lra_speed lra_accuracy pathfinder sparse_mlp".split()


@pytest.fixture
def module(monkeypatch):
    for folder in (ROOT, ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    return lambda name: importlib.import_module(f"benchmarks.paper.{name}")


@pytest.fixture
def text(module):
    """Return the module `text`. Skip if the sources of the standard library and of packages are not available."""
    text = module("text")
    found = text.sources(200)
    if sum(len(file.content) for file in found) < 2**20 or len({file.package for file in found}) < 2:
        pytest.skip("there are not enough Python sources of the standard library and of installed packages")
    return text


@pytest.fixture
def planned(module, monkeypatch):
    """Return a function from a size to the module of images, the style of this size, and drawings in this style."""
    images = module("pathfinder_images")
    monkeypatch.setattr(images, "POOL", 400)
    monkeypatch.setattr(images, "POOLS", 2)

    def plan(side, **changes):
        style = images.STYLES[side]._replace(**changes)
        drawings = images.plan(side, style, images.odds_from_discs(side, style), np.random.default_rng(0), 100)
        assert len(drawings.labels) >= 5
        return images, style, drawings

    return plan


@pytest.mark.parametrize("side", [*SIDES[:-1], pytest.param(SIDES[-1], marks=pytest.mark.slow)])
def test_labels_of_discs(planned, side):
    """On an enlarged skeleton, strokes that are no farther apart than a gap form one component."""
    images, style, drawings = planned(side)
    scale = {32: 6, 64: 5, 128: 4, 256: 3}[side]  # larger images have larger gaps
    dashes = np.where(drawings.dashes < images.FAR, drawings.dashes * [[scale], [1]], images.FAR)
    large = style._replace(dash=style.dash * scale, gap=style.gap * scale, width=1.0, radius=1.0)
    scaled = drawings._replace(dashes=dashes)
    drawn_images, _ = images.draw(side * scale, large, scaled)
    for drawn, discs, label in zip(drawn_images, scaled.ends[:, :, 0], drawings.labels, strict=True):
        near = ndimage.distance_transform_edt(drawn < 128) <= scale * (style.gap + 0.3) / 2
        components, _ = ndimage.label(near)
        first, second = (components[tuple(disc.astype(int))] for disc in discs)
        assert first and second and (first == second) == bool(label)


@pytest.mark.parametrize("side", SIDES)
def test_targets_of_pixels(planned, side):
    """The target of a pixel is the number of discs on its curve: one curve has both discs, or two curves have one."""
    images, style, drawings = planned(side)
    _, targets = images.draw(side, style, drawings)
    disc_counts = np.where(drawings.labels == 1, 2, 1)
    for target, discs, count in zip(targets, drawings.ends[:, :, 0].astype(int), disc_counts, strict=True):
        assert all(target[y, x] == count + 1 for y, x in discs)
        assert set(np.unique(target)) == {0, 1, count + 1}
    on_curves = (drawings.discs[:, :, None] == drawings.curves).any(1)
    with_discs = np.where(on_curves[..., None, None], drawings.dashes, images.FAR)
    _, alone = images.draw(side, style, drawings._replace(dashes=with_discs))
    np.testing.assert_array_equal(alone > 0, targets > 1)


def test_pathfinder_images_are_deterministic_and_balanced(module, monkeypatch):
    images = module("pathfinder_images")
    monkeypatch.setattr(images, "POOLS", 3)
    kind = images.STYLES[32], images.odds_from_discs(32, images.STYLES[32])
    drawn, targets, labels = images.examples(32, 300, [1, 2], *kind)
    again = images.examples(32, 300, [1, 2], images.STYLES[32], images.odds_from_discs(32, images.STYLES[32]))
    for first, second in zip((drawn, targets, labels), again, strict=True):
        np.testing.assert_array_equal(first, second)
    other = images.examples(32, 300, [1, 3], *kind).images
    assert not np.array_equal(drawn, other)
    assert drawn.shape == targets.shape == (300, 32, 32) and drawn.dtype == np.uint8 and drawn.max() == 255
    assert abs(labels.mean() - 0.5) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("side", "most"), [(32, 0.66), (64, 0.59), (128, 0.56)])
def test_visible_parts_of_discs_hardly_predict_the_label(module, side, most):
    """A vote of the 25 nearest of the other images is near chance, except for short curves."""
    section = module("sections.pathfinder_discs")
    x, y = section.disc_features(side, 3000)
    x = (x - x.mean(0)) / x.std(0)
    _, near = scipy.spatial.cKDTree(x).query(x, 26)
    assert np.mean((y[near[:, 1:]].mean(1) > 0.5) == y) < most  # the nearest is the image itself


def test_disc_results_become_a_table(module, monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(module("pathfinder_images"), "POOLS", 2)
    results = module("results").Results(tmp_path / "discs.json", {}, minutes=60, fresh=True)
    module("sections.pathfinder_discs").run(results, quick=True)
    (row,) = results.rows
    assert row["side"] == 32 and row["examples"] == 200 and 0.3 < row["accuracy"] < 0.9
    table = importlib.import_module("tables").TABLES["paper pathfinder discs"]({"rows": results.rows})
    assert f"{100 * row['accuracy']:.1f} (" in table


def test_log_odds_are_learned(module):
    images = module("pathfinder_images")
    x = np.random.default_rng(0).normal(size=(4000, 10))
    labels = x[:, 0] * x[:, 1] * x[:, 2] + x[:, 8] * x[:, 9] > 0
    odds = images.fit_log_odds(x[:2000], labels[:2000])
    assert np.mean((odds(x[2000:]) > 0) == labels[2000:]) > 0.9


def test_too_small_images(planned):
    with pytest.raises(ValueError, match="32 x 32 pixels have no room"):
        planned(32, dashes=40)


def value(module, tokens: list[str]) -> int:
    """Evaluate a ListOps expression with a stack."""
    stack: list[list] = [[]]
    for token in tokens:
        if token.startswith("["):
            stack.append([token])
        elif token == "]":
            name, *values = stack.pop()
            stack[-1].append(module("listops").OPERATORS[name](values))
        else:
            stack[-1].append(int(token))
    return stack[0][0]


def test_labels_of_listops(module):
    listops = module("listops")
    tokens, lengths, values = listops.examples(20, 50, 300, 0)
    for row, length, expected in zip(tokens, lengths, values, strict=True):
        assert 50 <= length <= 300 and row[:length].all() and not row[length:].any()
        assert value(module, [listops.TOKENS[i] for i in row[:length]]) == expected
    np.testing.assert_array_equal(listops.examples(20, 50, 300, 0)[0], tokens)
    assert value(module, "[MAX 4 [MED 1 5 8 ] 2 ]".split()) == 5
    assert value(module, "[SM 9 [MIN 7 3 ] ]".split()) == 2


def test_text_split_and_coverage(text):
    files = text.sources(100)
    assert len({file.content for file in files}) == len(files)
    training, held_out = text.tokens(files, False), text.tokens(files, True)
    assert len(training) + len(held_out) == sum(len(file.content) + 1 for file in files)
    for length in (16, 64):
        predicted = np.concatenate(
            [rows[:, 1:].ravel() for rows in text.stretches(training, 64 // length, length, 640)]
        )
        np.testing.assert_array_equal(predicted, training[1:641])


def small(models, **options):
    return models.Config(2, 32, 2, 64, (4, 8), 16, classes=3, **options)


def test_model_variants_are_equivalent(module):
    models = module("models")
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, 16)
    lengths = jnp.array([32, 20])

    def outputs(**options):
        config = small(models, **options)
        model = models.Transformer(config, nnx.Rngs(0))
        return model.classify(model(tokens, lengths), models.classified_tokens(config, tokens, lengths))

    # With one block, the butterfly pattern is full.
    for causal in (False, True):
        standard = outputs(attention="standard", causal=causal)
        for attention in ("flash", "block-sparse"):
            np.testing.assert_allclose(outputs(attention=attention, causal=causal), standard, atol=0.02)


def test_flops_and_parameters_of_gpt2(module):
    """124 M and 355 M parameters, without the padding of the vocabulary."""
    gpt2, models = module("gpt2_training"), module("models")
    for name, millions in (("small", 124), ("medium", 355)):
        config = gpt2.CONFIGS[name]
        shapes = nnx.eval_shape(lambda config=config: models.Transformer(config, nnx.Rngs(0)))
        count = sum(x.size for x in jax.tree.leaves(nnx.state(shapes)))
        assert round(count / 1e6) == millions
        attention = 12 * config.layers * config.width * 1024
        assert config.flops_per_token(count) == 6 * count + attention
        without_head = dataclasses.replace(config, projected=0.0)
        assert without_head.flops_per_token(count) == 6 * (count - gpt2.VOCABULARY * config.width) + attention


def test_easier_images_interpolate_between_sizes(module):
    images, pathfinder = module("pathfinder_images"), module("sections.pathfinder")
    half, full = images.STYLES[64], images.STYLES[128]
    assert full.mixed(half, 0.0) == full
    assert full.mixed(half, 1.0) == half
    for easier in pathfinder.easier(128):
        assert all(min(ends) <= x <= max(ends) for x, *ends in zip(easier, half, full, strict=True))
    assert all(pathfinder.EASIEST <= easier.dashes < images.STYLES[32].dashes for easier in pathfinder.easier(32))


def test_order_of_images_does_not_depend_on_the_number_of_processes(module, monkeypatch):
    pathfinder = module("sections.pathfinder")

    def numbered(side, seed, kinds, count):
        return {"labels": np.arange(count) + count * seed[-1], "seed": seed * count}

    monkeypatch.setattr(pathfinder, "make_images", numbered)
    for processes in (1, 3):
        monkeypatch.setattr(pathfinder, "PROCESSES", processes)
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            made = pathfinder.batched(pathfinder.images(pool, 8, [4, 5], [], 6), 2)
            batches = list(itertools.islice(made, 20))
        np.testing.assert_array_equal(np.concatenate([batch["labels"] for batch in batches]), np.arange(40))
        assert batches[0]["seed"] == [4, 5] and all(len(batch["labels"]) == 2 for batch in batches)


def test_half_of_the_images_are_easier(module, monkeypatch):
    images, pathfinder = module("pathfinder_images"), module("sections.pathfinder")
    monkeypatch.setattr(images, "POOLS", 2)
    kinds = [(style, images.odds_from_discs(32, style)) for style in (images.STYLES[32], *pathfinder.easier(32))]
    batch = pathfinder.make_images(32, [1, 2], kinds, 60)
    assert batch["tokens"].shape == batch["targets"].shape == (60, 1024) and batch["tokens"].max() < pathfinder.LEVELS
    standard = pathfinder.make_images(32, [1, 2], kinds[:1], 60)
    assert 0.4 < (batch["tokens"] > 0).sum() / (standard["tokens"] > 0).sum() < 0.97
    assert set(batch["labels"]) == {0, 1}


def test_rotary_scores_depend_on_the_distance(module):
    """The score depends on the distances along both axes."""
    models, grid = module("models"), (6, 8)
    positions = tuple(axis.ravel() for axis in np.indices(grid))
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 32))
    q, k = (models.rotated(jnp.broadcast_to(x, (1, 48, 1, 32)), positions)[0, :, 0].reshape(*grid, 32) for x in (q, k))
    scores = jnp.einsum("abd,xyd->abxy", q, k)
    np.testing.assert_allclose(scores[0, 0, 2, 3], scores[3, 4, 5, 7], rtol=1e-4)
    np.testing.assert_allclose(scores[2, 3, 0, 1], scores[4, 5, 2, 3], rtol=1e-4)
    others = np.array([scores[0, 0, 3, 2], scores[0, 0, 2, 4], scores[0, 0, 3, 3], scores[2, 3, 0, 0]])
    assert np.abs(others - scores[0, 0, 2, 3]).min() > 0.05
    np.testing.assert_allclose(jnp.linalg.norm(q, axis=-1), jnp.linalg.norm(q[0, 0]), rtol=1e-5)


def test_checkpoint_fits_every_size_and_attention(module, tmp_path):
    training, pathfinder = module("training"), module("sections.pathfinder")
    small, large = (
        dataclasses.replace(pathfinder.make_config(32, True, attention), grid=(side, side))
        for side, attention in ((16, "flash"), (64, "block-sparse"))
    )
    trainer = training.Trainer(small, training.label)
    pathfinder.save(trainer, tmp_path / "weights.npz")
    other = training.Trainer(large, training.label, seed=1)
    loaded = pathfinder.loaded(tmp_path / "weights.npz", other.weights)
    assert jax.tree.structure(loaded) == jax.tree.structure(other.weights)
    for old, new in zip(*map(jax.tree.leaves, (trainer.weights, loaded)), strict=True):
        np.testing.assert_array_equal(old, new)
    wider = training.Trainer(dataclasses.replace(large, width=128), training.label)
    with pytest.raises(SystemExit, match="of another model"):
        pathfinder.loaded(tmp_path / "weights.npz", wider.weights)


def test_pixel_order_does_not_change_features(module):
    models, pathfinder = module("models"), module("sections.pathfinder")
    tiled = dataclasses.replace(pathfinder.make_config(32, True, "flash"), grid=(16, 32))
    by_rows = dataclasses.replace(tiled, tile=(1, 1))
    image = jax.random.randint(jax.random.key(0), (2, 16, 32), 0, 16)
    order = models.in_tiles(np.arange(16 * 32).reshape(16, 32), tiled.tile)
    np.testing.assert_array_equal(order[[0, 15, 16, 127, 128]], [0, 15, 32, 7 * 32 + 15, 16])
    expected = models.Transformer(by_rows, nnx.Rngs(0))(image.reshape(2, -1))[:, order]
    features = models.Transformer(tiled, nnx.Rngs(0))(models.in_tiles(image, tiled.tile))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (features, expected)), atol=0.06)


def test_block_sparse_attention_sees_all_pixels_in_reach(module):
    models, pathfinder = module("models"), module("sections.pathfinder")
    config = dataclasses.replace(pathfinder.make_config(64, True, "block-sparse"), reach=16)
    y, x = (models.in_tiles(axis, config.tile) for axis in np.indices(config.grid))
    near = (np.abs(y[:, None] - y) <= 16) & (np.abs(x[:, None] - x) <= 16)
    mask = models.block_mask(config)
    assert mask.kept < 0.7 and mask.to_mask()[0, 0][near].all()


def test_data_parallel_training_equals_one_device(module):
    training, pathfinder = module("training"), module("sections.pathfinder")
    config = pathfinder.make_config(32, True, "block-sparse")
    random = np.random.default_rng(0)
    batches = [
        {
            "tokens": random.integers(16, size=(4, 1024)),
            "targets": random.integers(4, size=(4, 1024)),
            "labels": random.integers(2, size=4),
        }
        for _ in range(3)
    ]
    found = []
    for count in (1, min(4, jax.device_count())):
        trainer = training.Trainer(config, training.label_and_targets, devices=jax.devices()[:count])
        found.append([*training.train(trainer, iter(batches), 1e-3, steps=3), trainer.accuracy(batches, 0.99)])
    np.testing.assert_allclose(found[0][:3], found[1][:3], rtol=1e-3)
    assert found[0][3]["examples"] == found[1][3]["examples"] == 12


def test_target_loss_counts_only_tokens_with_targets(module):
    models, training = module("models"), module("training")
    config = small(models, background=0)
    model = models.Transformer(config, nnx.Rngs(0))
    tokens = jnp.arange(64).reshape(2, 32) % 16
    batch = {"tokens": tokens, "targets": jnp.zeros((2, 32), int).at[1, 3].set(2), "labels": jnp.array([0, 2])}
    one = training.label_and_targets(model, batch, None) - training.label(model, batch, None)
    log_probability = jax.nn.log_softmax(model.logits(model(tokens)))[1, 3, 2]
    np.testing.assert_allclose(one, -log_probability, rtol=1e-4)


def test_classifier_ignores_padding_and_background(module):
    models = module("models")
    config = small(models)
    model = models.Transformer(config, nnx.Rngs(0))
    tokens = jnp.array([[3, 0, 5, 0], [0, 0, 7, 1]])
    features = jax.random.normal(jax.random.key(0), (2, 4, config.width))
    padding = models.classified_tokens(config, tokens, jnp.array([4, 3]))
    background = models.classified_tokens(dataclasses.replace(config, background=0), tokens, None)
    assert models.classified_tokens(config, tokens, None) is None
    np.testing.assert_array_equal(background, tokens > 0)
    np.testing.assert_array_equal(padding, [[True] * 4, [True] * 3 + [False]])
    for counted in (padding, background):
        masked = jnp.where(counted[..., None], features, jnp.nan)
        expected = [model.classify(row[used][None])[0] for row, used in zip(features, counted, strict=True)]
        np.testing.assert_allclose(model.classify(masked, counted), expected, rtol=1e-5)


def test_several_steps_per_program(module):
    """The dropout mask depends on the number of a step only."""
    models, training = module("models"), module("training")
    random = np.random.default_rng(0)
    batches = [
        {"tokens": random.integers(16, size=(2, 32), dtype=np.int32), "labels": np.arange(2, dtype=np.int32)}
        for _ in range(4)
    ]
    losses = [
        list(training.train(training.Trainer(small(models), training.label), iter(batches), 1e-3, **options))
        for options in ({"steps": 4}, {"steps": 4, "steps_per_program": 2})
    ]
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_failures_are_recorded_and_large_batches_are_halved(module, monkeypatch):
    models, training = module("models"), module("training")
    ready = training.ready

    def on_a_small_device(config, loss, batches):
        if config.attention == "cudnn":
            raise ValueError("no such kernel\nand much more")
        if batches["tokens"].shape[1] > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return ready(config, loss, batches)

    monkeypatch.setattr(training, "ready", on_a_small_device)

    def make_batch(count: int):
        return {"tokens": np.zeros((count, 33), np.int32)}

    config = dataclasses.replace(small(models), grid=(32,), classes=0)
    failed, fits = training.compare(config, training.next_token, make_batch, 8, ["cudnn", "flash"], 0.01)
    assert failed["failure"] == "no such kernel" and failed["attention_dropout"] == 0 and "seconds_a_step" not in failed
    assert fits["batch"] == 2 and fits["failure"] is None and fits["seconds_a_step"] > 0

    monkeypatch.setattr(training, "ready", lambda *_: (_ for _ in ()).throw(RuntimeError("RESOURCE_EXHAUSTED")))
    (row,) = training.compare(config, training.next_token, make_batch, 8, ["flash"], 0.01)
    assert row["batch"] == 1 and row["failure"] == "RESOURCE_EXHAUSTED"


@pytest.mark.slow
def test_quick_run(module, text, monkeypatch, tmp_path):
    main = module("__main__")
    monkeypatch.setattr(module("pathfinder_images"), "POOLS", 2)

    def run(name, *flags, checkpoint="checkpoint"):
        # The time limit counts from the first import, which an earlier test may have made long ago.
        options = ["--quick", "--minutes", 60, "--output", tmp_path, "--checkpoint", tmp_path / checkpoint]
        with pytest.raises(SystemExit) as done:
            main.main([name, *flags, *map(str, options)])
        return done.value.code

    labels = run("pathfinder", "--labels-alone", checkpoint="labels")
    larger = ("pathfinder", "--side", "64", "--attention", "block-sparse")
    assert [labels, *(run(name) for name in SECTIONS), run(*larger)] == [0] * (len(SECTIONS) + 2)
    assert "was trained with targets" in run("pathfinder", "--side", "64", "--labels-alone")
    results = {name: json.loads((tmp_path / f"paper_{name}.json").read_text()) for name in SECTIONS}
    for name in ("gpt2_small", "bert", "lra_speed"):
        assert all(row["seconds_a_step"] > 0 and row["bytes"] > 0 for row in results[name]["rows"])
    assert results["gpt2_curves"]["largest_gap"]["standard and flash"]["training"] < 0.02
    assert {row["seed"] for row in results["gpt2_context"]["rows"]} == {0, 1}
    low, high = results["gpt2_context"]["difference"]["interval"]
    assert low < results["gpt2_context"]["difference"]["mean"] < high
    assert {row["task"] for row in results["lra_accuracy"]["rows"]} >= {"listops", "text"}
    for row in results["lra_accuracy"]["rows"]:
        assert row["interval"][0] <= row["accuracy"] <= row["interval"][1] and 0 < row["chance"] < 1
    stages = results["pathfinder"]["rows"]
    assert [(row["checkpoint"], row["side"], row["targets"]) for row in stages] == [
        ("labels", 32, False),
        ("checkpoint", 32, True),
        ("checkpoint", 64, True),
    ]
    assert all("--labels-alone" in row["command"] for row in stages[:1]) and "--side 64" in stages[2]["command"]

    pytest.importorskip("rich")  # imported by another benchmark that tables.py imports
    tables = importlib.import_module("tables")
    for name in SECTIONS:
        assert tables.TABLES[f"paper {name.replace('_', ' ')}"](results[name]).startswith("| ")
